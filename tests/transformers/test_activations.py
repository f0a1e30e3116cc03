"""liger_hw.activations: no plan changes a number, and the plan predicts what the layers hold."""

import copy
import functools
import gc
import itertools
import json
import pickle
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import liger_hw
from liger_hw.checkpointing import memory, passes
from liger_hw.checkpointing.recording import DeviceClock
from liger_hw.checkpointing.solver import KEEP, OFFLOAD

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")

PLENTY = 2**40
HALF = "half of what autograd saves"
PLANS = {"recompute": (0, 0), "keep": (PLENTY, 0), "mixed": (HALF, 0), "offload": (HALF, 2**28)}
TINY = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
TINY |= dict(head_dim=16, vocab_size=128, max_position_embeddings=64, pad_token_id=0)
MODELS = {
    "llama": dict(TINY),
    "mixtral": TINY | dict(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    "qwen3_moe": TINY | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
    "gemma3_text": TINY | dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2)
    | dict(num_hidden_layers=4),
    "gpt2": dict(n_embd=64, n_layer=3, n_head=4, vocab_size=128, n_positions=64, resid_pdrop=0.2, attn_pdrop=0.2),
}  # fmt: skip


def model(family="llama", **more):
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **MODELS[family] | more)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def tokens(batch=2, length=24, seed=0):
    ids = torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def train(model, count, inputs=None, accumulate=1, context=None):
    """Return losses and gradients of `count` passes; every one draws its own dropout."""
    results = []
    for number in range(count):
        torch.manual_seed(number)
        if number % accumulate == 0:
            model.zero_grad()
        with context() if context else torch.enable_grad():
            loss = model(**(inputs or tokens(seed=number))).loss
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        results.append(torch.rand(1))  # the state of the random generator
    return results


def planned(model, plan, inputs=None, **options):
    """Plan a copy of `model`; return it with its `Activations`."""
    model = copy.deepcopy(model)
    budget, host_budget = PLANS[plan]
    if budget == HALF:
        activations = liger_hw.activations(model, PLENTY, 0)
        train(model, 4, inputs, **options)
        budget = sum(layer.choice.nbytes - layer.record.input_bytes for layer in activations.plan.layers) // 2
        model.zero_grad()
    return model, liger_hw.activations(model, budget, host_budget)


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected)):
        assert torch.equal(a, b), f"result {number} differs"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", MODELS)
def test_same_bits(family, plan):
    plain = model(family)
    other, activations = planned(plain, plan)
    assert_same_bits(train(other, 7), train(plain, 7))
    assert not activations.rejected
    choices = [layer.choice for layer in activations.plan.layers]
    assert len(choices) == plain.config.num_hidden_layers and activations.plan.measured_seconds > 0
    assert activations.plan.seconds is None and "predicted" not in str(activations)  # on a CPU
    actions = {action for choice in choices for _, action in choice.actions or ()}
    if plan == "recompute":
        assert all(choice.actions == () for choice in choices)
    elif plan == "keep":
        assert all(choice.actions is None for choice in choices)
    elif plan == "mixed":
        assert actions <= {KEEP} and 0 < activations.plan.saved_seconds
    else:
        # experts are a loop with transformers 4.57: its slowest operations may fit the budget without a copy
        in_a_loop = len(activations.plan.layers[0].record.operations) > 60
        assert in_a_loop or OFFLOAD in actions and activations.plan.offloaded_bytes > 0
        assert not choices[-1].offloaded


def lora(base):
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    return peft.get_peft_model(base, config)


def frozen_below(base):
    """Freeze the embedding and the first layer."""
    for part in (base.model.embed_tokens, base.model.layers[0]):
        part.requires_grad_(False)
    return base


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


WAYS = {
    "accumulation": dict(options=dict(accumulate=3)),
    "autocast": dict(options=dict(context=bf16)),
    "autocast and accumulation": dict(options=dict(context=bf16, accumulate=2)),
    "lora": dict(change=lora),
    "frozen": dict(change=frozen_below),
    "patched": dict(change=lambda base: (liger_hw.patch(base), base)[1]),
    "eager experts": dict(family="mixtral", more=dict(experts_implementation="eager")),
    "eager attention": dict(more=dict(attn_implementation="eager")),
    "packed": dict(inputs=dict(
        input_ids=tokens()["input_ids"][:1], labels=tokens()["labels"][:1],
        position_ids=torch.cat((torch.arange(10), torch.arange(14)))[None],
    )),
}  # fmt: skip


@pytest.mark.parametrize("plan", ["mixed", "offload"])
@pytest.mark.parametrize("way", WAYS)
def test_same_bits_however_it_trains(way, plan):
    way = {"family": "llama", "more": {}, "change": lambda base: base, "inputs": None, "options": {}} | WAYS[way]
    plain = way["change"](model(way["family"], **way["more"]))
    other, activations = planned(plain, plan, way["inputs"], **way["options"])
    assert_same_bits(train(other, 9, way["inputs"], **way["options"]), train(plain, 9, way["inputs"], **way["options"]))
    assert activations.plan is not None and not activations.rejected


