"""Check that a row's bits depend on no other row."""

import inspect

import numpy
import pytest
import torch

import liger_hw
from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.dispatch import OPS
from liger_hw.kernels._logits import padded_rows
from liger_hw.kernels.vocabulary import _products
from liger_hw.sharding import _named
from liger_lab.cases import CASES, training_cases

# Products of matrices: a library may choose another kernel for another number of rows, and the interpreter multiplies
# by one, too.
PRODUCTS = {
    "fused_linear_cross_entropy", "fused_linear_selective_log_softmax", "glu_linear", "lora_glu_linear", "lora_linear",
    "mhc_coefficients", "multi_token_attention",
}  # fmt: skip
HEADS = "fused_linear_cross_entropy", "fused_linear_selective_log_softmax"
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
    """Return the bits; every NaN has the same, as IEEE 754 leaves its sign and payload open."""
    if not x.is_floating_point():
        return x
    x = x.detach().masked_fill(x.isnan(), torch.nan)
    return x.view(torch.int32 if x.itemsize == 4 else torch.int16)


WITH_ROWS = [name for name in CASES if OPS[name].shards.__self__._rule and name not in PRODUCTS | OF_ALL_ROWS]


def assert_rows_alike(batch, backend):
    every = torch.arange(batch.rows, device=batch.inputs[0].device)
    with use_backend(backend):
        whole = batch.results(every)
        for index in (every[-1:], every.flip(0).repeat(2)[1:]):
            for rows, expected in zip(batch.results(index), whole, strict=True):
                assert torch.equal(bits(rows), bits(expected)[index])


@pytest.mark.parametrize("name", WITH_ROWS)
def test_rows(name, backend, device):
    with use_backend(None):
        batch = batch_of(name, device)
    assert_rows_alike(batch, backend)


WITHOUT_LAUNCH = {"embedding", "kl_div", "tvd"}  # whose smallest case without a reduction the reference computes


@pytest.mark.skipif(interpreting() or torch.cuda.is_available(), reason="on a CPU, without the interpreter")
@pytest.mark.parametrize("name", [name for name in WITH_ROWS if name not in WITHOUT_LAUNCH])
def test_rows_of_emulated_machine_code(name):
    for package in ("tinygrad", "elftools"):  # the emulation's decoders
        pytest.importorskip(package)
    from liger_lab.levels.crosscompile import DEVICES
    from liger_lab.levels.emulation import executed_on

    with executed_on(DEVICES["gfx942"]) as executed:
        assert_rows_alike(batch_of(name, "cpu"), "amd:gfx942")
    assert executed


def head_of(name, device, dtype, features, vocabulary, **options):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, features, generator=generator) for n in (7, vocabulary))
    x, weight = (t.to(device, dtype).requires_grad_() for t in (x, weight))
    tokens = torch.randint(vocabulary, (7,), generator=generator).to(device)
    return Batch(name, (x, weight, tokens), {"invariant": True, "chunk_memory": 3 * 4 * vocabulary, **options})


def multiply_in_order(a, b, dtype):
    """Multiply by sums in the order of columns; numpy's order depends on a row's place."""
    return (a.astype(dtype)[:, :, None] * b.astype(dtype)[None]).sum(1)


@pytest.mark.parametrize("shape", [(16, 32), (19, 37)], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_heads(name, shape, backend, device, monkeypatch):
    if interpreting():
        monkeypatch.setattr(numpy, "matmul", multiply_in_order)
    dtype, logits_dtype = torch.float16 if interpreting() else torch.bfloat16, torch.float32 if 37 in shape else None
    assert_rows_alike(head_of(name, device, dtype, *shape, logits_dtype=logits_dtype), backend)


@pytest.mark.parametrize("vocabulary", [1021, 1024])
def test_rows_of_padded_logits(vocabulary, backend, device, monkeypatch):
    """Terms of one row of the gradient keep its stride, those of several have none of the padding."""
    if interpreting():
        monkeypatch.setattr(numpy, "matmul", multiply_in_order)
    monkeypatch.setattr(_products, "has_wide_products", lambda device: True)
    x, weight, tokens = head_of(HEADS[0], device, torch.float32, 32, vocabulary).inputs
    grads = []
    for rows in (1, 3):
        part = x.detach()[:rows].requires_grad_()
        with liger_hw.use_backend(backend):
            loss = liger_hw.fused_linear_cross_entropy(
                part, weight.detach().bfloat16(), tokens[:rows], reduction="sum", invariant=True
            )
        grads += torch.autograd.grad(loss, part)
    assert torch.equal(bits(grads[0][0]), bits(grads[1][0]))


@pytest.mark.skipif(interpreting(), reason="the same there")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", [None, "reference"], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_heads_on_cpu(name, way, dtype):
    assert_rows_alike(head_of(name, "cpu", dtype, 123, 517), way)


@pytest.mark.skipif(interpreting(), reason="the same there")
def test_losses_take_it():
    x, weight, tokens = head_of(HEADS[0], "cpu", torch.float32, 123, 517).inputs

    def gradients(rows):
        def formula(log_probs, _):
            return log_probs.square(), log_probs

        part = x.detach()[rows].requires_grad_()
        value, log_probs = liger_hw.token_loss(formula, part, weight, tokens[rows], invariant=True)
        value.backward()
        return log_probs, part.grad

    for rows, whole in zip(gradients(slice(4, 6)), gradients(slice(None)), strict=True):
        assert torch.equal(bits(rows), bits(whole[4:6]))


def test_fp16_gradients_in_the_forward_are_refused():
    x, weight, tokens = head_of(HEADS[0], "cpu", torch.float16, 8, 16).inputs
    with pytest.raises(ValueError, match=r"invariant: got True, allowed: False for gradients in fp16"):
        liger_hw.fused_linear_cross_entropy(x, weight, tokens, invariant=True)
    liger_hw.fused_linear_cross_entropy(x, weight, tokens, invariant=True, logits_dtype=torch.float32)
