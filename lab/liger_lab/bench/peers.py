"""Describe the other implementations of each op and import their libraries on demand."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch.nn import functional as F

from liger_hw import dispatch
from liger_hw._torch import grouped_mm
from liger_hw.kernels.moe.experts import sort_by_expert
from liger_hw.kernels.moe.grouped_mm import multiply_groups, multiply_rows
from liger_hw.spelling import check_known
from liger_hw.testing.case import Case

OURS, FLOOR = "liger_hw", "floor"
LOSS_ALONE = "liger_hw, loss alone"  # patched with the fused loss and nothing else
LOSS_COMPILED = "liger_hw, loss alone, compiled"


@dataclass(frozen=True)
class Peer:
    """One library's implementations of our ops.

    Attributes:
        make: case -> a function of the case's inputs, or None if the library lacks this op.
        package: the package that it needs; None for torch alone.
        on_cpu: whether it runs without an accelerator.
        overwrites: case -> whether it writes over its inputs. It then gets its own inputs and reuses them, as the
            library's benchmarks do: the measured time contains no clone.
        waits: case -> whether it waits for the device and so cannot be captured in a graph.
        note: a remark for readers of its numbers.
    """

    make: Callable[[Case], Callable | None]
    package: str | None = None
    on_cpu: bool = False
    overwrites: Callable[[Case], bool] = lambda case: False
    waits: Callable[[Case], bool] = lambda case: False
    note: str = ""


def _ours(case):
    op = dispatch.OPS[case.op]
    if case.op in ("swiglu", "geglu") and case.options.get("in_place"):
        # autograd leaves cannot be written in place; a model passes intermediate tensors
        return lambda gate, up: op(gate.view_as(gate), up.view_as(up), **case.options)
    return partial(op, **case.options)


def _eager(case):
    return partial(dispatch.OPS[case.op].reference, **case.options)


def _compile(case):
    if _groups(case):
        return None
    torch._dynamo.reset()  # compiled once for each shape, and torch limits recompilations of one function
    return torch.compile(_eager(case), dynamic=False)


def _conv1d(x, weight, bias=None, input_gate=None, output_gate=None, activation=None):
    """Convolve as transformers' models do without the package causal_conv1d."""
    u = x if input_gate is None else input_gate * x
    taps = weight.shape[1]
    y = F.conv1d(u.transpose(1, 2), weight[:, None], bias, padding=taps - 1, groups=len(weight))
    y = y[..., : x.shape[1]].transpose(1, 2)
    y = y if activation is None else F.silu(y)
    return y if output_gate is None else output_gate * y


def _torch(case):
    def columns(x):
        return x.shape[-1:]

    return {
        "rms_norm": lambda x, w: F.rms_norm(x, columns(x), w, 1e-6),
        "layer_norm": lambda x, w, b: F.layer_norm(x, columns(x), w, b, 1e-6),
        "group_norm": lambda x, w, b: F.group_norm(x, case.options["num_groups"], w, b),
        "causal_conv1d": partial(_conv1d, **case.options),
        "softmax": lambda x: F.softmax(x, -1),
        "cross_entropy": F.cross_entropy,
        "fused_linear_cross_entropy": lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
        "grouped_mm": lambda rows, weights, offs: grouped_mm()(rows, weights, offs=offs),
    }.get(case.op)


def _liger(case):
    from liger_kernel.transformers import LigerFusedCETVDLoss
    from liger_kernel.transformers import functional as liger

    if case.op == "experts":
        from liger_kernel.ops import LigerFusedMoEFunction

        return LigerFusedMoEFunction.apply

    if case.op == "embedding":
        from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

        return LigerEmbeddingFunction.apply if case.options.get("padding_idx") is None else None

    if case.op == "int2_matmul":
        from liger_kernel.ops.experimental.mm_int8int2 import matmul

        return matmul

    norm = {"eps": 1e-6}
    more = {}
    if case.op == "fused_linear_cross_entropy" and "accum_dtype" in case.options:
        more["accum_dtype"] = case.options["accum_dtype"]
    return {
        "rms_norm": lambda x, w: liger.liger_rms_norm(x, w, **norm),
        "fused_add_rms_norm": lambda x, residual, w: liger.liger_fused_add_rms_norm(x, residual, w, **norm),
        "modulated_rms_norm": liger.liger_modulated_rms_norm,
        "layer_norm": lambda x, w, b: liger.liger_layer_norm(x, w, b, **norm),
        "group_norm": lambda x, w, b: liger.liger_group_norm(x, w, b, x.shape[1], case.options["num_groups"], 1e-5),
        "poly_norm": lambda x, w, b: liger.liger_poly_norm(x, w, b, **norm),
        "dyt": liger.liger_dyt,
        "attention_residual": liger.liger_attn_res,
        "multi_token_attention": partial(liger.liger_multi_token_attention, **case.options),
        "neighborhood_attention": partial(liger.liger_fused_neighborhood_attention, **case.options),
        "swiglu": liger.liger_swiglu,
        "geglu": liger.liger_geglu,
        "activate": liger.liger_relu_squared if case.options.get("activation") == "relu_squared" else None,
        "softmax": liger.liger_softmax,
        "sparsemax": liger.liger_sparsemax,
        "mhc_coefficients": lambda *inputs: liger.liger_mhc_coeffs(*inputs, allow_fp32=True),
        "mhc_pre": liger.liger_mhc_pre,
        "mhc_post_res": liger.liger_mhc_post_res,
        "cross_entropy_tvd": lambda *inputs: LigerFusedCETVDLoss()(*inputs),
        "rope": liger.liger_rope,
        "cross_entropy": liger.liger_cross_entropy,
        "fused_linear_cross_entropy": lambda *inputs: liger.liger_fused_linear_cross_entropy(*inputs, **more),
    }.get(case.op)


