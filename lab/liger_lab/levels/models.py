"""Run each kernel beside the class of a model that it replaces: `liger-hw doctor MODEL`.

A probe of `patch` compares the class with the op's reference, in small widths on the CPU. Here the class and its
replacement run with the model's own widths where the model would run, on the same random weights and inputs, forward
and backward. The rule is that of every kernel (`testing.parity`): against the class in float64, the replacement's error
is at most twice the class's own in this dtype, plus one rounding.
"""

import copy
import functools
import itertools

import torch

from liger_hw import backends, dispatch
from liger_hw._triton import interpreting
from liger_hw.kernels.vocabulary.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_hw.patching.patch import patch, unpatch
from liger_hw.patching.report import build_without_weights
from liger_hw.patching.rotary import rotary_functions
from liger_hw.patching.rotation import case_of, replacement
from liger_hw.patching.swapping import is_swapped, original_class
from liger_hw.testing import parity

DTYPES = (torch.bfloat16, torch.float32)
ROWS, HEAD_DIM, WIDTH = 64, 64, 512  # where a module says no width of its own
LARGEST = {"cpu": 2**24}  # values of one module's weights, by type of device: two seconds of a CPU
LARGEST_ELSEWHERE = 2**28  # in float64 they take 2 GiB
HEADER = ["", "class", "replaced by", "runs as", "dtype", "forward", "gradients"]


def compare(model: str, device: torch.device, trust_remote_code=False, say=lambda line: None):
    """Yield a row for each kind of module that patching replaces, and each dtype.

    Its keys: "class", "op", "by" (the implementation that runs here), "dtype", "forward" and "gradients" (the largest
    difference as a share of the largest value, 0.0 where every bit agrees, None where nothing was compared), "error"
    (what the rule says, or None) and "skipped" (why nothing was compared, or None).

    Args:
        model: as in `liger_hw.patching.report.patch_report`.
        say: called with a few words before each step.

    Raises:
        ValueError: as `patch_report`.
    """
    built = build_without_weights(model, trust_remote_code, say)
    patch(built)
    seen = set()
    for module in built.modules():
        if not is_swapped(module) or type(module).liger_match.kind in ("causal_lm", "skip_logits"):
            continue
        shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
        match = type(module).liger_match
        key = (original_class(module), match, () if match.kind == "rope" else shapes)
        if key in seen:
            continue
        seen.add(key)
        say(f"{original_class(module).__name__}: {match}")
        for dtype in DTYPES:
            yield _row(module, match, dtype) | _compared(module, match, dtype, device)


def implementation(op, device, dtype=torch.float32) -> str:
    """Return the name of the implementation that serves `device` here."""
    name = dispatch.OPS[op].choose(device, dtype)
    return f"{name}, interpreted" if name != "reference" and interpreting() else name


def _row(module, match, dtype):
    return {"class": original_class(module).__name__, "op": str(match), "dtype": str(dtype).removeprefix("torch."),
            "forward": None, "gradients": None, "error": None, "skipped": None}  # fmt: skip


def _compared(module, match, dtype, device):
    op = "fused_linear_cross_entropy" if match.kind == "head" else match.op
    row = {"by": implementation(op, device, dtype) if op in dispatch.OPS else "ops"}
    generator = torch.Generator().manual_seed(0)
    try:
        for exact, original, patched_function, inputs, outputs in _functions(module, match, dtype, device, generator):
            inputs = [_leaf(x, device) for x in inputs]
            wide = [_leaf(x.double(), device) if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs]
            plain, patched = parity.run(original, inputs, {}), parity.run(patched_function, inputs, {})
            row["forward"] = max(row.get("forward") or 0.0, _apart(patched[:outputs], plain[:outputs]))
            row["gradients"] = max(row.get("gradients") or 0.0, _apart(patched[outputs:], plain[outputs:]))
            parity.compare(parity.run(exact, wide, {}), plain, patched, match.op or match.kind)
    except AssertionError as error:
        return row | {"error": str(error)}
    except (torch.OutOfMemoryError, _Skipped) as error:
        return row | {"skipped": str(error)[:200] or "out of memory"}
    except Exception as error:  # of a model's own code or of a kernel, of any kind: the doctor is asked for it
        return row | {"error": f"{type(error).__name__}: {error}"[:300]}
    return row


class _Skipped(Exception):
    """Say why a module is not compared."""


def _leaf(x, device):
    x = x.detach().to(device) if torch.is_tensor(x) else x
    return x.requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x


def _apart(results, expected):
    """Return the largest difference as a share of the largest value."""
    shares = [
        ((f.double() - e.double()).abs().max() / e.double().abs().max().clamp(min=1e-30)).item()
        for f, e in zip(results, expected)
        if e.numel()
    ]
    return max(shares, default=0.0)


