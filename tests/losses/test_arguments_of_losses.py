"""Check arguments of the losses that changed a result in silence: dtypes, labels, formulas of a program."""

import math

import numpy
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

from liger_hw import (
    cross_entropy,
    distillation_loss,
    fused_linear_cross_entropy,
    multi_token_loss,
    offline_distillation_loss,
    policy_loss,
    policy_loss_of_logits,
    preference_loss,
    router,
    sequence_loss,
    token_loss,
    unpaired_preference_loss,
    use_backend,
)
from liger_hw.chunked_loss import LigerFusedLinearGRPOLoss
from liger_hw.losses.engine import logits_loss
from liger_hw.losses.policy import OBJECTIVES
from liger_hw.transformers.functional import liger_fused_linear_kl_div
from liger_hw.transformers.vocab_parallel import vocab_parallel_cross_entropy

RANDOM = torch.Generator().manual_seed(0)
X, WEIGHT = torch.randn(6, 7, 8, generator=RANDOM), torch.randn(11, 8, generator=RANDOM)
TOKENS = torch.randint(11, (6, 7), generator=RANDOM)
ADVANTAGES, OLD = torch.randn(6, generator=RANDOM), torch.randn(6, 7, generator=RANDOM) * 0.2 - 2.5
PREFERRED = torch.tensor([True, False, True, True, False, False])
ROWS, ROW_TOKENS = X.flatten(0, 1), TOKENS.flatten()
TEACHER = torch.randn(42, 11, generator=RANDOM).log_softmax(-1)


def test_an_ignored_index_without_labels():
    """Without labels every row counts, also where `ignore_index` is a token."""
    stored = TEACHER.topk(4)
    functions = (
        lambda ignored: offline_distillation_loss(ROWS, WEIGHT, TEACHER, ignore_index=ignored),
        lambda ignored: offline_distillation_loss(ROWS, WEIGHT, *stored, ignore_index=ignored),
        lambda ignored: distillation_loss(ROWS, WEIGHT, ROWS, 2 * WEIGHT, ignore_index=ignored).loss,
        lambda ignored: liger_fused_linear_kl_div(ROWS, WEIGHT, TEACHER.exp(), ignore_index=ignored),
    )
    for function in functions:
        assert function(-100) > 0
        torch.testing.assert_close(function(0), function(-100))


@pytest.mark.parametrize("token", [-100, -1, 11])
@pytest.mark.parametrize(
    "function",
    [
        lambda tokens, mask: policy_loss(X, WEIGHT, tokens, ADVANTAGES, mask, beta=0.0).loss,
        lambda tokens, mask: policy_loss_of_logits(X @ WEIGHT.T, tokens, ADVANTAGES, mask, beta=0.0)[0].sum(),
        lambda tokens, mask: LigerFusedLinearGRPOLoss(beta=0.0)(X, WEIGHT, tokens, mask, ADVANTAGES)[0],
    ],
)
def test_a_token_that_is_neither_in_the_vocabulary_nor_masked(function, token):
    tokens, mask = TOKENS.clone(), torch.ones_like(TOKENS)
    tokens[1, 2], mask[1, 2] = token, 0
    valid = tokens.clone()
    valid[1, 2] = 0
    torch.testing.assert_close(function(tokens, mask), function(valid, mask))
    with pytest.raises(ValueError, match=rf"tokens: got \[{token}\], allowed: 0 to 10$"):
        function(tokens, None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float16])
def test_reference_log_probs_of_any_dtype(dtype):
    reference = torch.tensor([-5, -7, -3, -4, -20, -2])
    options = {"desirable_weight": 1.33, "undesirable_weight": 0.6}
    of_dtype, wide = (
        unpaired_preference_loss(X, WEIGHT, TOKENS, PREFERRED, ref_log_probs=values, **options).loss
        for values in (reference.to(dtype), reference.float())
    )
    assert of_dtype.dtype == torch.float32
    torch.testing.assert_close(of_dtype, wide, rtol=0, atol=0)


