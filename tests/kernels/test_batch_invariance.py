"""Check that a row's bits depend on no other row."""

import inspect

import pytest
import torch

from liger_hw import use_backend
from liger_hw.dispatch import OPS
from liger_hw.kernels._logits import padded_rows
from liger_hw.sharding import _named
from liger_lab.cases import CASES, training_cases

# Products of matrices: a library may choose another kernel for another number of rows, and the interpreter multiplies
# by one, too.
PRODUCTS = {
    "fused_linear_cross_entropy", "fused_linear_selective_log_softmax", "glu_linear", "lora_glu_linear", "lora_linear",
    "mhc_coefficients", "multi_token_attention",
}  # fmt: skip
OF_ALL_ROWS = {"jsd"}  # whose only result is a sum or a mean
LOGITS = {"cross_entropy", "kl_div", "selective_log_softmax", "tvd"}
ROW_DIMS = "0", "b", "n", "N"  # names of rows, or of the samples of a batch, in the ops' rules for DTensors


class Batch:
    """A call of an op, whose rows may be taken.

    Attributes:
        places: for each input the dimension of its rows, or None.
        rows: their number, or 0 if the call has none.
        size: number of values.
    """

    def __init__(self, name, inputs, options):
        self.op, self.inputs, self.options = OPS[name], inputs, dict(options)
        if "reduction" in inspect.signature(self.op).parameters:
            self.options["reduction"] = "none"
            self.options.pop("num_items", None)
        call, rule = self.op.shards.__self__._rule(self.op.arguments(*inputs, **self.options))
        dims = {key: _named(key, x.shape, rule[key]) for key, x in call._asdict().items() if torch.is_tensor(x)}
        row = next((row for row in ROW_DIMS if any(row in names for names in dims.values())), None)
        self.places = [dims[key].index(row) if row in dims.get(key, ()) else None for key in call._fields]
        by_row = [(x, place) for x, place in zip(inputs, self.places) if place is not None]
        self.rows = by_row[0][0].shape[by_row[0][1]] if by_row else 0
        self.size = sum(x.numel() for x, _ in by_row)

    def results(self, index):
        """Return results, and gradients by row, of the rows of `index`."""
        inputs, learns = list(self.inputs), []
        for i, (x, place) in enumerate(zip(self.inputs, self.places)):
            if place is not None:
                rows = self.layout(x.detach().index_select(place, index))
                inputs[i] = rows.requires_grad_(x.requires_grad)
                learns += [(inputs[i], place)] if x.requires_grad else []
        outputs = self.op(*inputs, **self.options)
        outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]
        assert all(len(y) == len(index) for y in outputs)
        diffable = [y for y in outputs if y.requires_grad and learns]
        gradients = ()
        if diffable:
            incoming = [self.incoming(y, index) for y in diffable]
            gradients = torch.autograd.grad(diffable, [x for x, _ in learns], incoming)
        return outputs + [gradient.movedim(place, 0) for gradient, (_, place) in zip(gradients, learns)]

    def layout(self, rows):
        """Return the rows in the memory that the op gets."""
        return rows

    def incoming(self, y, index):
        """Return a gradient of which each row of the batch has its own."""
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn((self.rows, *y.shape[1:]), generator=generator, dtype=torch.float64)
        return whole.to(y)[index]


class LogitsBatch(Batch):
    """A call of an op of logits, whose rows begin at 16-byte boundaries."""

    def layout(self, rows):
        return padded_rows(rows) if rows.ndim == 2 else rows


def batch_of(name, device):
    """Return the smallest case of several rows of several values."""
    kind = LogitsBatch if name in LOGITS else Batch
    batches = [kind(name, *case) for case in training_cases(name, torch.float32, device)]
    return min((b for b in batches if b.rows > 1 and b.size >= 8 * b.rows), key=lambda b: b.size)


def bits(x):
    return x.detach().view(torch.int32) if x.is_floating_point() else x


WITH_ROWS = [name for name in CASES if OPS[name].shards.__self__._rule and name not in PRODUCTS | OF_ALL_ROWS]


@pytest.mark.parametrize("name", WITH_ROWS)
def test_rows(name, backend, device):
    with use_backend(None):
        batch = batch_of(name, device)
    every = torch.arange(batch.rows, device=device)
    with use_backend(backend):
        whole = batch.results(every)
        for index in (every[-1:], every.flip(0).repeat(2)[1:]):
            for rows, expected in zip(batch.results(index), whole, strict=True):
                assert torch.equal(bits(rows), bits(expected)[index])
