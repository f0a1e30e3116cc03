"""`liger_hw.chunked_loss` and the losses of `liger_hw.transformers` give what the peer's signatures promise."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from test_policy import case as policy_case
from test_policy import whole as whole_policy
from test_preference import answers_of, whole, whole_unpaired
from test_preference import case as answers_case

import liger_hw.chunked_loss as modules
from liger_hw.chunked_loss import functional
from liger_hw.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_hw.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_hw.chunked_loss.fused_linear_unpaired_preference import LigerFusedLinearUnpairedPreferenceBase
from liger_hw.losses.policy import OBJECTIVES
from liger_hw.losses.preference_formulas import PAIR_LOSSES
from liger_hw.testing.inputs import log_probs, randn
from liger_hw.transformers import LigerFusedLinearJSD, LigerJSD, LigerKLDIVLoss, LigerTVDLoss, triton_grpo_loss

# constructor arguments with their defaults, and those of forward
SIGNATURES = {
    "LigerFusedLinearDPOLoss": (
        "ignore_index=-100, beta=0.1, alpha=1.0, compute_nll_loss=False, compiled=True, use_ref_model=True, "
        "average_log_prob=False, chunk_size=1, loss_type='sigmoid', label_smoothing=0.0, discopop_tau=0.05",
        "lin_weight, _input, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None",
    ),
    "LigerFusedLinearCPOLoss": (
        "ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True, compiled=True, "
        "average_log_prob=False, chunk_size=1",
        "lin_weight, _input, target, bias=None",
    ),
    "LigerFusedLinearSimPOLoss": (
        "ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True, compiled=True, gamma=0.5, "
        "chunk_size=1",
        "lin_weight, _input, target, bias=None",
    ),
    "LigerFusedLinearORPOLoss": (
        "ignore_index=-100, beta=0.1, compute_nll_loss=True, compiled=True, chunk_size=1",
        "lin_weight, _input, target, bias=None, nll_target=None",
    ),
    "LigerFusedLinearKTOLoss": (
        "ignore_index=-100, beta=0.1, compiled=True, use_ref_model=False, average_log_prob=False, chunk_size=1",
        "_input, lin_weight, target, bias=None, preference_labels=None, ref_input=None, ref_weight=None, "
        "ref_bias=None, kl=None",
    ),
    "LigerFusedLinearGRPOLoss": (
        "beta=0.04, compiled=True, use_ref_model=True, chunk_size=1, epsilon_low=0.2, epsilon_high=0.2, "
        "loss_type='dapo', max_completion_length=None, importance_sampling_level='token', sapo_temperature_pos=1.0, "
        "sapo_temperature_neg=1.05, temperature=1.0, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0, "
        "vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0",
        "_input, lin_weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None, "
        "old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, vllm_is_ratio=None, "
        "num_items_in_batch=None",
    ),
    "LigerFusedLinearJSDLoss": (
        "weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True, "
        "chunk_size=1024, return_soft_hard_loss=False",
        "student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None, "
        "teacher_bias=None",
    ),
}
SIGNATURES["LigerFusedLinearCosineSimilarityLoss"] = SIGNATURES["LigerFusedLinearJSDLoss"]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    found = getattr(modules, name)
    constructor, forward = SIGNATURES[name]
    assert str(inspect.signature(found)) == f"({constructor})"
    assert str(inspect.signature(found.forward)) == f"(self, {forward})"


def equal(found, expected):
    loss, beside = found
    assert isinstance(beside, (tuple, list)) and len(beside) == len(expected) - 1
    for a, b in zip((loss, *beside), expected):
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss_type", [name for name, formula in PAIR_LOSSES.items() if formula.smooths])
def test_the_smoothing_of_dpo(loss_type, device):
    """Each loss with a smoothing takes it, except that liger_kernel's "sigmoid" ignores it."""
    (x, w, b), ref, labels = answers_case(device=device)
    dpo = modules.LigerFusedLinearDPOLoss(beta=0.3, loss_type=loss_type, label_smoothing=0.1, use_ref_model=False)
    expected = whole(loss_type, labels, False, 0.0, 0.3, 0.0 if loss_type == "sigmoid" else 0.1)(x, w, b)
    equal(dpo(w, x, labels, b), expected)


