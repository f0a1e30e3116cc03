"""Run the plug-ins in the interfaces of trainers.

For a trainer that is not installed, the test copies its interface: base class, order of calls, names of functions.
"""

import enum
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import subprocess
import sys
import types

import pytest

pytest.importorskip("transformers")
import tiny  # noqa: E402
import torch  # noqa: E402

from liger_hw import integrations, patch  # noqa: E402
from liger_hw.patching import swapping
from liger_hw.stand_in.finder import VERSION  # noqa: E402

transformers = tiny.transformers


def swapped(model):
    return [m for m in model.modules() if swapping.is_swapped(m)]


def stand_in_modules(monkeypatch, **modules):
    """Fake modules of an absent package, with __ for dots; reimport the tested module."""
    for name, members in modules.items():
        module = types.ModuleType(name.replace("__", "."))
        vars(module).update(members, __spec__=importlib.machinery.ModuleSpec(module.__name__, None))
        monkeypatch.setitem(sys.modules, module.__name__, module)


def fresh(monkeypatch, name):
    monkeypatch.delitem(sys.modules, f"liger_hw.integrations.{name}", raising=False)
    return importlib.import_module(f"liger_hw.integrations.{name}")


# Hugging Face's Trainer -----------------------------------------------------------------------------------------------

ROWS = [{name: row for name, row in zip(("input_ids", "labels"), pair)} for pair in zip(*tiny.tokens(8).values())]


def train(model, tmp_path, callbacks=(), later=(), evaluate=False, **arguments):
    pytest.importorskip("accelerate")
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, learning_rate=1e-3, **arguments,
    )  # fmt: skip
    given = {"model_init": model} if isinstance(model, types.FunctionType) else {"model": model}
    trainer = transformers.Trainer(args=args, train_dataset=ROWS, eval_dataset=ROWS, callbacks=list(callbacks), **given)
    patched_at_init = bool(swapped(trainer.model))
    for callback in later:
        trainer.add_callback(callback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if evaluate:
        losses.append(trainer.evaluate()["eval_loss"])
    return losses, trainer.model, patched_at_init


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory):
    return train(tiny.model(), tmp_path_factory.mktemp("plain"), evaluate=True, prediction_loss_only=True)[0]


