import pytest
import torch
from torch.nn import functional as F

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.hooks import hooks
from liger_hw.kernels.attention.causal_conv1d import (
    causal_conv1d,
    causal_conv1d_backward_config,
    causal_conv1d_forward_config,
)
from liger_hw.testing.inputs import randn
from liger_hw.testing.parity import check, compare, run
from liger_hw.tuning import Config
from liger_hw.tuning.choice import override

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("causal_conv1d", dtype, device):
        check(causal_conv1d, inputs, options, backend)


@pytest.mark.parametrize("dtype", [torch.float16] if interpreting() else DTYPES[1:], ids=str)  # it truncates to bf16
def test_equals_torch(dtype, backend, device):
    torch.manual_seed(0)
    x, w, bias = (torch.randn(*size, dtype=dtype, device=device) for size in ((2, 200, 24), (24, 4), (24,)))
    with use_backend(backend):
        y = causal_conv1d(x, w, bias, activation="silu")
    wide = F.conv1d(x.float().transpose(1, 2), w.float()[:, None], bias.float(), padding=3, groups=24)[..., :200]
    # fp32 operations in another order can move a result across a tie, rarely
    assert (y != F.silu(wide).transpose(1, 2).to(dtype)).float().mean() < 1e-3


def test_equals_torch_with_gates():
    """Compare the definition itself."""
    torch.manual_seed(0)
    x, b, c = (torch.randn(2, 9, 5, dtype=torch.float64) for _ in range(3))
    w, states = torch.randn(5, 3, dtype=torch.float64), torch.randn(2, 5, 2, dtype=torch.float64)
    inputs = torch.cat([states, (b * x).transpose(1, 2)], 2)
    expected = c * F.conv1d(inputs, w[:, None], groups=5).transpose(1, 2)
    y, final = causal_conv1d(x, w, None, b, c, states, return_final_states=True)
    torch.testing.assert_close(y, expected)
    assert torch.equal(final, inputs[..., -2:])


def every_input(device, dtype=torch.float16, size=(2, 24, 20), taps=3):
    batch, _, channels = size
    sizes = size, (channels, taps), (channels,), size, size, (batch, channels, taps - 1)
    return [randn(*size, dtype=dtype, device=device) for size in sizes]


def test_final_states_alone(backend, device):
    """What they do not depend on gets no gradient, not zeros: an optimizer decays weights whose gradient is 0."""
    torch.manual_seed(0)
    inputs = every_input(device, torch.float32, (2, 9, 5), 4)
    gradients = []
    for name in ("reference", backend):
        with use_backend(name):
            _, final = causal_conv1d(*inputs, activation="silu", return_final_states=True)
            gradients.append(torch.autograd.grad((final**2).sum(), inputs, allow_unused=True))
    for expected, found in zip(*gradients):
        assert (expected is None) == (found is None)
        assert expected is None or torch.equal(expected, found)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_parts_continue_each_other(length, backend, device):
    """Pass final states to the next part: results and gradients are those of the whole."""
    torch.manual_seed(0)
    x, w, bias, *gates, states = every_input(device, torch.float32, (2, 9, 5), 4)

    def in_parts(op):
        def run_parts(x, w, bias, b, c, states):
            ys = []
            for start in range(0, 9, length):
                part = slice(start, start + length)
                y, states = op(
                    x[:, part], w, bias, b[:, part], c[:, part], states, activation="silu", return_final_states=True
                )
                ys.append(y)
            return torch.cat(ys, 1), states

        return run_parts

    inputs, options = (x, w, bias, *gates, states), {"activation": "silu", "return_final_states": True}
    exact = run(causal_conv1d.reference, [t.detach().double().requires_grad_() for t in inputs], options)
    reference = run(in_parts(causal_conv1d.reference), inputs, {})
    with use_backend(backend):
        compare(exact, reference, run(in_parts(causal_conv1d), inputs, {}), f"parts on {backend}")


def packed(device, numbers=(5, 5, 5, 2, 9, 9, 9, 9, 9, 9, 5, 5), rows=1):
    return torch.tensor([numbers] * rows, dtype=torch.int32, device=device)


