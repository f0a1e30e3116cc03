"""Policy-gradient losses over sampled completions: PPO, GRPO and their variants.

    log r_t = log_prob_t - old_log_prob_t          of a token, or its mean over the sequence (GSPO)
    loss    = sum_t w_t (objective(r_t, A) + beta KL_t - entropy_coef H_t)

The weights w_t are the reduction over the batch. The forward computes the gradients: token by token (`token_loss`),
or sequence by sequence (`sequence_loss`) if a token's loss depends on the other tokens.
"""

import inspect
import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from liger_hw.checks import check, names_arguments
from liger_hw.dispatch import widen
from liger_hw.kernels.vocabulary.cross_entropy.formula import MASKED, TARGET_DTYPES, check_labels
from liger_hw.kernels.vocabulary.selective_log_softmax import selective_log_softmax
from liger_hw.losses.arguments import check_head, check_numbers, choose, reference_log_probs
from liger_hw.losses.engine import CHUNK_MEMORY
from liger_hw.losses.sequences import sequence_loss, token_loss
from liger_hw.spelling import check_known


@dataclass(frozen=True)
class PolicyOptions:
    """Options of the policy losses. Every policy loss takes these as keywords.

    Attributes:
        loss_type: a key of `OBJECTIVES`. Default "dapo".
        beta: weight of the KL to the reference model, whose log-probabilities or hidden states and weight the loss then
            needs; 0 for none. Default 0.04.
        epsilon_low, epsilon_high: clip the ratio to [1 - epsilon_low, 1 + epsilon_high] (DAPO's clip-higher if they
            differ). "cispo" clips at epsilon_high alone. Default 0.2 each.
        delta: upper limit of the unclipped ratio (two-sided clipping, arXiv:2505.07291); None (default) for no limit.
            Not for "cispo", "sapo" and "vespo".
        importance_sampling_level: "token" (default), or "sequence" (GSPO, arXiv:2507.18071 eq. 7). "cispo", "sapo" and
            "vespo" take "token" only.
        temperature: divides the logits; give the temperature of the sampler. Default 1.
        kl_estimator: "k1", "k2" or "k3" (Schulman 2020, http://joschu.net/blog/kl-approx.html). Default "k3".
        use_bias_correction_kl: multiply the KL by the ratio (the unbiased estimate of DeepSeek-V3.2, arXiv:2512.02556).
            Default False.
        entropy_coef: weight of the entropy bonus; 0 (default) for none.
        max_completion_length: the constant length of "dr_grpo"; None (default) for the length T of the tensors.
        sapo_temperature_pos, sapo_temperature_neg: of "sapo", for advantages above 0 and for all others. Default 1 and
            1.05.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: of "vespo", for advantages >= 0 and < 0. Default
            2, 3, 3 and 2.
    """

    loss_type: str = "dapo"
    beta: float = 0.04
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    importance_sampling_level: str = "token"
    temperature: float = 1.0
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = False
    entropy_coef: float = 0.0
    max_completion_length: int | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self):
        as_option = 'another one with importance_sampling_level="sequence", which is GSPO'
        check(self.loss_type != "gspo", "loss_type", "gspo", as_option)
        check_known("loss_type", self.loss_type, OBJECTIVES)
        clips = OBJECTIVES[self.loss_type] is clipped
        levels = ("token", "sequence") if clips else ("token",)
        name = "importance_sampling_level"
        check_known(name, self.importance_sampling_level, levels, f"Importance sampling levels of {self.loss_type}")
        check_known("kl_estimator", self.kl_estimator, KL)
        for name in ("delta", "max_completion_length"):
            if getattr(self, name) is not None:
                check_numbers("None or a positive number", above=0, **{name: getattr(self, name)})
        check(clips or self.delta is None, "delta", self.delta, f"None for {self.loss_type}")
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.type is float}
        from_0, positive = ("beta", "epsilon_low"), ("temperature", "sapo_temperature_pos", "sapo_temperature_neg")
        check_numbers("0 or more", least=0, most=math.inf, epsilon_high=numbers.pop("epsilon_high"))
        check_numbers("0 or more", least=0, **{name: numbers.pop(name) for name in from_0})
        check_numbers("a positive number", above=0, **{name: numbers.pop(name) for name in positive})
        check_numbers(**numbers)


