"""On a CPU a label outside the vocabulary is one error in every op and loss that takes labels.

On a GPU no check makes the host wait: the tests of each op hold what happens there.
"""

import pytest
import torch

import liger_hw
from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.chunked_loss import functional
from liger_hw.losses.policy import policy_loss_of_logits
from liger_hw.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from liger_hw.transformers.vocab_parallel import vocab_parallel_cross_entropy

pytestmark = pytest.mark.skipif(interpreting(), reason="the interpreter's kernels do on a CPU what they do on a GPU")
VOCABULARY, FEATURES = 11, 4


def log_prob(log_probs, *others):
    return (log_probs,)


# name -> (the argument's name, function of hidden states (2, 3, H), weight and labels (2, 3))
LOSSES = {
    "cross_entropy": ("target", lambda x, w, y: liger_hw.cross_entropy((x @ w.T).flatten(0, 1), y.flatten())),
    "cross_entropy in place": (
        "target", lambda x, w, y: liger_hw.cross_entropy((x @ w.T).flatten(0, 1), y.flatten(), in_place=True)
    ),
    "LigerCrossEntropyLoss": ("target", lambda x, w, y: LigerCrossEntropyLoss()((x @ w.T).flatten(0, 1), y.flatten())),
    "fused_linear_cross_entropy": (
        "target", lambda x, w, y: liger_hw.fused_linear_cross_entropy(x.flatten(0, 1), w, y.flatten())
    ),
    "fused_linear_cross_entropy, rows": (
        "target",
        lambda x, w, y: liger_hw.fused_linear_cross_entropy(x.flatten(0, 1), w, y.flatten(), reduction="none"),
    ),
    "LigerFusedLinearCrossEntropyLoss": (
        "target", lambda x, w, y: LigerFusedLinearCrossEntropyLoss()(w, x.flatten(0, 1), y.flatten())
    ),
    "selective_log_softmax": ("tokens", lambda x, w, y: liger_hw.selective_log_softmax(x @ w.T, y)),
    "fused_linear_selective_log_softmax": (
        "tokens", lambda x, w, y: liger_hw.fused_linear_selective_log_softmax(x, w, y)
    ),
    "token_loss": ("tokens", lambda x, w, y: liger_hw.token_loss(log_prob, x.flatten(0, 1), w, y.flatten())),
    "sequence_loss": (
        "tokens", lambda x, w, y: liger_hw.sequence_loss(lambda p, entropy, groups: p.sum(), x, w, y)
    ),
    "policy_loss": ("tokens", lambda x, w, y: liger_hw.policy_loss(x, w, y, x[:, 0, 0], beta=0.0)),
    "policy_loss, reference": (
        "tokens",
        lambda x, w, y: liger_hw.policy_loss(x, torch.cat((w, w)), y, x[:, 0, 0], ref_x=x, ref_weight=w, beta=0.1),
    ),
    "policy_loss_of_logits": ("tokens", lambda x, w, y: policy_loss_of_logits(x @ w.T, y, x[:, 0, 0], beta=0.0)[0]),
    "preference_loss": ("labels", lambda x, w, y: liger_hw.preference_loss(x, w, y)),
    "preference_loss, nll": (
        "nll_labels", lambda x, w, y: liger_hw.preference_loss(x, w, y.clamp(0, 5), alpha=1.0, nll_labels=y)
    ),
    "unpaired_preference_loss": (
        "labels", lambda x, w, y: liger_hw.unpaired_preference_loss(x, w, y, torch.tensor([True, False]))
    ),
    "distillation_loss": (
        "labels",
        lambda x, w, y: liger_hw.distillation_loss(x.flatten(0, 1), w, x.flatten(0, 1).detach(), w, y.flatten()),
    ),
    "cross_entropy_tvd": (
        "target",
        lambda x, w, y: liger_hw.cross_entropy_tvd((x @ w.T).flatten(0, 1), (x @ w.T).flatten(0, 1), y.flatten()),
    ),
    "multi_token_loss": ("labels", lambda x, w, y: liger_hw.multi_token_loss([x, x], w, y)),
    "vocab_parallel_cross_entropy": ("target", lambda x, w, y: vocab_parallel_cross_entropy(x @ w.T, y)),
    "liger_fused_linear_orpo": ("labels", lambda x, w, y: functional.liger_fused_linear_orpo(x, w, y)),
}  # fmt: skip


@pytest.mark.parametrize("forced", [None, "reference"])
@pytest.mark.parametrize("outside", [VOCABULARY, -1, 10**12])
@pytest.mark.parametrize("name", LOSSES)
def test_an_error_that_names_the_label(name, outside, forced):
    argument, loss = LOSSES[name]
    x, w = torch.randn(2, 3, FEATURES, requires_grad=True), torch.randn(VOCABULARY, FEATURES, requires_grad=True)
    labels = torch.tensor([[0, 3, -100], [-100, 10, 4]])
    with use_backend(forced):
        if not name.startswith("policy"):  # which ignores positions by a mask
            loss(x, w, labels)
        labels[1, 1] = outside
        labels[labels == -100] = 0 if name.startswith("policy") else -100
        ignores = "" if name.startswith("policy") else ", or -100 to ignore"
        expected = rf"^{argument}: got \[{outside}\], allowed: 0 to (10|21){ignores}$"
        with pytest.raises(ValueError, match=expected):
            loss(x, w, labels)
