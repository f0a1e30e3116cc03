"""Check the loss of a patched model against the model's, in every way to ask for it."""

import copy
import inspect
import pickle
import warnings

import numpy
import pytest
import tiny
import torch

import liger_hw

pytestmark = pytest.mark.usefixtures("recognised_once")

transformers = tiny.transformers


@pytest.mark.parametrize(
    "extra",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"num_items_in_batch": torch.tensor([7, 9])},
        {"ignore_index": 5},
        {"shift_labels": torch.arange(34).reshape(2, 17) % 128},
        {"logits_to_keep": 17},
        {"attention_mask": torch.ones(2, 17, dtype=torch.long)},
    ],
    ids=lambda extra: " ".join(map(str, extra.items())),
)
def test_arguments_mean_what_they_meant(extra):
    plain, patched = tiny.pair()
    inputs = tiny.tokens() | extra
    inputs["labels"][inputs["labels"] == -100] = extra.get("ignore_index", -100)
    expected, found = tiny.call(plain, **inputs), tiny.call(patched, **inputs)
    assert tiny.is_lazy(found)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    expected.loss.sum().backward(), found.loss.sum().backward()
    for p, q in zip(plain.parameters(), patched.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5)


@tiny.fails_in_4
@pytest.mark.parametrize("skip_logits", [None, True, False])
def test_on_meta(skip_logits):
    plain, patched = (model.to("meta") for model in tiny.pair())
    inputs = {name: tensor.to("meta") for name, tensor in tiny.tokens().items()}
    for model, options in ((plain, {}), (patched, {"skip_logits": skip_logits})):
        outputs = model(**inputs, **options)
        outputs.loss.backward()
        assert outputs.logits.shape == (2, 17, 128) and type(outputs.logits) is torch.Tensor
        assert model.lm_head.weight.grad.shape == (128, 64)


def test_labels_by_position():
    plain, patched = tiny.pair()
    ids, labels = tiny.tokens().values()
    positional = (ids, None, None, None, None, labels)
    expected, found = plain(*positional), patched(*positional)
    assert tiny.is_lazy(found)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("skip_logits", [None, False, True])
def test_tuples(skip_logits):
    plain, patched = tiny.pair()
    expected = tiny.call(plain, **tiny.tokens(), return_dict=False)
    found = tiny.call(patched, **tiny.tokens(), return_dict=False, skip_logits=skip_logits)
    assert type(found) is tuple and len(found) == len(expected)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.softmax(found[1], -1), torch.softmax(expected[1], -1))


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("skip", [None, True, False])
def test_skip_logits(labelled, training, skip):
    plain, patched = tiny.pair()
    inputs = tiny.tokens() if labelled else {"input_ids": tiny.tokens()["input_ids"]}
    expected = tiny.call(plain.train(training), **inputs)
    found = tiny.call(patched.train(training), **inputs, skip_logits=skip)
    if labelled:
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    assert tiny.is_lazy(found) == (labelled and (training if skip is None else skip))
    assert torch.equal(torch.clone(found.logits), expected.logits)


class Positional(transformers.BertForMaskedLM):
    """A model whose forward has neither keyword arguments nor `skip_logits`, as remote code's."""

    def forward(self, input_ids=None, labels=None):
        return super().forward(input_ids=input_ids, labels=labels)


class WithItsOwn(transformers.LlamaForCausalLM):
    """A model with a `skip_logits` of its own."""

    def forward(self, input_ids=None, skip_logits=None):
        return "skipped" if skip_logits else super().forward(input_ids)


BERT = transformers.BertConfig(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Positional(BERT),
        lambda: transformers.BertForSequenceClassification(BERT),
        lambda: transformers.BertModel(BERT),
    ],
    ids=["no keyword arguments", "a loss of its own", "no loss"],
)
@pytest.mark.parametrize("flags", [{}, {"fused_linear_cross_entropy": False}], ids=str)
def test_every_patched_model_takes_skip_logits(build, flags):
    plain = build().eval()
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched, **flags)
    ids = tiny.tokens()["input_ids"]
    expected, found = plain(input_ids=ids), patched(input_ids=ids, skip_logits=True)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found[0], expected[0])
    pickle.loads(pickle.dumps(patched))(input_ids=ids, skip_logits=True)
    liger_hw.unpatch(patched)
    assert type(patched) is type(plain)


