"""Models that are not as expected: a clear message, and a model that is right."""

import copy
import functools
import json
import logging
import textwrap

import pytest
import tiny
import torch
from ranks import device

import liger_hw
from liger_hw.patching import swapping
from liger_hw.patching.head import heads_armed
from liger_hw.patching.head_call import Forward
from liger_hw.patching.patch import _log_once

transformers = tiny.transformers


def test_a_model_with_nothing_to_replace_says_so_and_stays_as_it_was(caplog):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    before = [type(module) for module in model.modules()]
    _log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "liger_hw"):
        summary = liger_hw.patch(model)
    assert not summary.replaced and [type(module) for module in model.modules()] == before
    assert "nothing of Sequential was replaced" in caplog.text and "BatchNorm1d" in caplog.text


class Quantised(torch.nn.Module):
    """A linear layer of 8-bit weights, as quantisation libraries have them."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = linear.weight.abs().max().detach() / 127
        self.register_buffer("weight", (linear.weight / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


@pytest.mark.parametrize("head_too", [False, True])
def test_quantised_weights(head_too):
    plain = tiny.model()
    for parent in list(plain.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and (head_too or name != "lm_head"):
                setattr(parent, name, Quantised(child))
    patched = copy.deepcopy(plain)
    summary = liger_hw.patch(patched)
    assert summary.replaced["LlamaMLP", "swiglu"] == 2
    reason = "its head is a Quantised, not a plain linear layer: logits are computed as before"
    assert (("LlamaForCausalLM", reason) in summary.left) == head_too
    tiny.assert_learns_alike(plain, patched, fused=not head_too, **tiny.tokens())


def test_a_weight_sharded_over_devices_keeps_its_logits():
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, patched = tiny.pair()
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        patched.lm_head.weight = torch.nn.Parameter(distribute_tensor(patched.lm_head.weight.data, mesh, [Shard(0)]))
        hidden = torch.randn(2, 3, 64)
        with heads_armed(patched, [patched.lm_head], Forward()), pytest.raises(RuntimeError, match="DTensor"):
            patched.lm_head(hidden)  # torch's own error, and not numbers of a part of the weight
        assert torch.equal(plain.lm_head(hidden), torch.nn.functional.linear(hidden, plain.lm_head.weight))
    finally:
        dist.destroy_process_group()


REMOTE = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    class RemoteConfig(LlamaConfig):
        model_type = "remote"

    class Scale(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.gain, self.small = torch.nn.Parameter(torch.rand(width)), 1e-4

        def forward(self, x):
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.small)
            return (self.gain * wide).to(x.dtype)

    class RemoteForCausalLM(LlamaForCausalLM):
        config_class = RemoteConfig

        def __init__(self, config):
            super().__init__(config)
            self.model.norm = Scale(config.hidden_size)
            self.post_init()
"""


def test_code_that_came_with_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "remote.py").write_text(textwrap.dedent(REMOTE))
    names = {"AutoConfig": "remote.RemoteConfig", "AutoModelForCausalLM": "remote.RemoteForCausalLM"}
    config = {"model_type": "remote", "auto_map": names} | tiny.TINY
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    plain = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    patched = copy.deepcopy(plain)
    summary = liger_hw.patch(patched)
    assert summary.replaced["Scale", "rms_norm(casting_mode='gemma', offset=0.0)"] == 1
    assert not any(swapping.is_swapped(module) for module in plain.modules())
    tiny.assert_learns_alike(plain.train(), patched.train(), **tiny.tokens())


@pytest.mark.parametrize("model", ["llama", None, transformers.LlamaConfig()], ids=["name", "None", "config"])
def test_what_is_no_model(model):
    with pytest.raises(ValueError, match="^model: got"):
        liger_hw.patch(model)


def _train(folder):
    rank, gradients = torch.distributed.get_rank(), []
    for model in tiny.pair():
        parallel = torch.nn.parallel.DistributedDataParallel(model.to(device()))
        inputs = {name: x.to(device()) for name, x in tiny.tokens(seed=rank).items()}
        parallel(**inputs, use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.save(gradients, folder / str(rank))


def test_two_processes_of_distributed_data_parallel(ranks, tmp_path):
    ranks(2, _train, tmp_path)
    first, second = (torch.load(tmp_path / str(rank), map_location="cpu") for rank in (0, 1))
    for plain, patched, elsewhere in zip(*first, second[1]):
        torch.testing.assert_close(patched, plain, rtol=1e-3, atol=1e-5)
        assert torch.equal(patched, elsewhere), "both processes end with the same gradient"


def test_accelerate(request):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # one of a process, which a Trainer may have made before
    request.addfinalizer(lambda: accelerate.state.AcceleratorState._reset_state(True))
    plain, patched = tiny.pair()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    losses = []
    for model in (plain, patched):
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
        for _ in range(2):
            loss = tiny.call(prepared, **tiny.tokens()).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
        assert torch.isfinite(accelerator.unwrap_model(prepared)(**tiny.tokens()).loss)
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)


ON_DEVICE = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")