def held_after_forward(model, inputs, tmp_path):
    """Return (loss, bytes that a forward allocates and leaves), by the allocator's events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss = model(**inputs, use_cache=False).loss
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return loss, sum(event["args"]["Bytes"] for event in events if event.get("name") == "[memory]")


@pytest.mark.parametrize("plan", ["keep", "mixed", "offload"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_predicts_the_bytes_that_the_layers_hold(family, plan, tmp_path):
    """The difference to a forward that recomputes every layer is what the plan keeps, on the device and the host."""
    inputs, held = tokens(batch=4, length=48), []
    for each in ("recompute", plan):
        other, activations = planned(model(family), each, inputs)
        train(other, 6, inputs)  # buffers on the host are allocated now
        other.zero_grad()
        loss, nbytes = held_after_forward(other, inputs, tmp_path)
        loss.backward()
        held.append(nbytes)
    kept = sum(layer.choice.nbytes - layer.record.input_bytes for layer in activations.plan.layers)
    assert held[1] - held[0] == pytest.approx(kept, rel=0.02)


# a model of two kinds of products ------------------------------------------------------------------------------------


class Layer(transformers.modeling_layers.GradientCheckpointingLayer):
    """A layer whose autograd saves three results of one size; its first product takes the most time."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 512), torch.nn.Linear(512, 128)

    def forward(self, x):
        y = self.up(x)
        return x + self.down(y * y.sigmoid())


class Rewriting(torch.nn.Linear):
    """Doubles its result where torch does not see it, as a kernel of another library may."""

    def forward(self, x):
        y = super().forward(x)
        y.detach().numpy()[...] *= 2
        return y


