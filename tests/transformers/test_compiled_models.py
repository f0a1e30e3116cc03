"""Test compiled and exported models, whole or layer by layer."""

import copy
import operator

import numpy
import pytest
import tiny
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.modeling_layers import GradientCheckpointingLayer

import liger_hw
from liger_hw.patching.traced_logits import TracedLogits

FAMILIES = "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi3 olmo2 granite mixtral glm4 gpt_oss nemotron".split()


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


def compiled(model, **inputs):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs, use_cache=False)


def can_be_compiled(model, **inputs):
    try:
        compiled(model, **inputs)
    except torch._dynamo.exc.TorchDynamoException:
        return False
    return True


def assert_same_gradients(plain, patched):
    for p, q in zip(plain.parameters(), patched.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_whole(family):
    skip_logits = True if family == "gemma2" else None
    plain, patched = tiny.pair(family)
    inputs = tiny.tokens()
    expected = tiny.call(plain, **inputs)
    try:
        found = compiled(patched, **inputs, skip_logits=skip_logits)
    except torch._dynamo.exc.TorchDynamoException:
        if can_be_compiled(plain, **inputs):
            raise
        pytest.skip(f"this transformers cannot compile its own {family} whole")
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    if not skip_logits:
        for read in (torch.sum, numpy.asarray, len, bool, list, lambda x: x == 0, lambda x: x[0], lambda x: 1 - x):
            with pytest.raises(RuntimeError, match="compiled"):
                read(found.logits)
    found.loss.backward(), expected.loss.backward()
    assert_same_gradients(plain, patched)


def test_lengths_share_a_graph():
    plain, patched = tiny.pair()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(patched, backend=counter, fullgraph=True)
    for length in (17, 20, 9, 31, 40):
        inputs = tiny.tokens(length=length)
        torch.testing.assert_close(function(**inputs, use_cache=False).loss, tiny.call(plain, **inputs).loss)
    assert counter.frame_count == 2  # one for the first length, and one for all others


def test_logits_of_a_compiled_model():
    plain, patched = tiny.pair()
    inputs = tiny.tokens()
    found = compiled(patched, **inputs, skip_logits=False)
    expected = tiny.call(plain, **inputs)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss)


def test_a_compiled_function_may_be_the_first_to_read_logits():
    plain, patched = tiny.pair(num_hidden_layers=1)
    function = torch.compile(lambda x: x.softmax(-1).square().sum(), backend="aot_eager")
    for model in (plain, patched):
        function(tiny.call(model, **tiny.tokens()).logits).backward()
    assert_same_gradients(plain, patched)


class WithOperators(tiny.transformers.LlamaForCausalLM):
    """A model whose forward, as remote code's, has operators of logits that no loss understands."""

    def forward(self, input_ids, labels):
        logits = 1 - self.lm_head(self.model(input_ids).last_hidden_state)
        logits = torch.where(logits == 0, logits, logits**2).masked_fill(logits > 3, 3.0)
        return tiny.transformers.modeling_outputs.CausalLMOutput(
            loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits
        )


def test_operators_that_no_loss_understands_compute_the_logits():
    plain = WithOperators(tiny.model(num_hidden_layers=1).config)
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched)
    losses = [torch.compile(model, backend="aot_eager")(**tiny.tokens()).loss for model in (plain, patched)]
    torch.testing.assert_close(*losses)


def _written_beside_views(x):
    first, last = x[:1], x[:, -1:].contiguous()
    x.mul_(0.5)
    x[:, 2] = first[:, 3] + last.sum()


def _written_twice_contiguous(x):
    rows = x[:, 1:].contiguous()
    rows.contiguous().mul_(0.5)
    x[:, 1:] = rows


def _written_through_a_view_that_was_read(x):
    column = x.select(-1, 3)
    column.mul_(0.5)


def _written_through_a_view_of_a_slice(x):
    rows = x[:, 1:]
    rows.transpose(0, 1).mul_(0.5)
    x[:, :-1] = rows + 1


