"""MLPs by pieces of the sequence: the results, gradients and side effects of the whole MLP, in less memory."""

import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from unreached import Unreached

from liger_hw.stand_in.ops import LigerTiledMLPFunction, apply_tiled_mlp
from liger_hw.testing.parity import compare, run
from liger_hw.transformers.family_modules import LigerTiledGEGLUMLP, LigerTiledSwiGLUMLP
from liger_hw.transformers.modules import LigerGEGLUMLP, LigerSwiGLUMLP
from liger_lab.bench.memory import peak

HIDDEN, INTERMEDIATE = 16, 40
CONFIG = types.SimpleNamespace(
    hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, hidden_act="silu", hidden_activation="gelu_pytorch_tanh"
)
KINDS = {LigerTiledSwiGLUMLP: LigerSwiGLUMLP, LigerTiledGEGLUMLP: LigerGEGLUMLP}
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def pair(kind=LigerTiledSwiGLUMLP, num_shards=3, dtype=torch.float32):
    """Return the tiled MLP and the whole one, with equal weights."""
    torch.manual_seed(0)
    tiled, whole = kind(CONFIG, num_shards).to(dtype), KINDS[kind](CONFIG).to(dtype)
    whole.load_state_dict(tiled.state_dict())
    return tiled, whole


def call(module):
    """Return the module as a function of x and its parameters."""
    names = [name for name, _ in module.named_parameters()]
    return lambda x, *parameters: torch.func.functional_call(module, dict(zip(names, parameters)), (x,))