class Stack(torch.nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


RESULT = 32 * 512 * 4  # bytes of a result that a layer saves


def step(model, rows=32, seed=0, **options):
    """Return output and gradients of one pass."""
    model.zero_grad()
    y = model(torch.randn(rows, 128, generator=torch.Generator().manual_seed(seed)))
    y.square().mean().backward(**options)
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.fixture
def stack():
    torch.manual_seed(0)
    return Stack().train()


def test_proves_that_a_kept_result_is_the_recomputed_one(stack):
    for layer in stack.layers:
        layer.up.__class__ = Rewriting
    expected = step(stack)
    activations = liger_hw.activations(stack, 3 * 2 * RESULT, 0)
    for _ in range(10):
        assert_same_bits(step(stack), expected)
    assert {position for rejected in activations.rejected.values() for position in rejected} == {0}
    assert activations.plan.saved_seconds > 0


def test_more_tokens_are_measured_anew(stack):
    plain = copy.deepcopy(stack)
    activations = liger_hw.activations(stack, 3 * 2 * RESULT, 0)
    for number, rows in enumerate([32] * 6 + [16, 64] + [16, 64] * 4):
        assert_same_bits(step(stack, rows, number), step(plain, rows, number))
        assert (activations.plan is None) == (number < 3 or 7 <= number < 10), number
    assert activations.plan.layers[0].record.input_bytes == 64 * 128 * 4


def test_out_of_memory_returns_to_recomputing(stack, monkeypatch, caplog):
    expected = step(stack)
    activations = liger_hw.activations(stack, 3 * 2 * RESULT, 0)
    for _ in range(5):
        step(stack)
    with monkeypatch.context() as patch:
        patch.setattr(stack.layers[1].down, "forward", lambda x: torch.empty(2**62))
        with pytest.raises(RuntimeError):
            step(stack)
    monkeypatch.setattr(memory.DeviceMemory, "failures", lambda self: 1)
    assert_same_bits(step(stack), expected)
    assert activations.plan is None and "smaller budget" in caplog.text
    assert_same_bits(step(stack), expected)
    assert str(activations) == "no plan: every layer is recomputed"
    for failures in (2, 3):  # under no plan: it stays with that
        monkeypatch.setattr(memory.DeviceMemory, "failures", lambda self, failures=failures: failures)
        stack(torch.randn(32, 128))  # a forward without its backward
        assert_same_bits(step(stack), expected)
        assert str(activations) == "no plan: every layer is recomputed"


def test_the_phases_of_the_first_passes(stack):
    """A pass without its backward is repeated; one of an unknown kind is timed, and the phase that was next follows."""
    activations, phases, lefts = liger_hw.activations(stack, 3 * 2 * RESULT, 0), [], []
    for backward in (True, False, True, True, True, True, True, False, True, True):
        loss = stack(torch.randn(32, 128)).square().mean()
        phases.append(activations.current.phase.value)
        lefts.append(str(activations).splitlines()[0])
        if backward:
            stack.zero_grad()
            loss.backward()
    expected = "warm up", "record", "record", "time", "prove", "check", "run", "run", "time", "run"
    assert tuple(phases) == expected
    assert "needs 2 more" in lefts[0] and "needs 1 more" in lefts[1] and "the next pass makes it" in lefts[3]


def test_a_plan_slower_than_recomputing_keeps_no_operation(stack):
    expected = step(stack)
    activations = liger_hw.activations(stack, 3 * 2 * RESULT, 0)
    for _ in range(4):
        step(stack)
    assert activations.current.phase.value == "prove" and any(layer.choice.actions for layer in activations.plan.layers)
    activations.memory = types.SimpleNamespace(counts=True, allocated=int, peak=int, failures=int)  # as of a device
    activations.measured.seconds = 1e-9
    phases = []
    for _ in range(4):
        assert_same_bits(step(stack), expected)
        phases.append(activations.current.phase.value)
    assert phases == ["check", "prove", "check", "run"]
    assert not any(layer.choice.actions for layer in activations.plan.layers)


class AddsProducts(Layer):
    """Writes a product over a result, as the adapters of LoRA do."""

    def forward(self, x):
        y = self.up(x)
        return x + self.down(y * y.cos().addmm_(x, self.up.weight.t()))


def test_operations_that_write_to_arguments_take_time(monkeypatch):
    """A layer kept whole saves their time, too, and one that keeps results runs them again."""
    ticks = itertools.count()
    monkeypatch.setattr(DeviceClock, "now", lambda clock: next(ticks))
    model = Stack()
    model.layers = torch.nn.ModuleList(AddsProducts() for _ in range(3))
    activations = liger_hw.activations(model, PLENTY, 0)
    for _ in range(4):
        step(model)
    for layer in activations.plan.layers:
        assert layer.record.other_seconds == 1 and layer.choice.actions is None
        assert layer.choice.seconds == len(layer.record.operations) + 1


def test_weights_of_a_class_of_their_own_are_not_kept():
    """bitsandbytes' packed weights are parameters, which a layer's backward reads without holding them."""
    peft, quantised = (pytest.importorskip(name) for name in ("peft", "quantised"))
    saved = []
    for change in (lambda each: each, quantised.in_4_bits):
        config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
        adapted = peft.get_peft_model(change(model(num_hidden_layers=1)), config)
        adapted.enable_input_require_grads()
        liger_hw.patch(adapted)
        activations = liger_hw.activations(adapted, PLENTY, 0)
        train(adapted, 4, tokens())
        saved.append(activations.plan.layers[0].record.saved_bytes)
    assert saved[1] == saved[0] > 0


def test_a_second_backward(stack):
    """A graph that is kept gives the same gradients again."""
    expected = step(stack)
    liger_hw.activations(stack, 3 * 2 * RESULT, 2**24)
    for _ in range(5):
        stack.zero_grad()
        loss = stack(torch.randn(32, 128, generator=torch.Generator().manual_seed(0))).square().mean()
        for _ in range(2):
            stack.zero_grad()
            loss.backward(retain_graph=True)
            assert_same_bits([p.grad for p in stack.parameters()], expected[1:])


@pytest.mark.parametrize("way", ["frozen", "patched", "autocast and accumulation"])
def test_large_inputs_leave_in_measured_passes_too(way, monkeypatch):
    monkeypatch.setattr(passes.Activations, "_has_large_inputs", lambda self, hidden: True)
    test_same_bits_however_it_trains(way, "offload")


def test_an_input_that_changes_after_it_was_offloaded(stack, monkeypatch):
    """Torch's checkpointing finds such a write by the tensor's version; a copy on the host has none."""
    monkeypatch.setattr(passes.Activations, "_has_large_inputs", lambda self, hidden: True)
    liger_hw.activations(stack, 3 * 2 * RESULT, 2**24)
    step(stack)

    def write(layer, args, output):
        args[0].detach().add_(1)

    stack.layers[1].register_forward_hook(write)
    with pytest.raises(RuntimeError, match="changed in place"):
        step(stack)


class Adding(Layer):
    """Takes tensors beside the hidden states, of which torch's checkpointing checks the versions."""

    def forward(self, x, more=None, factor=None):
        return super().forward(x if more is None else x + more * factor.exp())


@pytest.mark.parametrize("host", [0, 2**24])
def test_inputs_beside_the_hidden_states(host, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(passes.Activations, "_has_large_inputs", lambda self, hidden: host > 0)
    layers = torch.nn.ModuleList(Adding() for _ in range(3))
    layers.factor = torch.nn.Parameter(torch.rand(128))
    plain = copy.deepcopy(layers)
    liger_hw.activations(layers, 3 * RESULT // 2, host)

    def step(layers, writes):
        layers.zero_grad()
        more, x = torch.ones(32, 128), torch.ones(32, 128)
        for layer in layers:
            x = layer(x, more, layers.factor)
        if writes:
            more.add_(1)
        x.square().sum().backward()
        return [p.grad.clone() for p in layers.parameters()]

    for _ in range(6):
        assert_same_bits(step(layers, False), step(plain, False))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(layers, True)


def test_passes_that_call_fewer_layers(stack):
    plain = copy.deepcopy(stack)
    liger_hw.activations(stack, 3 * 2 * RESULT, 2**24)
    for number in range(12):
        results = []
        for model in (stack, plain):
            model.zero_grad()
            x = torch.randn(32, 128, generator=torch.Generator().manual_seed(number))
            for layer in [layer for layer in model.layers if number % 3 < 2 or layer is not model.layers[1]]:
                x = layer(x)
            x.square().mean().backward()
            results.append([x.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        assert_same_bits(*results)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("budget", [0, 10**5])
def test_functional_call_with_other_weights(budget, copied):
    """A layer is recomputed with the weights of its forward."""
    gradients = []
    for plans in (False, True):
        stack = model()
        if plans:
            liger_hw.activations(stack, budget, 0)
        train(stack, 6)
        stack = copy.deepcopy(stack) if copied else stack
        others = {name: (p.detach() * 1.5).requires_grad_() for name, p in stack.named_parameters()}
        loss = torch.func.functional_call(stack, others, (), tokens()).loss
        gradients.append(torch.autograd.grad(loss, list(others.values())))
    for ours, expected in zip(*gradients):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("copied", [False, True])
def test_weights_that_change_before_the_backward(copied):
    stack = model()
    liger_hw.activations(stack, 0, 0)
    train(stack, 2)
    stack = copy.deepcopy(stack) if copied else stack
    loss = stack(**tokens()).loss
    with torch.no_grad():
        stack.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_transforms():
    """They compute without a plan."""
    stack, results = model(), []
    embeddings = stack.get_input_embeddings()(tokens()["input_ids"]).detach()
    direction = torch.ones_like(embeddings)

    def loss(x):
        return stack(inputs_embeds=x, labels=tokens()["labels"]).loss

    for plans in (False, True):
        if plans:
            liger_hw.activations(stack, 0, 0)
            train(stack, 1)
        results.append(torch.func.grad(loss)(embeddings))
        with torch.autograd.forward_ad.dual_level(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            found = loss(torch.autograd.forward_ad.make_dual(embeddings, direction))
            results.append(torch.autograd.forward_ad.unpack_dual(found).tangent)
    torch.testing.assert_close(results[:2], results[2:], rtol=0, atol=0)


def test_a_batch_without_rows(stack):
    plain = copy.deepcopy(stack)
    liger_hw.activations(stack, 3 * 2 * RESULT, 2**24)
    for number, rows in enumerate([0, 32, 0, 32, 0, 32, 32, 0, 32, 32]):
        assert_same_bits(step(stack, rows, number)[1:], step(plain, rows, number)[1:]) if rows else step(stack, rows)


class Longer(Layer):
    """Its forward runs one operation more than its recomputation, once for each number of rows."""

    def __init__(self):
        super().__init__()
        del self.up, self.down
        self.parts, self.masks = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(3)), {}

    def forward(self, x):
        rows = len(x)
        if rows not in self.masks:
            self.masks[rows] = torch.ones(rows, 128).tril()
        a, b, c = (part(x) for part in self.parts)
        return x + a.sin() * b.sin() * self.masks[rows] * c.sin()


def test_forwards_that_run_more_operations_than_their_recomputation():
    """The operations behind it move by one, onto others of the same kind and size."""
    for budget in range(0, 4 * 3 * 64 * 128 * 4, 64 * 128 * 4):
        torch.manual_seed(0)
        model = Stack()
        model.layers = torch.nn.ModuleList(Longer() for _ in range(3))
        plain = copy.deepcopy(model)
        activations = liger_hw.activations(model, budget, 0)
        for number in range(10):
            rows = 64 if number < 6 else 63 - number
            assert_same_bits(step(model, rows, number), step(plain, rows, number))
        assert activations.plan is not None


@pytest.mark.parametrize("budget, host", [(0, 0), (167936, 0), (184320, 0), (299008, 0), (PLENTY, 0), (10**5, 2**24)])
def test_hooks_that_log_in_the_forward_alone(budget, host):
    def logged(plan):
        results, log = model("llama"), []
        now = [0]

        def norm(module, args, output):
            if now[0] >= 6 and len(log) < 3 * (now[0] - 5):
                log.append(output.detach().abs().mean())

        for layer in results.model.layers:
            layer.input_layernorm.register_forward_hook(norm)
        if plan:
            liger_hw.activations(results, budget, host)
        found = []
        for now[0] in range(9):
            found += train(results, 1, tokens(seed=now[0]))
        return found

    assert_same_bits(logged(True), logged(False))


class Probing(Layer):
    """From step 6 on, the forward alone runs more operations, on another weight, dimension or written memory."""

    now = 0

    def __init__(self, kind):
        super().__init__()
        self.kind, self.times = kind, 0

    def forward(self, x):
        probes = self.times < Probing.now - 5
        self.times += probes
        w = torch.nn.functional.linear
        if self.kind == "weight":
            if probes:
                w(x.detach(), self.up.weight.detach() + 1, self.up.bias.detach())
            return x + w(w(x, self.up.weight + 0, self.up.bias).sin(), self.down.weight, self.down.bias)
        if self.kind == "dimension":
            if probes:
                x.detach().softmax(-2)
            return x + self.down(self.up(x.softmax(-1)).sin())
        written = torch.zeros(x.shape)
        if probes:
            other = torch.zeros(x.shape)
            other.copy_(x.detach())
            other.mul_(2)
            w(other, self.up.weight.detach(), self.up.bias.detach())
        written.copy_(x)
        return written + self.down(self.up(written).sin())


@pytest.mark.parametrize("kind", ["weight", "dimension", "written"])
def test_operations_of_the_forward_alone(kind):
    """No other operation counts as the one whose result is kept: its options and sources differ."""
    for budget in [0, *range(RESULT // 2, 4 * RESULT, RESULT // 2)]:
        torch.manual_seed(0)
        stack = Stack()
        stack.layers = torch.nn.ModuleList(Probing(kind) for _ in range(3))
        plain = copy.deepcopy(stack)
        liger_hw.activations(stack, budget, 0)
        for Probing.now in range(9):
            expected, found = step(plain, seed=Probing.now), step(stack, seed=Probing.now)
            assert all(torch.equal(a, b) for a, b in zip(found, expected) if a.numel() > 1)


class Buffered(Layer):
    """A layer that writes to, or reads, buffers of unusual kinds."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.register_buffer("a", torch.rand(2, 512))
        b = {"same": self.a, "view": self.a[1], "strided": torch.rand(512, 64)[:, ::2]}
        b |= {"expanded": torch.rand(512, 1).expand(512, 99), "sparse": torch.eye(512).to_sparse()}
        self.register_buffer("b", b.get(kind, torch.rand(512)))

    def forward(self, x):
        y = self.up(x)
        if self.kind in ("same", "view"):
            self.a.mul_(1.1)
            y = y * self.b.clone().flatten()[:512]
        elif self.kind == "sparse":
            y = torch.sparse.mm(self.b, y.mT).mT
        elif self.kind != "deleted":
            y = y * self.b.sum(1)
        elif hasattr(self, "b"):
            y = y * self.b
        return x + self.down(y.sin())


@pytest.mark.parametrize("kind", ["same", "view", "strided", "expanded", "sparse", "deleted"])
@pytest.mark.parametrize("budget", [0, 4 * RESULT, PLENTY])
def test_buffers_of_unusual_kinds(kind, budget):
    torch.manual_seed(0)
    model = Stack()
    model.layers = torch.nn.ModuleList(Buffered(kind) for _ in range(3))
    plain = copy.deepcopy(model)
    activations = liger_hw.activations(model, budget, 0)
    for number in range(7):
        results = []
        for each in (model, plain):
            each.zero_grad()
            y = each(torch.randn(32, 128, generator=torch.Generator().manual_seed(number)))
            if kind == "deleted" and number == 5:
                for layer in each.layers:
                    del layer.b
            y.square().mean().backward()
            results.append([y.detach(), *(p.grad.clone() for p in each.parameters())])
            results[-1] += [b.to_dense() for b in each.buffers()]
        assert_same_bits(*results)
    assert not activations.rejected
    assert all(hasattr(layer, "b") == (kind != "deleted") for layer in model.layers)


@pytest.mark.parametrize("family", ["gpt_neo", "glm4_moe"])
def test_layers_with_buffers_keep_results(family):
    MODELS["gpt_neo"] = dict(hidden_size=64, num_layers=2, num_heads=4, vocab_size=128, max_position_embeddings=64)
    MODELS["gpt_neo"] |= dict(attention_types=[[["global", "local"], 1]], window_size=8)
    MODELS["glm4_moe"] = TINY | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    plain = model(family)
    other = copy.deepcopy(plain)
    activations = liger_hw.activations(other, 10**5, 0)
    assert_same_bits(train(other, 7), train(plain, 7))
    assert not activations.rejected and any(layer.choice.actions for layer in activations.plan.layers)


class Normed(torch.nn.Module):
    """A part with a batch norm, or with a buffer that scales."""

    def __init__(self, inner, kind):
        super().__init__()
        self.inner, self.norm = inner, torch.nn.BatchNorm1d(64) if kind == "batch norm" else None
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x):
        y = self.inner(x) * self.scale
        return y if self.norm is None else self.norm(y.mT).mT


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["spectral norm", "old spectral norm", "batch norm", "replaced"])
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_layers_with_a_state(kind, plan):
    """The recomputation has the buffers that the forward found, and leaves them as the forward did."""
    plain = model()
    for layer in plain.model.layers:
        if "spectral" in kind:
            utils = torch.nn.utils
            (utils if kind == "old spectral norm" else utils.parametrizations).spectral_norm(layer.self_attn.q_proj)
        else:
            layer.mlp = Normed(layer.mlp, kind)
    other = copy.deepcopy(plain)
    budget, host_budget = PLANS[plan]
    activations = liger_hw.activations(other, 10**5 if budget == HALF else budget, host_budget)
    for number in range(7):
        results = []
        for each in (other, plain):
            each.zero_grad()
            loss = each(**tokens(seed=number)).loss
            if kind == "replaced":
                for layer in each.model.layers:
                    layer.mlp.scale = layer.mlp.scale * 1.1
            loss.backward()
            results.append([loss.detach(), *(p.grad.clone() for p in each.parameters()), *each.buffers()])
        assert_same_bits(*results)
    assert not activations.rejected


@pytest.mark.parametrize("budget", [0, 10**5, PLENTY])
def test_a_buffer_with_a_gradient(budget):
    """functional_call may put a tensor that learns in the place of a buffer."""
    plain = model()
    for layer in plain.model.layers:
        layer.mlp = Normed(layer.mlp, "scaled")
    other = copy.deepcopy(plain)
    liger_hw.activations(other, budget, 0)
    for number in range(6):
        results = []
        for each in (other, plain):
            scale = torch.full((64,), 1.0 + number, requires_grad=True)
            tensors = {"model.layers.1.mlp.scale": scale}
            torch.func.functional_call(each, tensors, kwargs=tokens(seed=number)).loss.backward()
            results.append([scale.grad])
        assert_same_bits(*results)


def test_buffers_that_change_before_the_backward():
    other = model()
    for layer in other.model.layers:
        layer.mlp = Normed(layer.mlp, "scaled")
    liger_hw.activations(other, 0, 0)
    loss = other(**tokens()).loss
    other.model.layers[1].mlp.scale.mul_(2)
    with pytest.raises(RuntimeError, match="scale of Normed was changed in place.*change parameters and buffers after"):
        loss.backward()


@pytest.mark.parametrize("budget", [0, PLENTY])
def test_a_backward_that_does_not_reach_the_first_layers(budget):
    plain = frozen_below(model())
    other = copy.deepcopy(plain)
    activations = liger_hw.activations(other, budget, 0)
    assert_same_bits(train(other, 7), train(plain, 7))
    assert activations.plan is not None


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return operation(*args, **(kwargs or {}))


def test_hooks_that_enter_a_mode():
    plain = model()
    other, modes = copy.deepcopy(plain), []
    for layer in other.model.layers:
        layer.register_forward_pre_hook(lambda module, args: modes.append(Counting().__enter__()))
        layer.register_forward_hook(lambda module, args, output: modes.pop().__exit__(None, None, None))
    activations = liger_hw.activations(other, PLENTY, 0)
    assert_same_bits(train(other, 7), train(plain, 7))
    assert any(layer.choice.actions is None for layer in activations.plan.layers)


def test_generation_in_training_mode():
    """Without gradients a layer keeps its cache; older versions of transformers take it from checkpointed layers."""
    plain = model()
    other = copy.deepcopy(plain)
    liger_hw.activations(other, 0, 0)
    prompt = tokens(1, 5)["input_ids"]
    with torch.no_grad():
        found, expected = (m.generate(prompt, max_new_tokens=6, do_sample=False) for m in (other, plain))
    assert torch.equal(found, expected)


class Random(Layer):
    rate = 0.0

    def forward(self, x):
        y = torch.native_dropout(self.up(x), 0.5, self.rate > 0)[0]
        return x + self.down(torch.nn.functional.dropout(y * y.sigmoid(), 0.1))


@torch.library.custom_op("liger_test::masked", mutates_args=())
def masked(x: torch.Tensor) -> torch.Tensor:
    """Draw random numbers without a tag that says so, as packages of attention may."""
    return (torch.rand_like(x) > 0.5).to(x.dtype)


class Masked(Layer):
    def forward(self, x):
        y = self.up(x)
        y = y * masked(y.detach())
        return x + self.down(torch.nn.functional.dropout(y * y.sigmoid(), 0.1))


@pytest.mark.parametrize("layer, results", [(Random, 2), (Masked, 3)])
def test_operations_that_draw_random_numbers_unseen(layer, results):
    """One begins after it was recorded, one has no tag that says so: the numbers drawn after them depend on it."""
    torch.manual_seed(0)
    model = Stack()
    model.layers = torch.nn.ModuleList(layer() for _ in range(3))
    plain = copy.deepcopy(model)
    liger_hw.activations(model, 3 * results * RESULT, 0)
    for number in range(9):
        Random.rate, bits = 0.5 * (number > 5), []
        for each in (model, plain):
            torch.manual_seed(number)
            bits.append(step(each))
        assert_same_bits(*bits)


def encoder_decoder():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=50, use_cache=False,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    )).train()  # fmt: skip


def test_more_tokens_of_later_layers_are_measured_anew():
    """A decoder's, while its encoder's stay."""
    model = encoder_decoder()
    activations, ids = liger_hw.activations(model, 60_000, 0), torch.randint(2, 50, (2, 16))
    for number, length in enumerate([4] * 7 + [200] * 5 + [100]):
        model.zero_grad()
        model(input_ids=ids, labels=torch.randint(2, 50, (2, length))).loss.backward()
        assert (activations.plan is None) == (number < 3 or 8 <= number < 11), number
    assert activations.plan.layers[-1].record.input_bytes == 2 * 200 * 32 * 4


def test_a_decoder_of_any_length_keeps_its_plan():
    """Once its longest texts were measured, shorter ones do not count as growth."""
    model = encoder_decoder()
    activations = liger_hw.activations(model, 10**9, 0)
    for number, (length, decoded) in enumerate([(16, 30)] + [(16, 4), (12, 20), (16, 30), (8, 10)] * 4):
        ids = torch.randint(2, 50, (2, length))
        model(input_ids=ids, labels=torch.randint(2, 50, (2, decoded))).loss.backward()
        assert (activations.plan is None) == (number < 3), number


def test_another_default_device(stack):
    expected = step(stack)
    activations = liger_hw.activations(stack, 3 * 2 * RESULT, 2**24)
    for _ in range(6):
        stack.zero_grad()
        x = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
        with torch.device("meta"):
            stack(x).square().mean().backward()
        assert_same_bits([p.grad for p in stack.parameters()], expected[1:])
    assert activations.plan is not None


def test_a_pass_leaves_no_tensors(stack):
    """Reference cycles would hold the layers' inputs until Python collects them."""
    liger_hw.activations(stack, 3 * 2 * RESULT, 2**24)
    gc.collect()
    gc.disable()
    try:
        for phase in ("warm up", "record", "time", "prove", "check", "run"):
            stack.zero_grad()
            stack(torch.randn(32, 128)).square().mean().backward()
            stack(torch.randn(32, 128)) if phase == "run" else None  # a graph without a backward
            left = [type(x) for x in gc.get_objects() if type(x) is torch.Tensor and x.shape[:1] == (32,)]
            assert not left, phase
    finally:
        gc.enable()


class WholeCall(Layer):
    """A layer of which checkpointing runs the hooks too, as in transformers 5.17."""

    gradient_checkpointing = property(lambda self: False, lambda self, value: None)

    def __call__(self, *args):
        function = functools.partial(types.MethodType(torch.nn.Module.__call__, self))
        return self._gradient_checkpointing_func(function, *args) if self.checkpoints else function(*args)

    checkpoints = property(lambda self: "_gradient_checkpointing_func" in vars(self))


def gather(layer, args):
    """Run an operation in the forward alone, as FSDP2's hook does."""
    if torch._C._current_graph_task_id() == -1:
        torch.ones(8) * 2


@pytest.mark.parametrize("budget, host", [(PLENTY, 0), (3 * 2 * RESULT, 0), (3 * RESULT, 2**24)])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_within_the_checkpoint(late, budget, host):
    """The plan is that of layers without hooks, which run in the forward and not in the recomputation."""
    torch.manual_seed(0)
    model = Stack()
    model.layers = torch.nn.ModuleList(WholeCall() for _ in range(3))
    plain = copy.deepcopy(model)
    for layer in () if late else model.layers:
        layer.register_forward_pre_hook(gather, prepend=True)
    activations = liger_hw.activations(model, budget, host)
    for layer in model.layers if late else ():
        layer.register_forward_pre_hook(gather, prepend=True)
    for number in range(7):
        assert_same_bits(step(model, seed=number), step(plain, seed=number))
    assert any(layer.choice.actions != () for layer in activations.plan.layers) and not activations.rejected
    record = activations.plan.layers[0].record
    assert [op.label for op in record.operations] == ["up", "sigmoid", "mul", "down"][: len(record.operations)]
    activations.undo()
    assert all(len(layer._forward_pre_hooks) == 1 and not layer._forward_hooks for layer in model.layers)


def test_copies_checkpoint_whole_layers(stack):
    expected = step(stack)
    liger_hw.activations(stack, 3 * 2 * RESULT, 0)
    for _ in range(5):
        step(stack)
    for other in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        assert other.layers[0].gradient_checkpointing
        assert_same_bits(step(other), expected)


def test_copies_recompute_what_a_forward_changes():
    """Buffers that a forward writes to are those of before it in the recomputation, and written once."""
    plain = model()
    for layer in plain.model.layers:
        layer.mlp = Normed(layer.mlp, "batch norm")
    other = copy.deepcopy(plain)
    liger_hw.activations(other, 0, 0)
    other = copy.deepcopy(other)
    assert_same_bits(train(other, 3), train(plain, 3))
    assert_same_bits(list(other.buffers()), list(plain.buffers()))


def test_copies_under_transforms():
    plain = model()
    other = copy.deepcopy(plain)
    liger_hw.activations(other, 0, 0)
    results = []
    for each in (copy.deepcopy(other), plain):
        weights = {name: p.detach() for name, p in each.named_parameters()}
        loss = functools.partial(torch.func.functional_call, each, kwargs=tokens())
        results.append(list(torch.func.grad(lambda w, loss=loss: loss(w).loss)(weights).values()))
    assert_same_bits(*results)


def test_undo_gives_the_former_checkpointing_back():
    llama = model()
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    former = [vars(layer)["_gradient_checkpointing_func"] for layer in llama.model.layers]
    liger_hw.activations(llama, 0)
    second = liger_hw.activations(llama, 0)
    second.undo()
    assert [vars(layer)["_gradient_checkpointing_func"] for layer in llama.model.layers] == former
    llama.gradient_checkpointing_disable()
    liger_hw.activations(llama, 0)
    assert llama.model.layers[0].gradient_checkpointing
    assert liger_hw.activations(llama, None) is None
    assert not llama.model.layers[0].gradient_checkpointing


def switch_names():
    """The names of transformers' switches that this version has."""
    return [
        name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(model(), f"{name}_enable")
    ]


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("copied", [False, True])
def test_a_program_that_switches_checkpointing_on_keeps_the_plan(copied):
    for name in switch_names():
        plain = model()
        other = copy.deepcopy(plain)
        if copied:
            liger_hw.activations(other, 0, 0)
            other = copy.deepcopy(other)
        activations = liger_hw.activations(other, PLENTY, 0)
        for switched in (plain, other):
            getattr(switched, f"{name}_enable")()
        assert_same_bits(train(other, 6), train(plain, 6))
        assert activations.plan is not None and activations.plan.saved_seconds > 0
        liger_hw.activations(other, None)
        assert other.model.layers[0].gradient_checkpointing  # as the program asked
        assert "_set_gradient_checkpointing" not in vars(other)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_a_program_that_switches_checkpointing_off_ends_the_plan():
    for name in switch_names():
        other = model()
        activations = liger_hw.activations(other, PLENTY, 0)
        getattr(other, f"{name}_disable")()
        train(other, 4)
        assert activations.plan is None and not other.model.layers[0].gradient_checkpointing


def test_a_model_with_a_plan_is_saved_and_loaded():
    other = model()
    liger_hw.activations(other, PLENTY, 0)
    loaded = pickle.loads(pickle.dumps(other))
    assert_same_bits(train(loaded, 2), train(model(), 2))


def test_a_model_that_is_moved_before_its_first_pass():
    expected = train(model(), 6)
    other = model().to("meta")
    activations = liger_hw.activations(other, str(PLENTY), 0)
    other.to_empty(device="cpu").load_state_dict(model().state_dict())
    other.tie_weights()
    other.model.rotary_emb = model().model.rotary_emb
    assert_same_bits(train(other, 6), expected)
    assert activations.device.type == "cpu" and activations.plan is not None
    other = model().to("meta")
    liger_hw.activations(other, "auto")
    other.to_empty(device="cpu")
    other.model.rotary_emb = model().model.rotary_emb
    with pytest.raises(ValueError, match="a CPU does not count memory"):
        train(other, 1)


def test_patch_plans():
    expected = train(model(), 6)
    other = model()
    summary = liger_hw.patch(other, activations=PLENTY)
    assert_same_bits(train(other, 1), train(liger_hw_patched(), 1))
    train(other, 5)
    assert summary.activations.plan is not None and len(train(other, 6)) == len(expected)
    assert liger_hw.patch(other).activations is None
    assert "activations" in vars(summary) and other.model.layers[0].gradient_checkpointing  # the plan stays
    liger_hw.activations(other, None)
    with pytest.raises(ValueError, match="budget: got 1.5"):
        liger_hw.patch(model(), activations=1.5)


def liger_hw_patched():
    other = model()
    liger_hw.patch(other)
    return other


def test_patch_plans_for_models_built_later():
    cls = type(model())
    liger_hw.patch(cls, activations=PLENTY)
    try:
        built = model()
    finally:
        liger_hw.unpatch(cls)
    assert_same_bits(train(built, 6), train(liger_hw_patched(), 6))
    assert passes.plans_of(built)[0].plan is not None


def test_the_names_of_liger_kernel_plan(monkeypatch):
    from liger_hw.transformers import _apply_liger_kernel_to_instance, apply_liger_kernel_to_llama

    monkeypatch.setenv("LIGER_HW_ACTIVATIONS", "1GiB")
    for apply in (_apply_liger_kernel_to_instance, apply_liger_kernel_to_llama):
        other = model()
        assert apply(model=other).activations.budget == 2**30
    assert _apply_liger_kernel_to_instance(other, activations=7).activations.budget == 7
    monkeypatch.setenv("LIGER_HW_ACTIVATIONS", "much")
    with pytest.raises(ValueError, match="budget: got 'much'"):
        apply_liger_kernel_to_llama(model=model())


@pytest.mark.parametrize("arguments, message", [
    ((torch.nn.Linear(2, 2), 1), "model: got Linear, which is left alone"),
    (("model", 1), "model: got str"),
    ((Stack().requires_grad_(False), 1), "needs a gradient"),
    ((Stack(), "auto"), "budget: got auto, allowed: bytes"),
    ((Stack(), -1), "budget: got -1"),
    ((Stack(), "infGiB"), "budget: got 'infGiB', allowed: bytes"),
    ((Stack(), "80gb"), "budget: got '80gb', allowed: bytes"),
    ((Stack(), 1, 2**60), "host_budget: got 1152921504606846976, allowed: 0 to"),
], ids=str)  # fmt: skip
def test_bad_input(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # else the model may move to it later
    with pytest.raises(ValueError, match=message):
        liger_hw.activations(*arguments)


def test_compiled_models_are_refused(stack):
    stack.compile()
    with pytest.raises(ValueError, match="activation_memory_budget"):
        liger_hw.activations(stack, 1)


def test_a_budget_that_nothing_fits_is_refused_in_the_first_backward(stack, monkeypatch):
    liger_hw.activations(stack, 100)
    monkeypatch.setattr(memory.DeviceMemory, "peak", lambda self: 200)
    with pytest.raises(ValueError, match="the peak of a pass that recomputes every layer"):
        step(stack)
