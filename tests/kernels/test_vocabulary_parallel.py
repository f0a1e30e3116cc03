"""Losses of a head whose vocabulary is sharded over ranks, against those of the whole head."""

import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from liger_hw import fused_linear_cross_entropy, fused_linear_selective_log_softmax
from liger_hw._triton import interpreting
from liger_hw.dispatch import widen
from liger_hw.testing import parity
from liger_hw.transformers.vocab_parallel import vocab_parallel_cross_entropy

BACKENDS = ["nvidia"] if interpreting() else [None, "reference"]
ROWS, HIDDEN = 11, 8
CE_OPTIONS = [
    {},
    {"reduction": "sum", "softcap": 5.0, "logit_scale": 1.5},
    {"reduction": "none", "lse_square_scale": 0.01, "return_z_loss": True},
    {"label_smoothing": 0.1, "softcap": 3.0, "lse_square_scale": 0.1},
    {"label_smoothing": 0.2, "ce_weight": True, "reduction": "none"},
    {"ce_weight": True, "lse_square_scale": 0.1, "return_z_loss": True},
    {"return_token_accuracy": True, "return_predicted_tokens": True, "return_z_loss": True, "softcap": 1.0},
    {"return_token_accuracy": True, "reduction": "none", "label_smoothing": 0.1},
    {"use_token_scaling": True, "num_items": 7.0, "chunk_memory": 200},
    {"use_token_scaling": True, "reduction": "none", "ignore_index": 3},
]
SELECTED_OPTIONS = [
    {},
    {"return_entropy": True, "return_lse": True, "temperature": 0.7, "softcap": 4.0},
    {"return_entropy": True, "ignore_index": 3, "logit_scale": -1.5, "chunk_memory": 200},
]


class FromWhole(torch.autograd.Function):
    """Give each rank its rows of a whole tensor; gather the gradient."""

    @staticmethod
    def forward(ctx, x, form):
        mesh = init_device_mesh(device().type, (dist.get_world_size(),))
        part = distribute_tensor(x.detach(), mesh, [Shard(0)])
        return part if form == "DTensor" else part.to_local()

    @staticmethod
    def backward(ctx, grad):
        if isinstance(grad, DTensor):
            return grad.full_tensor(), None
        grads = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(grads, grad.contiguous())
        return torch.cat(grads), None


def normal(*shape, **options):
    return torch.randn(shape, device=device(), **options)


def numbers(*targets):
    return torch.tensor(targets, device=device())


def of_shards(op, form):
    """Return a function like `op` whose weight and bias each rank holds in part."""
    group = {"group": dist.group.WORLD} if form == "group" else {}

    def run(x, weight, target, bias, *others, **options):
        weight, bias = (FromWhole.apply(t, form) for t in (weight, bias))
        return op(x, weight, target, bias, *others, **options, **group)

    return run


def check(op, options, form, vocabulary, dtype):
    torch.manual_seed(0)
    x, weight, bias = (normal(*s, dtype=dtype) for s in ((ROWS, HIDDEN), (vocabulary, HIDDEN), (vocabulary,)))
    target = torch.randint(0, vocabulary, (ROWS,), device=device())
    target[::5] = options.get("ignore_index", -100)
    target[1:5] = torch.randint(0, 3, (4,), device=device())  # several of the first rank's
    options, others = dict(options), []
    if options.pop("ce_weight", False):
        others = [torch.rand(vocabulary, device=device())]
    inputs = [t.requires_grad_() for t in (x, weight)] + [target, bias.requires_grad_(), *others]
    double = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs]
    exact, reference = parity.run(op.reference, double, options), parity.run(op.reference, inputs, options)
    found = parity.run(of_shards(op, form), inputs, options)
    parity.compare(exact, reference, found, f"{op.__name__}, {options}, {form}")
    for result in found[: len(found) - 3]:  # every rank has the same bits of the results
        of_ranks = [torch.empty_like(result) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, result.contiguous())
        assert all(torch.equal(result.nan_to_num(), other.nan_to_num()) for other in of_ranks)