def _read_options(options, function):
    """Return `PolicyOptions`; raise a ValueError for an unknown option, with the nearest argument of `function`."""
    for name in options:
        if name not in OPTION_NAMES:
            check_known("option", name, OPTION_NAMES, others=inspect.signature(function).parameters)
    return PolicyOptions(**options)


# objectives: (log-probabilities by the policy, log r, the `Batch`, options) -> (loss, is clipped) of each token


def clipped(log_probs, log_weights, batch, options):
    """Compute PPO's loss, arXiv:1707.06347 eq. 7, and GRPO's, arXiv:2402.03300 eq. 3."""
    r = log_weights.exp()
    inside = r.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
    limited = r if options.delta is None else r.clamp(max=options.delta)
    loss = -torch.minimum(limited * batch.advantages, inside * batch.advantages)
    low, high = r < 1 - options.epsilon_low, r > 1 + options.epsilon_high
    return loss, (low & (batch.advantages < 0)) | (high & (batch.advantages > 0))


def cispo(log_probs, log_weights, batch, options):
    """Compute CISPO's loss, arXiv:2506.13585 eq. 4: a constant clipped ratio weights the log-probability."""
    r = log_weights.detach().exp()
    loss = -r.clamp(max=options.epsilon_high) * batch.advantages * log_probs
    return loss, (r > options.epsilon_high) & (batch.advantages > 0)


def sapo(log_probs, log_weights, batch, options):
    """Compute SAPO's loss, arXiv:2511.20347: a soft gate on the ratio replaces clipping."""
    temperatures = options.sapo_temperature_pos, options.sapo_temperature_neg
    tau = choose(batch.advantages > 0, *temperatures, batch.advantages.dtype)
    gate = torch.sigmoid(tau * (log_weights.exp() - 1)) * 4 / tau
    return -gate * batch.advantages, torch.zeros_like(gate, dtype=torch.bool)


def vespo(log_probs, log_weights, batch, options):
    """Compute VESPO's loss, arXiv:2602.10693: `vespo_weights`, constant, weight the log-probabilities."""
    phi = vespo_weights(log_weights, batch.advantages, batch.mask, batch.ratio, options)
    loss = -phi * batch.advantages * log_probs
    return loss, torch.zeros_like(loss, dtype=torch.bool)


OBJECTIVES = {
    "grpo": clipped, "bnpo": clipped, "dr_grpo": clipped, "dapo": clipped, "luspo": clipped, "ppo": clipped,
    "cispo": cispo, "sapo": sapo, "vespo": vespo,
}  # fmt: skip
KL = {  # estimates of the KL of the policy from the reference model; log_r = log_prob - ref_log_prob
    "k1": lambda log_r: log_r,
    "k2": lambda log_r: log_r.square() / 2,
    "k3": lambda log_r: torch.expm1(-log_r) + log_r,
}


def vespo_weights(log_ratio, advantages, mask, ratio, options):
    """Compute phi(w) = exp(lambda + k log w - lambda w) of sequence importance weights.

    The advantage's sign selects k and lambda, by sequence or by token as the advantages. phi has no gradient. It is 0
    where it would be NaN or infinite, as in the authors' code.

    Args:
        log_ratio, mask: (B, T). advantages: (B, 1) or (B, T). ratio: (B, 1), (B, T) or None.

    Returns:
        phi in the shape of `advantages`.
    """
    with torch.no_grad():
        least, most = math.log(1e-8), 20.0
        log_w = (log_ratio.clamp(-most, most) * mask).sum(-1, keepdim=True)
        if ratio is not None:
            log_ratio = ratio.log().clamp(least, most)  # by token, or one value for the whole sequence
            log_w = log_w + (log_ratio * mask if ratio.shape == mask.shape else log_ratio).sum(-1, keepdim=True)
        log_w, rises = log_w.clamp(least, most), advantages >= 0
        k = choose(rises, options.vespo_k_pos, options.vespo_k_neg, advantages.dtype)
        slope = choose(rises, options.vespo_lambda_pos, options.vespo_lambda_neg, advantages.dtype).clamp(min=1e-4)
        return torch.exp(slope + k * log_w - slope * log_w.exp()).nan_to_num(0.0, 0.0, 0.0)


