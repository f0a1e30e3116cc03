"""Our losses give what the trainers of TRL compute, given the same log-probabilities or logits.

TRL keeps its losses in methods of its trainers. They are called here without a trainer: with an object that has what
the method looks at, and a model that returns the log-probabilities it is made of.
"""

from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from naive import token_log_probs

pytest.importorskip("trl", reason="TRL is not installed; the check `trl` installs it and runs these tests")

from test_policy import case as policy_case  # noqa: E402
from test_preference import answers_of  # noqa: E402
from test_preference import case as answers_case  # noqa: E402
from trl.experimental.cpo import CPOTrainer  # noqa: E402
from trl.experimental.gkd import GKDTrainer  # noqa: E402
from trl.experimental.orpo import ORPOTrainer  # noqa: E402
from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.kto_trainer import KTOTrainer  # noqa: E402
from trl.trainer.utils import entropy_from_logits, selective_log_softmax  # noqa: E402

import liger_hw  # noqa: E402
from liger_hw.losses.distillation import distillation_loss  # noqa: E402
from liger_hw.losses.policy import policy_loss  # noqa: E402
from liger_hw.losses.preference import preference_loss, unpaired_preference_loss  # noqa: E402

BETA, SMOOTHING = 0.3, 0.1
ACCELERATOR = SimpleNamespace(
    device="cpu", num_processes=1, sync_gradients=True, gather=lambda x: x, gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x, autocast=nullcontext,
)  # fmt: skip


class Trainer(SimpleNamespace):
    """What TRL's methods look at: any attribute that is not given is off."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def trainer(**attributes):
    return Trainer(
        accelerator=ACCELERATOR, model=SimpleNamespace(training=True), beta=BETA, label_smoothing=SMOOTHING,
        precompute_ref_logps=True, aux_loss_enabled=False, use_weighting=False, _total_train_tokens=0, _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)), **attributes,
    )  # fmt: skip


class Model:
    """Return log-probabilities of the T tokens after the first, like TRL's fused head."""

    def __init__(self, x, weight, bias):
        self.layer, self.training = (x, weight, bias), True

    def __call__(self, labels, **inputs):
        x, weight, bias = self.layer
        log_probs, entropy = token_log_probs(x, weight, labels[:, 1:], bias)
        none = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=entropy, mean_logits=none, is_top1=none.bool())


def trl_inputs(labels):
    """Tokens and their mask as TRL has them, one position more than our shifted labels."""
    ids = F.pad(labels.clamp(min=0), (1, 0))
    return {"input_ids": ids, "completion_mask": F.pad((labels != -100).long(), (1, 0)), "attention_mask": ids}


def same(loss, expected, leaves):
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def logged(theirs, name):
    """Return a metric as an fp32 tensor, so that fp32's tolerance applies."""
    return torch.tensor(theirs._metrics["train"][name][0])


DPO = {  # our name -> TRL's
    name: name
    for name in ("sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
                 "discopop", "aot")
} | {"aot_pair": "aot_unpaired"}  # fmt: skip

SMOOTHED = ("exo_pair", "robust", "aot", "aot_pair")  # by TRL; ours, and not TRL's, is the one of "sigmoid", too


@pytest.mark.parametrize("loss_type", DPO)
def test_dpo(loss_type):
    (x, w, b), ref, labels = answers_case()
    reference = answers_of(ref[0], ref[1], labels, ref[2], False)
    found = preference_loss(
        x, w, labels, b, loss_type, BETA, SMOOTHING if loss_type in SMOOTHED else 0.0, ref_log_probs=reference,
        **({"delta": 0.0} if loss_type == "bco_pair" else {}),
    )  # fmt: skip
    inputs = trl_inputs(labels) | dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference.chunk(2)))
    theirs = trainer(
        loss_types=[DPO[loss_type]], loss_weights=[1.0], f_divergence_type="reverse_kl",
        args=SimpleNamespace(discopop_tau=0.05),
    )  # fmt: skip
    same(found.loss, DPOTrainer._compute_loss(theirs, Model(x, w, b), inputs, False), (x, w, b))
    torch.testing.assert_close(found.chosen_rewards.mean(), logged(theirs, "rewards/chosen"))


