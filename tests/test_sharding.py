"""Ops of DTensors: for every sharding the results and gradients of the op on whole tensors, or an error."""

import pytest
import torch
from ranks import device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from liger_hw._triton import interpreting
from liger_hw.dispatch import OPS
from liger_hw.testing import parity
from liger_lab.cases import CASES, training_cases

WITHOUT_A_RULE = {"dequantize_4bit", "experts", "grouped_mm"}
BACKENDS = ["nvidia"] if interpreting() else [None]


def sample(op):
    torch.manual_seed(0)
    return next(iter(training_cases(op, torch.float32, device())))


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


class Sharded(torch.autograd.Function):
    """Distribute a tensor; gather its gradient."""

    @staticmethod
    def forward(ctx, x, mesh, placements):
        return distribute_tensor(x.detach(), mesh, placements)

    @staticmethod
    def backward(ctx, grad):
        return grad.full_tensor(), None, None


def of_shards(op, placements, mesh):
    """Return a function like `op` that distributes its tensors and gathers its results."""

    def run(*inputs, **options):
        inputs = [Sharded.apply(x, mesh, placements(i, x)) if torch.is_tensor(x) else x for i, x in enumerate(inputs)]
        results = op(*inputs, **options)
        results = (results,) if torch.is_tensor(results) else results
        return tuple(whole(result) for result in results)

    return run


def check(op, placements, inputs, options, mesh, compiled=None):
    double = [
        x.detach().double().requires_grad_(x.requires_grad) if torch.is_tensor(x) and x.is_floating_point() else x
        for x in inputs
    ]
    exact = parity.run(OPS[op].reference, double, options)
    reference = parity.run(OPS[op].reference, inputs, options)
    parity.compare(exact, reference, parity.run(of_shards(compiled or OPS[op], placements, mesh), inputs, options), op)


def every_sharding(op):
    mesh = init_device_mesh(device().type, (2,))
    inputs, options = sample(op)
    first = inputs[0]
    for dim in range(first.ndim):
        for others in (False, True):  # the other tensors whole, or like the first

            def placements(i, x, dim=dim, others=others):
                alike = i == 0 or others and x.shape == first.shape
                return [Shard(dim) if alike else Replicate()]

            check(op, placements, inputs, options, mesh)
    check(op, lambda i, x: [Replicate()], inputs, options, mesh)


def each_argument(op):
    """Shard every tensor along every dimension, and both factors of an adapter by their rank."""
    mesh = init_device_mesh(device().type, (2,))
    inputs, options = sample(op)
    for i, x in enumerate(inputs):
        for dim in range(x.ndim if torch.is_tensor(x) else 0):
            check(op, lambda k, _, i=i, dim=dim: [Shard(dim) if k == i else Replicate()], inputs, options, mesh)
    if op.startswith("lora"):
        *_, a, b = (i for i, x in enumerate(inputs) if torch.is_tensor(x))
        check(op, lambda i, _: [{a: Shard(0), b: Shard(1)}.get(i, Replicate())], inputs, options, mesh)


@pytest.mark.parametrize("op", sorted(set(CASES) - WITHOUT_A_RULE))
@pytest.mark.parametrize("forced", BACKENDS)
def test_every_argument_sharded(op, forced, ranks):
    ranks(2, each_argument, op, backend=forced)


@pytest.mark.parametrize("op", sorted(set(CASES) - WITHOUT_A_RULE))
@pytest.mark.parametrize("forced", BACKENDS)
def test_every_sharding_of_two_ranks(op, forced, ranks):
    ranks(2, every_sharding, op, backend=forced)


def two_axes(op):
    """Rows sharded over one axis of the mesh, another dimension over the other, and a partial sum."""
    mesh = init_device_mesh(device().type, (2, 2))
    inputs, options = sample(op)
    rows = inputs[0].ndim - 1

    def shards(i, x):
        return [Shard(0), Shard(rows)] if x.shape == inputs[0].shape else [Replicate(), Replicate()]

    check(op, shards, inputs, options, mesh)
    check(op, lambda i, x: [Shard(0), Shard(0)] if i == 0 else [Replicate(), Replicate()], inputs, options, mesh)
    check(op, lambda i, x: [Shard(0), Partial()] if i == 0 else [Replicate(), Shard(0)], inputs, options, mesh)


@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "fused_linear_selective_log_softmax"])
@pytest.mark.parametrize("forced", BACKENDS)
def test_four_ranks_of_two_axes(op, forced, ranks):
    ranks(4, two_axes, op, backend=forced)