def token_weights(mask, options, num_items=None, dtype=torch.float32):
    """Return each token's weight in the batch loss, (B, T), by the published reductions."""
    mask = mask.to(dtype)
    batch, length = mask.shape
    lengths = mask.sum(-1, keepdim=True)
    kind = options.loss_type
    if kind in ("grpo", "sapo"):  # mean over sequences of the mean over tokens
        return mask / lengths.clamp(min=1) / batch
    if kind == "dr_grpo":  # arXiv:2503.20783: a constant length
        return mask / (batch * (options.max_completion_length or length))
    if kind == "luspo":  # arXiv:2602.05261: a sequence's weight grows with its length
        return mask / batch
    if num_items is None or kind in ("bnpo", "ppo"):  # all tokens have the same weight
        num_items = lengths.sum().clamp(min=1)
    return mask / num_items


def _losses(log_probs, entropy, batch, options):
    """Compute (loss, KL or None, is clipped) of each token; any values at masked positions."""
    old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    log_weights = log_probs - old
    if options.importance_sampling_level == "sequence":
        log_weights = log_weights.sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True).clamp(min=1)
        log_weights = log_weights.expand(log_probs.shape)
    loss, is_clipped = OBJECTIVES[options.loss_type](log_probs, log_weights, batch, options)
    if batch.ratio is not None and options.loss_type != "vespo":  # phi of "vespo" includes the ratio
        loss = loss * batch.ratio
    kl = None
    if options.beta:
        kl = KL[options.kl_estimator](log_probs - batch.ref_log_probs)
        kl = kl * log_weights.exp() if options.use_bias_correction_kl else kl
        loss = loss + options.beta * kl
    if options.entropy_coef:
        loss = loss - options.entropy_coef * entropy
    return loss, kl, is_clipped


class PolicyOutput(NamedTuple):
    """Output of `policy_loss`; only the loss has a gradient, the others are for logging.

    Attributes:
        loss: ().
        kl: mean over the unmasked tokens, (); None if beta is 0.
        clip_ratio: share of the unmasked tokens with a clipped ratio, ().
        entropy: mean over the unmasked tokens, (); None unless return_entropy or entropy_coef asks for it.
        log_probs: (B, T) of the given tokens, 0 at masked positions.
    """

    loss: torch.Tensor
    kl: torch.Tensor | None
    clip_ratio: torch.Tensor
    entropy: torch.Tensor | None
    log_probs: torch.Tensor


class Batch(NamedTuple):
    """Checked inputs (B, T) of a policy loss; absent inputs are None.
    The ratio may be (B, 1). Masked positions are 0, and MASKED in `tokens`."""

    tokens: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    old_log_probs: torch.Tensor | None
    ref_log_probs: torch.Tensor | None
    ratio: torch.Tensor | None

    @classmethod
    def of(cls, tokens, mask, advantages, old_log_probs, ref_log_probs, ratio):
        fits = tokens.ndim == 2 and tokens.dtype in TARGET_DTYPES
        check(fits, "tokens", tokens, "int64 or int32 of shape (B, T)")
        shape = tokens.shape
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        check(mask.shape == shape, "mask", mask, f"shape {tuple(shape)}, as tokens")
        mask = mask != 0

        def rows(name, value, shapes, expand=True):
            if value is None:
                return None
            check(tuple(value.shape) in shapes, name, value, f"a shape of {', '.join(map(str, shapes))}")
            value = widen(value if value.ndim == 2 else value[:, None]).detach()
            value = value.expand(shape) if expand else value
            return value.masked_fill(~(mask if value.shape == shape else mask.any(-1, keepdim=True)), 0)

        whole, by_sequence = tuple(shape), [(shape[0],), (shape[0], 1), tuple(shape)]
        return cls(
            tokens.masked_fill(~mask, MASKED),
            mask,
            rows("advantages", advantages, by_sequence),
            rows("old_log_probs", old_log_probs, [whole]),
            rows("ref_log_probs", ref_log_probs, [whole]),
            rows("vllm_is_ratio", ratio, by_sequence, expand=False),
        )

    def mean(self, values):
        """Return the mean of the values over the unmasked tokens."""
        values = values.detach() if values.is_floating_point() else values.float()
        return (values * self.mask).sum() / self.mask.sum().clamp(min=1)


def token_losses(log_probs, entropy, batch, options):
    """Compute (loss, KL or None, is clipped), each (B, T), 0 at masked positions."""
    (loss, kl, is_clipped), masked = _losses(log_probs, entropy, batch, options), ~batch.mask
    return loss.masked_fill(masked, 0), None if kl is None else kl.masked_fill(masked, 0), is_clipped & batch.mask