def step(module, x):
    """Return the result and the gradients of x and the parameters."""
    x = x.detach().clone().requires_grad_()
    y = module(x)
    loss = (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    return y.detach(), *torch.autograd.grad(loss, (x, *module.parameters()))


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape, num_shards", [((2, 37, HIDDEN), 4), ((96, HIDDEN), 32), ((50, HIDDEN), None)], ids=str)
def test_parity(kind, dtype, shape, num_shards):
    """The rule of the ops, whose reference is the MLP of each piece: its weights' gradients round in every sum."""
    tiled, whole = pair(kind, num_shards, dtype)
    inputs = [torch.randn(*shape).to(dtype).requires_grad_(), *whole.parameters()]
    exact = run(call(whole.double()), [x.detach().double().requires_grad_() for x in inputs], {})

    def pieces(x, *parameters):
        return torch.cat([call(whole)(piece, *parameters) for piece in x.chunk(num_shards or 1, -2)], -2)

    whole.to(dtype)
    compare(exact, run(pieces, inputs, {}), run(call(tiled), inputs, {}), f"{num_shards} pieces")


@kinds
def test_memory(kind):
    """Less than the whole MLP, and than the whole MLP under activation checkpointing."""
    tiled, whole = pair(kind, num_shards=8)
    x = torch.randn(4096, HIDDEN, requires_grad=True)
    device = torch.device("cpu")
    plain, recomputed, pieces = (
        peak(lambda f=f: f(x).sum().backward(), device)
        for f in (whole, lambda x: checkpoint(whole, x, use_reentrant=False), tiled)
    )
    row = 4096 * 4
    assert pieces < recomputed - row * INTERMEDIATE and pieces < plain - row * INTERMEDIATE, (pieces, recomputed, plain)
    assert pieces < row * (5 * HIDDEN + INTERMEDIATE)
    with torch.no_grad():
        assert peak(lambda: tiled(x), device) < row * (HIDDEN + INTERMEDIATE) < peak(lambda: whole(x), device)


def test_memory_of_the_gradient_of_x():
    """It is written piece by piece into its own memory, beside one piece and the parameters' gradients."""
    tiled, _ = pair(num_shards=64)
    x = torch.randn(16384, HIDDEN, requires_grad=True)
    y = tiled(x)
    needed = peak(lambda: torch.autograd.grad(y, x, torch.ones_like(y)), torch.device("cpu"))
    assert needed < 2.5 * x.nbytes  # ones, the gradient, and one piece


def test_without_gradients():
    tiled, whole = pair()
    x = torch.randn(2, 37, HIDDEN)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = tiled(x)
            assert not y.requires_grad
            torch.testing.assert_close(y, whole(x))
            assert tiled(x[:, :0]).shape == (2, 0, HIDDEN)
    assert tiled(x[:, :0]).shape == (2, 0, HIDDEN)


def test_frozen_parts():
    tiled, whole = pair()
    x = torch.randn(2, 37, HIDDEN)
    for module in (tiled, whole):
        module.up_proj.weight.requires_grad_(False)
        module(x).square().sum().backward()
    assert tiled.up_proj.weight.grad is None
    torch.testing.assert_close(tiled.down_proj.weight.grad, whole.down_proj.weight.grad)
    for module in (tiled, whole):
        module.requires_grad_(False)
    assert not tiled(x).requires_grad
    gradients = []
    for module in (tiled, whole):
        leaf = x.clone().requires_grad_()
        module(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_activation_checkpointing(use_reentrant):
    tiled, whole = pair()
    x = torch.randn(2, 37, HIDDEN, requires_grad=True)
    checkpoint(tiled, x, use_reentrant=use_reentrant).square().sum().backward()
    ours, x.grad = x.grad, None
    whole(x).square().sum().backward()
    torch.testing.assert_close(ours, x.grad)
    for a, b in zip(tiled.parameters(), whole.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


def test_autocast():
    """The recomputation runs under the forward's autocast, also where the backward does not."""
    tiled, whole = pair()
    x = torch.randn(2, 37, HIDDEN)
    results = []
    for module in (tiled, whole):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(leaf)
        assert y.dtype == torch.bfloat16
        results.append(torch.autograd.grad(y.float().square().sum(), (leaf, *module.parameters())))
    exact = torch.autograd.grad(whole.double()(x.double()).square().sum(), list(whole.parameters()))
    for ours, plain, e in zip(results[0][1:], results[1][1:], exact):
        assert ours.dtype == torch.float32
        assert (ours - e).norm() <= 2 * (plain - e).norm()


def test_a_second_backward_and_second_order():
    tiled, whole = pair(LigerTiledSwiGLUMLP)
    x = torch.randn(2, 37, HIDDEN, requires_grad=True)
    y = tiled(x).square().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(y, x)[0], first, rtol=0, atol=0)
    torch.testing.assert_close(first, torch.autograd.grad(whole(x).square().sum(), x)[0])


def test_gradient_of_a_gradient():
    tiled, whole = pair()
    x, gradients = torch.randn(2, 37, HIDDEN, requires_grad=True), []
    for module in (tiled, whole):
        (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        gradients.append(torch.autograd.grad(dx.square().sum(), (x, *module.parameters())))
    for ours, expected in zip(*gradients):
        torch.testing.assert_close(ours, expected)


def test_backward_after_one_that_failed():
    """The gradient is that of the later backward alone."""
    layer, fails = torch.nn.Linear(4, 4), []

    def refuse(gradient):
        if fails:
            raise RuntimeError("refused")

    def function(module, x):
        x.register_hook(refuse)
        return module(x)

    x = torch.randn(7, 4, requires_grad=True)
    y = apply_tiled_mlp(function, layer, x * 1.0, 3)
    expected = torch.autograd.grad(layer(x).square().sum(), x)[0]
    fails.append(True)
    with pytest.raises(RuntimeError, match="refused"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    fails.clear()
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0], expected)


def test_a_backward_within_a_backward():
    """A hook between two pieces runs another backward through the same graph."""
    layer, x, within = torch.nn.Linear(4, 4), torch.randn(7, 4, requires_grad=True), []

    def hook(module, dx, dy):
        if not within:
            within.append(None)
            within[0] = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]

    layer.register_full_backward_hook(hook)
    y = apply_tiled_mlp(lambda module, x: module(x), layer, x * 1.0, 3)
    (found,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    layer._backward_hooks.clear()
    torch.testing.assert_close(found, torch.autograd.grad(layer(x).square().sum(), x)[0])
    torch.testing.assert_close(within[0], torch.autograd.grad(layer(x).sum(), x)[0])


def test_backwards_of_several_threads():
    layer, x = torch.nn.Linear(4, 4), torch.randn(64, 4, requires_grad=True)
    y = apply_tiled_mlp(lambda module, x: module(x), layer, x * 1.0, 8)
    (unit,) = torch.autograd.grad(layer(x).sum(), x)
    with ThreadPoolExecutor(4) as pool:
        scales = [float(i) for i in range(1, 41)]
        found = pool.map(lambda s: torch.autograd.grad(y, x, torch.full_like(y, s), retain_graph=True)[0], scales)
        for scale, gradient in zip(scales, found):
            torch.testing.assert_close(gradient, unit * scale)


def test_functional_call_with_other_weights():
    """The backward computes with the weights of the forward, also after the module has its own again."""
    tiled, whole = pair()
    others = {name: (2 * p.detach()).requires_grad_() for name, p in whole.named_parameters()}
    x, gradients = torch.randn(2, 37, HIDDEN, requires_grad=True), []
    for module in (tiled, whole):
        y = torch.func.functional_call(module, others, (x,)).square().sum()
        gradients.append(torch.autograd.grad(y, (x, *others.values())))
    for ours, expected in zip(*gradients):
        torch.testing.assert_close(ours, expected)


def test_weights_that_change_before_the_backward():
    """In place: an error. A parameter that was replaced: the gradient of the former one."""
    tiled, whole = pair()
    x, gradients = torch.randn(2, 37, HIDDEN, requires_grad=True), []
    y = tiled(x).square().sum()
    with torch.no_grad():
        tiled.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weight of Linear was changed in place"):
        y.backward()
    tiled.load_state_dict(whole.state_dict())
    for module in (tiled, whole):
        y, former = module(x).square().sum(), module.up_proj.weight
        module.up_proj.weight = torch.nn.Parameter(former.detach() * 2)
        gradients.append(torch.autograd.grad(y, (x, former)))
    for ours, expected in zip(*gradients):
        torch.testing.assert_close(ours, expected)


def test_saved_tensors_that_may_change():
    tiled, whole = pair()
    x, gradients = torch.randn(2, 37, HIDDEN), []
    for module in (tiled, whole):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            leaf = x.clone().requires_grad_()
            h = leaf * 1.0
            y = module(h).square().sum()
            with torch.no_grad():
                h.zero_()
                module.up_proj.weight.mul_(1.5)
            gradients.append(torch.autograd.grad(y, (leaf, *module.parameters())))
    for ours, expected in zip(*gradients):
        torch.testing.assert_close(ours, expected)


def test_transforms_and_forward_mode():
    tiled, whole = pair()
    x, direction = torch.randn(2, 7, HIDDEN), torch.randn(2, 7, HIDDEN)
    apply = torch.func.grad, torch.func.jacrev, torch.func.vmap
    for ours, expected in zip(*[[f(lambda x, m=m: m(x).square().sum())(x) for f in apply] for m in (tiled, whole)]):
        torch.testing.assert_close(ours, expected)
    tangents = []
    for module in (tiled, whole):
        with torch.autograd.forward_ad.dual_level():
            y = module(torch.autograd.forward_ad.make_dual(x, direction))
            tangents.append(torch.autograd.forward_ad.unpack_dual(y).tangent)
    torch.testing.assert_close(*tangents)


@pytest.mark.parametrize("utils", [torch.nn.utils, torch.nn.utils.parametrizations], ids=["hook", "parametrization"])
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_a_part_with_a_state(utils):
    """A piece more would be a step more of the power iteration."""
    tiled, whole = pair()
    x, results = torch.randn(2, 37, HIDDEN), []
    for module in (tiled, whole):
        torch.manual_seed(0)
        utils.spectral_norm(module.up_proj)
        results.append(step(module, x))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected)


def test_x_with_other_uses_and_pieces_without_a_gradient():
    """Torch adds the gradient of a residual connection; pieces that the result does not depend on have zeros."""
    layer, x = torch.nn.Linear(4, 4), torch.randn(7, 4, requires_grad=True)
    seen = []

    def function(module, piece):
        seen.append(piece)
        return module(piece if len(seen) % 3 else piece.detach())

    y = apply_tiled_mlp(function, layer, x, 3) * 2 + x
    (found,) = torch.autograd.grad(y.square().sum(), x)
    kept = torch.ones(7, 1)
    kept[6:] = 0
    (expected,) = torch.autograd.grad((layer(x * kept + (x * (1 - kept)).detach()) * 2 + x).square().sum(), x)
    torch.testing.assert_close(found, expected)


def test_hooks():
    """Of parameters once, with the whole gradient; of the module as of the whole one."""
    tiled, whole = pair()
    x = torch.randn(2, 37, HIDDEN, requires_grad=True)
    seen = {tiled: [], whole: []}
    for module, calls in seen.items():
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name, calls=calls: calls.append((name, p.grad.clone()))
            )
        module.register_full_backward_hook(lambda m, dx, dy, calls=calls: calls.append(("backward", dx[0].clone())))
        module.register_forward_hook(lambda m, args, y, calls=calls: calls.append(("forward", y.detach().clone())))
        module(x).square().sum().backward()
    ours, theirs = (dict(calls) for calls in seen.values())
    assert len(seen[tiled]) == len(seen[whole]) == 5 and ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])