def heads_fewer_than_ranks():
    mesh = init_device_mesh(device().type, (2,))
    inputs = [torch.randn(2, heads, 5, 8, device=device()).requires_grad_() for heads in (4, 1)]
    inputs += [torch.randn(1, 5, 8, device=device()) for _ in range(2)]
    check("rope", lambda i, x: [Shard(1) if i == 0 else Replicate()], inputs, {}, mesh)


@pytest.mark.parametrize("forced", BACKENDS)
def test_one_head_of_keys(forced, ranks):
    ranks(2, heads_fewer_than_ranks, backend=forced)


def tokens_of_a_table():
    """The table whole, or its columns sharded over another axis; its gradient is a partial sum over the tokens."""
    table, tokens = torch.randn(9, 6, device=device()).requires_grad_(), torch.randint(9, (4, 11), device=device())
    mesh = init_device_mesh(device().type, (2, 2))
    for columns in (Replicate(), Shard(1)):
        placements = [Replicate(), columns], [Shard(0), Replicate()]
        check("embedding", lambda i, x, placements=placements: placements[i], (table, tokens), {"padding_idx": 2}, mesh)


@pytest.mark.parametrize("forced", BACKENDS)
def test_tokens_of_a_table(forced, ranks):
    ranks(4, tokens_of_a_table, backend=forced)


def means():
    """A rank with all labels, a rank without any: the mean divides by the labels of both."""
    mesh = init_device_mesh(device().type, (2,))
    target = torch.tensor([3, 4, 0, -100, -100, -100], device=device())
    logits, x, weight = (torch.randn(s, device=device()).requires_grad_() for s in ((6, 9), (6, 5), (9, 5)))
    columns = torch.rand(9, device=device())

    def rows(i, x):
        return [Shard(0) if x.shape[0] == 6 else Replicate()]

    for options in ({}, {"reduction": "sum"}, {"num_items": 4}, {"return_token_accuracy": True, "return_z_loss": True}):
        options = options | {"lse_square_scale": 0.1}
        check("cross_entropy", rows, (logits, target), options, mesh)
        check("cross_entropy", rows, (logits, target, columns), options, mesh)
        check("fused_linear_cross_entropy", rows, (x, weight, target), options, mesh)


@pytest.mark.parametrize("forced", BACKENDS)
def test_means_of_losses(forced, ranks):
    ranks(2, means, backend=forced)


def row_of_one_rank():
    mesh = init_device_mesh(device().type, (2,))
    x, weight = torch.randn(1, 5, device=device()).requires_grad_(), torch.randn(9, 5, device=device()).requires_grad_()
    target = torch.tensor([3], device=device())

    def rows(i, x):
        return [Shard(0) if x.shape[0] == 1 else Replicate()]

    check("rms_norm", rows, (x, weight[0].detach().requires_grad_()), {}, mesh)
    check("cross_entropy", rows, (x, target), {}, mesh)
    check("fused_linear_cross_entropy", rows, (x, weight, target), {}, mesh)


@pytest.mark.parametrize("forced", BACKENDS)
def test_a_rank_without_rows(forced, ranks):
    ranks(2, row_of_one_rank, backend=forced)


def refusals():
    mesh = init_device_mesh(device().type, (2,))
    x, weight = torch.randn(4, 8, device=device()), torch.ones(8, device=device())
    with pytest.raises(ValueError, match="^weight: got a Tensor, allowed: a DTensor on the mesh of x"):
        OPS["rms_norm"](distribute_tensor(x, mesh, [Shard(0)]), weight)
    with pytest.raises(ValueError, match="^weight: got a DTensor, allowed: a plain tensor, like x"):
        OPS["rms_norm"](x, distribute_tensor(weight, mesh, [Replicate()]))
    for op in sorted(WITHOUT_A_RULE):
        inputs, options = sample(op)
        inputs = [distribute_tensor(x, mesh, [Replicate()]) if torch.is_tensor(x) else x for x in inputs]
        with pytest.raises(NotImplementedError, match=f"^{op} has no rule for DTensors"):
            OPS[op](*inputs, **options)


@pytest.mark.parametrize("forced", BACKENDS)
def test_what_has_no_rule_is_refused(forced, ranks):
    ranks(2, refusals, backend=forced)


def compiled():
    mesh = init_device_mesh(device().type, (2,))
    for op in ("rms_norm", "swiglu"):
        inputs, options = sample(op)
        torch._dynamo.reset()
        function = torch.compile(OPS[op], fullgraph=True, backend="aot_eager")
        check(op, lambda i, x: [Shard(0) if i == 0 else Replicate()], inputs, options, mesh, function)


@pytest.mark.parametrize("forced", BACKENDS)
def test_compiled(forced, ranks):
    ranks(2, compiled, backend=forced)
