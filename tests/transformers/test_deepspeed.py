"""Patched models under DeepSpeed learn as the plain model on one device; the check `distributed` installs it."""

import copy
import functools
import importlib.util

import pytest
import tiny
import torch
import torch.distributed as dist
from engines import (
    PLANS,
    Engine,
    labels_of_one_batch,
    learn_alike,
    learn_alike_in_bf16,
    learn_the_same_with_planned_activations,
    prepare,
)
from ranks import device
from test_adapters_on_ranks import adapt

import liger_hw
from liger_hw.patching.hooks import is_zero3_hook
from liger_hw.patching.lazy_logits import LazyLogits

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("the package deepspeed is not installed", allow_module_level=True)

TIED = {"tie_word_embeddings": True}
ZERO3 = {  # the default thresholds would leave every weight of a tiny model whole
    name: 0
    for name in (
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
    )
}  # fmt: skip


def configuration(stage, offload=(), **options):
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage} | (ZERO3 if stage == 3 else {}) | dict(offload), **options,
    }  # fmt: skip


class DeepSpeed(Engine):
    def backward(self, loss, last):
        self.model.backward(loss, scale_wrt_gas=False)  # the loss is divided already
        if not last:
            self.model.step()  # changes no weight before the last batch

    def gradients(self):
        from deepspeed.utils import safe_get_full_grad

        grads = [safe_get_full_grad(p) if p.requires_grad else None for p in self.model.parameters()]
        return [None if grad is None else grad.to(device()) for grad in grads]

    def step(self):
        self.model.step()


def zero(model, stage, **options):
    import deepspeed

    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
    engine = DeepSpeed(model)
    engine.model, engine.optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=engine.optimizer, config=configuration(stage, **options)
    )
    if stage == 3:
        assert not any(p.numel() for p in model.parameters()), "ZeRO-3 left a weight whole"
    return engine


def zero_init(model):
    """Build the model again in shards, as transformers does for a Trainer, and patch it then."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
    kept = HfDeepSpeedConfig(configuration(3))  # transformers builds in shards while it lives
    sharded = AutoModelForCausalLM.from_config(model.config)
    del kept
    unset_hf_deepspeed_config()
    assert not any(p.numel() for p in sharded.parameters()), "transformers built a weight whole"
    pairs = list(zip(sharded.parameters(), model.parameters(), strict=True))
    with deepspeed.zero.GatheredParameters([shard for shard, _ in pairs], modifier_rank=0), torch.no_grad():
        for shard, whole in pairs:
            shard.copy_(whole)
    assert str(liger_hw.patch(sharded.train())) == str(liger_hw.patch(model))
    return zero(sharded, 3)


class OfAccelerate(Engine):
    """Accelerate's optimizer step is a part of the last backward, so it shows no gradients."""

    def __init__(self, model, accelerator):
        super().__init__(model)
        self.accelerator = accelerator
        self.model, self.optimizer = accelerator.prepare(model, self.optimizer)

    def backward(self, loss, last):
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(loss, scale_wrt_gas=False)

    def gradients(self):
        return None

    def step(self):
        pass


def zero_of_accelerate(model, stage):
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(True)
    plugin = DeepSpeedPlugin(hf_ds_config=configuration(stage), gradient_accumulation_steps=2)
    backend = InitProcessGroupKwargs(backend=dist.get_backend())
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[backend], gradient_accumulation_steps=2)
    engine = OfAccelerate(model, accelerator)
    unset_hf_deepspeed_config()  # else transformers builds the next test's models in shards
    return engine


@pytest.fixture
def check(ranks):
    def run(engine, **options):
        ranks(2, functools.partial(learn_alike, engine, **options))

    return run


