"""A model whose forward a program wrote: what it returns, which options it takes, what it does beside the head."""

import copy
import dataclasses
import functools
import sys
import types
from typing import NamedTuple

import pytest
import tiny
import torch
from torch.utils.checkpoint import checkpoint

import liger_hw

pytestmark = pytest.mark.usefixtures("recognised_once")

LlamaForCausalLM = tiny.transformers.LlamaForCausalLM
CausalLMOutput = tiny.transformers.modeling_outputs.CausalLMOutput


class Pair(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass
class Fields:
    loss: torch.Tensor
    logits: torch.Tensor


def both(forward, **attributes):
    """A plain model with this `forward`, and its patched copy."""
    plain, patched = tiny.model(), tiny.model()
    cls = type("Own", (LlamaForCausalLM,), {"forward": forward, **attributes})
    plain.__class__ = patched.__class__ = cls
    liger_hw.patch(patched)
    assert hasattr(patched.lm_head, "liger_is_head")
    return plain, patched


def hidden_and_loss(model, input_ids, labels):
    """Hidden states, and a function of logits."""
    hidden = model.model(input_ids=input_ids).last_hidden_state
    return hidden, lambda logits: model.loss_function(logits=logits, labels=labels, vocab_size=tiny.VOCABULARY)


def assert_alike(plain, patched, read, **options):
    """Assert equal losses, other results and gradients; `read` takes outputs to a loss and another tensor."""
    results = []
    for model in (plain, patched):
        loss, other = read(model(**tiny.tokens(), **options))
        loss.backward()
        results.append((loss.detach(), other.detach() * 1, *(p.grad for p in model.parameters())))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)


KINDS = {
    "a loss alone": (lambda loss, logits: loss, lambda o: (o, o)),
    "a dictionary": (lambda loss, logits: {"loss": loss, "logits": logits}, lambda o: (o["loss"], o["logits"])),
    "a named tuple": (Pair, lambda o: (o.loss, o.logits)),
    "a dataclass": (Fields, lambda o: (o.loss, o.logits)),
    "an object": (lambda loss, logits: types.SimpleNamespace(loss=loss, logits=logits), lambda o: (o.loss, o.logits)),
    "a list": (lambda *pair: [*pair], lambda o: (o[0], o[1])),
    "a list compiled": (lambda *pair: [*pair], lambda o: (o[0], o[1])),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_any_kind(kind):
    make, read = KINDS[kind]

    def forward(self, input_ids, labels):
        hidden, loss_of = hidden_and_loss(self, input_ids, labels)
        logits = self.lm_head(hidden)
        self.loss_function  # noqa: B018, by this name `patch` sees that the forward computes a loss
        return make(loss_of(logits), logits)

    plain, patched = both(forward)
    if "compiled" in kind:
        patched.compile(backend="eager")
    assert_alike(plain, patched, read)


def within_a_checkpoint(self, hidden, loss_of, use_reentrant):
    logits = checkpoint(self.lm_head, hidden, use_reentrant=use_reentrant)
    return loss_of(logits)


def with_its_loss_within_a_checkpoint(self, hidden, loss_of, use_reentrant):
    return checkpoint(lambda hidden: loss_of(self.lm_head(hidden)), hidden, use_reentrant=use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("head", [within_a_checkpoint, with_its_loss_within_a_checkpoint])
def test_a_head_that_a_checkpoint_calls_again_in_the_backward(head, use_reentrant):
    def forward(self, input_ids, labels):
        self.loss_function  # noqa: B018
        return CausalLMOutput(loss=head(self, *hidden_and_loss(self, input_ids, labels), use_reentrant))

    assert_alike(*both(forward), lambda outputs: (outputs.loss, outputs.loss))


def write_hidden(self, hidden):
    hidden.detach()[:, 0] = 0


def write_hidden_uncounted(self, hidden):
    hidden.data.mul_(2)


def write_weight_uncounted(self, hidden):
    self.lm_head.weight.data.mul_(2)


@pytest.mark.parametrize("write", [write_hidden, write_hidden_uncounted, write_weight_uncounted])
def test_what_a_forward_writes_between_head_and_loss_is_an_error(write):
    def forward(self, input_ids, labels):
        hidden, loss_of = hidden_and_loss(self, input_ids, labels)
        logits = self.lm_head(hidden)
        write(self, hidden)
        self.loss_function  # noqa: B018
        return CausalLMOutput(loss=loss_of(logits))

    plain, patched = both(forward)
    with torch.no_grad(), pytest.raises(RuntimeError, match="skip_logits=False"):
        patched(**tiny.tokens())
    plain, patched = both(forward)
    with torch.no_grad():
        expected, found = plain(**tiny.tokens()).loss, patched(**tiny.tokens(), skip_logits=False).loss
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("step", ["bias", "mask"])
def test_an_operand_of_a_step_that_the_forward_writes_later(step):
    def forward(self, input_ids, labels):
        hidden, loss_of = hidden_and_loss(self, input_ids, labels)
        bias, mask = torch.arange(tiny.VOCABULARY) / 50, input_ids > 20
        logits = self.lm_head(hidden)
        logits = logits + bias if step == "bias" else logits[mask]
        bias.zero_(), mask.fill_(True)
        self.loss_function  # noqa: B018
        loss = loss_of(logits) if step == "bias" else torch.nn.functional.cross_entropy(logits, labels[input_ids > 20])
        return CausalLMOutput(loss=loss, logits=logits)

    with torch.no_grad():  # else torch refuses the write
        expected, found = (model(**tiny.tokens()) for model in both(forward))
    assert tiny.is_lazy(found)
    torch.testing.assert_close([found.loss, found.logits * 1], [expected.loss, expected.logits])


def test_a_row_that_is_added_to_wider_logits():
    """The loss adds a row before it rounds to the head's dtype: of fp32 logits it would be another sum."""

    def forward(self, input_ids, labels):
        hidden, loss_of = hidden_and_loss(self, input_ids, labels)
        logits = self.lm_head(hidden).float() + (100.3 + torch.arange(tiny.VOCABULARY) / 500)
        self.loss_function  # noqa: B018
        return CausalLMOutput(loss=loss_of(logits), logits=logits)

    expected, found = (model.bfloat16()(**tiny.tokens()) for model in both(forward))
    assert not tiny.is_lazy(found) and torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.2}, {"skip_logits": True}, {"invariant": True}])