def test_use_liger_kernel_reaches_this_library(tmp_path, stand_in, plain_losses):
    config = {"rms_norm": False}
    losses, model, _ = train(
        tiny.model(), tmp_path, use_liger_kernel=True, liger_kernel_config=config, evaluate=True,
        prediction_loss_only=True,
    )  # fmt: skip
    kinds = {type(m).liger_match.kind for m in swapped(model)}
    assert {"head", "causal_lm", "mlp", "rope"} <= kinds and "norm" not in kinds
    torch.testing.assert_close(losses, plain_losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize("how", ["constructor", "later", "model_init"])
def test_trainer_callback(how, tmp_path, plain_losses):
    callback = integrations.LigerHwCallback(layer_norm=False)
    model = (lambda: tiny.model()) if how == "model_init" else tiny.model()
    where = {"later" if how == "later" else "callbacks": [callback]}
    losses, model, patched_at_init = train(model, tmp_path, **where)
    assert patched_at_init == (how != "later") and swapped(model)
    torch.testing.assert_close(losses, plain_losses[:3], rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="unheard_of"):
        integrations.LigerHwCallback(unheard_of=True)
    with pytest.raises(ValueError, match="activations: got '64MiB', allowed: LigerHwActivationsCallback"):
        integrations.LigerHwCallback(activations="64MiB")


def test_trainer_callback_for_activations(tmp_path, plain_losses):
    """It replaces the trainer's gradient checkpointing, and ends with the training."""
    plans = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            plans.append(str(model.model.layers[0]._gradient_checkpointing_func.activations))

    callbacks = [integrations.LigerHwActivationsCallback(10**6), Watch()]
    losses, model, _ = train(tiny.model(), tmp_path, callbacks, gradient_checkpointing=True)
    assert losses == plain_losses[:3] and len(plans) == 3 and plans[0].startswith("no plan yet: it needs 2 more")
    assert not hasattr(model.model.layers[0]._gradient_checkpointing_func, "activations")


@pytest.mark.parametrize("switched_on", [False, True])
def test_use_liger_kernel_plans_activations(switched_on, tmp_path, stand_in, plain_losses):
    """The trainer's own gradient checkpointing does not end the plan."""
    losses, model, _ = train(
        tiny.model(), tmp_path, use_liger_kernel=True, liger_kernel_config={"activations": 10**6},
        gradient_checkpointing=switched_on,
    )  # fmt: skip
    torch.testing.assert_close(losses, plain_losses[:3], rtol=1e-6, atol=0)
    plan = model.model.layers[0]._gradient_checkpointing_func.activations
    assert str(plan) == "no plan yet: the next pass makes it"  # it took part in all three steps


# Lightning ------------------------------------------------------------------------------------------------------------


class Callback:  # the used part of lightning.pytorch.callbacks.Callback
    def setup(self, trainer, pl_module, stage):
        raise NotImplementedError


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_lightning_callback(package, monkeypatch):
    if importlib.util.find_spec("lightning") is None:
        for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks", "pytorch_lightning"):
            monkeypatch.setitem(sys.modules, name, None)
        top = {"lightning": {"lightning": {}, "lightning__pytorch": {}}, "pytorch_lightning": {"pytorch_lightning": {}}}
        base = {"lightning": "lightning__pytorch__callbacks", "pytorch_lightning": "pytorch_lightning__callbacks"}
        stand_in_modules(monkeypatch, **top[package], **{base[package]: {"Callback": Callback}})
    callback = fresh(monkeypatch, "lightning_callback").LigerHwLightningCallback(rms_norm=False)
    module = torch.nn.Module()
    module.model = tiny.model()
    callback.setup(None, module, "fit")
    assert {type(m).liger_match.kind for m in swapped(module)} == {"head", "causal_lm", "mlp", "rope"}


# Axolotl --------------------------------------------------------------------------------------------------------------


class BasePlugin:  # the used part of axolotl.integrations.base.BasePlugin of release 0.19
    def register(self, cfg): ...

    def get_input_args(self): ...

    def post_model_build(self, cfg, model): ...


class Config(dict):  # axolotl.utils.dict.DictDefault: what is missing is None
    __getattr__ = dict.get


@pytest.fixture
def axolotl(monkeypatch):
    pytest.importorskip("pydantic")
    if importlib.util.find_spec("axolotl") is None:
        stand_in_modules(
            monkeypatch, axolotl={}, axolotl__integrations={}, axolotl__integrations__base={"BasePlugin": BasePlugin}
        )
    return fresh(monkeypatch, "axolotl")


def test_axolotl_plugin(axolotl):
    plugin = axolotl.LigerHwPlugin()
    module, _, name = plugin.get_input_args().rpartition(".")
    fields = getattr(importlib.import_module(module), name).model_fields  # as Axolotl finds and merges it
    assert set(fields) == {*axolotl.KEYS} and all(field.default is None for field in fields.values())
    model = tiny.model()
    plugin.register({"plugins": ["liger_hw.integrations.axolotl.LigerHwPlugin"]})
    plugin.post_model_build(Config(liger_glu_activation=False), model)
    assert {type(m).liger_match.kind for m in swapped(model)} == {"head", "causal_lm", "norm", "rope"}
    plugin.post_model_build(Config(liger_cross_entropy=True), model)
    assert dict(type(model).liger_match.options)["cross_entropy"]
    with pytest.raises(ValueError, match="fused_linear_cross_entropy"):
        plugin.post_model_build(Config(liger_cross_entropy=True, liger_fused_linear_cross_entropy=True), model)


def test_axolotl_plugin_maps_an_older_key(axolotl):
    model = tiny.model()
    axolotl.LigerHwPlugin().post_model_build(Config(liger_swiglu=False, liger_rms_norm_gated=True), model)
    assert {type(m).liger_match.kind for m in swapped(model)} == {"head", "causal_lm", "norm", "rope"}


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"liger_use_token_scaling": True}, "liger_use_token_scaling: got True"),
        ({"liger_rms_norm_gated": False}, "liger_rms_norm_gated: got False"),
        ({"liger_swiglu": True, "liger_glu_activation": True}, "liger_swiglu: got True"),
        ({"liger_rmsnorm": True}, "unknown key 'liger_rmsnorm'; did you mean 'liger_rms_norm'"),
    ],
)
def test_axolotl_plugin_drops_no_key(keys, words, axolotl):
    with pytest.raises(ValueError, match=words):
        axolotl.LigerHwPlugin().register(Config(keys))