@pytest.mark.parametrize("config", [{}, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages(stage, config, check):
    check(functools.partial(zero, stage=stage), **config)


@pytest.mark.parametrize("config", [{}, TIED], ids=["untied", "tied"])
def test_models_built_in_shards(config, check):
    check(zero_init, **config)


@pytest.mark.parametrize("stage", [2, 3])
def test_divisor_of_zero(stage, check):
    check(functools.partial(zero, stage=stage), counted=True, of_rank=labels_of_one_batch)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_zero(reentrant, check):
    check(functools.partial(zero, stage=3), checkpointed=reentrant)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("stage", [2, 3])
def test_planned_activations_of_zero(stage, plan, ranks):
    """Layers of ZeRO-3 gather weights, in the same order on all ranks only where each recomputes all of them."""
    engine = functools.partial(zero, stage=stage)
    ranks(2, learn_the_same_with_planned_activations, engine, *PLANS[plan], stage == 3)


@pytest.mark.parametrize("checkpointed", [None, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_of_zero(stage, checkpointed, check):
    """Stage 3 gathers the weights of layers by hooks, so these run PEFT's forward."""
    check(functools.partial(zero, stage=stage), change=adapt, checkpointed=checkpointed)


@pytest.mark.parametrize("config", [{}, TIED], ids=["untied", "tied"])
def test_evaluation_of_zero(config, check):
    check(functools.partial(zero, stage=3), evaluate=True, **config)


@pytest.mark.parametrize("stage", [2, 3])
def test_rounded_layers_of_zero(stage, ranks):
    ranks(2, learn_alike_in_bf16, functools.partial(zero, stage=stage), {"bf16": {"enabled": True}})


@pytest.mark.parametrize("stage, weights", [(2, "optimizer"), (3, "optimizer"), (3, "param")])
def test_offloading_of_zero(stage, weights, check):
    offloaded = {f"offload_{weights}": {"device": "cpu"}}
    check(functools.partial(zero, stage=stage, zero_force_ds_cpu_optimizer=False, offload=offloaded))


def learn_from_a_disk(folder):
    losses = []
    for name, model in zip(("plain", "patched"), tiny.pair()):
        place = {"device": "nvme", "nvme_path": f"{folder}/{name}"}
        offload = {"offload_optimizer": place, "offload_param": place | {"buffer_size": 10**5}}
        engine = zero(model.to(device()), 3, zero_force_ds_cpu_optimizer=False, offload=offload).model
        for seed in range(3):
            loss = engine(**{name: x.to(device()) for name, x in tiny.tokens(seed=seed).items()}).loss
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
    torch.testing.assert_close(torch.stack(losses[3:]), torch.stack(losses[:3]), rtol=1e-5, atol=0)


def test_offloading_to_a_disk(ranks, tmp_path):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        pytest.skip("DeepSpeed's disk access needs libaio with its headers")
    AsyncIOBuilder().load()  # compiled here for minutes, once: a rank would count as hung
    ranks(1, learn_from_a_disk, str(tmp_path))


def train_by_logits(config, hooked):
    """Hold a loss with and without read logits, and its gradients, to the plain model's.

    Only hooks of `hooked` see logits and the output of an activation before the program reads them.
    """
    plain = tiny.model(**config).to(device())
    engine = prepare(copy.deepcopy(plain), functools.partial(zero, stage=3))
    model, seen = engine.model.module, []
    activation = model.model.layers[0].mlp.act_fn
    for module in (model.lm_head, activation) if hooked else ():
        module.register_forward_hook(lambda module, inputs, output: seen.append(output.sum()))
    inputs = {name: x.to(device()) for name, x in tiny.tokens().items()}
    outputs = engine.model(**inputs)
    assert len(seen) == (2 if hooked else 0)
    assert hooked or type(outputs.logits) is LazyLogits and outputs.logits.cell.values is None
    expected = plain(**inputs)
    torch.testing.assert_close(outputs.loss, expected.loss)
    # logits up to 10, whose fp32 roundings make 2e-5 in the plain model alone (against fp64)
    torch.testing.assert_close(outputs.logits.detach() + 0, expected.logits, rtol=1e-4, atol=4e-5)
    (expected.loss + expected.logits.logsumexp(-1).mean()).backward()
    engine.backward(outputs.loss + outputs.logits.logsumexp(-1).mean(), True)
    for found, p in zip(engine.gradients(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("config", [{}, TIED], ids=["untied", "tied"])
def test_logits_of_zero(config, hooked, ranks):
    ranks(2, train_by_logits, config, hooked)


def tell_hooks_apart():
    """Only DeepSpeed's own hooks count as such, however a program decorates its own."""
    from deepspeed.utils.nvtx import instrument_w_nvtx

    head = zero(tiny.model().to(device()), 3).model.module.lm_head
    hooks = *head._forward_hooks.values(), *head._forward_pre_hooks.values()
    assert hooks and all(map(is_zero3_hook, hooks))
    for hook in hooks:

        @functools.wraps(hook)
        def around(*arguments, hook=hook):
            return hook(*arguments)

        for own in (around, functools.wraps(hook)(lambda *_: None), instrument_w_nvtx(lambda *_: None), print):
            assert not is_zero3_hook(own)
        assert not is_zero3_hook(functools.partial(hook))


def test_hooks_of_others(ranks):
    ranks(2, tell_hooks_apart)


@pytest.mark.parametrize("config", [{}, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_of_accelerate(stage, config, check):
    check(functools.partial(zero_of_accelerate, stage=stage), **config)