@pytest.mark.parametrize("chunk_size", [1, 2, 5])
def test_pairs(chunk_size, device):
    (x, w, b), ref, labels = answers_case(device=device)
    dpo = modules.LigerFusedLinearDPOLoss(beta=0.3, compute_nll_loss=True, alpha=0.7, chunk_size=chunk_size)
    equal(dpo(w, x, labels, b, *ref), whole("sigmoid", labels, False, 0.7, 0.3, 0.0)(x, w, b, *ref))
    without = modules.LigerFusedLinearDPOLoss(beta=0.3, use_ref_model=False, loss_type="ipo", average_log_prob=True)
    equal(without(w, x, labels, b, *ref), whole("ipo", labels, True, 0.0, 0.3)(x, w, b))
    cpo = modules.LigerFusedLinearCPOLoss(beta=0.3, label_smoothing=0.1, chunk_size=chunk_size)
    equal(cpo(w, x, labels, b), whole("sigmoid", labels, False, 1.0, 0.3)(x, w, b))
    simpo = modules.LigerFusedLinearSimPOLoss(beta=0.3, label_smoothing=0.1, chunk_size=chunk_size)
    equal(simpo(w, x, labels, b), whole("simpo", labels, True, 1.0, 0.3)(x, w, b))
    orpo = modules.LigerFusedLinearORPOLoss(beta=0.3, chunk_size=chunk_size)
    c, r = answers_of(x, w, labels, b, True).chunk(2)
    odds = (c - r) - (torch.log1p(-c.exp()) - torch.log1p(-r.exp()))
    expected = *whole("orpo", labels, True, 1.0, 0.3)(x, w, b), F.logsigmoid(odds).mean(), odds.mean()
    equal(orpo(w, x, labels, b), expected)


@pytest.mark.parametrize("chunk_size", [1, 2, 5])
def test_kto(chunk_size, device):
    (x, w, b), ref, labels = answers_case(5, 5, device=device)
    preferred = torch.tensor([True, False, True, True, False], device=device)
    kto = modules.LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=True, chunk_size=chunk_size)
    found = kto(x, w, labels, b, preferred, *ref, kl=torch.tensor(0.2, device=device))
    equal(found, whole_unpaired("kto", labels, preferred)(x, w, b, *ref))


@pytest.mark.parametrize("loss_type", sorted(set(OBJECTIVES) - {"ppo"}))
def test_grpo(loss_type, device):
    (x, w, b), tokens, advantages, beside = policy_case(device=device)
    options = {"loss_type": loss_type, "max_completion_length": 7}
    expected = whole_policy(tokens, advantages, **beside, **options)(x, w, b)[:3]
    grpo, mask = modules.LigerFusedLinearGRPOLoss(**options), beside["mask"].long()
    logps = {"ref_per_token_logps": beside["ref_log_probs"], "old_per_token_logps": beside["old_log_probs"]}
    equal(grpo(x, w, tokens, mask, advantages, b, **logps), expected)
    logits = F.pad(F.linear(x, w, b), (0, 0, 0, 1))
    args = beside["old_log_probs"], beside["ref_log_probs"], tokens, advantages, mask
    named = {"temperature": 1.0, "eps_high": 0.2, "inplace": False, **options}
    equal(triton_grpo_loss(logits, *args, reduce=True, **named), expected)
    loss, kl, clipped = triton_grpo_loss(logits, *args, **named)
    assert loss.shape == kl.shape == clipped.shape == tokens.shape
    assert triton_grpo_loss(logits, *args, beta=0.0)[1] is None