def test_packed_sequences_are_computed_alone(backend, device):
    torch.manual_seed(0)
    x, w, bias, b, c, _ = (t.detach() for t in every_input(device, torch.float32, (1, 12, 20), 4))
    with use_backend(backend):
        y = causal_conv1d(x, w, bias, b, c, seq_idx=packed(device), activation="silu")
        for part in (slice(0, 3), slice(3, 4), slice(4, 10), slice(10, 12)):
            alone = causal_conv1d(x[:, part], w, bias, b[:, part], c[:, part], activation="silu")
            assert torch.equal(y[:, part], alone)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_no_value_passes_to_another_sequence(poison, backend, device):
    """Poison the second of three sequences."""
    torch.manual_seed(0)
    x, w, bias, *_ = every_input(device, torch.float32, (2, 12, 20), 4)
    numbers, bad = packed(device, rows=2), (0, slice(3, 10))
    x = x.detach().clone()
    x[bad] = poison
    x.requires_grad_()
    with use_backend(backend):
        y = causal_conv1d(x, w, bias, seq_idx=numbers, activation="silu")
        dy = torch.ones_like(y)
        dy[bad] = poison
        (dx,) = torch.autograd.grad(y, x, dy)
    for of_x in (y, dx):
        finite = of_x.isfinite()
        assert finite[1].all() and finite[0, :3].all() and finite[0, 10:].all() and not finite[0, 3].any()


def test_padding_has_no_result_and_no_gradient(backend, device):
    torch.manual_seed(0)
    inputs = every_input(device, torch.float32, (1, 12, 20), 4)[:5]
    numbers = packed(device, (-1, -1, 0, 0, 0, 0, 0, 0, -1, 1, 1, -7))
    absent = numbers[0] < 0
    with use_backend(backend):
        y, dx, _, _, db, dc = run(causal_conv1d, inputs, {"seq_idx": numbers})
    for x in (y, dx, db, dc):
        assert not x[0, absent].any() and x[0, ~absent].all()


@pytest.mark.parametrize("rows, taps, stages", [(1, 4, 1), (2, 2, 3), (4, 4, 2)])
def test_programs_share_sequences(rows, taps, stages, backend, device):
    """Divide the rows so that programs begin and end in every place of a sequence."""
    torch.manual_seed(0)
    inputs = every_input(device, torch.float32, (3, 23, 20), taps)
    options = {"activation": "silu", "return_final_states": True}
    config = Config({"ROWS": rows, "COLS": 32, "STAGES": stages}, num_warps=1, programs=1)
    forward, backward = causal_conv1d_forward_config.key(20, 4, 3), causal_conv1d_backward_config.key(20, 4, 4)
    numbers = (torch.rand(3, 23) < 0.4).cumsum(1).to(device)
    with override(forward, config), override(backward, config):
        check(causal_conv1d, inputs, options, backend)
        check(causal_conv1d, (*inputs[:5], None, numbers), {"activation": "silu"}, backend)