def test_axolotl_plugin_refuses_to_run_beside_the_other(axolotl):
    with pytest.raises(ValueError, match="LigerPlugin"):
        axolotl.LigerHwPlugin().register({"plugins": [axolotl.OTHER, "liger_hw.integrations.axolotl.LigerHwPlugin"]})


# ms-swift and verl ----------------------------------------------------------------------------------------------------


def test_ms_swift_plugin(monkeypatch):
    """ms-swift loads the file by its path, under a name of its own."""
    if importlib.util.find_spec("liger_kernel") is not None:
        pytest.skip("the package liger_kernel is installed here")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    command = [sys.executable, "-m", "liger_hw.integrations.ms_swift"]
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    path = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment).stdout.strip()
    spec = importlib.util.spec_from_file_location("_swift_external_0", path)
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        assert importlib.metadata.version("liger-kernel") == VERSION and integrations.is_installed()
    finally:
        integrations.uninstall()


def test_verl_module(monkeypatch):
    if importlib.util.find_spec("liger_kernel") is not None:
        pytest.skip("the package liger_kernel is installed here")
    try:
        fresh(monkeypatch, "verl")
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        model = tiny.model()  # as verl calls it
        _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)
        assert {type(m).liger_match.kind for m in swapped(model)} == {"norm", "mlp", "rope", "skip_logits"}
    finally:
        integrations.uninstall()


# TRL ------------------------------------------------------------------------------------------------------------------


class TheirChunkedLogProb(torch.autograd.Function):  # trl.trainer.utils._ChunkedLogProbFunction of release 1.16
    calls = []

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap=None, logit_scale=1.0, outputs=()):
        TheirChunkedLogProb.calls.append(outputs)
        logits = (
            torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias.to(hidden.dtype)).float() * logit_scale
        )
        logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
        log_p = logits.log_softmax(-1)
        squares = (2 * log_p).logsumexp(-1).detach() if "log_sum_sq_probs" in outputs else None
        entropy = -(log_p.exp() * log_p).sum(-1) if "entropy" in outputs else None
        top = logits.argmax(-1) == targets if "is_top1" in outputs else None
        mean = logits.mean(-1).detach() if "mean_logits" in outputs else None
        return log_p.gather(-1, targets[:, None])[:, 0], entropy, squares, mean, top


@pytest.fixture
def trl(monkeypatch):
    utils = {"_ChunkedLogProbFunction": TheirChunkedLogProb}
    stand_in_modules(monkeypatch, trl={"__version__": "1.16.0"}, trl__trainer={}, trl__trainer__utils=utils)
    module = fresh(monkeypatch, "trl")
    TheirChunkedLogProb.calls.clear()
    yield module, sys.modules["trl.trainer.utils"]
    module.original_function.cache_clear()


ALL_OUTPUTS = "log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs"