def _written_after_a_copy(x):
    rows = x[:, 1:].reshape(-1, 12)
    x.sum()  # computes the logits
    x.mul_(0.5)
    x[:, 1:] = rows.view(2, 4, 12)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__((..., slice(3, 9)), -5.0), lambda x: x.mul_(0.5), torch.relu_, _written_beside_views,
        lambda x: x.float().exp_(), lambda x: x[..., :9].zero_(), lambda x: x.view(-1, x.size(-1))[3:].neg_(),
        lambda x: x[:, 1:].contiguous().zero_(), lambda x: x[x[..., 0].sum() > 0 * x[..., 0]].zero_(),
        lambda x: torch.nn.functional.relu(x, inplace=True), lambda x: (x * 2.0).zero_(),
        lambda x: operator.imul(x, 0.5), lambda x: operator.isub(x[:, 1:], 2.0),
        torch.no_grad()(lambda x: x.mul_(0.5)), lambda x: x.data.mul_(0.5), lambda x: x[:, 1:].detach().zero_(),
        _written_twice_contiguous, _written_through_a_view_that_was_read, _written_through_a_view_of_a_slice,
        _written_after_a_copy, lambda x: x.narrow(-1, 0, 3).zero_(), lambda x: x.unbind(0)[0].detach().zero_(),
    ],
)  # fmt: skip
def test_writes_to_traced_logits(write):
    head, results = torch.nn.Linear(8, 12), []
    hidden = torch.randn(2, 5, 8)
    for logits in (head(hidden), TracedLogits.after(head, hidden)):
        write(logits)
        loss = torch.nn.functional.cross_entropy((logits / 2.0).view(-1, 12), torch.arange(10))
        results.append((loss, logits + 0, *torch.autograd.grad(loss, list(head.parameters()))))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.register_hook(print), lambda x: x[:, 1:].retain_grad(), lambda x: x.grad_fn,
        lambda x: torch.autograd.grad(x.sum(), x),
    ],
)  # fmt: skip
def test_the_gradient_of_traced_logits_is_refused(read):
    with pytest.raises(RuntimeError, match="skip_logits=False"):
        read(TracedLogits.after(torch.nn.Linear(8, 12), torch.randn(2, 5, 8)))


class WithWrites(tiny.transformers.LlamaForCausalLM):
    """A model whose forward, as Chameleon's, writes to its logits."""

    def forward(self, input_ids, labels):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits[:, :, 3:9] = torch.finfo(logits.dtype).min
        return tiny.transformers.modeling_outputs.CausalLMOutput(
            loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits
        )


def test_a_compiled_forward_may_write_to_its_logits():
    plain, inputs = WithWrites(tiny.model(num_hidden_layers=1).config), tiny.tokens()
    plain.loss_type = "ForCausalLM"  # else transformers warns, which no compiler traces
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched)
    expected, found = plain(**inputs), torch.compile(patched, backend="aot_eager", fullgraph=True)(**inputs)
    torch.testing.assert_close((found.loss, found.logits), (expected.loss, expected.logits))
    expected.loss.backward(), found.loss.backward()
    assert_same_gradients(plain, patched)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class WithCodeForTensors(tiny.transformers.LlamaForCausalLM):
    def forward(self, input_ids, labels):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits = Doubled.apply(logits) if isinstance(logits, torch.Tensor) else logits
        return tiny.transformers.modeling_outputs.CausalLMOutput(
            loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits
        )


def _loss_of_doubled(logits, labels, vocab_size, **_):
    return torch.nn.functional.cross_entropy(Doubled.apply(logits).view(-1, vocab_size), labels.view(-1))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("part", ["forward", "loss_function"])
