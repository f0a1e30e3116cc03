"""Compare a tiny model with its patched copy."""

import contextlib
import copy
import warnings

import alike
import torch
import zoo

import liger_hw
from liger_hw.patching import rotary
from liger_hw.patching.lazy_logits import LazyLogits

LOSS_PARTS = ("head", "causal_lm")
ALMOST = ("layer_norm",)  # torch takes the variance in another order: all bits but a few of fp32's last


def learn(plain, patched, inputs):
    """What differs between training steps of both, as a dictionary of figures.

    `loss`, `logits` and `gradient` (of the worst parameter, `gradient_of`) are shares of what another order of sums may
    change, by the rule of alike.py: above 1, a mistake.
    """

    def run(model):
        torch.manual_seed(1)
        return model(**copy.deepcopy(inputs))  # some write to their labels

    reference, found = alike.Reference(plain, run), alike.step(patched, run)
    fused = isinstance(found.outputs.logits, LazyLogits) and found.outputs.logits.cell.values is None
    worst, where = reference.gradients(found.gradients)
    return {
        "fused": fused,
        "auxiliary": getattr(reference.step.outputs, "aux_loss", None) is not None,
        "loss": reference.loss(found.outputs.loss),
        "logits": reference.logits(torch.clone(found.outputs.logits) if fused else found.outputs.logits),
        "gradient": worst,
        "gradient_of": where,
    }


def round_alike(plain, patched, inputs):
    """Name the replaced modules of a bf16 model that are not bitwise equal.

    Every module is called with what the plain model's forward called it with, or with random rows where that forward
    does not come by (a vision tower without an image).
    """
    calls = {}

    def hook(name):
        def remember(module, args, kwargs):
            calls.setdefault(name, (copy.deepcopy(args), copy.deepcopy(kwargs)))

        return remember

    ours = {
        name: module
        for name, module in patched.named_modules()
        if hasattr(type(module), "liger_match") and type(module).liger_match.kind not in LOSS_PARTS
    }
    theirs = dict(plain.named_modules())
    with contextlib.ExitStack() as stack, torch.no_grad():
        for name in ours:
            stack.callback(theirs[name].register_forward_pre_hook(hook(name), with_kwargs=True).remove)
        torch.manual_seed(1)
        with contextlib.suppress(RuntimeError):  # not every model runs in bf16: then up to where it does
            plain(**copy.deepcopy(inputs))
    wrong = []
    for name, module in ours.items():
        args, kwargs = calls.get(name) or (_rows(module), {})
        if args is None:
            continue
        try:
            expected = _called(theirs[name], args, kwargs)
        except RuntimeError:  # the call that the forward ended at
            continue
        if not _same(expected, _called(module, args, kwargs), type(module).liger_match.op not in ALMOST):
            wrong.append(name)
    return wrong


def _called(module, args, kwargs):
    torch.manual_seed(1)
    with torch.no_grad():
        return module(*copy.deepcopy(args), **copy.deepcopy(kwargs))


def _rows(module):
    match = type(module).liger_match
    names = dict(match.names)
    if match.kind == "norm":
        weight = getattr(module, names["weight"]) if names["weight"] else None
        return (torch.randn(3, 64 if weight is None else weight.numel(), dtype=torch.bfloat16),)
    if match.kind == "mlp":
        return (torch.randn(2, 3, getattr(module, names["gate"]).in_features, dtype=torch.bfloat16),)
    return None


def _same(expected, found, exact):
    if isinstance(expected, (tuple, list)):
        return len(expected) == len(found) and all(_same(e, f, exact) for e, f in zip(expected, found))
    if not torch.is_tensor(expected):
        return True  # a cache, or nothing
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    if exact:
        return torch.equal(expected.nan_to_num(), found.nan_to_num())
    return (expected != found).float().mean() < 0.02


def row(model_type, cls):
    """Compare one class of models; return figures, with differences in `mismatch`.

    Raises:
        zoo.NotTiny: there is no such tiny model.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, inputs = zoo.build(model_type, cls)
        patched = copy.deepcopy(plain)
        summary = liger_hw.patch(patched)
        found = {"model_type": model_type, "class": cls, "modern": _is_modern(plain)} | learn(plain, patched, inputs)
        wrong = round_alike(plain.bfloat16(), patched.bfloat16(), inputs)
    found["replaced"] = dict(sorted(_sums(summary.replaced).items()))
    found["left"] = {f"{name}: {why}": count for (name, why), count in sorted(summary.left.items())}
    found["mismatch"] = [name for name in ("loss", "logits", "gradient") if not found[name] <= 1] + wrong
    return found


def _is_modern(model):
    """Whether it has an RMSNorm or a rotary function, as models since Llama do."""
    classes = {type(module) for module in model.modules()}
    return any("rmsnorm" in cls.__name__.lower() or rotary.rotary_functions(cls) for cls in classes)


def _sums(replaced):
    sums = {}
    for (_, what), count in replaced.items():
        sums[what] = sums.get(what, 0) + count
    return {what: count for what, count in sums.items() if what not in LOSS_PARTS and not what.startswith("causal_lm")}