FURTHER_DPO = [  # our options, TRL's options
    ({"loss_type": "ipo_norm"}, {"loss_types": ["ipo"]}),
    ({"loss_type": "ipo", "average_log_prob": True}, {"loss_types": ["ipo"]}),
    ({"loss_type": "sigmoid_norm"}, {"loss_types": ["sigmoid_norm"]}),
    ({"loss_type": "sft"}, {"loss_types": ["sft"]}),
    ({"ld_alpha": 0.4}, {"ld_alpha": 0.4}),
    ({"ld_alpha": 0.0, "loss_type": "ipo_norm"}, {"ld_alpha": 0.0, "loss_types": ["ipo"]}),
    (
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "delta": 0.0},
        {"loss_types": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    ),
    *(
        ({"loss_type": name, "f_divergence": divergence, "f_alpha": 0.3}, {"loss_types": [name]})
        for name in ("sigmoid", "sigmoid_norm", "hinge")
        for divergence in ("forward_kl", "js_divergence", "alpha_divergence")
    ),
]


@pytest.mark.parametrize("ours, options", FURTHER_DPO, ids=lambda options: str(sorted(options.values(), key=str)))
def test_further_dpo(ours, options):
    (x, w, b), ref, labels = answers_case()
    for answer in range(len(labels)):  # TRL divides by the tokens of the unshifted mask: the same without a prompt
        labels[answer] = torch.where(torch.arange(5) < 5 - answer % 3, labels[answer].clamp(min=0), -100)
    average = ours.get("average_log_prob", False)
    sums = answers_of(ref[0], ref[1], labels, ref[2], False)
    if "ld_alpha" in ours:  # without a reference: its sums would have to be weighted alike
        sums = torch.zeros_like(sums)
    reference = sums / (labels != -100).sum(1) if average else sums
    found = preference_loss(x, w, labels, b, beta=BETA, ref_log_probs=reference, **ours)
    inputs = trl_inputs(labels) | dict(zip(("ref_chosen_logps", "ref_rejected_logps"), sums.chunk(2)))
    inputs["completion_mask"][:, 0] = 0
    theirs = trainer(
        f_divergence_type=ours.get("f_divergence", "reverse_kl"), f_alpha_divergence_coef=0.3,
        **({"loss_types": ["sigmoid"], "loss_weights": [1.0]} | options),
    )  # fmt: skip
    same(found.loss, DPOTrainer._compute_loss(theirs, Model(x, w, b), inputs, False), (x, w, b))


def test_apo_zero_unpaired():
    (x, w, b), ref, labels = answers_case()
    reference = answers_of(ref[0], ref[1], labels, ref[2], False)
    preferred = torch.tensor([True, False, True, True, False, False])
    theirs = trainer(
        loss_type="apo_zero_unpaired", calculate_KL=False, desirable_weight=2.0, undesirable_weight=0.5,
        _compute_kl_logps=lambda model, batch: None,
    )  # fmt: skip
    inputs = trl_inputs(labels) | {"label": preferred, "ref_logps": reference}
    expected = KTOTrainer._compute_loss(theirs, Model(x, w, b), inputs, False)
    found = unpaired_preference_loss(
        x, w, labels, preferred, b, "apo_zero_unpaired", BETA, False, 2.0, 0.5, ref_log_probs=reference
    )
    same(found.loss, expected, (x, w, b))


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo", "simpo"])
def test_cpo(loss_type):
    (x, w, b), _, labels = answers_case()
    average = loss_type == "simpo"
    theirs = trainer(loss_type=loss_type, alpha=0.0, simpo_gamma=0.5)
    losses, chosen, rejected = CPOTrainer.cpo_loss(theirs, *answers_of(x, w, labels, b, average).chunk(2))
    smoothing = SMOOTHING if loss_type in ("sigmoid", "simpo") else 0.0
    found = preference_loss(x, w, labels, b, loss_type, BETA, smoothing, average_log_prob=average)
    same(found.loss, losses.mean(), (x, w, b))
    torch.testing.assert_close(found.chosen_rewards, chosen)
    torch.testing.assert_close(found.rejected_rewards, rejected)