VIEWS = {
    "channels first": lambda x: x.transpose(1, 2),
    "a part of the channels": lambda x: x[..., 4:14],
    "every other channel": lambda x: x[..., ::2],
    "a part of the tokens": lambda x: x[:, 3:17],
    "one row for all": lambda x: x[:1].expand(3, -1, -1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided(view, backend, device):
    torch.manual_seed(0)
    x, b, c = (randn(2, 20, 20, dtype=torch.float16, device=device) for _ in range(3))
    batch, _, channels = view(x).shape
    w, states = (randn(*size, dtype=torch.float16, device=device) for size in ((3, channels), (2, batch, channels)))

    def of_views(op):
        def call(x, b, c, w, states):
            states = states.permute(1, 2, 0)
            return op(view(x), w.t(), None, view(b), view(c), states, return_final_states=True)

        return call

    inputs = x, b, c, w, states
    exact = run(of_views(causal_conv1d.reference), [t.detach().double().requires_grad_() for t in inputs], {})
    reference = run(of_views(causal_conv1d.reference), inputs, {})
    with use_backend(backend):
        compare(exact, reference, run(of_views(causal_conv1d), inputs, {}), f"strided causal_conv1d on {backend}")


def test_adjacent_channels_are_not_copied(backend, device):
    """Read x and both gates in place from one projection, in transformers' layout."""
    b, c, x = torch.randn(2, 20, 60, device=device).transpose(1, 2).chunk(3, 1)
    launches = []
    with use_backend(backend), hooks.replace_launches(lambda kernel, grid, config, *args: launches.append(args)):
        causal_conv1d(x.transpose(1, 2), torch.randn(20, 3, device=device), None, b.mT, c.mT)
    (args,) = launches
    assert [arg.data_ptr() for arg in (args[0], *args[3:5])] == [t.data_ptr() for t in (x, b, c)]


@pytest.mark.parametrize("size", [(0, 4, 5), (2, 0, 5), (2, 4, 0)], ids=str)
def test_no_values(size, backend, device):
    inputs = every_input(device, torch.float32, size)
    with use_backend(backend):
        y, final, *grads = run(causal_conv1d, inputs, {"return_final_states": True})
    assert y.shape == size and final.shape == inputs[-1].shape
    assert [grad.shape for grad in grads] == [x.shape for x in inputs]
    assert not any(grad.any() for grad in grads[:-1])
    if size[1] == 0:
        assert torch.equal(final, inputs[-1]) and grads[-1].all()


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    x, w, row = torch.randn(2, 6, 4, device=device), torch.randn(4, 3, device=device), torch.randn(4, device=device)
    states, numbers = torch.randn(2, 4, 2, device=device), torch.zeros(2, 6, dtype=torch.int64, device=device)
    cases = [
        ((x.long(), w), {}, "x"), ((x[0], w), {}, "x"), ((x, w[:3]), {}, "weight"), ((x, w[:, :1]), {}, "weight"),
        ((x, torch.cat([w, w], 1)), {}, "weight"), ((x, w[None]), {}, "weight"), ((x, w, x), {}, "bias"),
        ((x, w, row[:1]), {}, "bias"), ((x, w, row, x[:1]), {}, "input_gate"),
        ((x, w, None, None, x.half()), {}, "output_gate"), ((x, w), {"seq_idx": numbers[0]}, "seq_idx"),
        ((x, w), {"initial_states": states[..., :1]}, "initial_states"),
        ((x, w), {"initial_states": states.double()}, "initial_states"),
        ((x, w), {"seq_idx": numbers.float()}, "seq_idx"),
        ((x, w), {"seq_idx": numbers, "initial_states": states}, "seq_idx"),
        ((x, w), {"seq_idx": numbers, "return_final_states": True}, "seq_idx"),
    ]  # fmt: skip
    with use_backend(which or backend):
        for inputs, options, argument in cases:
            with pytest.raises(ValueError, match=f"^{argument}: got"):
                causal_conv1d(*inputs, **options)
        with pytest.raises(ValueError, match="^unknown activation 'silo'; did you mean 'silu'"):
            causal_conv1d(x, w, activation="silo")


def test_deterministic(backend, device):
    inputs = every_input(device, torch.float32, (2, 30, 20))
    with use_backend(backend):
        first, second = (run(causal_conv1d, inputs, {"activation": "silu"}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("options", [{"activation": "silu"}, {"return_final_states": True}], ids=str)
def test_compiles_without_a_graph_break(options, backend, device):
    inputs = every_input(device, torch.float32)
    with use_backend(backend):
        expected = run(causal_conv1d, inputs, options)
        compiled = torch.compile(lambda *x: causal_conv1d(*x, **options), fullgraph=True, backend="aot_eager")
        outputs = run(compiled, inputs, options={})
    assert all(torch.equal(a, b) for a, b in zip(expected, outputs))


def test_equals_transformers(backend, device):
    """Compare with the module in fp32, where its further roundings are small."""
    lfm2 = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    torch.manual_seed(0)
    config = lfm2.Lfm2Config(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
                             num_hidden_layers=1, vocab_size=16, layer_types=["conv"])  # fmt: skip
    module, hidden = lfm2.Lfm2ShortConv(config, 0).to(device), torch.randn(2, 11, 16, device=device)

    def forward(hidden):
        b, c, x = module.in_proj(hidden).chunk(3, -1)
        return module.out_proj(causal_conv1d(x, module.conv.weight.squeeze(1), module.conv.bias, b, c))

    expected = module(hidden)
    with use_backend(backend):
        torch.testing.assert_close(forward(hidden), expected)