def check_all(op, all_options, dtype):
    ranks = dist.get_world_size()
    for options, (form, vocabulary) in itertools.product(all_options, (("DTensor", 37), ("group", 9 * ranks))):
        check(op, options, form, vocabulary, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", CE_OPTIONS, ids=str)
@pytest.mark.parametrize("forced", BACKENDS)
def test_cross_entropy(options, dtype, forced, ranks):
    ranks(2, check_all, fused_linear_cross_entropy, [options], dtype, backend=forced)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", SELECTED_OPTIONS, ids=str)
@pytest.mark.parametrize("forced", BACKENDS)
def test_selective_log_softmax(options, dtype, forced, ranks):
    ranks(2, check_all, fused_linear_selective_log_softmax, [options], dtype, backend=forced)


class ColumnsFromWhole(torch.autograd.Function):
    """Give each rank its columns of whole logits; gather the gradient."""

    @staticmethod
    def forward(ctx, logits):
        return logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        grads = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(grads, grad.contiguous())
        return torch.cat(grads, -1)


def cross_entropy_of_columns(dtype, options):
    """Hold the loss of sharded logits to its definition over whole ones."""
    torch.manual_seed(0)
    ranks, vocabulary = dist.get_world_size(), 9 * dist.get_world_size()
    logits = normal(ROWS, 2, vocabulary, dtype=dtype, requires_grad=True)
    target = torch.randint(0, vocabulary, (ROWS, 2), device=device())
    target[::5] = -100

    def definition(logits):
        """Return this rank's loss, and gradients of which each rank's own columns are those of its loss."""
        log_p = widen(logits).log_softmax(-1)
        parts = log_p.chunk(ranks, -1) if options["mode"] == "partition" else [log_p]
        alpha, averaged = options["label_smoothing"], parts[0].shape[-1]
        alpha *= averaged / (averaged - 1) if options["formula"] == "megatron" else 1
        nll = -log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        losses = [torch.where(target == -100, 0, (1 - alpha) * nll - alpha * part.mean(-1)) for part in parts]
        grads = [torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in losses]
        own = torch.cat([grad.chunk(len(grads), -1)[i] for i, grad in enumerate(grads)], -1)
        return losses[dist.get_rank() % len(losses)].detach(), own

    loss = vocab_parallel_cross_entropy(ColumnsFromWhole.apply(logits), target, dist.group.WORLD, **options)
    found = loss.detach(), torch.autograd.grad(loss.sum(), logits)[0]
    exact = definition(logits.detach().double().requires_grad_())
    parity.compare(exact, definition(logits), found, f"cross entropy of columns, {options}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["global", "partition"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("forced", BACKENDS)
def test_cross_entropy_of_columns(smoothing, mode, dtype, forced, ranks):
    for formula in ("pytorch", "megatron"):
        options = {"label_smoothing": smoothing, "mode": mode, "formula": formula}
        ranks(2, cross_entropy_of_columns, dtype, options, backend=forced)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("forced", BACKENDS)
def test_four_ranks(dtype, forced, ranks):
    fused, selected = fused_linear_cross_entropy, fused_linear_selective_log_softmax
    ranks(4, check_all, fused, [CE_OPTIONS[1], CE_OPTIONS[-1]], dtype, backend=forced)
    ranks(4, check_all, selected, SELECTED_OPTIONS[1:2], dtype, backend=forced)


def smaller_vocabulary_than_ranks():
    for vocabulary in (3, 5):  # the parts of 5 are 2, 2, 1 and 0 rows
        check(fused_linear_cross_entropy, {}, "DTensor", vocabulary, torch.float32)


def test_a_rank_without_a_part_of_the_vocabulary(ranks):
    ranks(4, smaller_vocabulary_than_ranks)


def masked_columns():
    """All logits of one rank are -inf, and a row's target is among them."""
    x, weight, target = normal(4, 8), normal(6, 8), numbers(0, 1, 2, 4)
    bias = numbers(*[0.0] * 3, *[float("-inf")] * 3)
    for op, options in ((fused_linear_cross_entropy, {"reduction": "none"}), (fused_linear_selective_log_softmax, {})):
        expected = op(x, weight, target, bias, **options)
        found = of_shards(op, "group")(x, weight, target, bias, **options)
        assert found[3].isinf()
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("forced", BACKENDS)
def test_masked_columns(forced, ranks):
    ranks(2, masked_columns, backend=forced)


def huge_columns():
    """Logits are so large that the difference of two overflows: within a rank, and between ranks."""
    x, weight, target = normal(4, 8), 0 * normal(6, 8), numbers(0, 1, 2, 4)
    bias = numbers(3e38, -3e38, 0.0, -3e38, 0.0, 2e38)
    for op, options in (
        (fused_linear_cross_entropy, {"reduction": "none"}),
        (fused_linear_cross_entropy, {"reduction": "none", "label_smoothing": 0.1}),
        (fused_linear_selective_log_softmax, {}),
        (fused_linear_selective_log_softmax, {"temperature": 2.0, "return_entropy": True, "return_lse": True}),
    ):
        expected = op.reference(x, weight, target, bias, **options)
        torch.testing.assert_close(of_shards(op, "group")(x, weight, target, bias, **options), expected)


@pytest.mark.parametrize("forced", BACKENDS)
def test_huge_columns(forced, ranks):
    ranks(2, huge_columns, backend=forced)


def infinite_columns():
    """One rank has a logit of +inf in each row: the log-sum-exp and its square are +inf, the rest is NaN."""
    x, weight, target = normal(4, 8).requires_grad_(), normal(6, 8), numbers(0, 1, 4, 5)
    bias = numbers(0.0, 0.0, 0.0, 0.0, float("inf"), 0.0)
    for op, options in (
        (fused_linear_cross_entropy, {"reduction": "none", "return_z_loss": True}),
        (fused_linear_cross_entropy, {"reduction": "none", "return_z_loss": True, "lse_square_scale": 0.1}),
        (fused_linear_cross_entropy, {"return_z_loss": True, "lse_square_scale": 0.1, "label_smoothing": 0.1}),
        (fused_linear_selective_log_softmax, {"return_entropy": True, "return_lse": True}),
    ):
        expected = parity.run(op.reference, (x, weight, target, bias), options)
        found = parity.run(of_shards(op, "group"), (x, weight, target, bias), options)
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("forced", BACKENDS)
def test_infinite_columns(forced, ranks):
    ranks(2, infinite_columns, backend=forced)


def communication(op):
    """Count what ranks exchange: targets and a few numbers a row in the forward, and the gradient of `x` once."""
    from torch.distributed.tensor.debug import CommDebugMode

    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gathered, original = [], getattr(dist, name)

    def record(output, *args):
        gathered.append(output.numel())
        return original(output, *args)

    setattr(dist, name, record)
    try:
        rows, vocabulary = 64, 400
        x, weight = normal(rows, 8).requires_grad_(), normal(vocabulary // 2, 8).requires_grad_()
        target = torch.randint(0, vocabulary, (rows,), device=device())
        with CommDebugMode() as counts:
            op(x, weight, target, group=dist.group.WORLD, chunk_memory=16 * 200 * 4).sum().backward()
    finally:
        setattr(dist, name, original)
    assert gathered == [2 * 16 * 4] * 4, (
        "peak, total, the target's distance and whether it is here, in each of 4 chunks"
    )
    others = sorted(
        str(kind).partition(".")[2] for kind, count in counts.get_comm_counts().items() for _ in range(count)
    )
    assert others[-1:] == ["all_reduce"] and len(others) == 2 and "all" in others[0] and "gather" in others[0], (
        f"{others}: the targets once, and the gradient of x once"
    )


@pytest.mark.parametrize(
    "op", [fused_linear_cross_entropy, fused_linear_selective_log_softmax], ids=lambda op: op.__name__
)
def test_communication(op, ranks):
    ranks(2, communication, op)


def labels_of_one_rank_only():
    """Every target lies in the first rank's part, or no row counts: no rank waits for another."""
    for target in (numbers(*[0] * 6), numbers(*[-100] * 6)):
        x, weight, bias = normal(6, 8).requires_grad_(), normal(10, 8).requires_grad_(), normal(10)
        for op in (fused_linear_cross_entropy, fused_linear_selective_log_softmax):
            expected = torch.autograd.grad(op(x, weight, target, bias).sum(), (x, weight))
            found = torch.autograd.grad(of_shards(op, "DTensor")(x, weight, target, bias).sum(), (x, weight))
            torch.testing.assert_close(found, expected)


def test_targets_of_one_rank(ranks):
    ranks(2, labels_of_one_rank_only)


def compiled():
    torch._dynamo.reset()
    x, weight, target = normal(6, 8).requires_grad_(), normal(10, 8).requires_grad_(), numbers(*range(6))
    mesh = init_device_mesh(device().type, (2,))
    shard = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
    fused_linear_cross_entropy(x, weight, target).backward()
    expected, x.grad = x.grad, None

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x, shard, target):
        return fused_linear_cross_entropy(x, shard, target)

    loss(x, shard, target).backward()
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(shard.grad.full_tensor(), weight.grad)


@pytest.mark.parametrize("forced", BACKENDS[:1])
def test_compiled(forced, ranks):
    ranks(2, compiled, backend=forced)


def refusals():
    x, target = normal(4, 8), numbers(0, 0, 0, 0)
    mesh = init_device_mesh(device().type, (2,))
    shard = distribute_tensor(normal(6, 8), mesh, [Shard(0)])
    for weight, group in ((shard, dist.group.WORLD), (normal(6, 8), mesh)):
        with pytest.raises(ValueError, match="^group: got .*, allowed: None for a weight that is a DTensor"):
            fused_linear_cross_entropy(x, weight, target, group=group)
    if device().type == "cpu":  # a GPU does not read targets to check them
        with pytest.raises(ValueError, match="^target: got .*, allowed: 0 to 5"):
            fused_linear_cross_entropy(x, shard, target + 6)

    for placement in (Shard(1), _StridedShard(0, split_factor=2)):
        weight = DTensor.from_local(normal(6, 8), mesh, [placement], run_check=False)
        with pytest.raises(ValueError, match="^weight: got a DTensor with .*FSDP2"):
            fused_linear_cross_entropy(x, weight, target)


def other_batches():
    """Compute losses outside the forward of a head that FSDP2 sharded: each rank has rows of its own."""
    # FSDP2's default mesh takes a GPU for each rank
    mesh = init_device_mesh(device().type, (2,))
    head = fully_shard(torch.nn.Linear(8, 6, bias=False, device=device()), mesh=mesh)
    x, target = normal(4, 8, requires_grad=True), numbers(0, 1, 2, -100)
    for op in (fused_linear_cross_entropy, fused_linear_selective_log_softmax):
        result = op(x, head.weight, target + dist.get_rank() * (target == 1))
        values = getattr(result, "log_probs", result)
        assert values.isnan().all()
        values.sum().backward()
        assert x.grad[1].isnan().all() and head.weight.grad.to_local().isnan().any()
        x.grad = head.weight.grad = None


@pytest.mark.parametrize("forced", BACKENDS)
def test_targets_that_differ_between_ranks_make_results_nan(forced, ranks):
    ranks(2, other_batches, backend=forced)


def test_wrong_arguments(ranks):
    ranks(2, refusals)


def another_number_of_rows():
    rows = 4 + dist.get_rank()
    fused_linear_cross_entropy(normal(rows, 8), normal(6, 8), numbers(*range(rows)), group=dist.group.WORLD)


def death():
    if dist.get_rank() == 1:
        os._exit(1)
    fused_linear_cross_entropy(normal(4, 8), normal(6, 8), numbers(0, 1, 2, 3), group=dist.group.WORLD)


@pytest.mark.skipif(interpreting(), reason="the same there")
@pytest.mark.parametrize("function, error", [(another_number_of_rows, "rank 0: died"), (death, "rank 0: Traceback")])
def test_ranks_that_disagree(function, error):
    """Gloo ends a process that receives more than it expects, and says that the ranks' collectives mismatch."""
    if torch.accelerator.is_available() and torch.accelerator.device_count() > 1:
        pytest.skip("NCCL reports nothing before its time limit; a launcher ends the other ranks")
    pair = Ranks(2)  # of its own, as it does not survive
    start = time.monotonic()
    try:
        with pytest.raises(AssertionError, match=error):
            pair.run(function, ())
    finally:
        pair.stop()
    assert time.monotonic() - start < 120


def compiled_columns():
    logits, target = normal(3, 2, 8, requires_grad=True), torch.randint(0, 16, (3, 2), device=device())

    def loss(logits):
        return vocab_parallel_cross_entropy(logits, target, dist.group.WORLD, label_smoothing=0.1).sum()

    found, expected = torch.compile(loss, backend="aot_eager")(logits), loss(logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, logits), torch.autograd.grad(expected, logits))


def test_compiled_cross_entropy_of_columns(ranks):
    ranks(2, compiled_columns)
