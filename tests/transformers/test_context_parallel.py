"""Patched models whose sequences are split over ranks learn as the plain model on whole sequences."""

import functools

import pytest
import tiny
import torch
import torch.distributed as dist
from engines import ddp, fsdp2, learn_alike
from ranks import device
from transformers import AttentionInterface, AttentionMaskInterface

LENGTH = 12


class Gathered(torch.autograd.Function):
    """Gather the parts of all ranks along dimension 2; give each rank the gradient of its part."""

    @staticmethod
    def forward(ctx, part, lengths):
        ctx.lengths = lengths
        padded = torch.nn.functional.pad(part, (0, 0, 0, max(lengths) - part.shape[2])).contiguous()
        of_ranks = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(of_ranks, padded)
        return torch.cat([padded[:, :, :length] for padded, length in zip(of_ranks, lengths)], 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.split(ctx.lengths, 2)[dist.get_rank()], None


def attention(lengths, module, query, key, value, attention_mask, scaling, **_):
    """Attend from this rank's part of the sequence to the whole."""
    key, value = (Gathered.apply(x, lengths).repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    first = sum(lengths[: dist.get_rank()])
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device()).tril()[first : first + query.shape[2]]
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def whole_batch(rank):
    if rank:
        return []
    inputs = {name: x.to(device()) for name, x in tiny.tokens(2, LENGTH).items()}
    inputs["labels"][:, :4] = -100
    return [inputs]


def part_of_batch(lengths, rank):
    (inputs,) = whole_batch(0)
    shift_labels = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    inputs |= {"shift_labels": shift_labels, "position_ids": torch.arange(LENGTH, device=device()).expand(2, -1)}
    return [{name: x.split(lengths, 1)[rank].contiguous() for name, x in inputs.items()}]


def split(engine, model, **options):
    model.config._attn_implementation = "context_parallel"
    return engine(model, **options)


def attends_by_formula(model):
    """Let the plain model compute the softmax as `attention` does; torch's kernels on GPUs round differently."""
    model.config._attn_implementation = "eager"
    return model


def learn_alike_in_parts(engine, lengths):
    AttentionInterface.register("context_parallel", functools.partial(attention, lengths))
    AttentionMaskInterface.register("context_parallel", lambda *args, **kwargs: None)
    of_rank = functools.partial(part_of_batch, lengths)
    learn_alike(
        functools.partial(split, engine), of_rank, whole_batch, counted=True, change=attends_by_formula,
        beside_plain=True,
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [(6, 6), (8, 4), (3, 9)], ids=str)
@pytest.mark.parametrize("engine", [ddp, fsdp2], ids=["ddp", "fsdp2"])
def test_parts_of_a_sequence(engine, lengths, ranks):
    """Labels shifted before the split; a part of three tokens has none. Transformers takes no part without tokens."""
    ranks(2, learn_alike_in_parts, engine, lengths)
