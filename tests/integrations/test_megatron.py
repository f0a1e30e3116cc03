"""`apply_liger_kernel_to_megatron` and its modules, on stand-ins of Megatron-Core's interfaces.

The parity rule holds the numbers against those of the classes and functions that they replace.
"""

import copy
import logging
import os
import sys
import types

import megatron_core
import pytest
import torch

from liger_hw.stand_in.megatron import (
    LigerMegatronCrossEntropy,
    LigerMegatronRMSNorm,
    LigerMegatronSwiGLU,
    apply_liger_kernel_to_megatron,
)
from liger_hw.testing.parity import compare

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def megatron(monkeypatch):
    return megatron_core.install(monkeypatch)


def config(**options):
    return types.SimpleNamespace(**({"normalization": "RMSNorm", "sequence_parallel": False} | options))


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def run(function, *leaves):
    """Return the result of `function` and the gradients of `leaves`."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, random(*y.shape, seed=1).to(y.dtype))


def hold(ours, megatrons, *leaves):
    """Hold `ours` to the parity rule, with Megatron's function as the reference."""
    exact = run(megatrons, *(leaf.double() for leaf in leaves))
    compare(exact, run(megatrons, *leaves), run(ours, *leaves), "the replacement")


def places(megatron):
    return {
        "layer_norm": megatron["models.backends"].LocalSpecProvider.layer_norm,
        "last norm": megatron["transformer.transformer_block"].LayerNormImpl,
        "last norm of gpt": megatron["models.gpt.gpt_layer_specs"].LNImpl,
        "fused": megatron["fusions.fused_cross_entropy"].fused_vocab_parallel_cross_entropy,
        "unfused": megatron["tensor_parallel.cross_entropy"].vocab_parallel_cross_entropy,
        "fused copy": megatron["models.common.language_module.language_module"].fused_vocab_parallel_cross_entropy,
        "unfused copy": megatron["tensor_parallel"].vocab_parallel_cross_entropy,
        "swiglu": megatron["fusions.fused_bias_swiglu"].SwiGLUFunction,
    }


NORMS = {"layer_norm", "last norm", "last norm of gpt"}
LOSSES = {"fused", "unfused", "fused copy", "unfused copy"}


@pytest.mark.parametrize(
    ("flags", "replaced"),
    [
        ({}, NORMS),
        ({"rms_norm": False}, set()),
        ({"rms_norm": False, "cross_entropy": True}, LOSSES),
        ({"rms_norm": False, "swiglu": True}, {"swiglu"}),
        ({"cross_entropy": True, "swiglu": True}, NORMS | LOSSES | {"swiglu"}),
    ],
)
def test_flags_name_the_places_and_a_second_call_changes_nothing(megatron, flags, replaced):
    before = places(megatron)
    apply_liger_kernel_to_megatron(**flags)
    once = places(megatron)
    assert {name for name in before if once[name] is not before[name]} == replaced
    assert all(once[name].__wrapped__ is before[name] for name in replaced)
    apply_liger_kernel_to_megatron(**flags)
    assert places(megatron) == once


def test_norms_of_specs(megatron):
    provider = megatron["models.backends"].LocalSpecProvider()
    apex = provider.layer_norm()
    apply_liger_kernel_to_megatron()
    assert provider.layer_norm() is apex and provider.layer_norm(for_qk=True) is apex
    assert provider.layer_norm(rms_norm=True, for_qk=True) is LigerMegatronRMSNorm
    assert provider.layer_norm(False) is megatron["transformer.torch_norm"].WrappedTorchNorm  # as without the patch
    last = megatron["transformer.transformer_block"].LayerNormImpl
    assert isinstance(last, type)  # Megatron calls no function that it finds in a spec
    norm = last(config=config(sequence_parallel=True), hidden_size=8, eps=1e-3)
    assert type(norm) is LigerMegatronRMSNorm and norm.eps == 1e-3 and norm.weight.sequence_parallel is True
    assert type(last(config=config(normalization="LayerNorm"), hidden_size=8)) is torch.nn.LayerNorm


def test_a_last_norm_of_another_library_stays(megatron, caplog):
    class TENorm:
        pass

    megatron["transformer.transformer_block"].LayerNormImpl = TENorm
    with caplog.at_level(logging.INFO):
        apply_liger_kernel_to_megatron()
    assert megatron["transformer.transformer_block"].LayerNormImpl is TENorm
    assert "transformer_block.LayerNormImpl stays TENorm" in caplog.text