def arguments(outputs, softcap=5.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).to(dtype).requires_grad_() for n in (6, 31))
    bias = torch.randn(31, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(31, (6,), generator=generator)
    return [hidden, weight, bias, targets, 0.7, 4096, softcap, 0.9, outputs]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("outputs", [(), ("log_probs", "entropy"), ("is_top1", "entropy"), ALL_OUTPUTS])
def test_trl_log_probabilities(trl, outputs, softcap):
    ours, utils = trl
    ours.accelerate_trl()
    args, again = arguments(outputs, softcap), arguments(outputs, softcap)
    found = utils._ChunkedLogProbFunction.apply(*args)
    assert not TheirChunkedLogProb.calls
    expected = TheirChunkedLogProb.apply(*again)
    for f, e in zip(found, expected):
        assert (f is None) == (e is None)
        if e is not None:
            torch.testing.assert_close(f, e)
    sum(x.sum() for x in found[:2] if x is not None).backward()
    sum(x.sum() for x in expected[:2] if x is not None).backward()
    for f, e in zip(args[:3], again[:3]):
        torch.testing.assert_close(f.grad, e.grad)
    ours.restore_trl()
    assert utils._ChunkedLogProbFunction is TheirChunkedLogProb


def test_trl_options_reach_the_op(trl, monkeypatch):
    ours, utils = trl
    seen, op = [], ours.fused_linear_selective_log_softmax
    monkeypatch.setattr(ours, "fused_linear_selective_log_softmax", lambda *a, **o: seen.append(o) or op(*a, **o))
    ours.accelerate_trl(chunk_memory=2**10, accum_dtype=torch.float32)
    found = utils._ChunkedLogProbFunction.apply(*arguments(("entropy",)))[0]
    torch.testing.assert_close(found, TheirChunkedLogProb.apply(*arguments(("entropy",)))[0])
    assert seen[0]["chunk_memory"] == 2**10 and seen[0]["accum_dtype"] == torch.float32
    for name, value in {"chunk_memory": 0, "accum_dtype": torch.bfloat16}.items():
        with pytest.raises(ValueError, match=f"^{name}: got"):
            ours.accelerate_trl(**{name: value})


@pytest.mark.parametrize("why", ["outputs", "dtypes", "sharded", "cast_lm_head_to_fp32"])
def test_trl_serves_options_that_the_op_lacks(trl, why):
    ours, utils = trl
    ours.accelerate_trl()
    args = arguments(("log_probs", "rank_of_token") if why == "outputs" else ("log_probs",))
    if why == "dtypes":
        args[0] = args[0].detach().bfloat16()
    if why == "cast_lm_head_to_fp32":  # of a head in bf16; its logits are in fp32
        args[1:3] = (x.detach().bfloat16() for x in args[1:3])
    if why == "sharded":
        args[1].ds_id = 3  # as ZeRO-3 marks its parameters
    found = utils._ChunkedLogProbFunction.apply(*args)[0]
    assert bool(TheirChunkedLogProb.calls) == (why != "cast_lm_head_to_fp32")
    torch.testing.assert_close(found, TheirChunkedLogProb.apply(*args)[0])


def test_trl_before_it_had_the_function(trl, monkeypatch):
    ours, utils = trl
    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    with pytest.raises(RuntimeError, match="trl 1.16.0 has no _ChunkedLogProbFunction"):
        ours.accelerate_trl()


# the Hub's kernels ----------------------------------------------------------------------------------------------------


class Mode(enum.Flag):  # kernels.Mode
    TRAINING = enum.auto()
    INFERENCE = enum.auto()
    TORCH_COMPILE = enum.auto()


@pytest.fixture
def hub(monkeypatch):
    """What `use_kernels=True` does, without the package kernels: forwards replaced by the mapping's layers."""
    module = importlib.import_module("transformers.integrations.hub_kernels")
    modeling_utils = importlib.import_module("transformers.modeling_utils")
    stand_in_modules(monkeypatch, kernels={"Mode": Mode})
    if not hasattr(module, "_kernels_enabled") or not hasattr(modeling_utils, "kernelize"):
        pytest.skip("this transformers keeps no mapping that could be added to")
    mapping = {"RMSNorm": {"cuda": "the Hub's"}}

    def kernelize(model, mode=None):
        mode = mode or (Mode.TRAINING if model.training else Mode.INFERENCE)
        for layer in model.modules():
            if hasattr(type(layer), "kernel_layer_name"):
                repository = mapping[type(layer).kernel_layer_name]["xpu"][mode]
                layer.forward = types.MethodType(repository.load().forward, layer)

    monkeypatch.setattr(module, "_kernels_enabled", True)
    monkeypatch.setattr(module, "get_kernel_mapping_transformers", lambda: mapping, raising=False)
    monkeypatch.setattr(modeling_utils, "kernelize", kernelize)
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda *args: True, raising=False)
    ours = fresh(monkeypatch, "hub_kernels")
    ours.register_hub_kernels()
    ours.register_hub_kernels()  # nothing new
    yield ours, mapping, modeling_utils
    ours.unregister_hub_kernels()
    assert mapping == {"RMSNorm": {"cuda": "the Hub's"}, **{name: {} for name in ours.LAYERS if name != "RMSNorm"}}
    assert modeling_utils.kernelize is kernelize


