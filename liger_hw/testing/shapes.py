"""The shapes of real models: what the tuner and the benchmark measure each op at, and what `liger-hw info` shows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from liger_hw.spelling import check_known

TOKENS = 8192  # rows of a training step on one GPU: 8 sequences of 1024, or 2 of 4096
MiB = 2**20


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
        op: the op's name in `dispatch.OPS`.
        label: sizes, readable: "8192x4096", "2x4096x32/8x128", and an option where there is one: "8192x32000 in place".
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
PLAIN = (("gelu_new", 10240), ("relu_squared", 9216))  # MLPs without a gate: Phi-2, Minitron-4B
LONG_ROWS = ((2048, 65536), (512, 262144))
HEAD_NORM_ROWS = TOKENS * 32  # query heads of one layer whose norm is per head, as Qwen3's


def _randn(*shape, grad=True, scale=1.0):
    return lambda device, dtype: torch.randn(shape, device=device, dtype=dtype).mul_(scale).requires_grad_(grad)


def _tokens(vocabulary, rows=TOKENS):
    return lambda device, dtype: torch.randint(vocabulary, (rows,), device=device)


def _heads(batch, seq, heads, head_dim):
    """As attention makes them: (B, T, H, D) in memory, seen as (B, H, T, D)."""
    made = _randn(batch, seq, heads, head_dim, grad=False)
    return lambda device, dtype: made(device, dtype).transpose(1, 2).requires_grad_()


def _case(op, label, *makers, **options):
    return Case(op, label, lambda device, dtype: tuple(make(device, dtype) for make in makers), options)


def _norm_case(op, rows, cols) -> Case:
    x, parameter = _randn(rows, cols), _randn(cols)
    tensors = {
        "rms_norm": (x, parameter),
        "fused_add_rms_norm": (x, x, parameter),
        "layer_norm": (x, parameter, parameter),
    }
    return _case(op, f"{rows}x{cols}", *tensors[op])


def _glu_case(op, rows, cols, note="", **options) -> Case:
    return _case(op, f"{rows}x{cols}{note}", _randn(rows, cols), _randn(rows, cols), **options)


def _clamped_case(rows, cols) -> Case:
    options = {"limit": 7.0, "alpha": 1.702, "offset": 1.0, "interleaved": True}
    return _case("clamped_swiglu", f"{rows}x{cols}", _randn(rows, 2 * cols), **options)


def _glu_linear_case(rows, hidden, intermediate, activation) -> Case:
    x, weight = _randn(rows, intermediate), _randn(hidden, intermediate, scale=intermediate**-0.5)
    options = {} if activation == "swiglu" else {"activation": "gelu_tanh"}
    return _case("glu_linear", f"{rows}x{intermediate}x{hidden}", x, x, weight, **options)


def _rope_case(batch, seq, heads, kv_heads, head_dim) -> Case:
    angle = _randn(1, seq, head_dim, grad=False)
    q, k = (_heads(batch, seq, count, head_dim) for count in (heads, kv_heads))
    return _case("rope", f"{batch}x{seq}x{heads}/{kv_heads}x{head_dim}", q, k, angle, angle)


def _loss_case(rows, vocabulary, note="", op="cross_entropy", **options) -> Case:
    logits = _randn(rows, vocabulary)
    return _case(op, f"{rows}x{vocabulary}{note}", logits, _tokens(vocabulary, rows), **options)


def _divergence_case(op, rows, vocabulary) -> Case:
    def log_probabilities(device, dtype):
        return torch.randn(rows, vocabulary, device=device, dtype=dtype).log_softmax(-1)

    def student(device, dtype):
        made = log_probabilities(device, dtype)
        return (made.exp() if op == "tvd" else made).requires_grad_()

    def teacher(device, dtype):
        made = log_probabilities(device, dtype)
        return made if op == "jsd" else made.exp()

    return _case(op, f"{rows}x{vocabulary}", student, teacher)


def _linear_loss_case(rows, hidden, vocabulary, note="", op="fused_linear_cross_entropy", **options) -> Case:
    """With logits of variance 1: of larger ones the softmax is so sharp that a kernel may skip most of the gradient."""
    x, weight = _randn(rows, hidden), _randn(vocabulary, hidden, scale=hidden**-0.5)
    label = f"{rows}x{hidden}x{vocabulary}{note}"
    return _case(op, label, x, weight, _tokens(vocabulary, rows), **options)


def _every_case() -> Iterator[Case]:
    for rows, cols in [(HEAD_NORM_ROWS, 128), *((TOKENS, model.hidden) for model in MODELS), *LONG_ROWS]:
        yield _norm_case("rms_norm", rows, cols)
    for model in MODELS:
        yield _norm_case("fused_add_rms_norm", TOKENS, model.hidden)
    for rows, cols in [*((TOKENS, cols) for cols in LAYER_NORM_WIDTHS), *LONG_ROWS]:
        yield _norm_case("layer_norm", rows, cols)
    for model in MODELS:
        yield _glu_case(model.activation, TOKENS, model.intermediate)
    yield _clamped_case(TOKENS, 2880)  # gpt-oss-20b's experts
    for activation, cols in PLAIN:
        yield _case("activate", f"{TOKENS}x{cols} {activation}", _randn(TOKENS, cols), activation=activation)
    for model in MODELS:
        yield _glu_linear_case(TOKENS, model.hidden, model.intermediate, model.activation)
    for model in MODELS:
        yield _rope_case(TOKENS // 4096, 4096, model.heads, model.kv_heads, model.head_dim)
    for model in MODELS:
        yield _loss_case(TOKENS, model.vocabulary)
    for model in MODELS:
        yield _linear_loss_case(TOKENS, model.hidden, model.vocabulary)
    for model in (MODELS[0], MODELS[6]):
        yield _loss_case(TOKENS, model.vocabulary, op="selective_log_softmax")
        yield _linear_loss_case(TOKENS, model.hidden, model.vocabulary, op="fused_linear_selective_log_softmax")
        for op in ("kl_div", "jsd", "tvd"):
            yield _divergence_case(op, TOKENS // 2, model.vocabulary)


def _further_cases() -> Iterator[Case]:
    """What the benchmark measures beside: other numbers of rows and other options, odd widths, and sizes at which the
    host is slower than any device."""
    for op in ("rms_norm", "fused_add_rms_norm", "layer_norm"):
        for rows, cols in [
            (32768, 1024), (16384, 4096), (16384, 8192), (8192, 16384), (HEAD_NORM_ROWS, 128), *LONG_ROWS,
            (8192, 1001), (4099, 3001), (16, 2048),
        ]:  # fmt: skip
            yield _norm_case(op, rows, cols)
    for op in ("swiglu", "geglu"):
        for rows, cols in [(16384, 14336), (16384, 8192)]:
            yield _glu_case(op, rows, cols)
            yield _glu_case(op, rows, cols, " in place", in_place=True)
        yield _glu_case(op, 8191, 4099)
        yield _glu_case(op, 16, 2048)
    yield _rope_case(4, 4096, 32, 8, 128)
    yield _rope_case(3, 1365, 12, 4, 80)
    yield _rope_case(1, 16, 16, 4, 64)
    for vocabulary in (32000, 128256, 256000):
        yield _loss_case(TOKENS, vocabulary, " in place", in_place=True)
    yield _loss_case(4099, 50257)
    yield _loss_case(16, 2048)
    for sizes in [(8192, 4096, 128256), (16384, 2048, 128256), (8192, 2304, 256000), (8192, 896, 151936)]:
        yield _linear_loss_case(*sizes)
        yield _linear_loss_case(*sizes, " 256 MiB", chunk_memory=256 * MiB)
        yield _linear_loss_case(*sizes, " 1 GiB", chunk_memory=1024 * MiB)
    yield _linear_loss_case(8192, 4096, 128256, " fp32 dW", accum_dtype=torch.float32)
    yield _linear_loss_case(4099, 1600, 50257)
    yield _linear_loss_case(16, 256, 1024)


def cases(ops=(), further=False) -> list[Case]:
    """Every op's cases, or those of the ops named, in the order of models' sizes; no shape twice.

    Args:
        ops: names of ops; none means all.
        further: with the shapes that only the benchmark looks at: they need no configuration of their own.

    Raises:
        ValueError: an op is unknown, or has no case.
    """
    every = [*_every_case(), *(_further_cases() if further else ())]
    found = {(case.op, case.label): case for case in every}
    known = list(dict.fromkeys(op for op, _ in found))
    for op in ops:
        check_known("op", op, known)
    wanted = [case for case in found.values() if case.op in (ops or known)]
    return sorted(wanted, key=lambda case: known.index(case.op))


def step(op, inputs, options) -> None:
    """Forward and backward of `op`, with gradients of one; made for shapes and launches, not for values."""
    outputs = op(*inputs, **options)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None and y.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