@DTYPES
@pytest.mark.parametrize("width", [64, 123])
def test_rms_norm_is_torchs(dtype, width):
    x, weight = 3 * random(5, 2, width, dtype=dtype), random(width, seed=2, dtype=dtype)
    norm, torchs = LigerMegatronRMSNorm(config(), width, 1e-4), torch.nn.RMSNorm(width, 1e-4)

    def call(module):
        return lambda x, weight: torch.func.functional_call(module, {"weight": weight}, x)

    hold(call(norm), call(torchs), x, weight)
    if dtype == torch.bfloat16:  # of two roundings a quarter of the values differ, of another order of the sum few
        assert (call(norm)(x, weight) != call(torchs)(x, weight)).float().mean() < 0.05
    centered = LigerMegatronRMSNorm(config(layernorm_zero_centered_gamma=True), (width,), 1e-4)
    assert not centered.weight.any() and centered.weight.sequence_parallel is False
    hold(call(centered), lambda x, weight: call(torchs)(x, weight + 1), x.float(), weight.float())
    assert LigerMegatronRMSNorm(config(), 8, zero_centered_gamma=True).zero_centered_gamma


def test_bad_norms():
    with pytest.raises(ValueError, match=r"config.normalization: got 'LayerNorm', allowed: 'RMSNorm'"):
        LigerMegatronRMSNorm(config(normalization="LayerNorm"), 8)
    with pytest.raises(ValueError, match="normalization: got 'L2Norm'"):
        LigerMegatronRMSNorm(config(), 8, normalization="L2Norm")
    with pytest.raises(ValueError, match="hidden_size: .*allowed: one dimension"):
        LigerMegatronRMSNorm(config(), (2, 8))


@DTYPES
@pytest.mark.parametrize("shape", [(3, 2, 31), (7, 32)], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_losses_of_the_language_module(megatron, dtype, shape, fused):
    loss_of = megatron["models.common.language_module.language_module"].compute_language_model_loss
    labels = torch.randint(31, shape[:-1], generator=torch.Generator().manual_seed(3))
    group = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    logits = 4 * random(*shape, dtype=dtype)
    natives = run(lambda x: loss_of(labels, x, fused, group), logits)
    exact = run(lambda x: loss_of(labels, x, fused, group), logits.double())
    apply_liger_kernel_to_megatron(cross_entropy=True)
    ours = run(lambda x: loss_of(labels, x, fused, None), logits)
    compare(exact, natives, ours, "the loss")


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_label_smoothing_of_a_call(megatron, smoothing):
    labels, logits = torch.tensor([[0, 5], [2, 7], [30, 2]]), random(3, 2, 31, dtype=torch.float32)
    native = megatron["tensor_parallel"].vocab_parallel_cross_entropy
    apply_liger_kernel_to_megatron(cross_entropy=True)
    ours = megatron["tensor_parallel"].vocab_parallel_cross_entropy
    assert ours is not native
    hold(lambda x: ours(x, labels, smoothing), lambda x: native(x, labels, smoothing), logits)
    ours(vocab_parallel_logits=logits, target=labels, label_smoothing=smoothing)  # as verl calls it
    loss = LigerMegatronCrossEntropy(label_smoothing=smoothing)
    torch.testing.assert_close(loss(logits, labels), ours(logits, labels, smoothing), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\)"):
        ours(logits, labels, 1.0)


def test_masked_labels_have_no_loss_and_no_gradient(megatron):
    apply_liger_kernel_to_megatron(cross_entropy=True)
    labels = torch.tensor([[0, -100]])
    loss, gradient = run(
        lambda x: megatron["tensor_parallel"].vocab_parallel_cross_entropy(x, labels), random(1, 2, 9).float()
    )
    assert loss[0, 1] == 0 and not gradient[0, 1].any() and gradient[0, 0].any()


def _rank(rank, where, queue):
    torch.distributed.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    sys.modules["megatron.core.parallel_state"].GROUP = group
    part = random(3, 2, 32).float().chunk(2, -1)[rank].contiguous()
    labels = torch.tensor([[0, 5], [2, 17], [30, 2]])
    fused = sys.modules["megatron.core.fusions.fused_cross_entropy"].fused_vocab_parallel_cross_entropy
    unfused = sys.modules["megatron.core.tensor_parallel"].vocab_parallel_cross_entropy
    losses = run(lambda x: fused(x, labels, group), part), run(lambda x: unfused(x, labels), part)
    queue.put((rank, [[t.numpy() for t in loss] for loss in losses]))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="autograd's threads of accelerators survive no fork")