BY_DEFAULT_DTYPE = {
    "multi_token": lambda: multi_token_loss(X[None], WEIGHT, TOKENS, head_weights=(0.7,)),
    "preference": lambda: preference_loss(X, WEIGHT, TOKENS, ld_alpha=0.3, loss_type="ipo"),
    "unpaired": lambda: unpaired_preference_loss(X, WEIGHT, TOKENS, PREFERRED, desirable_weight=1.33),
} | {
    kind: lambda kind=kind: policy_loss(
        X, WEIGHT, TOKENS, ADVANTAGES, loss_type=kind, old_log_probs=OLD, ref_log_probs=OLD, sapo_temperature_pos=1.1
    )
    for kind in OBJECTIVES
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", BY_DEFAULT_DTYPE)
def test_the_default_dtype_changes_nothing(name, dtype):
    expected = BY_DEFAULT_DTYPE[name]()
    torch.set_default_dtype(dtype)
    try:
        actual = BY_DEFAULT_DTYPE[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(actual, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0)


LEARNING = {
    "pair": lambda scale: (
        preference_loss(
            X, WEIGHT, TOKENS, loss_type=lambda pairs, beta, smoothing: -F.logsigmoid(scale * pairs.margin)
        ).loss
    ),
    "kto": lambda scale: unpaired_preference_loss(X, WEIGHT, TOKENS, PREFERRED, kl=scale).loss,
    "bco_pair": lambda scale: preference_loss(X, WEIGHT, TOKENS, loss_type="bco_pair", delta=scale).loss,
    "token": lambda scale: token_loss(lambda log_probs, _: (2 * scale * log_probs,), ROWS, WEIGHT, ROW_TOKENS)[0],
    "sequence": lambda scale: sequence_loss(lambda log_probs, *_: (scale * log_probs).sum(), X, WEIGHT, TOKENS)[0],
    "logits": lambda scale: logits_loss(lambda logits: (scale * logits).square().sum(), ROWS, WEIGHT),
}


@pytest.mark.parametrize("name", LEARNING)
def test_a_formula_of_another_tensor_that_learns(name):
    """Its gradient would be lost: the forward makes the gradients of the head alone."""
    scale = torch.tensor(0.3, requires_grad=True)
    with use_backend("reference"):
        LEARNING[name](scale).backward()
    assert scale.grad.abs() > 0
    exact = LEARNING[name](scale.detach())
    with torch.no_grad():
        torch.testing.assert_close(LEARNING[name](scale), exact)
    with pytest.raises(ValueError, match=r"further tensor \(\) that requires grad"):
        LEARNING[name](scale)


def partly(scale, chunk_memory):
    """Losses whose formula computes with `scale` for the last rows alone, and returns a constant for the first."""
    last = torch.arange(6) >= 4
    by_row = last.repeat_interleave(7).float()

    def by_sequence(log_probs, _, groups):
        return (scale * log_probs[0][last[groups]]).sum() if last[groups].any() else torch.zeros(())

    def by_token(log_probs, _, weights):
        return (scale * log_probs * weights if weights.any() else torch.zeros_like(log_probs).detach(),)

    def by_logits(logits, weights):
        return scale * (logits.logsumexp(-1) * weights).sum() if weights.any() else torch.zeros(())

    def by_answer(answers, _):
        chosen = answers.preferred
        return -scale * answers.log_probs * chosen if chosen.any() else torch.zeros(len(chosen))

    memory = {"chunk_memory": chunk_memory}
    return {
        "sequence": lambda x: sequence_loss(by_sequence, x, WEIGHT, TOKENS, **memory)[0],
        "token": lambda x: token_loss(by_token, x.flatten(0, 1), WEIGHT, ROW_TOKENS, rows=(by_row,), **memory)[0],
        "logits": lambda x: logits_loss(by_logits, x.flatten(0, 1), WEIGHT, None, (by_row,), **memory),
        "answer": lambda x: unpaired_preference_loss(x, WEIGHT, TOKENS, last, loss_type=by_answer, **memory).loss,
    }


ONE_ANSWER = 7 * 11 * 4


@pytest.mark.parametrize("chunk_memory", [ONE_ANSWER, 2**29])
@pytest.mark.parametrize("name", partly(None, 1))
def test_a_formula_that_computes_with_a_tensor_that_learns_in_a_later_chunk(name, chunk_memory):
    with pytest.raises(ValueError, match=r"further tensor \(\) that requires grad"):
        partly(torch.tensor(0.3, requires_grad=True), chunk_memory)[name](X)


@pytest.mark.parametrize("name", partly(None, 1))
def test_a_formula_that_is_constant_for_a_chunk(name):
    results = []
    for implementation, chunk_memory in ((None, ONE_ANSWER), (None, 2**29), ("reference", 2**29)):
        x = X.clone().requires_grad_()
        with use_backend(implementation):
            loss = partly(1.5, chunk_memory)[name](x)
        loss.backward()
        results.append((loss.detach(), x.grad))
    for result in results[:-1]:
        torch.testing.assert_close(result, results[-1])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: token_loss(lambda lp, _: (-lp.detach(),), x.flatten(0, 1), WEIGHT, ROW_TOKENS)[0],
        lambda x: sequence_loss(lambda lp, *_: -lp.detach().sum(), x, WEIGHT, TOKENS)[0],
        lambda x: logits_loss(lambda logits: logits.detach().sum(), x.flatten(0, 1), WEIGHT),
        lambda x: preference_loss(x, WEIGHT, TOKENS, loss_type=lambda pairs, *_: -pairs.margin.detach()).loss,
    ],
)
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_a_formula_that_is_constant_for_every_chunk(function, implementation):
    """A backward is torch's error, not gradients of 0."""
    x = X.clone().requires_grad_()
    with use_backend(implementation):
        loss = function(x)
    assert not loss.requires_grad and loss.isfinite()