@pytest.mark.parametrize("runs_on", ["cpu", pytest.param("device", marks=ON_DEVICE)])
@pytest.mark.parametrize("first", ["patch", "accelerate"])
@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_offloading_by_accelerate(how, first, runs_on, tmp_path):
    """Weights in host memory or on disk, layers on a CPU or on the accelerator, as of the unpatched model there."""
    accelerate = pytest.importorskip("accelerate")
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(kind.type, 0) if runs_on == "device" else "cpu"
    room = {"rtol": 1e-3, "atol": 1e-4} if runs_on == "device" else {}  # kernels sum in another order
    plain = tiny.model()
    patched = copy.deepcopy(plain)
    plain = plain.to(device)
    tokens = {name: x.to(device) for name, x in tiny.tokens().items()}

    def offload():
        if how == "cpu_offload":
            accelerate.cpu_offload(patched, execution_device=device)
        elif how == "disk_offload":
            accelerate.disk_offload(patched, tmp_path, execution_device=device)
        else:
            places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "lm_head": "disk", "model.norm": "cpu"}
            places |= {"model.layers.1": device, "model.rotary_emb": device}
            accelerate.dispatch_model(patched, places, main_device=device, offload_dir=tmp_path, force_hooks=True)

    steps = [lambda: liger_hw.patch(patched), offload]
    for step in steps if first == "patch" else steps[::-1]:
        step()
    # the other way round, dispatch_model has set a forward on every module
    assert (sum(map(swapping.is_swapped, patched.modules())) > 3) == ((how, first) != ("dispatch_model", "accelerate"))
    for labelled in (True, False):
        inputs = tokens if labelled else {"input_ids": tokens["input_ids"]}
        with torch.no_grad():
            expected, found = tiny.call(plain, **inputs), tiny.call(patched, **inputs)
        torch.testing.assert_close(found.logits, expected.logits, **room)
        if labelled:
            torch.testing.assert_close(found.loss, expected.loss, **room)
    gradients = []
    for model in (plain, patched):  # offloaded weights get no gradient
        embeds = torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        tiny.call(model, inputs_embeds=embeds, labels=tokens["labels"]).loss.backward()
        gradients.append(embeds.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    liger_hw.unpatch(patched)
    with torch.no_grad():
        assert torch.equal(tiny.call(patched, **inputs).logits, expected.logits)
    if first == "patch":
        kept = [vars(m)["_old_forward"] for m in patched.modules() if "_old_forward" in vars(m)]
        assert kept and all(f.__qualname__.split(".")[0] in {type(m).__name__ for m in plain.modules()} for f in kept)


def test_transformers_heads_for_later_tokens():
    """Patched layers of `MtpModel` and the model's head give `multi_token_loss` plain torch's cross entropies."""
    kind = getattr(transformers.modeling_layers, "MtpModel", None)
    if not hasattr(kind, "forward_layer"):
        pytest.skip("this transformers has no layers of MtpModel to call")
    main = tiny.model("glm4_moe", num_mtp_layers=2, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    plain = main, kind(main, 2)
    for p in plain[1].layers.parameters():  # MtpModel leaves the experts' as they are in memory
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(0))
    patched = copy.deepcopy(plain)
    for model in patched:
        liger_hw.patch(model)
    ids = tiny.tokens()["input_ids"]

    def states(model, mtp):
        found, positions = [model.model(ids).last_hidden_state], torch.arange(ids.shape[1])[None]
        for ahead in (1, 2):
            tokens = torch.nn.functional.pad(ids[:, ahead:], (0, ahead))
            found.append(mtp.forward_layer(ahead - 1, found[-1], positions, None, input_ids=tokens))
        return found

    expected = sum(
        torch.nn.functional.cross_entropy(main.lm_head(x[:, :-ahead]).flatten(0, 1), ids[:, ahead:].flatten())
        for ahead, x in enumerate(states(*plain), 1)
    )
    found = liger_hw.multi_token_loss(states(*patched), patched[0].lm_head.weight, ids).loss
    torch.testing.assert_close(found, expected)
    for value in (expected, found):
        value.backward()
    for p, q in zip(plain[1].parameters(), patched[1].parameters()):
        assert p.grad is not None
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5)


def own_loss(self, logits, labels, vocab_size, **options):
    return torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1)) * 2


def refuses(self):
    raise NotImplementedError


@pytest.mark.parametrize("member", ["loss_function", "get_output_embeddings", "static"])
def test_members_that_other_models_have_as_properties(member):
    members = {
        "loss_function": {"loss_function": own_loss},
        "static": {"loss_function": staticmethod(functools.partial(own_loss, None))},
        "get_output_embeddings": {"get_output_embeddings": refuses},
    }[member]
    plain = tiny.model("llama")
    plain.__class__ = type("Unusual", (type(plain),), members)
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched)
    ids = torch.arange(3, 11)[None]
    expected, actual = (model(input_ids=ids, labels=ids) for model in (plain, patched))
    torch.testing.assert_close(actual.loss, expected.loss)
    torch.testing.assert_close(actual.logits, expected.logits)


def test_a_module_that_refuses_attributes_is_patched_and_restored():
    norm = tiny.model("llama").model.norm

    def refuse(self, name, value):
        raise AttributeError("frozen")

    frozen = type("Frozen", (type(norm),), {"__setattr__": refuse})
    norm.__class__ = frozen
    assert liger_hw.patch(norm).replaced
    liger_hw.unpatch(norm)
    assert type(norm) is frozen


@tiny.fails_in_4
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi", "nemotron"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_on_the_meta_device(family, dtype):
    """torch.autocast does not know this device."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    if family != "gpt2":
        sizes |= {"intermediate_size": 48, "num_key_value_heads": 4}
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).to("meta", dtype)
    ids = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    assert liger_hw.patch(model).replaced
    outputs = model(input_ids=ids, labels=ids)
    assert outputs.loss.shape == () and outputs.logits.shape == (2, 5, 64)