def test_a_call_without_a_group_uses_megatrons(megatron, tmp_path):
    """Released versions pass no group to the unfused loss, whose vocabulary is sharded all the same."""
    apply_liger_kernel_to_megatron(cross_entropy=True)
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, tmp_path / "meet", queue)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    results = dict(queue.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join()
    labels = torch.tensor([[0, 5], [2, 17], [30, 2]])
    loss, gradient = run(lambda x: megatron_core.native_cross_entropy(x, labels, 0.0), random(3, 2, 32).float())
    for rank, losses in results.items():
        for ours in losses:
            torch.testing.assert_close(torch.from_numpy(ours[0]), loss)
            torch.testing.assert_close(torch.from_numpy(ours[1]), gradient.chunk(2, -1)[rank])


def test_a_loss_that_no_known_module_calls_is_told(monkeypatch, caplog):
    modules = megatron_core.install(monkeypatch, without=("models.common.language_module.language_module",))
    apply_liger_kernel_to_megatron(cross_entropy=True)
    assert "may keep Megatron's loss" in caplog.text
    assert hasattr(modules["fusions.fused_cross_entropy"].fused_vocab_parallel_cross_entropy, "__wrapped__")


@DTYPES
@pytest.mark.parametrize("shape", [(5, 64), (3, 2, 246)], ids=str)
def test_swiglu_in_an_mlp_imported_before(megatron, dtype, shape):
    swiglu, calls = megatron["transformer.mlp"].bias_swiglu_impl, megatron["fusions.fused_bias_swiglu"].calls
    apply_liger_kernel_to_megatron(swiglu=True)
    x = random(*shape, dtype=dtype)
    hold(lambda x: swiglu(x, None), megatron_core.native_swiglu, x)
    hold(LigerMegatronSwiGLU(), megatron_core.native_swiglu, x)
    assert not calls
    bias = random(shape[-1], dtype=dtype)
    torch.testing.assert_close(swiglu(x, bias), megatron_core.native_swiglu(x + bias), rtol=0, atol=0)
    swiglu(x, None, True)
    swiglu(x, None, False, True)
    assert calls == [(True, False), (False, True)]


def test_swiglu_as_a_module():
    x, taken = random(2, 8), []
    for name, options in {
        "bias": {"bias": x},
        "fp8": {"fp8_input_store": True},
        "CPU": {"cpu_offload_input": True},
    }.items():
        with pytest.raises(RuntimeError, match=f"does not serve .*{name}.*fallback_impl=megatron"):
            LigerMegatronSwiGLU()(x, **options)
        LigerMegatronSwiGLU(lambda *arguments: taken.append(arguments))(x, **options)
    assert [arguments[1:] for arguments in taken] == [(x, False, False), (None, True, False), (None, False, True)]
    with pytest.raises(ValueError, match=r"input: .*allowed: \(tokens, 2 F\)"):
        LigerMegatronSwiGLU()(random(8))
    with pytest.raises(ValueError, match="input: .*an even width"):
        LigerMegatronSwiGLU()(random(2, 7))
    copied = copy.deepcopy(LigerMegatronSwiGLU(in_place=True))
    before = x.clone()
    run(copied, x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("flag", ["rms_norm", "cross_entropy", "swiglu"])
def test_without_megatron(monkeypatch, flag):
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ImportError, match=rf"\({flag}=True\) needs megatron\.core\..*: install megatron-core"):
        apply_liger_kernel_to_megatron(**{"rms_norm": False, flag: True})


MISSING = {
    ("models.backends", "LocalSpecProvider"): "rms_norm",
    ("transformer.torch_norm", "WrappedTorchNorm"): "rms_norm",
    ("transformer.transformer_block", "LayerNormImpl"): "rms_norm",
    ("fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy"): "cross_entropy",
    ("tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy"): "cross_entropy",
    ("fusions.fused_bias_swiglu", "SwiGLUFunction"): "swiglu",
}


@pytest.mark.parametrize("missing", MISSING, ids=str)
def test_without_a_name(monkeypatch, missing):
    """An error that names the flag to leave out, and no place is replaced."""
    modules = megatron_core.install(monkeypatch, without=(missing,))
    before = {name: dict(vars(module)) for name, module in modules.items()}
    flag = MISSING[missing]
    with pytest.raises(
        ImportError, match=rf"\({flag}=True\) needs megatron\.core\.{missing[0]}\.{missing[1]}, .*lacks"
    ):
        apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)
    assert {name: dict(vars(module)) for name, module in modules.items()} == before


def test_without_a_method(monkeypatch, megatron):
    monkeypatch.delattr(megatron["models.backends"].LocalSpecProvider, "layer_norm")
    with pytest.raises(ImportError, match="needs megatron.core.models.backends.LocalSpecProvider.layer_norm, "):
        apply_liger_kernel_to_megatron()
