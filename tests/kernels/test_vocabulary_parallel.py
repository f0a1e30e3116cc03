"""Losses of a head whose vocabulary is sharded over ranks, against those of the whole head."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from liger_hw import fused_linear_cross_entropy, fused_linear_selective_log_softmax
from liger_hw._triton import interpreting
from liger_hw.testing import parity

BACKENDS = ["nvidia"] if interpreting() else [None, "reference"]
ROWS, HIDDEN = 21, 16
CE_OPTIONS = [
    {},
    {"reduction": "sum", "softcap": 5.0, "logit_scale": 1.5},
    {"reduction": "none", "lse_square_scale": 0.01, "return_z_loss": True},
    {"label_smoothing": 0.1, "softcap": 3.0, "lse_square_scale": 0.1},
    {"label_smoothing": 0.2, "ce_weight": True, "reduction": "none"},
    {"ce_weight": True, "lse_square_scale": 0.1, "return_z_loss": True},
    {"return_token_accuracy": True, "return_predicted_tokens": True, "return_z_loss": True, "softcap": 1.0},
    {"return_token_accuracy": True, "reduction": "none", "label_smoothing": 0.1},
    {"use_token_scaling": True, "num_items": 7.0, "chunk_memory": 400},
    {"use_token_scaling": True, "reduction": "none", "ignore_index": 3},
]
SELECTED_OPTIONS = [
    {},
    {"return_entropy": True, "return_lse": True, "temperature": 0.7, "softcap": 4.0},
    {"return_entropy": True, "ignore_index": 3, "logit_scale": -1.5, "chunk_memory": 400},
]


class FromWhole(torch.autograd.Function):
    """Give each rank its rows of a whole tensor; gather the gradient."""

    @staticmethod
    def forward(ctx, x, form):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        part = distribute_tensor(x.detach(), mesh, [Shard(0)])
        return part if form == "DTensor" else part.to_local()

    @staticmethod
    def backward(ctx, grad):
        if isinstance(grad, DTensor):
            return grad.full_tensor(), None
        grads = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(grads, grad.contiguous())
        return torch.cat(grads), None


def of_shards(op, form):
    """Return a function like `op` whose weight and bias each rank holds in part."""
    group = {"group": dist.group.WORLD} if form == "group" else {}

    def run(x, weight, target, bias, *others, **options):
        weight, bias = (FromWhole.apply(t, form) for t in (weight, bias))
        return op(x, weight, target, bias, *others, **options, **group)

    return run


def check(op, options, form, vocabulary, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(ROWS, HIDDEN, dtype=dtype), torch.randn(vocabulary, HIDDEN, dtype=dtype)
    bias, target = torch.randn(vocabulary, dtype=dtype), torch.randint(0, vocabulary, (ROWS,))
    target[::5] = options.get("ignore_index", -100)
    target[1:5] = torch.randint(0, 4, (4,))  # several of the first rank's
    options, others = dict(options), []
    if options.pop("ce_weight", False):
        others = [torch.rand(vocabulary)]
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
