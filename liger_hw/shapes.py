"""The shapes of real models: what the tuner and the benchmark measure each op at, and what `liger-hw info` shows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

TOKENS = 8192  # rows of a training step on one GPU: 8 sequences of 1024, or 2 of 4096


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
        op: the op's name in `dispatch.OPS`.
        label: sizes, readable: "8192x4096", "2x4096x32/8x128".
        make: (device, dtype) -> the op's tensors; those that want a gradient ask for it. On "meta" they take no memory.
        options: the op's keyword arguments.
    """

    op: str
    label: str
    make: Callable[[torch.device | str, torch.dtype], tuple]
    options: dict = field(default_factory=dict)


@dataclass(frozen=True)
class _Model:
    """The sizes of one published model that its kernels see."""

    name: str
    hidden: int
    intermediate: int
    activation: str
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


MODELS = (
    _Model("Qwen2.5-0.5B", 896, 4864, "swiglu", 14, 2, 64, 151936),
    _Model("Llama-3.2-1B", 2048, 8192, "swiglu", 32, 8, 64, 128256),
    _Model("Gemma-2-2B", 2304, 9216, "geglu", 8, 4, 256, 256000),
    _Model("Phi-3-mini", 3072, 8192, "swiglu", 32, 32, 96, 32064),
    _Model("Gemma-3-12B", 3840, 15360, "geglu", 16, 8, 256, 262208),
    _Model("Mistral-7B", 4096, 14336, "swiglu", 32, 8, 128, 32000),
    _Model("Llama-3-8B", 4096, 14336, "swiglu", 32, 8, 128, 128256),
    _Model("Llama-3-70B", 8192, 28672, "swiglu", 64, 8, 128, 128256),
    _Model("Llama-3-405B", 16384, 53248, "swiglu", 128, 8, 128, 128256),
)
LAYER_NORM_WIDTHS = (768, 1024, 4608, 8192)  # GPT-2, BERT-large, StarCoder2-7B, Command R
HEAD_NORM_ROWS = TOKENS * 32  # query heads of one layer whose norm is per head, as Qwen3's


def _randn(*shape, grad=True):
    return lambda device, dtype: torch.randn(shape, device=device, dtype=dtype).requires_grad_(grad)


def _tokens(vocabulary):
    return lambda device, dtype: torch.randint(vocabulary, (TOKENS,), device=device)


def _heads(batch, seq, heads, head_dim):
    """As attention makes them: (B, T, H, D) in memory, seen as (B, H, T, D)."""
    made = _randn(batch, seq, heads, head_dim, grad=False)
    return lambda device, dtype: made(device, dtype).transpose(1, 2).requires_grad_()


def _case(op, label, *makers, **options):
    return Case(op, label, lambda device, dtype: tuple(make(device, dtype) for make in makers), options)


def _every_case() -> Iterator[Case]:
    for rows, cols in [(HEAD_NORM_ROWS, 128), *((TOKENS, model.hidden) for model in MODELS)]:
        yield _case("rms_norm", f"{rows}x{cols}", _randn(rows, cols), _randn(cols))
    for model in MODELS:
        x = _randn(TOKENS, model.hidden)
        yield _case("fused_add_rms_norm", f"{TOKENS}x{model.hidden}", x, x, _randn(model.hidden))
    for cols in LAYER_NORM_WIDTHS:
        yield _case("layer_norm", f"{TOKENS}x{cols}", _randn(TOKENS, cols), _randn(cols), _randn(cols))
    for model in MODELS:
        x = _randn(TOKENS, model.intermediate)
        yield _case(model.activation, f"{TOKENS}x{model.intermediate}", x, x)
    for model in MODELS:
        batch, seq = TOKENS // 4096, 4096
        label = f"{batch}x{seq}x{model.heads}/{model.kv_heads}x{model.head_dim}"
        angle = _randn(1, seq, model.head_dim, grad=False)
        q, k = (_heads(batch, seq, heads, model.head_dim) for heads in (model.heads, model.kv_heads))
        yield _case("rope", label, q, k, angle, angle)
    for model in MODELS:
        logits = _randn(TOKENS, model.vocabulary)
        yield _case("cross_entropy", f"{TOKENS}x{model.vocabulary}", logits, _tokens(model.vocabulary))
    for model in MODELS:
        x, weight = _randn(TOKENS, model.hidden), _randn(model.vocabulary, model.hidden)
        label = f"{TOKENS}x{model.hidden}x{model.vocabulary}"
        yield _case("fused_linear_cross_entropy", label, x, weight, _tokens(model.vocabulary))


def cases(ops=()) -> list[Case]:
    """Every op's cases, or those of the ops named, smallest first within an op; no shape twice.

    Raises:
        ValueError: an op is unknown, or has no case.
    """
    found = {(case.op, case.label): case for case in _every_case()}
    known = dict.fromkeys(op for op, _ in found)
    unknown = [op for op in ops if op not in known]
    if unknown:
        raise ValueError(f"OPS: got {', '.join(unknown)}, allowed: {', '.join(known)}")
    return [case for case in found.values() if case.op in (ops or known)]


def step(op, inputs, options) -> None:
    """Forward and backward of `op`, with gradients of one; made for shapes and launches, not for values."""
    outputs = op(*inputs, **options)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None and y.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