def _functions(module, match, dtype, device, generator):
    """Yield (the class's function for float64, for `dtype`, the replacement, inputs, output count)."""

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    if match.kind == "rope":
        functions = rotary_functions(original_class(module))
        width = getattr(module, "head_dim", None)
        for name, rotation in match.names:
            args = case_of(rotation, dtype, dtype, length=ROWS, width=width if type(width) is int else HEAD_DIM)
            heads = 2 if rotation.form.startswith("q") or rotation.is_complex else 1
            tables = [x.to(device) for x in args[heads:]]  # no gradient goes to them
            original, rotated = (
                _on_heads(f, tables) for f in (functions[name], replacement(functions[name], rotation))
            )
            yield original, original, rotated, args[:heads], heads
    elif match.kind == "head":
        vocabulary, hidden = module.weight.shape
        vocabulary = min(vocabulary, _largest(device) // hidden)
        labels = torch.randint(vocabulary, (ROWS,), generator=generator).to(device)

        def original(x, w):
            return torch.nn.functional.cross_entropy(
                (x @ w.t()).to(torch.promote_types(x.dtype, torch.float32)), labels
            )

        def fused(x, w):
            return fused_linear_cross_entropy(x, w, labels)

        yield original, original, fused, [random(ROWS, hidden), random(vocabulary, hidden) * hidden**-0.5], 1
    else:
        yield _module_functions(module, match, dtype, device, random)


def _on_heads(rotate, tables):
    def function(*heads):
        wide = [t if t.is_complex() else t.to(heads[0].dtype) for t in tables]
        rotated = rotate(*heads, *wide)
        return tuple(rotated) if isinstance(rotated, (tuple, list)) else rotated

    return function


def _largest(device):
    return LARGEST.get(device.type, LARGEST_ELSEWHERE)


def _module_functions(module, match, dtype, device, random):
    count = sum(p.numel() for p in module.parameters())
    if count > _largest(device):
        raise _Skipped(f"its {count / 1e6:.0f}e6 weights are more than are compared on this device")
    patched = copy.deepcopy(module).to_empty(device=device).to(dtype).eval()  # without dropout
    names = [name for name, _ in patched.named_parameters()]
    weights = [
        1 + 0.3 * random(*p.shape) if p.ndim == 1 else random(*p.shape) * p.shape[-1] ** -0.5
        for p in patched.parameters()
    ]
    plain = copy.deepcopy(patched)
    unpatch(plain)
    exact = copy.deepcopy(plain)
    if match.kind == "experts":
        exact.config._experts_implementation = "eager"  # torch's grouped product takes no float64
    for inputs in _candidates(module, match, random):
        fixed = [x.to(device) if torch.is_tensor(x) and not x.is_floating_point() else x for x in inputs]
        try:
            _call(plain, names, fixed, [x.to(device) for x in weights])(*_floats(fixed, device))
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue
        split = len(_floats(fixed, device))

        def function(of, *tensors, fixed=fixed, split=split):
            return _call(of, names, fixed, tensors[split:])(*tensors[:split])

        calls = (functools.partial(function, of) for of in (exact, plain, patched))
        return *calls, [*_floats(fixed, device), *weights], 1
    raise _Skipped("no inputs are known that its class takes")


def _floats(inputs, device):
    return [x.to(device) for x in inputs if torch.is_tensor(x) and x.is_floating_point()]


def _call(module, names, fixed, weights):
    """Return a function of the floating point inputs that calls the module with these weights."""

    def call(*floats):
        given = iter(floats)
        args = [next(given) if torch.is_tensor(x) and x.is_floating_point() else x for x in fixed]
        return torch.func.functional_call(module, dict(zip(names, weights)), tuple(args))

    return call


def _candidates(module, match, random):
    """Yield inputs that a module of this kind may take."""
    sizes = dict.fromkeys(itertools.chain.from_iterable(tuple(p.shape)[::-1] for p in module.parameters()))
    for width in [*sizes, WIDTH]:
        if match.kind == "gated_norm":
            yield random(ROWS, width), random(ROWS, width)
        elif match.kind == "experts":
            count = module.down_proj.shape[0]
            index = torch.arange(ROWS * 2).view(ROWS, 2) % count
            yield random(ROWS, width), index, random(ROWS, 2).softmax(-1)
        elif match.kind == "sorted_experts":
            yield (random(next(module.parameters()).shape[0] * 8, width),)
        else:
            yield (random(1, ROWS, width),)


def failures(rows) -> list[str]:
    """Return the failures as text."""
    return [f"{row['class']} in {row['dtype']}: {row['error']}" for row in rows if row["error"]]


def table_rows(rows) -> list[list[str]]:
    """Return the rows as cells, without a header."""
    return [
        ["WRONG" if row["error"] else "", row["class"], row["op"], row["by"], row["dtype"],
         row["skipped"] or _shown(row["forward"]), "" if row["skipped"] else _shown(row["gradients"])]
        for row in rows
    ]  # fmt: skip


def _shown(share):
    return "-" if share is None else "bitwise" if share == 0 else f"within {share:.1e}"


def advice(device) -> list[str]:
    """Return lines on the limits of a run on this device."""
    if device.type != "cpu" or interpreting() and backends.forced():
        return []
    return ["no accelerator is here: plain torch ran the definition of each op, and no kernel. Run this "
            "where the model trains, or under TRITON_INTERPRET=1 LIGER_HW_BACKEND=nvidia (slow)"]  # fmt: skip