def test_grpo_with_itself_as_reference(device):
    (x, w, b), tokens, advantages, beside = policy_case(device=device)
    alone = modules.LigerFusedLinearGRPOLoss(use_ref_model=False)
    _, (kl, clipped) = alone(x, w, tokens, beside["mask"], advantages, b)
    assert kl == 0 and clipped == 0
    with pytest.raises(ValueError, match="ref_log_probs"):
        modules.LigerFusedLinearGRPOLoss()(x, w, tokens, beside["mask"], advantages, b)
    with pytest.raises(ValueError, match="max_completion_length"):
        modules.LigerFusedLinearGRPOLoss(loss_type="dr_grpo")
    with pytest.raises(ValueError, match="loss_type"):
        modules.LigerFusedLinearDPOLoss(loss_type="dpo")


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: modules.LigerFusedLinearDPOLoss(loss_type="dpo"), "Unsupported loss_type: dpo. Supported types are"),
        (lambda: modules.LigerFusedLinearDPOLoss(loss_type="exo_pair"), "label_smoothing must be > 0 for loss_type="),
        (lambda: modules.LigerFusedLinearDPOLoss(loss_type="robust", label_smoothing=0.5), r"must lie in \[0.0, 0.5\)"),
        (lambda: modules.LigerFusedLinearGRPOLoss(loss_type="dpo"), "Unknown loss type: dpo"),
        (lambda: modules.LigerFusedLinearGRPOLoss(loss_type="dr_grpo"), "max_completion_length must be provided"),
        (lambda: triton_grpo_loss(*[None] * 5, loss_type="dpo"), "Unknown loss_type 'dpo'. Supported types"),
    ],
)
def test_errors_have_the_words_of_liger_kernel(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_distillation(device):
    torch.manual_seed(0)
    x, w, teacher_x, teacher_w = (randn(*shape, device=device) for shape in ((6, 8), (31, 8), (6, 5), (31, 5)))
    labels = torch.tensor([0, 5, -100, 7, 30, 2], device=device)
    s, t, keep = F.linear(x, w), F.linear(teacher_x, teacher_w), labels != -100
    hard = F.cross_entropy(s, labels)
    log_q, log_p = (F.log_softmax(z / 2, -1)[keep] for z in (s, t))
    m = (0.3 * log_p.exp() + 0.7 * log_q.exp()).log()
    of_p, of_q = (F.kl_div(m, log, reduction="batchmean", log_target=True) for log in (log_p, log_q))
    soft = 0.3 * of_p + 0.7 * of_q
    jsd = modules.LigerFusedLinearJSDLoss(0.4, 0.6, 0.3, temperature=2.0, return_soft_hard_loss=True)
    loss, *parts = jsd(x, w, teacher_x, teacher_w, labels)
    equal((loss, parts), (0.4 * hard + 0.6 * soft, soft, hard))
    assert modules.LigerFusedLinearJSDLoss()(x, w, teacher_x, teacher_w, labels).ndim == 0
    cosine = modules.LigerFusedLinearCosineSimilarityLoss(beta=0.5)(x, w, teacher_x, teacher_w, labels)
    expected = 0.5 * hard + 0.5 * 0.5 * (1 - F.cosine_similarity(s, t))[keep].mean()
    torch.testing.assert_close(cosine, expected)
    fused = LigerFusedLinearJSD(0.3, temperature=2.0)(x, w, teacher_x, teacher_w, labels)
    torch.testing.assert_close(fused, soft)
    for module in (jsd, modules.LigerFusedLinearCosineSimilarityLoss()):  # as GKD's trainer calls it
        expected = module(x, w, teacher_x, teacher_w, labels)
        found = module(x.view(2, 3, -1), w, teacher_x.view(2, 3, -1), teacher_w, labels.view(2, 3))
        equal((found[0], found[1:]), (expected[0], *expected[1:])) if module is jsd else equal((found, ()), (expected,))


def test_divergences(device):
    torch.manual_seed(0)
    q, p = log_probs(5, 31, torch.float32, device), log_probs(5, 31, torch.float32, device, False)
    torch.testing.assert_close(LigerJSD(0.0)(q, p), F.kl_div(q, p, reduction="batchmean", log_target=True))
    torch.testing.assert_close(LigerKLDIVLoss()(q, p.exp()), torch.nn.KLDivLoss()(q, p.exp()))
    of_logs = LigerKLDIVLoss(reduction="batchmean", log_target=True)
    torch.testing.assert_close(of_logs(q, p), F.kl_div(q, p, reduction="batchmean", log_target=True))
    labels = torch.tensor([0, -100, 1, 2, -100], device=device)
    expected = (q.exp() - p.exp()).abs().sum(-1)[labels != -100].mean() / 2
    torch.testing.assert_close(LigerTVDLoss()(q.exp(), p.exp(), labels), expected)


def test_functions_are_the_modules(device):
    (x, w, b), ref, labels = answers_case(device=device)
    module = modules.LigerFusedLinearDPOLoss()(w, x, labels, b, *ref)
    function = functional.liger_fused_linear_dpo(x, w, labels, b, *ref)
    assert torch.equal(module[0], function[0])


BASES = {
    "pairs": LigerFusedLinearPreferenceBase, "answers": LigerFusedLinearUnpairedPreferenceBase,
    "completions": LigerFusedLinearPPOBase,
}  # fmt: skip


@pytest.mark.parametrize("given", [{}, {"ref_input": torch.zeros(2, 3, 8)}], ids=["neither", "input alone"])
@pytest.mark.parametrize("name", ["dpo", "kto", *BASES])
def test_a_reference_model_that_is_missing(name, given):
    """Its log-probabilities would count as 0, which is another loss."""
    x, w, labels, preferred = (
        torch.zeros(2, 3, 8),
        torch.zeros(5, 8),
        torch.zeros(2, 3).long(),
        torch.tensor([1, 0]) > 0,
    )
    dpo, kto = modules.LigerFusedLinearDPOLoss(), modules.LigerFusedLinearKTOLoss(use_ref_model=True)
    base = BASES.get(name)
    calls = {
        "dpo": [lambda: dpo(w, x, labels, **given), lambda: functional.liger_fused_linear_dpo(x, w, labels, **given)],
        "kto": [
            lambda: kto(x, w, labels, None, preferred, **given),
            lambda: functional.liger_fused_linear_kto(x, w, labels, preferred, **given),
        ],
        "pairs": [lambda: base.forward(base, None, x, w, labels, use_ref_model=True, **given)],
        "answers": [lambda: base.forward(base, None, x, w, labels, preferred, use_ref_model=True, **given)],
        "completions": [lambda: base.forward(base, None, x, w, labels, x, x, use_ref_model=True, **given)],
    }
    for call in calls[name]:
        with pytest.raises(ValueError, match=f"^{'ref_weight' if given else 'ref_input'}: .*use_ref_model=False"):
            call()
