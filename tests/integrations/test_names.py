"""Every public name of liger_kernel, and every import of it in the trainers, through the stand-in.

`liger_kernel.json` holds facts of release 0.8.5: module -> name -> what takes parameters -> its parameters.
`imports.json` holds what released trainers import: package and version -> module -> names.
"""

import importlib
import importlib.util
import inspect
import json
import pathlib

import pytest
import torch

pytest.importorskip("transformers")

from liger_hw.stand_in.names import REPLACEMENTS  # noqa: E402

HERE = pathlib.Path(__file__).parent
NAMES = json.loads((HERE / "liger_kernel.json").read_text())
IMPORTS = json.loads((HERE / "imports.json").read_text())
ADDED = {"CrossEntropyOutput": ["entropy"]}  # fields of outputs, which come last
MUST_BE_GIVEN = inspect.Parameter.empty


def parameters(function):
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]


def needs_trl(module, name):
    return name == "LigerORPOTrainer" and importlib.util.find_spec("trl") is None


@pytest.mark.parametrize("module", NAMES)
def test_names_and_parameters(module, stand_in):
    """The same parameters in the same order, with the same defaults; what must be given there may be left out here.

    A name that nothing serves is an ImportError that says what to use.
    """
    stand_in_module = importlib.import_module(f"liger_kernel.{module}".rstrip("."))
    for name, signatures in NAMES[module].items():
        if (module, name) in REPLACEMENTS:
            with pytest.raises(ImportError, match=f"{name} is not served by liger_hw: "):
                getattr(stand_in_module, name)
            continue
        if needs_trl(module, name):
            continue
        served = getattr(stand_in_module, name)
        assert name in dir(stand_in_module) or name.startswith(("_", "Liger", "liger", "apply", "torch")), name
        for what, expected in signatures.items():
            ours = parameters(served if what in ("call", "new") else getattr(served, what))
            theirs = parameters(eval(f"lambda {expected}: 0", {"torch": torch}))  # noqa: S307
            assert [p[0] for p in ours[len(theirs) :]] == ADDED.get(name, []), (name, what)
            assert [p[:2] for p in ours[: len(theirs)]] == [p[:2] for p in theirs], (name, what)
            for (parameter, _, default), (_, _, promised) in zip(ours, theirs):
                assert promised is MUST_BE_GIVEN or default == promised, (name, what, parameter)


def test_two_functions_of_one_name_are_told_apart_by_their_module(stand_in):
    from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction as distillation
    from liger_kernel.ops import LigerFusedLinearJSDFunction as divergence
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSDFunction as again
    from liger_kernel.transformers.jsd import LigerJSDFunction

    assert divergence is again and distillation is not divergence
    torch.manual_seed(0)
    x, w, teacher_x, teacher_w = (torch.randn(*shape) for shape in ((6, 8), (31, 8), (6, 5), (31, 5)))
    labels = torch.randint(31, (6,))
    soft = divergence.apply(x, w, teacher_x, teacher_w, labels, 0.3)
    hard = torch.nn.functional.cross_entropy(x @ w.T, labels)
    both = distillation.apply(x, w, teacher_x, teacher_w, labels, None, None, 0.4, 0.6, 0.3)
    torch.testing.assert_close(both, 0.4 * hard + 0.6 * soft)
    log_q, log_p = ((a @ b.T).log_softmax(-1) for a, b in ((x, w), (teacher_x, teacher_w)))
    torch.testing.assert_close(LigerJSDFunction.apply(log_q, log_p, None, 0.3), soft)


@pytest.mark.parametrize("package", IMPORTS)
def test_imports_of_trainers(package, stand_in):
    for module, names in IMPORTS[package].items():
        for name in names:
            scope = {}
            exec(f"from {module} import {name}", scope)  # noqa: S102
            assert scope[name] is not None


def test_names_that_a_module_only_imports(stand_in):
    """Programs import a name from any module of liger_kernel that has it."""
    from liger_kernel.chunked_loss.dpo_loss import LigerFusedLinearPreferenceBase  # noqa: F401
    from liger_kernel.ops.cross_entropy import infer_device, is_hip, is_npu_available  # noqa: F401
    from liger_kernel.ops.rms_norm import calculate_settings, ensure_contiguous  # noqa: F401
    from liger_kernel.ops.utils import amp_custom_bwd, amp_custom_fwd  # noqa: F401
    from liger_kernel.transformers.auto_model import MODEL_TYPE_TO_APPLY_LIGER_FN  # noqa: F401
    from liger_kernel.transformers.grpo_loss import GrpoLossFunction, get_gamma_weights  # noqa: F401
    from liger_kernel.transformers.model.llama import LigerCausalLMOutputWithPast, LigerForCausalLMLoss  # noqa: F401
    from liger_kernel.transformers.monkey_patch import (  # noqa: F401
        IS_TRANSFORMERS_V5_OR_LATER,
        PEFT_AVAILABLE,
        LigerRMSNorm,
        liger_cross_entropy,
        transformer_version,
    )

    functional = importlib.import_module("liger_kernel.transformers.functional")
    ops = importlib.import_module("liger_kernel.ops")
    functions = {name for name in NAMES["ops"] if name.startswith("Liger") and ("ops", name) not in REPLACEMENTS}
    assert len(functions) >= 28
    for name in functions:
        assert getattr(functional, name) is getattr(ops, name)


@pytest.mark.parametrize(
    "module, name, advice",
    [
        ("ops.rms_norm", "_rms_norm_forward_kernel", "use an autograd function"),
        ("ops.cross_entropy", "MAX_FUSED_SIZE", "calculate_settings"),
        ("transformers.monkey_patch", "_patch_rms_norm_module", r"use liger_hw.patch\(module\)"),
        ("transformers.monkey_patch", "llama_lce_forward", r"use liger_hw.patch\(model\)"),
        ("transformers.functional", "LigerFusedLinearScaledCrossEntropyTPFunction", "use liger_fused_linear"),
    ],
)
def test_names_that_are_refused_with_advice(module, name, advice, stand_in):
    with pytest.raises(ImportError, match=advice):
        exec(f"from liger_kernel.{module} import {name}")  # noqa: S102


def test_unknown_names_and_modules_are_the_usual_errors(stand_in):
    with pytest.raises(ImportError, match="unheard_of"):
        from liger_kernel.transformers import unheard_of  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="liger_kernel.unheard_of"):
        import liger_kernel.unheard_of  # noqa: F401
    with pytest.raises(ImportError, match=r"use liger_hw.patch\(model\)"):
        from liger_kernel.transformers.model.llama import lce_forward  # noqa: F401
    with pytest.raises(ImportError, match="use LigerRMSNormFunction.apply"):
        from liger_kernel.ops.rms_norm import rms_norm_backward  # noqa: F401
    with pytest.raises(AttributeError, match="stands in"):
        importlib.import_module("liger_kernel.ops").unheard_of  # noqa: B018