def test_options_of_a_models_own_forward_are_its_own(options):
    def forward(self, input_ids, labels, label_smoothing=0.0, skip_logits=None, invariant=False):
        hidden, loss_of = hidden_and_loss(self, input_ids, labels)
        logits = self.lm_head(hidden)
        self.loss_function  # noqa: B018
        loss = loss_of(logits) * (1 + bool(skip_logits) + 2 * invariant) + label_smoothing * logits.logsumexp(-1).mean()
        return CausalLMOutput(loss=loss)

    assert_alike(*both(forward), lambda outputs: (outputs.loss, outputs.loss), **options)


def another_loss(logits, labels, vocab_size, **_):
    return 2 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("place", [LlamaForCausalLM, tiny.transformers.PreTrainedModel])
@pytest.mark.parametrize("kind", [staticmethod, lambda function: property(lambda self: function)])
def test_a_loss_function_that_a_program_sets_in_the_class_later(kind, place, monkeypatch):
    plain, patched = tiny.pair()
    monkeypatch.setattr(place, "loss_function", kind(another_loss), raising=False)
    tiny.assert_learns_alike(plain, patched, fused=False, **tiny.tokens())


def test_attributes_of_a_program_whose_names_begin_as_the_packages():
    model = tiny.model()
    liger_hw.patch(model)
    model.liger_run = model.model.norm.liger_run = "mine"
    copied = tiny.copy.deepcopy(model)
    liger_hw.unpatch(copied)
    assert copied.liger_run == copied.model.norm.liger_run == "mine"


OWN_FORWARD = """
def forward(self, input_ids, labels=None, **kwargs):
    logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
    logits = logits / 2 if {} else logits
    return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)
"""


def is_plain(x):
    return type(x) is torch.Tensor


@functools.singledispatch
def class_name(x):
    return "another"


@class_name.register(torch.Tensor)
def _(x):
    return x.__class__.__name__


class Names:
    @staticmethod
    def of(x):
        return type(x).__name__


class Asks(torch.nn.Module):
    def forward(self, x):
        return is_plain(x)


@pytest.mark.parametrize(
    "question",
    [
        "type(logits) is torch.Tensor", "logits.__class__ == torch.Tensor", "'View' in logits.grad_fn.name()",
        "type(logits).__name__ == 'Tensor'", "not vars(logits)", "getattr(logits, '__dict__') == {}",
        "not torch.overrides.has_torch_function_unary(logits)", "is_plain(logits)", "class_name(logits) == 'Tensor'",
        "Names.of(logits) == 'Tensor'", "functools.partial(is_plain)(logits)", "functools.cache(is_plain)(logits)",
        "self.asks(logits)", "self.asked(logits)", "tests.is_plain(logits)",
    ],
)  # fmt: skip
def test_a_forward_that_asks_what_its_logits_are(question):
    namespace = {}
    exec(OWN_FORWARD.format(question), globals() | {"tests": sys.modules[__name__]}, namespace)
    plain = tiny.model()
    plain.__class__ = type("Own", (LlamaForCausalLM,), namespace | {"asked": lambda self, x: is_plain(x)})
    plain.asks = Asks()
    patched = copy.deepcopy(plain)
    assert "may ask for the class of its logits" in str(liger_hw.patch(patched))
    assert_alike(plain, patched, lambda outputs: (outputs.loss, outputs.logits))


def test_a_forward_that_asks_about_its_device_keeps_the_loss_without_logits():
    def halved(logits):
        return logits / 2 if logits.device.type == "cpu" else logits

    def forward(self, input_ids, labels):
        hidden, loss_of = hidden_and_loss(self, input_ids, labels)
        logits = halved(self.lm_head(hidden))
        self.loss_function  # noqa: B018
        return Fields(loss=loss_of(logits), logits=logits)

    assert_alike(*both(forward), lambda outputs: (outputs.loss, outputs.logits))


def test_a_forward_whose_helpers_are_odd_keeps_the_loss_without_logits():
    def halved(logits):
        return logits / 2

    halved.registry, halved.__wrapped__ = ["mine"], halved

    def forward(self, input_ids, labels):
        hidden, loss_of = hidden_and_loss(self, input_ids, labels)
        logits = halved(self.lm_head(hidden))
        self.loss_function  # noqa: B018
        return Fields(loss=loss_of(logits), logits=logits)

    assert_alike(*both(forward), lambda outputs: (outputs.loss, outputs.logits))


def test_logits_print_as_a_tensor():
    plain, patched = tiny.pair()
    expected, found = (model(**tiny.tokens()).logits for model in (plain, patched))
    assert tiny.is_lazy(types.SimpleNamespace(logits=found))
    for shown in (str, repr, "{}".format):
        assert shown(found).partition("grad_fn")[0] == shown(expected).partition("grad_fn")[0]