def test_orpo():
    (x, w, b), _, labels = answers_case()
    theirs = ORPOTrainer.odds_ratio_loss(trainer(), *answers_of(x, w, labels, b, True).chunk(2))
    found = preference_loss(x, w, labels, b, "orpo", BETA, average_log_prob=True)
    same(found.loss, -theirs[0].mean(), (x, w, b))  # TRL subtracts it from the NLL


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 0.5)])
def test_kto(weights, monkeypatch):
    (x, w, b), ref, labels = answers_case()
    reference = answers_of(ref[0], ref[1], labels, ref[2], False)
    preferred = torch.tensor([True, False, True, True, False, False])
    kl = answers_of(x, w, labels, b, False).detach() + 0.4
    theirs = trainer(
        loss_type="kto", calculate_KL=True, desirable_weight=weights[0], undesirable_weight=weights[1],
        _compute_kl_logps=lambda model, batch: kl,
    )  # fmt: skip
    inputs = trl_inputs(labels) | {"label": preferred, "ref_logps": reference, "ref_KL_logps": reference}
    expected = KTOTrainer._compute_loss(theirs, Model(x, w, b), inputs, False)
    point = (kl - reference).mean().clamp(min=0)
    found = unpaired_preference_loss(
        x, w, labels, preferred, b, "kto", BETA, False, *weights, ref_log_probs=reference, kl=point
    )
    same(found.loss, expected, (x, w, b))


GRPO = [
    *({"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")),
    *({"loss_type": name, "level": "sequence"} for name in ("grpo", "dapo", "luspo")),
    {"loss_type": "grpo", "delta": 1.1},
    {"loss_type": "dapo", "use_bias_correction_kl": True},
    {"loss_type": "bnpo", "entropy_coef": 0.1},
    {"loss_type": "vespo", "ratio": torch.rand(3, 1, generator=torch.Generator().manual_seed(0)) + 0.5},
    {"loss_type": "grpo", "ratio": torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) + 0.5},
]


@pytest.mark.parametrize("variant", GRPO, ids=lambda variant: " ".join(map(str, list(variant.items())[:2])))
def test_grpo(variant):
    (x, w, b), tokens, advantages, beside = policy_case()
    options = {"epsilon_high": 1.1 if variant["loss_type"] == "cispo" else 0.2, "max_completion_length": 9}
    level, ratio = variant.get("level", "token"), variant.get("ratio")
    more = {name: value for name, value in variant.items() if name not in ("level", "ratio")}
    found = policy_loss(
        x,
        w,
        tokens,
        advantages,
        bias=b,
        importance_sampling_level=level,
        vllm_is_ratio=ratio,
        **beside,
        **options,
        **more,
    )
    mask = beside["mask"].long()
    args = SimpleNamespace(
        delta=more.get("delta"), use_bias_correction_kl="use_bias_correction_kl" in more, steps_per_generation=1,
        sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    )  # fmt: skip

    def log_probs(model, input_ids, attention_mask, logits_to_keep, **others):
        return *token_log_probs(x, w, tokens, b), None

    theirs = trainer(
        args=args, loss_type=variant["loss_type"], importance_sampling_level=level, epsilon_low=0.2,
        epsilon_high=options["epsilon_high"], top_entropy_quantile=1.0, max_completion_length=9,
        current_gradient_accumulation_steps=1, use_vllm=ratio is not None, vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled="entropy_coef" in more, entropy_coef=more.get("entropy_coef", 0.0),
        _get_per_token_logps_and_entropies=log_probs, get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )  # fmt: skip
    theirs.beta = 0.04
    inputs = {
        "prompt_ids": tokens[:, :1], "prompt_mask": mask[:, :1], "completion_ids": tokens, "completion_mask": mask,
        "advantages": advantages, "old_per_token_logps": beside["old_log_probs"],
        "ref_per_token_logps": beside["ref_log_probs"], "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": ratio,
    }  # fmt: skip
    same(found.loss, GRPOTrainer._compute_loss(theirs, None, inputs), (x, w, b))
    torch.testing.assert_close(found.kl, logged(theirs, "kl"))