@names_arguments
def policy_loss(
    x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, advantages: torch.Tensor,
    mask: torch.Tensor | None = None, bias: torch.Tensor | None = None, old_log_probs: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None, ref_x: torch.Tensor | None = None,
    ref_weight: torch.Tensor | None = None, ref_bias: torch.Tensor | None = None,
    vllm_is_ratio: torch.Tensor | None = None, num_items: torch.Tensor | float | None = None,
    softcap: float | None = None, logit_scale: float = 1.0, return_entropy: bool = False,
    chunk_memory: float = CHUNK_MEMORY, logits_dtype: torch.dtype | None = None, invariant: bool = False,
    counted_rows: int | None = None, accum_dtype: torch.dtype | None = None, **options,
):  # fmt: skip
    """Compute the policy loss of a batch of completions from hidden states.

    Args:
        x: (B, T, H) hidden states, each of the position before its token. weight: (V, H). bias: (V,) or None.
        tokens: (B, T) int64 or int32, the token sampled from each row of `x` (already shifted).
        advantages: (B,), or by token (B, T); a constant, as are the log-probabilities and ratios below.
        mask: (B, T), not 0 where a token counts; None for all.
        old_log_probs: (B, T) by the policy that sampled; None for the current policy.
        ref_log_probs: (B, T) by the reference model; or ref_x (B, T, H'), ref_weight and ref_bias to compute them. A
            beta other than 0 requires one of the two.
        vllm_is_ratio: (B,), (B, 1) or (B, T), multiplies the objective, not the KL; "vespo" uses it in phi.
        num_items: divisor of "dapo", "cispo" and "vespo", a number or a tensor of one; None for the unmasked tokens.
        softcap, logit_scale: as in `selective_log_softmax`.
        return_entropy: also return the mean entropy.
        chunk_memory: bytes that a chunk of logits may take.
        logits_dtype: of the policy's and the reference model's logits, as in `fused_linear_cross_entropy`.
        invariant: of both models, as in `sequence_loss`.
        counted_rows: the most unmasked tokens; accum_dtype: both as in `sequence_loss`.
        options: of `PolicyOptions`.

    Returns:
        A `PolicyOutput`: (loss, kl, clip_ratio, entropy, log_probs), of which the last four are for logging.

    Raises:
        ValueError: shapes do not fit, a loss type is unknown or an option is out of range; on a CPU, an unmasked token
            is outside the vocabulary (elsewhere the loss is then NaN).
        RuntimeError: a second backward.

    Examples:
        >>> hidden, head, tokens = torch.rand(2, 5, 8), torch.rand(10, 8), torch.randint(10, (2, 5))
        >>> advantages = torch.tensor([1.0, -1.0])
        >>> output = liger_hw.policy_loss(hidden, head, tokens, advantages, beta=0.0)
    """
    options = _read_options(options, policy_loss)
    if num_items is not None and not (torch.is_tensor(num_items) and num_items.numel() == 1):
        check_numbers("None, a positive number, or a tensor of one", above=0, num_items=num_items)
    check(x.shape[:-1] == tokens.shape, "x", x, f"({', '.join(map(str, tokens.shape))}, H), one row for each token")
    linear = {
        "temperature": options.temperature, "softcap": softcap, "logit_scale": logit_scale, "ignore_index": MASKED,
        "chunk_memory": chunk_memory, "logits_dtype": logits_dtype, "invariant": invariant,
        "counted_rows": counted_rows, "accum_dtype": accum_dtype,
    }  # fmt: skip
    num_items = num_items.reshape(()) if torch.is_tensor(num_items) else num_items
    batch = Batch.of(tokens, mask, advantages, old_log_probs, ref_log_probs, vllm_is_ratio)
    check_head(x, weight)
    check_labels("tokens", batch.tokens, len(weight), MASKED)
    if options.beta and ref_log_probs is None:
        fits = ref_x is not None and ref_weight is not None
        check(fits, "ref_log_probs", None, "(B, T), or ref_x and ref_weight, where beta is not 0")
        reference = reference_log_probs(ref_x, ref_weight, ref_bias, "tokens", batch.tokens, linear)
        batch = batch._replace(ref_log_probs=reference)
    weights = token_weights(batch.mask, options, num_items, torch.promote_types(x.dtype, torch.float32))
    linear["with_entropy"] = return_entropy or options.entropy_coef != 0
    couples_tokens = options.importance_sampling_level == "sequence" or options.loss_type == "vespo"
    compute = _loss_by_sequence if couples_tokens else _loss_by_token
    loss, log_probs, *logged = compute(x, weight, bias, batch, weights, options, linear)
    return PolicyOutput(loss, *(value if value is None else batch.mean(value) for value in logged), log_probs)


