import pytest
import torch
from naive import hold, token_log_probs

from liger_hw.kernels.vocabulary.chunked_head import ChunkedHead
from liger_hw.losses import sequences
from liger_hw.losses.sequences import sequence_loss
from liger_hw.testing.inputs import randn


def case(count=6, length=5, device="cpu"):
    torch.manual_seed(0)
    x, w, b = (randn(*shape, device=device) for shape in ((count, length, 8), (37, 8), (37,)))
    tokens = torch.randint(0, 37, (count, length), device=device)
    tokens[0, :2] = tokens[-1, 3] = -100
    return (x, w, b), tokens


def formula(log_probs, entropy, groups):
    """Couples all tokens of a group, and tells one group from another."""
    factors = torch.arange(1, 99, device=log_probs.device)[groups]
    value = (log_probs.sum(-1).prod(0) * factors).square().sum() / 1e4
    return value if entropy is None else value + (entropy.sum(-1).prod(0) * factors).sum()


@pytest.mark.parametrize("rows", [3, 7, 12, 30])  # that fit the memory: of 5 in a sequence, 30 in all
@pytest.mark.parametrize("parts, with_entropy", [(1, True), (2, False), (3, True)])
def test_any_memory_gives_the_same(parts, rows, with_entropy, engine, device):
    inputs, tokens = case(device=device)
    bytes_of_a_row = 40 * 4  # 37 columns, padded to 16 bytes

    def whole(x, w, b):
        found = token_log_probs(x, w, tokens, b, 0.7)
        grouped = [row.reshape(parts, -1, 5) for row in found]
        value = formula(grouped[0], grouped[1] if with_entropy else None, slice(0, 6 // parts))
        return value, *(found if with_entropy else found[:1])

    def fused(x, w, b):
        found = sequence_loss(
            formula, x, w, tokens, b, parts, temperature=0.7, with_entropy=with_entropy,
            chunk_memory=rows * bytes_of_a_row,
        )  # fmt: skip
        return [value for value in found if value is not None]

    hold(whole, fused, inputs, torch.float32, f"{parts} {rows}")


@pytest.mark.parametrize("parts, rows", [(2, 30), (2, 10), (2, 7), (1, 5), (2, 5), (2, 3)])
def test_logits_that_fit_are_made_once(parts, rows, monkeypatch):
    """The products compute all rows, and recompute only rows that did not fit."""
    (x, w, b), tokens = case()
    multiplied, logits = [], ChunkedHead.logits

    def counted(head, part, at=0):
        multiplied.append(part.stop - part.start)
        return logits(head, part, at)

    monkeypatch.setattr(ChunkedHead, "logits", counted)
    sequence_loss(formula, x, w, tokens, b, parts, chunk_memory=rows * 160)
    group = 5 * parts
    assert sum(multiplied) == 30 + 30 // group * max(group - rows, 0)


def test_a_split_covers_every_row_once():
    for rows in ([slice(0, 8)], [slice(0, 4), slice(10, 14)], [slice(2, 5), slice(5, 6), slice(9, 13)]):
        every = [row for part in rows for row in range(part.start, part.stop)]
        for size in range(1, 14):
            dropped, kept = sequences._split(rows, size)
            found = [row for part in dropped + kept for row in range(part.start, part.stop)]
            assert found == every and all(part.stop - part.start <= size for part in dropped)
            assert sum(part.stop - part.start for part in kept) == min(size, len(every))


def test_a_formula_may_write_to_its_arguments(engine, device):
    inputs, tokens = case(device=device)
    with torch.no_grad():
        _, expected, *_ = sequence_loss(lambda log_probs, *_: log_probs.sum(), *inputs[:2], tokens, inputs[2])
        _, found, *_ = sequence_loss(lambda log_probs, *_: log_probs.sub_(1).sum(), *inputs[:2], tokens, inputs[2])
    assert torch.equal(found, expected)


def test_bad_input():
    (x, w, b), tokens = case()
    with pytest.raises(ValueError, match="^tokens"):
        sequence_loss(formula, x, w, tokens[:, :3], b)
    with pytest.raises(ValueError, match="^temperature"):
        sequence_loss(formula, x, w, tokens, b, temperature=0.0)