@pytest.mark.parametrize("beta, temperature", [(0.0, 1.0), (0.3, 1.0), (0.5, 2.0), (1.0, 1.0)])
def test_generalised_jsd(beta, temperature):
    torch.manual_seed(0)
    x, w = torch.randn(9, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True)
    teacher_x, teacher_w = torch.randn(9, 6), torch.randn(31, 6)
    labels = torch.tensor([0, 5, -100, 7, 30, 2, -100, 1, 1])
    theirs = GKDTrainer.generalized_jsd_loss(
        F.linear(x, w)[None], F.linear(teacher_x, teacher_w)[None], labels[None], beta, temperature
    )
    found = distillation_loss(
        x, w, teacher_x, teacher_w, labels, beta=beta, temperature=temperature, hard_weight=0.0, soft_weight=1.0
    )
    same(found.loss, theirs, (x, w))


def test_selected_log_probabilities():
    torch.manual_seed(0)
    logits, tokens = torch.randn(3, 7, 41), torch.randint(0, 41, (3, 7))
    found = liger_hw.selective_log_softmax(logits, tokens, return_entropy=True)
    torch.testing.assert_close(found.log_probs, selective_log_softmax(logits, tokens))
    torch.testing.assert_close(found.entropy, entropy_from_logits(logits))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("num_items", [None, 11])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation_trainer(beta, num_items, softcap):
    """Its loss and the student's entropy, of hidden states; it keeps its own function (docs/trainers.md says why)."""
    distillation_trainer = pytest.importorskip("trl.trainer.distillation_trainer")
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(s, generator=generator) for s in ((2, 5, 8), (2, 5, 6), (31, 8), (31, 6), (31,), (31,))]
    mask, counts = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]), 6
    found = []
    for is_ours in (False, True):
        x, teacher_x, w, teacher_w, b, teacher_b = (t.clone().requires_grad_() for t in tensors)
        if is_ours:
            labels = torch.where(mask != 0, 0, -100)
            options = {"softcap": softcap, "logit_scale": 0.7}
            output = distillation_loss(
                x, w, teacher_x, teacher_w, labels, b, teacher_b, beta=beta, temperature=0.9, hard_weight=0.0,
                soft_weight=1.0, teacher_softcap=softcap, teacher_logit_scale=1.3, counted_rows=counts, **options,
            )  # fmt: skip
            loss = output.loss if num_items is None else output.loss * counts / num_items
            rows = liger_hw.fused_linear_selective_log_softmax(
                x, w, labels, b, temperature=0.9, return_entropy=True, counted_rows=counts, **options
            )
            entropy = rows.entropy.sum()
        else:
            scales, caps = (0.7, 1.3), (softcap, softcap)
            loss, entropy, _ = distillation_trainer._chunked_divergence_loss(
                x, teacher_x, w, teacher_w, mask, beta, num_items, b, teacher_b, *scales, *caps, 0.9
            )
        found.append((loss, entropy, *torch.autograd.grad(loss, (x, w, b))))
    for theirs, ours in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def pairs_of_text():
    batch = {}
    for name in ("chosen", "rejected"):
        ids, lengths = torch.randint(0, 31, (3, 7)), torch.tensor([[7], [5], [6]])
        at = torch.arange(7)
        batch[f"{name}_input_ids"], batch[f"{name}_attention_mask"] = ids, (at < lengths).long()
        batch[f"{name}_labels"] = ids.masked_fill((at < 2) | (at >= lengths), -100)
    return batch