def _loss_by_sequence(x, weight, bias, batch, weights, options, linear):
    """Return (loss (), log-probabilities, KL or None, is clipped, entropy or None) of coupled tokens."""

    def sequence_sum(log_probs, entropy, groups):
        part = Batch(*(row if row is None else row[groups] for row in batch))
        entropy = entropy if entropy is None else entropy[0]
        return (token_losses(log_probs[0], entropy, part, options)[0] * weights[groups]).sum()

    loss, log_probs, entropy = sequence_loss(sequence_sum, x, weight, batch.tokens, bias, **linear)
    _, kl, is_clipped = token_losses(log_probs, entropy, batch, options)
    return loss, log_probs, kl, is_clipped, entropy


def _loss_by_token(x, weight, bias, batch, weights, options, linear):
    """Return the values of `_loss_by_sequence` where a token's loss depends on the token alone."""

    def formula(log_probs, entropy, weights, *rows):
        part = Batch(None, *rows)
        loss, kl, is_clipped = _losses(log_probs, entropy, part, options)
        logged = (value for value in (is_clipped & part.mask, log_probs, kl, entropy) if value is not None)
        return loss * weights, *logged

    tokens, *rows = batch
    rows = [row if row is None else row.expand(tokens.shape).reshape(-1) for row in (weights, *rows)]
    loss, *logged = token_loss(formula, x.reshape(-1, x.shape[-1]), weight, tokens.reshape(-1), bias, rows, **linear)
    logged = iter([row.reshape(tokens.shape) for row in logged])
    is_clipped, log_probs = next(logged), next(logged)
    kl = next(logged) if options.beta else None
    return loss, log_probs, kl, is_clipped, next(logged) if linear["with_entropy"] else None


@names_arguments
def policy_loss_of_logits(
    logits: torch.Tensor, tokens: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor | None = None,
    old_log_probs: torch.Tensor | None = None, ref_log_probs: torch.Tensor | None = None,
    vllm_is_ratio: torch.Tensor | None = None, in_place: bool = False, **options,
):  # fmt: skip
    """Compute each token's policy loss from logits (B, T, V) or (B, T+1, V).

    Args:
        in_place: the backward writes the gradient over `logits`, which the caller must own.
        others: as in `policy_loss`; without entropy. The loss ignores the logits of position T + 1.

    Returns:
        (loss (B, T), KL (B, T) or None if beta is 0, is clipped (B, T), the `Batch`). Masked positions are 0. The KL
        and the clipping have no gradient.

    Raises:
        ValueError: as `policy_loss`.

    Examples:
        >>> logits, tokens = torch.rand(2, 5, 10), torch.randint(10, (2, 5))
        >>> advantages = torch.tensor([1.0, -1.0])
        >>> output = liger_hw.policy_loss_of_logits(logits, tokens, advantages, beta=0.0)
    """
    options = _read_options(options, policy_loss_of_logits)
    check(options.entropy_coef == 0, "entropy_coef", options.entropy_coef, "0, from logits")
    batch = Batch.of(tokens, mask, advantages, old_log_probs, ref_log_probs, vllm_is_ratio)
    check(batch.ref_log_probs is not None or not options.beta, "ref_log_probs", None, "(B, T), where beta is not 0")
    length = tokens.shape[1]
    fits = logits.ndim == 3 and logits.shape[0] == len(tokens) and logits.shape[1] in (length, length + 1)
    check(fits, "logits", logits, f"({len(tokens)}, {length} or {length + 1}, V)")
    check_labels("tokens", batch.tokens, logits.shape[-1], MASKED)
    # an ignored token at the last position avoids a slice of the logits, which the kernel would copy
    padded = torch.nn.functional.pad(batch.tokens, (0, logits.shape[1] - length), value=MASKED)
    log_probs = selective_log_softmax(logits, padded, options.temperature, ignore_index=MASKED, in_place=in_place)
    loss, kl, is_clipped = token_losses(log_probs[:, :length], None, batch, options)
    return loss, None if kl is None else kl.detach(), is_clipped, batch


OPTION_NAMES = tuple(field.name for field in fields(PolicyOptions))