def test_a_model_keeps_its_own_skip_logits():
    patched = tiny.model()
    patched.__class__ = WithItsOwn
    liger_hw.patch(patched)
    ids = tiny.tokens()["input_ids"]
    assert patched(ids, skip_logits=True) == "skipped" and patched(ids).logits.shape == (2, 17, 128)


def test_a_second_loss_of_logits_that_are_gone():
    """A trainer's own loss adds to the model's, and lets go of the outputs before the backward."""

    def loss(model):
        outputs = tiny.call(model, **tiny.tokens())
        return outputs.loss + 1e-3 * outputs.logits.float().logsumexp(-1).square().mean()

    plain, patched = tiny.pair()
    for model in (plain, patched):
        loss(model).backward()
    for p, q in zip(plain.parameters(), patched.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5)


def test_shift_labels_alone_give_no_loss_as_theirs_and_real_logits():
    plain, patched = tiny.pair()
    inputs = {"input_ids": tiny.tokens()["input_ids"], "shift_labels": tiny.tokens()["labels"]}
    expected, found = tiny.call(plain, **inputs), tiny.call(patched, **inputs)
    assert expected.loss is None and found.loss is None and torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere"])
def test_logits_read_afterwards(family):
    plain, patched = tiny.pair(family, flags={"layer_norm": False})  # the one part that is not the same to the bit
    expected, found = tiny.call(plain, **tiny.tokens()), tiny.call(patched, **tiny.tokens())
    lazy = found.logits
    assert lazy.shape == expected.logits.shape and lazy.dtype == expected.logits.dtype and tiny.is_lazy(found)
    assert torch.equal(lazy.argmax(-1), expected.logits.argmax(-1)) and torch.equal(lazy[0, 3], expected.logits[0, 3])
    assert torch.equal(lazy.detach(), expected.logits)
    (lazy * torch.ones(())).sum().backward(), expected.logits.sum().backward()
    for p, q in zip(plain.parameters(), patched.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4)


def test_logits_of_weights_that_are_gone_are_an_error():
    _, patched = tiny.pair()
    outputs = patched(**tiny.tokens())
    outputs.loss.backward()
    torch.optim.SGD(patched.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="skip_logits=False"):
        outputs.logits.sum()


@pytest.mark.parametrize("fused", [True, False])
def test_options_of_the_ops_pass_through_the_model(fused):
    plain, patched = tiny.pair()
    inputs, skip = tiny.tokens(), None if fused else False
    options = {"label_smoothing": 0.2, "return_token_accuracy": True, "return_predicted_tokens": True}
    options |= {"lse_square_scale": 0.01, "return_entropy": True}
    found = tiny.call(patched, **inputs, **options, skip_logits=skip)
    logits = plain(**inputs).logits[:, :-1].flatten(0, 1)
    targets = inputs["labels"][:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.2)
    expected = expected + 0.01 * logits.logsumexp(-1).square()[targets != -100].mean()
    torch.testing.assert_close(found.loss, expected)
    right = (logits.argmax(-1) == targets)[targets != -100].float().mean()
    torch.testing.assert_close(found.token_accuracy, right)
    entropy = torch.distributions.Categorical(logits=logits[targets != -100]).entropy().mean()
    torch.testing.assert_close(found.entropy, entropy)
    assert found.predicted_tokens.shape == (34,)
    assert tiny.call(patched, **inputs, **options, skip_logits=skip, return_dict=False)[-1] == found.entropy