def _cce(case):
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy if case.op == "fused_linear_cross_entropy" else None


def _quack(case):
    from quack import cross_entropy, rmsnorm

    return {
        "rms_norm": rmsnorm,
        "fused_add_rms_norm": lambda x, residual, w: rmsnorm(x, w, residual=residual, prenorm=True),
        "cross_entropy": partial(cross_entropy, inplace_backward=bool(case.options.get("in_place"))),
    }.get(case.op)


def _floor(case):
    if case.op == "experts":
        return _ExpertsFloor()
    return Products([(0, 1)]) if case.op == "fused_linear_cross_entropy" else None


class Products:
    """Compute only the matrix products of linear layers, into own buffers.

    They are each layer's logits and, with gradients enabled, both gradients of a layer that learns.

    Args:
        layers: positions of (x, weight) of each layer among the inputs.
    """

    def __init__(self, layers):
        self.layers, self.buffers = layers, None

    def __call__(self, *inputs):
        layers = [(inputs[x].detach().flatten(0, -2), inputs[weight].detach()) for x, weight in self.layers]
        if self.buffers is None:
            logits = [x.new_empty(len(x), len(weight)).normal_() for x, weight in layers]
            learn = [inputs[x].requires_grad for x, _ in self.layers]
            gradients = [[torch.empty_like(t) for t in layer] if yes else [] for layer, yes in zip(layers, learn)]
            self.buffers = [(y, torch.empty_like(y), layer_grad) for y, layer_grad in zip(logits, gradients)]
        for (x, weight), (dlogits, logits, gradients) in zip(layers, self.buffers):
            torch.mm(x, weight.t(), out=logits)
            if torch.is_grad_enabled() and gradients:
                torch.mm(dlogits, weight, out=gradients[0])
                torch.mm(dlogits.t(), x, out=gradients[1])
        return logits


class _ExpertsFloor:
    """Compute only the grouped products of gated experts: two, and four in a backward."""

    def __init__(self):
        self.buffers = None

    def __call__(self, x, gate_up, down, index, weights):
        x, gate_up, down = x.detach(), gate_up.detach(), down.detach()
        if self.buffers is None:
            order, _, offs = sort_by_expert(index, len(gate_up))
            rows = x[order // index.shape[1]]
            y, hidden = (rows.new_empty(len(rows), size).normal_() for size in (down.shape[2], gate_up.shape[1]))
            self.buffers = rows, y, hidden, offs
        rows, y, hidden, offs = self.buffers
        multiply_rows(rows, gate_up.transpose(1, 2), offs, None)
        out = multiply_rows(y, down.transpose(1, 2), offs, None)
        if torch.is_grad_enabled():
            multiply_rows(rows, down, offs, None)
            multiply_groups(rows, y, offs, None)
            multiply_groups(hidden, rows, offs, None)
            multiply_rows(hidden, gate_up, offs, None)
        return out[: len(x)]


def _groups(case):
    """Tell whether the op's reference and the peer wait for the sizes of groups."""
    return case.op in ("grouped_mm", "experts")


def _losses(case):
    return case.op in ("cross_entropy", "fused_linear_cross_entropy")


PEERS = {
    OURS: Peer(_ours, on_cpu=True, overwrites=lambda case: bool(case.options.get("in_place"))),
    "liger": Peer(
        _liger,
        "liger_kernel",
        overwrites=lambda case: case.op != "fused_linear_cross_entropy",
        waits=lambda case: _losses(case) or _groups(case),
        note="with its defaults, which work in place (norms over the incoming gradient, GLU over gate and up "
        "in backward, RoPE over q and k, cross entropy over the logits), on the same tensors in every round",
    ),
    "compile": Peer(_compile, on_cpu=True, note="torch.compile of our reference, for each shape, without CUDA graphs"),
    "torch": Peer(_torch, on_cpu=True, note="torch's own fused operators; the loss of 16-bit logits is in 16 bits"),
    "eager": Peer(_eager, on_cpu=True, waits=_groups, note="our reference in plain torch, loss in fp32"),
    "cce": Peer(
        _cce, "cut_cross_entropy", waits=_losses, note="with its default gradient filter, which skips small gradients"
    ),
    "quack": Peer(_quack, "quack", overwrites=lambda case: bool(case.options.get("in_place"))),
    FLOOR: Peer(_floor, on_cpu=True, note="the matrix products alone"),
}
NAMES = tuple(name for name in PEERS if name not in (OURS, FLOOR))


def choose(names, device: torch.device) -> list[str]:
    """Return the providers to measure, ours first.

    Args:
        names: names of peers; empty means all installed ones (on a CPU, those that compile nothing).

    Raises:
        ValueError: one of the names is unknown, not installed, or needs an accelerator that is not here.
    """
    on_cpu = device.type == "cpu"
    for name in names:
        check_known("peer", name, NAMES)
        if on_cpu and not PEERS[name].on_cpu:
            raise ValueError(f"--against: got {name}, which runs on accelerators alone, and torch finds none here")
        if not _installed(name):
            package = PEERS[name].package.replace("_", "-") + ("-kernels" if name == "quack" else "")
            raise ValueError(f"--against: got {name}, which is not installed here: pip install {package}")
    if not names:
        names = [name for name in NAMES if _installed(name) and (not on_cpu or name in ("torch", "eager"))]
    return [OURS, *dict.fromkeys(names), FLOOR]


def _installed(name) -> bool:
    return PEERS[name].package is None or find_spec(PEERS[name].package) is not None