def orpo_trainer(kind, **attributes):
    it = trainer(
        is_encoder_decoder=False, padding_value=0, concatenated_inputs=ORPOTrainer.concatenated_inputs,
        get_batch_logps=ORPOTrainer.get_batch_logps, _checked=None,
    )  # fmt: skip
    vars(it).update(attributes)
    it.concatenated_forward = partial(kind.concatenated_forward, it)
    if kind is not ORPOTrainer:
        it._hidden_states = partial(kind._hidden_states, it)
    it.odds_ratio_loss = partial(ORPOTrainer.odds_ratio_loss, it)
    return it


@pytest.fixture
def new_accelerator_state():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_key_value_heads": 2}


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    "family, options",
    [
        ("llama", SIZES),
        ("opt", {"hidden_size": 16, "ffn_dim": 24, "num_attention_heads": 2, "word_embed_proj_dim": 16}),
        ("qwen3_moe", {**SIZES, **ROUTED, "output_router_logits": True}),
    ],
)
def test_orpo_trainer(family, options, precision, new_accelerator_state):
    """Return both trainers' loss, gradients and metrics of one model and the same pairs."""
    import transformers
    from accelerate import Accelerator

    from liger_hw.stand_in.orpo_trainer import LigerORPOTrainer

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, vocab_size=31, **options)
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    model = accelerator.prepare_model(transformers.AutoModelForCausalLM.from_config(config).eval())
    routes = {"aux_loss_enabled": "output_router_logits" in options, "aux_loss_coef": 0.1, "accelerator": accelerator}
    batch, found = pairs_of_text(), []
    for kind in (ORPOTrainer, LigerORPOTrainer):
        loss, metrics = kind.get_batch_loss_metrics(orpo_trainer(kind, **routes), model, batch)
        found.append((loss, metrics, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)))
    (expected, their_metrics, their_gradients), (loss, metrics, gradients) = found
    near, far = (1e-6, 1e-4) if precision == "no" else (1e-2, 1e-2)  # TRL rounds logits to bf16, ours are fp32
    torch.testing.assert_close(loss, expected, rtol=max(near, 1e-5), atol=near)
    assert metrics == pytest.approx(their_metrics, rel=far, abs=far)
    for ours, theirs in zip(gradients, their_gradients):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=far, atol=near)


@pytest.mark.parametrize(
    "family, options",
    [("gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0}), ("cohere", {}), ("granite", {"logits_scaling": 8.0})],
)
def test_orpo_trainer_refuses_logits_that_are_more_than_a_product(family, options):
    import transformers

    from liger_hw.stand_in.orpo_trainer import LigerORPOTrainer

    config = transformers.AutoConfig.for_model(family, vocab_size=31, num_key_value_heads=2, **SIZES, **options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="^model: got .*, allowed: one whose logits are its head's product"):
        LigerORPOTrainer.get_batch_loss_metrics(orpo_trainer(LigerORPOTrainer), model, pairs_of_text())


def test_orpo_trainer_refuses_an_adapted_head():
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    from liger_hw.stand_in.orpo_trainer import LigerORPOTrainer

    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, tie_word_embeddings=False, **SIZES))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], r=2))
    with pytest.raises(ValueError, match="^model: got PeftModel, allowed"):
        LigerORPOTrainer.get_batch_loss_metrics(orpo_trainer(LigerORPOTrainer), model, pairs_of_text())


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_orpo_trainer_refuses_prompts(kind):
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    from liger_hw.stand_in.orpo_trainer import LigerORPOTrainer

    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, **SIZES))
    model = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="^model: got PeftModelForCausalLM, allowed"):
        LigerORPOTrainer.get_batch_loss_metrics(orpo_trainer(LigerORPOTrainer), model, pairs_of_text())


def test_orpo_trainer_takes_a_trained_head():
    """PEFT's modules_to_save, which hold the head's weight."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    from liger_hw.stand_in.orpo_trainer import LigerORPOTrainer

    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, tie_word_embeddings=False, **SIZES))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2))
    loss, _ = LigerORPOTrainer.get_batch_loss_metrics(orpo_trainer(LigerORPOTrainer), model, pairs_of_text())
    loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if p.requires_grad and "lm_head" in name)