COUNTED = int((tiny.tokens()["labels"][:, 1:] != -100).sum())
WEIGHTS = torch.linspace(-1, 3, 34).reshape(2, 17).where(tiny.tokens()["labels"] != -100, float("nan"))
OPTIONS = [
    {"use_token_scaling": True}, {"use_token_scaling": True, "label_smoothing": 0.1, "lse_square_scale": 0.01},
    {"use_token_scaling": False}, {"accum_dtype": torch.float32}, {"chunk_memory": 2**14}, {"counted_rows": COUNTED},
    {"label_smoothing": 0.1},
    {"ce_weight": torch.linspace(0.5, 1.5, 128)},
    {"token_weights": WEIGHTS, "label_smoothing": 0.1}, {"token_weights": WEIGHTS, "counted_rows": COUNTED},
]  # fmt: skip


@pytest.mark.parametrize("num_items", [None, 9])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options))
def test_options_mean_the_same_in_training_and_evaluation(options, num_items):
    _, patched = tiny.pair()
    inputs = tiny.tokens() | options | ({} if num_items is None else {"num_items_in_batch": num_items})
    expected = patched(**inputs).loss
    grads = torch.autograd.grad(expected, list(patched.parameters()))
    found = patched(**inputs, skip_logits=False).loss
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found, list(patched.parameters())), grads):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    patched.eval()
    torch.testing.assert_close(patched(**inputs).loss, expected)
    torch.testing.assert_close(patched(**inputs, skip_logits=True).loss, expected)


@pytest.mark.parametrize(
    "way, shifts, num_items",
    [("training", True, None), ("training", False, torch.tensor(9)), ("training", True, torch.tensor([9, 9])),
     ("evaluation", True, None), ("logits", True, torch.tensor(9)), ("logits", False, None), ("compiled", True, 9)],
    ids=str,
)  # fmt: skip
def test_weights_of_tokens_are_those_of_their_definition(way, num_items, shifts):
    """Cross entropy of each label in float64, times its weight; the divisor is as without weights."""
    plain, patched = tiny.pair(num_hidden_layers=1)
    inputs = tiny.tokens() | ({} if num_items is None else {"num_items_in_batch": num_items})
    ids, labels = inputs["input_ids"], inputs["labels"]
    if not shifts:
        inputs["shift_labels"] = labels
    logits, rows = plain.double()(ids).logits, slice(1, None) if shifts else slice(None)
    losses = torch.nn.functional.cross_entropy(
        logits[:, : -1 if shifts else None].flatten(0, 1), labels[:, rows].flatten(), reduction="none"
    )
    counts = labels[:, rows].flatten() != -100
    divisor = counts.sum() if num_items is None else num_items
    expected = (losses * WEIGHTS[:, rows].flatten())[counts].sum() / divisor
    expected.sum().backward()
    run = torch.compile(patched, backend="eager") if way == "compiled" else patched
    options = {"skip_logits": {"evaluation": True, "logits": False}.get(way)}
    patched.train(way != "evaluation")
    found = run(**inputs, token_weights=WEIGHTS, **options)
    torch.testing.assert_close(found.loss, expected.float(), rtol=1e-5, atol=1e-5)
    found.loss.sum().backward()
    for p, q in zip(plain.parameters(), patched.parameters()):
        torch.testing.assert_close(q.grad, p.grad.float(), rtol=1e-3, atol=1e-4)


def test_weights_of_tokens_that_do_not_fit():
    _, patched = tiny.pair(num_hidden_layers=1)
    for weights in (torch.ones(2, 16), 2.0, torch.ones(2, 17, requires_grad=True)):
        for skip_logits in (None, False):
            with pytest.raises(ValueError, match="^token_weights: got"):
                patched(**tiny.tokens(), token_weights=weights, skip_logits=skip_logits)