OPTIONS = {
    "preference": (("logit_scale", "softcap"), lambda **o: preference_loss(X, WEIGHT, TOKENS, **o).loss),
    "unpaired": (
        ("logit_scale", "softcap"), lambda **o: unpaired_preference_loss(X, WEIGHT, TOKENS, PREFERRED, **o).loss,
    ),
    "policy": (
        ("logit_scale", "softcap", "num_items"),
        lambda **o: policy_loss(X, WEIGHT, TOKENS, ADVANTAGES, beta=0.0, **o).loss,
    ),
    "multi_token": (
        ("logit_scale", "softcap"), lambda **o: multi_token_loss(X[None], WEIGHT, TOKENS, **o),
    ),
    "token": (
        ("logit_scale", "temperature"), lambda **o: token_loss(lambda lp, _: (-lp,), ROWS, WEIGHT, ROW_TOKENS, **o)[0],
    ),
    "sequence": (
        ("logit_scale", "temperature"), lambda **o: sequence_loss(lambda lp, *_: -lp.sum(), X, WEIGHT, TOKENS, **o)[0],
    ),
    "distillation": (
        ("temperature", "logit_scale", "teacher_logit_scale"),
        lambda **o: distillation_loss(ROWS, WEIGHT, ROWS, 2 * WEIGHT, **o).loss,
    ),
    "kl_div": (("eps", "temperature"), lambda **o: liger_fused_linear_kl_div(ROWS, WEIGHT, TEACHER.exp(), **o)),
    "vocab_parallel": (
        ("label_smoothing",), lambda **o: vocab_parallel_cross_entropy(X @ WEIGHT.T, TOKENS, **o).sum(),
    ),
    "cross_entropy": (
        ("logit_scale", "label_smoothing", "num_items"), lambda **o: cross_entropy(ROWS @ WEIGHT.T, ROW_TOKENS, **o),
    ),
    "linear_cross_entropy": (
        ("logit_scale", "num_items"), lambda **o: fused_linear_cross_entropy(ROWS, WEIGHT, ROW_TOKENS, **o),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_a_number_that_learns(name):
    """Its gradient would be lost, and so would a tangent."""
    options, loss = OPTIONS[name]
    for option in options:
        number = {"label_smoothing": 0.1, "eps": 1e-3}.get(option, 1.5)
        with pytest.raises(ValueError, match=f"{option}: got"):
            loss(**{option: torch.tensor(number, requires_grad=True)})
        with forward_ad.dual_level(), pytest.raises((ValueError, RuntimeError), match=f"{option}: got|forward-mode"):
            loss(**{option: forward_ad.make_dual(torch.tensor(number), torch.ones(()))})
        if option != "num_items":
            with pytest.raises(ValueError, match=f"{option}: got '{number}'"):
                loss(**{option: str(number)})
        exact = loss(**{option: number})
        numpys = (
            numpy.array(number),
            numpy.float64(number),
            numpy.longdouble(number),
            numpy.array(numpy.longdouble(number)),
        )
        for same in (*numpys, torch.tensor(number, dtype=torch.float64)):
            torch.testing.assert_close(loss(**{option: same}), exact, rtol=0, atol=0)


def test_a_learning_scale_of_the_router():
    """Its gradient is that of the definition also at 1, where a number multiplies nothing."""
    for value in (1.0, 1.5):
        scale = torch.tensor(value, requires_grad=True)
        weights, _ = router(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), 2, scale=scale)
        weights.sum().backward()
        torch.testing.assert_close(scale.grad, torch.tensor(5.0))


def test_a_value_that_is_a_view_of_the_logits():
    """Their gradient overwrites them, but not the value."""
    x, head = X[0, :1], WEIGHT[:1]
    for loss in (torch.squeeze, lambda logits: logits[0].unbind()[0]):
        torch.testing.assert_close(logits_loss(loss, x.clone().requires_grad_(), head), (x @ head.T).squeeze())


def test_memory_of_a_chunk_is_finite():
    with pytest.raises(ValueError, match="chunk_memory: got inf"):
        fused_linear_cross_entropy(ROWS, WEIGHT, ROW_TOKENS, chunk_memory=math.inf)


@pytest.mark.parametrize(
    "function",
    [
        lambda: token_loss(lambda log_probs, entropy: (log_probs.mean(),), ROWS, WEIGHT, ROW_TOKENS),
        lambda: token_loss(lambda log_probs, entropy: -log_probs, ROWS, WEIGHT, ROW_TOKENS),
        lambda: token_loss(lambda log_probs, entropy: (log_probs, None), ROWS, WEIGHT, ROW_TOKENS),
        lambda: sequence_loss(lambda log_probs, entropy, groups: log_probs.sum(-1), X, WEIGHT, TOKENS),
        lambda: logits_loss(lambda logits: logits.square(), ROWS, WEIGHT),
        lambda: preference_loss(X, WEIGHT, TOKENS, loss_type=lambda pairs, *_: pairs.margin[:, None] + pairs.margin),
        lambda: preference_loss(X, WEIGHT, TOKENS, loss_type=lambda pairs, *_: pairs.margin.mean()),
        lambda: preference_loss(X, WEIGHT, TOKENS, loss_type=lambda pairs, *_: None),
        lambda: unpaired_preference_loss(X, WEIGHT, TOKENS, PREFERRED, loss_type=lambda answers, _: answers[0][1:]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_results_of_formulas_have_the_documented_shape(function, implementation):
    with use_backend(implementation), pytest.raises(ValueError, match=r"the result of (formula|loss|loss_type): got"):
        function()


@pytest.mark.parametrize(("ignored", "dtype"), [(2**40, torch.int32), (True, torch.int64), (1.5, torch.int64)])
def test_an_ignored_index_that_no_label_can_have(ignored, dtype):
    with pytest.raises(ValueError, match="ignore_index: got"):
        cross_entropy(TEACHER, ROW_TOKENS.to(dtype), ignore_index=ignored)


def test_a_divisor_in_float64():
    logits, tokens = TEACHER.double(), ROW_TOKENS
    expected = F.cross_entropy(logits, tokens, reduction="sum") / 3.3
    for divisor in (3.3, torch.tensor(3.3, dtype=torch.float64)):
        torch.testing.assert_close(cross_entropy(logits, tokens, num_items=divisor), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["policy", "token", "linear_cross_entropy"])
def test_numbers_within_a_compiled_function(name):
    """A divisor may be a tensor, and a number that learns is refused there, too."""
    options, loss = OPTIONS[name]
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def compiled(value, option):
        return loss(**{option: value})

    if "num_items" in options:
        divisor = torch.tensor(5.0)
        torch.testing.assert_close(compiled(divisor, "num_items"), loss(num_items=divisor))
    with pytest.raises(ValueError, match="logit_scale: got"):
        compiled(torch.tensor(1.5, requires_grad=True), "logit_scale")