def test_compute_params():
    """ZeRO must learn when a listed gradient is complete: its hook runs once, after the last piece."""
    layer, x = torch.nn.Linear(4, 4), torch.randn(7, 4)
    whole = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
    for apply in (apply_tiled_mlp, LigerTiledMLPFunction.apply):
        seen, layer.weight.grad = [], None
        hook = layer.weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
        apply(lambda module, x: module(x), layer, x, 3, [layer.weight]).square().sum().backward()
        hook.remove()
        (gradient,) = seen
        torch.testing.assert_close(gradient, whole)


def test_a_function_of_more_than_the_module():
    """A tensor that the function takes from elsewhere gets its gradient, too."""
    layer, scale = torch.nn.Linear(4, 4), torch.ones(4, requires_grad=True)
    x = torch.randn(7, 4)
    found = torch.autograd.grad(apply_tiled_mlp(lambda m, x: m(x) * scale, layer, x, 3).square().sum(), scale)[0]
    torch.testing.assert_close(found, torch.autograd.grad((layer(x) * scale).square().sum(), scale)[0])


def test_dropout_is_drawn_again_alike():
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Dropout(0.5))
    x = torch.randn(40, 4)
    torch.manual_seed(1)
    y = apply_tiled_mlp(lambda module, x: module(x), layer, x, 3)
    (gradient,) = torch.autograd.grad(y.sum(), layer[0].weight)
    kept = (y != 0).float() * 2
    torch.testing.assert_close(gradient, kept.T @ x)


def test_bad_input():
    tiled, _ = pair()
    with pytest.raises(ValueError, match="^x: got .*allowed: two dimensions or more"):
        tiled(torch.zeros(HIDDEN))
    for shards in (0, -1, 2.5, True):
        tiled.num_shards = shards
        with pytest.raises(ValueError, match="^shards: got .*allowed: None or a positive integer"):
            tiled(torch.zeros(3, HIDDEN))


@kinds
def test_no_incoming_gradient_stays_none(kind):
    """An optimizer decays the weight whose gradient is zeros, not the one without a gradient."""
    tiled, whole = pair(kind)
    for module in (tiled, whole):
        x, anchor = torch.randn(2, 9, HIDDEN, requires_grad=True), torch.zeros((), requires_grad=True)
        (anchor + Unreached.apply(module(x * 1)).sum()).backward()
        assert x.grad is None and all(parameter.grad is None for parameter in module.parameters())