WAYS = {
    "training": {}, "evaluation": {}, "lazy evaluation": {"skip_logits": True}, "logits": {"skip_logits": False},
    "compiled": {}, "compiled logits": {"skip_logits": False}, "tuple": {"return_dict": False, "skip_logits": False},
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": torch.tensor(9), "token_weights": WEIGHTS}], ids=len)
@pytest.mark.parametrize("option", [{"logits_dtype": torch.float32}, {"invariant": True}], ids=list)
@pytest.mark.parametrize("way", WAYS)
def test_options_of_the_products_are_those_of_the_op(way, option, more):
    """Same bits as the op on the model's hidden states, whether or not the logits are also computed."""
    torch.compiler.reset()  # at the limit of recompilations the model runs eagerly, and adds gradients in another order
    plain, patched = tiny.pair(dtype=torch.bfloat16, num_hidden_layers=1)
    inputs = tiny.tokens() | more
    if "compiled" in way:  # labels that are shifted already, too
        inputs["shift_labels"] = inputs["labels"]
    patched.train("evaluation" not in way)
    run = torch.compile(patched, backend="eager") if "compiled" in way else patched
    output = run(**inputs, **option, **WAYS[way])
    loss, logits = output[:2] if way == "tuple" else (output.loss, output.logits)
    # torch 2.11 adds gradients of a compiled plain Llama's keys and values in another order than eagerly
    layers = torch.compile(patched.model, backend="eager") if "compiled" in way else patched.model
    hidden, shift = layers(inputs["input_ids"]).last_hidden_state, int("compiled" not in way)
    targets, weights = (
        torch.nn.functional.pad(t, (0, shift), value=-100)[:, shift:] for t in (inputs["labels"], WEIGHTS)
    )
    weights = {"token_weights": weights.flatten(), "num_items": inputs["num_items_in_batch"]} if more else {}
    expected = liger_hw.fused_linear_cross_entropy(
        hidden.flatten(0, 1), patched.lm_head.weight, targets.flatten(), **weights, **option
    )
    assert torch.equal(loss, expected)
    if way not in ("training", "lazy evaluation", "compiled"):
        assert torch.equal(logits.detach(), patched(inputs["input_ids"]).logits)
    else:
        assert way == "compiled" or tiny.is_lazy(output)
    found, expected = (torch.autograd.grad(value, list(patched.parameters())) for value in (loss, expected))
    assert all(map(torch.equal, found, expected))


def test_logits_in_fp32_under_autocast():
    """Autocast casts neither hidden states nor head."""
    _, patched = tiny.pair(num_hidden_layers=1)
    run = torch.compile(patched, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        found = [model(**tiny.tokens(), logits_dtype=torch.float32).loss for model in (patched, run)]
        hidden = patched.model(tiny.tokens()["input_ids"]).last_hidden_state[:, :-1].flatten(0, 1)
    head, targets = patched.lm_head.weight, tiny.tokens()["labels"][:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(hidden.float() @ head.T, targets)
    for loss in found:
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


class Fp32Logits(transformers.LlamaForCausalLM):
    """A model whose own forward asks for logits in fp32."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = self.loss_function(logits, labels, self.config.vocab_size, logits_dtype=torch.float32)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_logits_in_fp32_for_which_a_forward_asks_under_autocast():
    model = Fp32Logits(tiny.model(num_hidden_layers=1).config)
    liger_hw.patch(model)
    assert model(**tiny.tokens()).loss > 0
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="an option of the model's call"):
        model(**tiny.tokens())


class OwnLoss(transformers.LlamaForCausalLM):
    """A model whose forward, as remote code's, calls torch's cross entropy and ignores other keyword arguments."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class OwnCall(transformers.LlamaForCausalLM):
    """A model whose forward passes no keyword argument to its loss."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = self.loss_function(logits, labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


@pytest.mark.parametrize("options", [{"invariant": True}, *OPTIONS[3:]], ids=lambda options: " ".join(options))
@pytest.mark.parametrize("flags", [{}, {"fused_linear_cross_entropy": False}], ids=str)
@pytest.mark.parametrize("kind", [OwnLoss, OwnCall, transformers.LlamaForCausalLM])
def test_options_that_the_models_loss_never_sees(kind, flags, options):
    """They are errors, as a silent loss without them would be another one; without them the model runs as before."""
    plain = tiny.model(num_hidden_layers=1)
    plain.__class__ = kind
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched, **flags)
    torch.testing.assert_close(patched(**tiny.tokens()).loss, plain(**tiny.tokens()).loss)
    if kind is transformers.LlamaForCausalLM and not flags:
        assert patched(**tiny.tokens(), **options).loss.isfinite()
        return
    for skip_logits in (None, False):
        with pytest.raises(ValueError, match=f"^.*{next(iter(options))}.*: got .*, allowed: none here"):
            patched(**tiny.tokens(), **options, skip_logits=skip_logits)


@pytest.mark.parametrize("option", [{"logits_dtype": torch.float32}, {"invariant": True}], ids=list)
@pytest.mark.parametrize("reason", ["flag", "hook", "second loss", "forward"])
def test_options_of_the_products_without_hidden_states(reason, option, monkeypatch):
    flags = {"cross_entropy": True, "fused_linear_cross_entropy": False} if reason == "flag" else {}
    _, patched = tiny.pair(num_hidden_layers=1, flags=flags)
    if reason == "hook":
        patched.lm_head.register_forward_hook(lambda *_: None)
    if reason == "forward":
        monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: 2 * torch.nn.functional.linear(x, self.weight))
    with pytest.raises(ValueError, match=f"^{next(iter(option))}: got"):
        output = patched(**tiny.tokens(), **option)
        (output.loss + output.logits.float().square().mean()).backward()


def test_wrong_options_of_the_products():
    _, patched = tiny.pair(dtype=torch.float16, num_hidden_layers=1)
    for option, value in {"logits_dtype": torch.float64, "invariant": True}.items():  # in fp16 gradients have a factor
        with pytest.raises(ValueError, match=f"^{option}: got"):
            patched(**tiny.tokens(), **{option: value})
    inputs = tiny.tokens()
    with pytest.raises(ValueError, match="^invariant: .*int64"):
        patched(inputs["input_ids"], labels=inputs["labels"].int(), invariant=True)


@pytest.mark.parametrize("skip_logits", [None, False])
@pytest.mark.parametrize(
    "option, value", [("chunk_memory", "bogus"), ("chunk_memory", 0), ("chunk_mem_const", 4), ("accum_dtype", "bogus")]
)
def test_bad_options_of_chunks(option, value, skip_logits):
    _, patched = tiny.pair()
    with pytest.raises(ValueError, match=f"^{option}: got"):
        patched(**tiny.tokens(), **{option: value}, skip_logits=skip_logits)


def test_an_option_is_not_lost_with_labels_that_do_not_fit():
    _, patched = tiny.pair()
    inputs = tiny.tokens()
    with pytest.raises(ValueError, match="^label_smoothing: .*int64"):
        patched(input_ids=inputs["input_ids"], labels=inputs["labels"].int(), label_smoothing=0.1)


@pytest.mark.parametrize("flags", [{}, {"cross_entropy": True, "fused_linear_cross_entropy": False}], ids=str)
@pytest.mark.parametrize(
    "kind",
    [int, torch.tensor, lambda n: torch.tensor([n, 2 * n]), numpy.int64],
    ids=["int", "tensor", "vector", "numpy"],  # an address in a name would differ from worker to worker
)
@pytest.mark.parametrize("number", [0, 4])
def test_divisors(number, kind, flags):
    plain, patched = tiny.pair(flags=flags)
    expected, found = (m(**tiny.tokens(), num_items_in_batch=kind(number)).loss for m in (plain, patched))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert_same_gradients_of(found.sum(), patched, expected.sum(), plain)


def assert_same_gradients_of(found, patched, expected, plain):
    """Compare gradients, and where they are infinite or NaN."""
    found.backward()
    expected.backward()
    for ours, theirs in zip(patched.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("factor", [float("inf"), -float("inf"), float("nan"), torch.tensor(float("inf")), 0.0])
def test_losses_times_an_infinite_number(factor):
    plain, patched = tiny.pair()
    expected, found = (m(**tiny.tokens()).loss * factor for m in (plain, patched))
    assert_same_gradients_of(found, patched, expected, plain)


@pytest.mark.parametrize("num_items", [None, torch.tensor(7), 0.0])
def test_hooks_of_saved_tensors_that_turn_conditions_into_numbers(num_items):
    plain, patched = tiny.pair()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 1, lambda x: x):
        expected, found = (m(**tiny.tokens(), num_items_in_batch=num_items).loss for m in (plain, patched))
    assert_same_gradients_of(found, patched, expected, plain)


def test_batched_gradients_of_a_loss_without_logits_are_refused():
    plain, patched = tiny.pair()

    def gradients(model, **options):
        loss = model(**tiny.tokens(), **options).loss
        return torch.autograd.grad(loss, model.lm_head.weight, torch.tensor([1.0, 2.0]), is_grads_batched=True)[0]

    with pytest.raises(RuntimeError, match="takes no batched gradients.*skip_logits=False"):
        gradients(patched)
    torch.testing.assert_close(gradients(patched, skip_logits=False), gradients(plain))
    x, w = torch.randn(4, 8), torch.randn(16, 8, requires_grad=True)
    loss = liger_hw.fused_linear_cross_entropy(x, w, torch.arange(4))
    with pytest.raises(RuntimeError, match="takes no batched gradients.*use_backend"):
        torch.autograd.grad(loss, w, torch.tensor([1.0, 2.0]), is_grads_batched=True)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("number", [float("nan"), 1e-300, 1e-40, True])
def test_divisors_that_a_quotient_of_rows_cannot_take(number, kind, ignored):
    inputs = tiny.tokens()
    if ignored:
        inputs["labels"] = torch.full_like(inputs["labels"], -100)
    expected, found = (m(**inputs, num_items_in_batch=kind(number)).loss for m in tiny.pair())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("written", ["shift_labels", "num_items_in_batch", "token_weights", "ce_weight"])
def test_tensors_of_a_loss_that_are_written_before_its_backward(written, own):
    """The gradients are those of the forward, also where a loss of the program's own makes the backward read logits."""
    _, patched = tiny.pair()
    inputs, gradients = tiny.tokens(), []
    for writes in (False, True):
        torch.manual_seed(0)
        options = {"shift_labels": inputs["labels"].roll(-1, 1), "num_items_in_batch": torch.tensor(7.0)}
        options |= {"token_weights": torch.rand(2, 17), "ce_weight": torch.rand(tiny.VOCABULARY)}
        options = {name: value for name, value in options.items() if name in ("shift_labels", written)}
        out = patched(**inputs, **options)
        loss = out.loss + (out.logits.square().mean() if own else 0)
        if writes:
            options[written].fill_(3)
        gradients.append(torch.autograd.grad(loss, list(patched.parameters())))
    for expected, found in zip(*gradients):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_divisors_with_a_dtype_and_a_gradient(dtype):
    results = []
    for model in tiny.pair():
        divisor = torch.tensor(7.0, dtype=dtype, requires_grad=dtype == torch.float32)
        loss = model(**tiny.tokens(), num_items_in_batch=divisor).loss
        loss.backward()
        results.append((loss.detach(), divisor.grad, *(p.grad for p in model.parameters())))
    for found, expected in zip(*reversed(results)):
        assert expected is found is None or found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5) if expected is not None else None


UNSERVED = {
    "loss_weights": [1.0, 2.0], "weight": torch.ones(128),
    "reduction": "sum", "logit_scale": 0.5, "return_z_loss": True,
}  # fmt: skip


@pytest.mark.parametrize("skip_logits", [None, False])
@pytest.mark.parametrize("option", UNSERVED)
def test_options_of_a_loss_that_nothing_serves_are_refused(option, skip_logits):
    _, patched = tiny.pair()
    with pytest.raises(ValueError, match=f"^{option}: got"):
        patched(**tiny.tokens(), **{option: UNSERVED[option]}, skip_logits=skip_logits)


def test_keywords_that_are_none_of_the_loss_pass_as_in_the_unpatched_model():
    plain, patched = tiny.pair()
    harmless = {"reduction": "mean", "return_z_loss": False, "logit_scale": 1.0}
    harmless |= {"max_length_q": 17, "unheard_of": torch.ones(2)}
    expected, found = tiny.call(plain, **tiny.tokens(), **harmless), tiny.call(patched, **tiny.tokens(), **harmless)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("by", ["configuration", "argument"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_losses_of_routers(family, by):
    asked = {"output_router_logits": True}
    config = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.3}
    plain, patched = tiny.pair(family, **config, **(asked if by == "configuration" else {}))
    inputs = tiny.tokens() | (asked if by == "argument" else {})
    expected, found = tiny.assert_learns_alike(plain, patched, **inputs)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss)
    without = tiny.call(plain, **tiny.tokens(), output_router_logits=False)
    torch.testing.assert_close(expected.loss - 0.3 * expected.aux_loss, without.loss)


def test_cross_entropy_of_real_logits():
    plain, patched = tiny.pair(flags={"cross_entropy": True, "fused_linear_cross_entropy": False})
    assert type(patched.lm_head) is torch.nn.Linear
    tiny.assert_learns_alike(plain, patched, fused=False, **tiny.tokens())


def test_the_loss_function_is_called_as_that_of_the_plain_model():
    plain, patched = tiny.pair(num_hidden_layers=1)
    expected, found = plain.loss_function, patched.loss_function
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(found, name) == getattr(expected, name)
    assert inspect.signature(found) == inspect.signature(expected)
    labels, logits = tiny.tokens()["labels"], torch.randn(2, 17, tiny.VOCABULARY)
    for copied in (found, copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        torch.testing.assert_close(copied(logits, labels, tiny.VOCABULARY), expected(logits, labels, tiny.VOCABULARY))


def test_a_loss_function_of_the_users_own():
    plain, patched = tiny.pair()
    for m in (plain, patched):
        m.loss_function = lambda logits, labels, vocab_size, **kwargs: (logits.float() ** 2).mean()
    tiny.assert_learns_alike(plain, patched, fused=False, **tiny.tokens())


def test_labels_that_do_not_fit_give_their_error():
    plain, patched = tiny.pair()
    inputs = tiny.tokens() | {"logits_to_keep": 3}
    with pytest.raises(ValueError) as expected:
        plain(**inputs)
    with pytest.raises(ValueError) as found:
        patched(**inputs)
    assert str(found.value) == str(expected.value)
    assert vars(patched.lm_head).keys() == vars(plain.lm_head).keys(), "an error leaves the head as it was"


def test_biased_and_tied_heads():
    plain, patched = tiny.pair("phi")  # its head has a bias
    assert patched.lm_head.bias is not None
    tiny.assert_learns_alike(plain, patched, **tiny.tokens())
    plain, patched = tiny.pair("llama", tie_word_embeddings=True)
    assert patched.lm_head.weight is patched.model.embed_tokens.weight
    tiny.assert_learns_alike(plain, patched, **tiny.tokens())


def test_frozen_parts():
    for frozen in ("model", "lm_head"):
        plain, patched = tiny.pair()
        for m in (plain, patched):
            getattr(m, frozen).requires_grad_(False)
        tiny.assert_learns_alike(plain, patched, **tiny.tokens())


def test_heads_that_are_not_linear_keep_their_logits():
    class Head(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    plain = tiny.model()
    plain.lm_head.__class__ = Head
    patched = copy.deepcopy(plain)
    summary = liger_hw.patch(patched)
    reason = "its head is a Head, not a plain linear layer: logits are computed as before"
    assert summary.left["LlamaForCausalLM", reason] == 1
    tiny.assert_learns_alike(plain, patched, fused=False, **tiny.tokens())


@pytest.mark.parametrize("flags", [{}, {"cross_entropy": True, "fused_linear_cross_entropy": False}], ids=str)
@pytest.mark.parametrize("num_items", [None, 0, 4, torch.tensor(0), torch.tensor(4), torch.tensor([4, 8])], ids=str)
def test_no_label_that_counts(num_items, flags):
    plain, patched = tiny.pair(flags=flags)
    inputs = tiny.tokens() | ({} if num_items is None else {"num_items_in_batch": num_items})
    inputs["labels"].fill_(-100)
    losses = [model(**inputs).loss for model in (plain, patched)]
    assert torch.equal(*(loss.nan_to_num(7.0) for loss in losses)) and losses[0].dtype == losses[1].dtype
    for loss in losses:
        loss.sum().backward()
    for p, q in zip(plain.parameters(), patched.parameters()):
        assert torch.equal(q.grad.nan_to_num(7.0), p.grad.nan_to_num(7.0))


@pytest.mark.parametrize("flags", [{}, {"cross_entropy": True, "fused_linear_cross_entropy": False}], ids=str)
def test_float64_keeps_the_dtype_of_their_loss(flags):
    """Hugging Face's loss is fp32 whatever the logits are."""
    plain, patched = tiny.pair(dtype=torch.float64, flags=flags)
    expected, found = tiny.call(plain, **tiny.tokens()), tiny.call(patched, **tiny.tokens())
    assert found.loss.dtype is expected.loss.dtype is torch.float32
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)


def test_saved_tensors_may_change():
    """Two gradients of lazy logits were an internal error of torch there."""
    plain, patched = tiny.pair()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        for model in (plain, patched):
            outputs = tiny.call(model, **tiny.tokens())
            (outputs.loss + outputs.logits.float().logsumexp(-1).mean()).backward()
    for p, q in zip(plain.parameters(), patched.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5)


NEW_HEADS = {
    "resized": lambda model: model.resize_token_embeddings(136),
    "set": lambda model: model.set_output_embeddings(torch.nn.Linear(64, 136)),
    "attribute": lambda model: setattr(model, "lm_head", torch.nn.Linear(64, 136, bias=False)),
}


@pytest.mark.parametrize("change", NEW_HEADS)
def test_a_head_that_a_program_sets_after_patch_is_patched_too(change):
    _, patched = tiny.pair(tie_word_embeddings=False)
    NEW_HEADS[change](patched)
    patched.config.vocab_size = 136
    plain = copy.deepcopy(patched)
    liger_hw.unpatch(plain)
    tiny.assert_learns_alike(plain, patched, **tiny.tokens())
    liger_hw.unpatch(patched)
    assert type(patched.lm_head) is torch.nn.Linear


def test_a_new_head_of_another_kind_warns_once():
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    plain, patched = tiny.pair()
    for model in (plain, patched):
        torch.manual_seed(0)
        model.lm_head = Doubled(64, 128)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            found = tiny.call(patched, **tiny.tokens())
    assert sum("by a Doubled, not a plain linear layer" in str(w.message) for w in caught) == 1
    assert torch.equal(found.loss, tiny.call(plain, **tiny.tokens()).loss)


def test_a_forward_leaves_nothing_on_the_head_and_its_copies():
    plain, patched = tiny.pair()
    copies, before = [], pickle.dumps(patched)

    def copy_head(*_):
        copies.extend([copy.deepcopy(patched.lm_head), pickle.loads(pickle.dumps(patched.lm_head))])

    handle = patched.model.norm.register_forward_hook(copy_head)
    assert tiny.is_lazy(tiny.call(patched, **tiny.tokens()))
    handle.remove()
    assert pickle.dumps(patched) == before
    hidden = torch.randn(2, 64)
    for head in (patched.lm_head, *copies):
        assert vars(head).keys() == vars(plain.lm_head).keys()
        assert type(head(hidden)) is torch.Tensor and torch.equal(head(hidden), plain.lm_head(hidden))