def test_compiled_code_of_a_program_gets_tensors(part, compiler):
    """A compiler sees no tensor in `TracedLogits`, and an autograd function would cut their graph."""
    plain = (WithCodeForTensors if part == "forward" else tiny.transformers.LlamaForCausalLM)(
        tiny.model(num_hidden_layers=1).config
    )
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched)
    if part == "loss_function":
        plain.loss_function = patched.loss_function = _loss_of_doubled
    losses = [torch.compile(model, backend=compiler)(**tiny.tokens()).loss for model in (plain, patched)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    assert_same_gradients(plain, patched)


def _compile_the_loss_function(model, compiler):
    model.loss_function = torch.compile(model.loss_function, backend=compiler)
    return lambda inputs: model(**inputs).loss


def _compile_a_second_loss(model, compiler):
    @torch.compile(backend=compiler)
    def loss_of(outputs, labels):
        loss = model.loss_function(outputs.logits.float(), labels.flip(1), tiny.VOCABULARY, num_items_in_batch=9)
        return loss + outputs.hidden_states[-1].square().mean()

    return lambda inputs: loss_of(model(**inputs, output_hidden_states=True), inputs["labels"])


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiled", [_compile_the_loss_function, _compile_a_second_loss])
def test_a_compiled_loss_gets_the_gradient_of_an_eager_head(compiled, compiler):
    plain, patched = tiny.pair(num_hidden_layers=1)
    losses = [compiled(model, compiler)(tiny.tokens()) for model in (plain, patched)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    assert_same_gradients(plain, patched)


def compile_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_compiled_layers(family, checkpointing):
    """What docs/faq.md recommends: the rest runs as it does without a compiler, logits included."""
    plain, patched = tiny.pair(family)
    if checkpointing:
        patched.gradient_checkpointing_enable({"use_reentrant": False})
    compile_layers(patched)
    for length in (17, 20, 33):
        inputs = tiny.tokens(length=length)
        expected, found = tiny.call(plain, **inputs), tiny.call(patched, **inputs)
        assert tiny.is_lazy(found)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        found.loss.backward(), expected.loss.backward()
    assert_same_gradients(plain, patched)


def test_exported():
    plain, patched = tiny.pair()
    plain.eval(), patched.eval()
    ids = tiny.tokens()["input_ids"]
    program = torch.export.export(patched, (ids,), {"use_cache": False}, strict=False)
    expected = plain(ids, use_cache=False).logits
    torch.testing.assert_close(program.module()(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    other = copy.deepcopy(patched)(ids + 1, use_cache=False).logits
    torch.testing.assert_close(program.module()(ids + 1, use_cache=False).logits, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt2"])
def test_small_layers_are_compiled_as_unpatched(family, monkeypatch):
    plain, patched = tiny.pair(family)
    inputs = tiny.tokens()

    def operations(model):
        torch._dynamo.reset()
        graphs = []

        def backend(graph, _):
            graphs.append([str(node.target) for node in graph.graph.nodes if node.op != "placeholder"])
            return graph

        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.compile(backend=backend)
        tiny.call(model, **inputs).loss.backward()
        return graphs

    expected = operations(plain)
    assert expected and operations(patched) == expected
    monkeypatch.setattr("liger_hw.dispatch.ops.FUSED_VALUES", 1)
    assert operations(patched) != expected


llama = tiny.transformers.models.llama.modeling_llama
REPLACED = {  # what a program replaces, by which function
    "class's forward": (llama.LlamaMLP, "forward", lambda self, x: x),
    "norm's forward": (llama.LlamaRMSNorm, "forward", lambda self, x: x * 2),
    "activation's forward": (tiny.transformers.activations.SiLUActivation, "forward", lambda self, x: x.tanh()),
    "linear's forward": (torch.nn.Linear, "forward", lambda self, x: torch.matmul(x, self.weight.T) / 2),
    "rotary function": (llama, "apply_rotary_pos_emb", lambda q, k, *args, **kwargs: (q, k)),
    "helper of the rotary function": (llama, "rotate_half", lambda x: x),
    "function of torch": (torch.nn.functional, "silu", lambda x, inplace=False: x.tanh()),
    "another of torch": (torch, "rsqrt", lambda x: x.tanh()),
}


@pytest.mark.parametrize(
    "replaced, whole", [*((name, False) for name in REPLACED), ("norm's forward", True), ("linear's forward", True)]
)
def test_code_replaced_after_compilation_counts(replaced, whole, monkeypatch):
    monkeypatch.setattr("liger_hw.dispatch.ops.FUSED_VALUES", 1)  # no module is small: the ops compute all
    owner, name, function = REPLACED[replaced]
    plain, patched = tiny.pair(num_hidden_layers=1)
    backend = CompileCounterWithBackend("aot_eager")
    for module in [patched] if whole else patched.model.layers:
        module.compile(backend=backend, fullgraph=True)

    def assert_same_loss():
        expected, found = (tiny.call(model, **tiny.tokens()).loss for model in (plain, patched))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        return expected

    before = assert_same_loss()
    with monkeypatch.context() as context:
        context.setattr(owner, name, function)
        assert not torch.equal(assert_same_loss(), before), "the replacement shows"
    frames = backend.frame_count
    assert torch.equal(assert_same_loss(), before) and backend.frame_count == frames, "the ops compute again"


SET = {  # what a program sets on an instance of a compiled layer
    "activation's forward": lambda mlp: setattr(mlp.act_fn, "forward", torch.tanh),
    "last projection's forward": lambda mlp: setattr(mlp.down_proj, "forward", lambda x: x[..., :64]),
}


@pytest.mark.parametrize("change", SET)
def test_forwards_set_after_compilation_count(change, monkeypatch):
    monkeypatch.setattr("liger_hw.dispatch.ops.FUSED_VALUES", 1)
    plain, patched = tiny.pair(num_hidden_layers=1)
    compile_layers(patched)
    before = tiny.call(plain, **tiny.tokens()).loss
    torch.testing.assert_close(tiny.call(patched, **tiny.tokens()).loss, before)
    for model in (plain, patched):
        SET[change](model.model.layers[0].mlp)
    expected = tiny.call(plain, **tiny.tokens()).loss
    assert not torch.equal(expected, before)
    torch.testing.assert_close(tiny.call(patched, **tiny.tokens()).loss, expected)


class LossOf(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, labels):
        return self.model(input_ids=ids, labels=labels, use_cache=False).loss


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_step_learns(strict):
    plain = tiny.model("llama").train()
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched)
    ids = torch.randint(3, tiny.VOCABULARY, (2, 7))
    losses = []
    for model in (plain, patched):
        losses.append(torch.export.export(LossOf(model), (ids, ids), strict=strict).module()(ids, ids))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    for found, expected in zip(patched.parameters(), plain.parameters()):
        torch.testing.assert_close(found.grad, expected.grad)


class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(50, 32))

    def forward(self, x, target):
        return liger_hw.fused_linear_cross_entropy(x, self.weight, target)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_loss_learns(strict):
    args, loss = (torch.randn(11, 32), torch.randint(50, (11,))), Loss()
    exported = torch.export.export(loss, args, strict=strict).module()
    exported(*args).backward()
    (expected,) = torch.autograd.grad(loss(*args), loss.weight)
    torch.testing.assert_close(exported.weight.grad, expected)
    with torch.no_grad():
        exported = torch.export.export(loss, args, strict=strict).module()
        torch.testing.assert_close(exported(*args), loss(*args))