@pytest.mark.parametrize("family", ["llama", "olmo2", "cohere"])  # two orders of rounding, and no RMSNorm
def test_hub_kernels(family, hub, monkeypatch):
    ours, mapping, modeling_utils = hub
    plain, model = tiny.model(family), tiny.model(family)
    for layer in model.modules():
        if "Norm" in type(layer).__name__:
            monkeypatch.setattr(type(layer), "kernel_layer_name", "RMSNorm", raising=False)
        if "MLP" in type(layer).__name__:
            monkeypatch.setattr(type(layer), "kernel_layer_name", "SwiGLUMLP", raising=False)
    for training in (True, False):
        modeling_utils.kernelize(model.train(training))
        tiny.assert_learns_alike(plain.train(training), model, fused=False, **tiny.tokens())
    proved = {cls.__name__ for (cls, _), forward in ours._forwards.items() if forward is not cls.forward}
    assert {name for name in proved if "MLP" in name} and (family == "cohere") == (
        not {n for n in proved if "RMS" in n}
    )
    for name in ours.LAYERS:
        assert set(mapping[name]) >= {"cuda", "rocm", "xpu"}
        compiled = {Mode.TRAINING | Mode.TORCH_COMPILE, Mode.INFERENCE | Mode.TORCH_COMPILE}
        assert set(mapping[name]["rocm"]) == {Mode.TRAINING, Mode.INFERENCE} | compiled


def test_hub_kernels_compile_whole(hub, monkeypatch):
    _, _, modeling_utils = hub
    model = tiny.model()
    norm = type(model.model.norm)
    monkeypatch.setattr(norm, "kernel_layer_name", "RMSNorm", raising=False)
    modeling_utils.kernelize(model)
    expected = tiny.call(model, **tiny.tokens()).loss
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(tiny.call(compiled, **tiny.tokens()).loss, expected)


FOLDER = """
import importlib.metadata, json, sys
from pathlib import Path

from packaging.version import Version
from transformers.utils import import_utils

least, read = getattr(import_utils, "KERNELS_MIN_VERSION", "0"), importlib.metadata.version
if Version(read("kernels")) < Version(least):  # the newest on an index may be older than transformers asks for
    importlib.metadata.version = lambda name: least if name == "kernels" else read(name)
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import hub_kernels
from transformers.utils import kernel_config

build = Path(sys.argv[1], "build", "torch-cpu")
build.mkdir(parents=True)
(build / "__init__.py").write_text("from liger_hw.integrations import hub_kernels as layers")
facts = {"id": "_liger_hw_cpu_1", "name": "liger-hw", "version": 1, "license": "Apache-2.0", "python-depends": [],
         "backend": {"type": "cpu"}}
(build / "metadata.json").write_text(json.dumps(facts))
hub_kernels.get_device_type = kernel_config.infer_device = lambda model: "xpu"  # transformers refuses a CPU
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
model, tokens = LlamaForCausalLM(LlamaConfig(**sizes)), torch.arange(16).view(2, 8)
mapping = {"RMSNorm": f"{sys.argv[1]}:Norm", "rotary_pos_emb": f"{sys.argv[1]}:Rotary"}
plain = model(input_ids=tokens, labels=tokens).loss
model.train().set_use_kernels(True, kernel_config.KernelConfig(mapping, use_local_kernel=True))
losses = [model.train(training)(input_ids=tokens, labels=tokens).loss for training in (True, False)]
assert all(torch.equal(plain, loss) for loss in losses), (plain, losses)
from liger_hw.integrations.hub_kernels import _forwards
assert len([cls for (cls, _), forward in _forwards.items() if forward is not cls.forward]) == 2, _forwards
"""


def test_hub_kernels_of_a_local_folder(tmp_path):
    """As docs/trainers.md describes it, in a process of its own: transformers looks for kernels at its import."""
    if not [*importlib.metadata.distributions(name="kernels")]:  # other tests import a stand-in of the package
        pytest.skip("kernels is not installed")
    pytest.importorskip("transformers.utils.kernel_config")
    subprocess.run([sys.executable, "-c", FOLDER, str(tmp_path)], check=True, timeout=300)


def test_hub_kernels_without_the_package(monkeypatch):
    ours = fresh(monkeypatch, "hub_kernels")
    module = importlib.import_module("transformers.integrations.hub_kernels")
    monkeypatch.setattr(module, "_kernels_enabled", False, raising=False)
    with pytest.raises(RuntimeError, match="package kernels"):
        ours.register_hub_kernels()


def test_patched_models_can_be_kernelized(hub, monkeypatch):
    _, _, modeling_utils = hub
    model = tiny.model()
    monkeypatch.setattr(type(model.model.norm), "kernel_layer_name", "RMSNorm", raising=False)
    patch(model)
    modeling_utils.kernelize(model)
    assert "forward" in vars(model.model.norm)
    tiny.assert_learns_alike(tiny.model(), model, **tiny.tokens())
