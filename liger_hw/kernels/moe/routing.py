r"""Choose experts for tokens, and sort pairs of a token and an expert by expert.

The router and its losses are torch's operations on (T, E) logits. No function waits for the device. The sort:

    order = argsort(index, stable)          tokens[i]   = order[i] / k              position[order[i]] = i
    weights[i] = w[order[i]]                offs[e]     = pairs whose expert is at most e

`torch.sort` is the first launch and one kernel the second, instead of eight of torch's. Letters: S = T k pairs.
"""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check
from liger_hw.dispatch import raw, widen
from liger_hw.launch import launch
from liger_hw.spelling import check_known
from liger_hw.tuning import Config, tuned

SCORES = {"softmax": lambda logits: torch.softmax(logits, -1), "sigmoid": torch.sigmoid}


def router(
    logits, k, scores="softmax", normalise=True, scale=1.0, correction_bias=None, groups=1, kept_groups=1, eps=0.0,
    dtype=None,
):  # fmt: skip
    """Choose k experts for each token, and weigh them.

    Bitwise equal to the routers of transformers: Mixtral by the defaults; Qwen3-MoE with normalise=norm_topk_prob and
    dtype=logits.dtype; DeepSeek-V3 with fp32 logits, scores="sigmoid", eps=1e-20, normalise=norm_topk_prob,
    scale=routed_scaling_factor, correction_bias, groups=n_group and kept_groups=topk_group (arXiv:2412.19437).

    Args:
        logits: (T, E), any floating dtype; scores are computed in fp32.
        k: experts a token.
        scores: "softmax" or "sigmoid".
        normalise: divide the weights by their sum plus `eps`.
        scale: a factor of the weights.
        correction_bias: (E,), added to the scores for the choice alone; None: 0.
        groups: experts form groups of E / groups neighbours, and a token chooses from its best `kept_groups`, by the
            sum of each group's two largest scores.
        kept_groups: number of groups to choose from.
        dtype: dtype of the weights; fp32 by default.

    Returns:
        (weights (T, k), index (T, k) int64); gradients reach the logits through the weights.

    Raises:
        ValueError: `scores` is unknown, or k, groups or kept_groups do not fit.

    Examples:
        >>> weights, chosen, *_ = liger_hw.router(torch.rand(6, 4), k=2)
    """
    check(logits.ndim == 2 and logits.is_floating_point(), "logits", logits, "floating point of shape (T, E)")
    check_known("scores", scores, SCORES)
    number = logits.shape[1]
    check(groups > 0 and number % groups == 0, "groups", groups, f"a divisor of {number} experts")
    check(0 < kept_groups <= groups, "kept_groups", kept_groups, f"1 to {groups}")
    check(0 < k <= number // groups * kept_groups, "k", k, f"1 to {number // groups * kept_groups}")
    expert_scores = SCORES[scores](widen(logits))
    ranked = expert_scores.detach() if correction_bias is None else expert_scores.detach() + correction_bias
    if kept_groups < groups:
        grouped = ranked.view(-1, groups, number // groups)
        best = grouped.topk(min(2, number // groups), dim=-1)[0].sum(-1).topk(kept_groups, dim=-1)[1]
        kept = torch.zeros(len(logits), groups, dtype=torch.bool, device=logits.device).scatter_(1, best, True)
        ranked = grouped.masked_fill(~kept[..., None], float("-inf")).view_as(ranked)
    # the order of the chosen, in which they are added up, is that of the classes above
    index = ranked.topk(k, dim=-1, sorted=scores == "softmax")[1]
    weights = expert_scores.gather(1, index)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    if torch.is_tensor(scale) or scale != 1.0:  # a tensor may learn
        weights = weights * scale
    return weights.to(dtype or weights.dtype), index


def load_balancing_loss(router_logits, k, attention_mask=None):
    """Compute the auxiliary loss that balances experts (arXiv:2101.03961, equations 4 to 6).

    E sum over experts of (share of the choices) (mean probability), over the tokens of all layers, as transformers'
    `load_balancing_loss_func`. Shares count k choices a token, so balanced experts give k.

    Args:
        router_logits: (T, E), or a sequence of them, one for each layer.
        k: experts a token.
        attention_mask: (B, L) with T = B L, 0 for padding; None: no padding.

    Returns:
        A scalar in fp32.

    Examples:
        >>> liger_hw.load_balancing_loss(torch.rand(6, 4), k=2).shape
        torch.Size([])
    """
    layers = [router_logits] if torch.is_tensor(router_logits) else list(router_logits)
    mask = None if attention_mask is None else attention_mask.reshape(-1, 1).float()
    counts, sums, rows = 0.0, 0.0, 0.0
    for logits in layers:
        probabilities = torch.softmax(logits, -1)
        chosen = torch.zeros_like(probabilities, dtype=torch.float32)
        chosen.scatter_(1, probabilities.detach().topk(k, dim=-1)[1], 1.0)
        probabilities = probabilities.float()
        if mask is not None:
            chosen, probabilities = chosen * mask, probabilities * mask
        counts, sums = counts + chosen.sum(0), sums + probabilities.sum(0)
        rows = rows + (len(logits) if mask is None else mask.sum())
    return (counts / rows * (sums / rows)).sum() * counts.shape[0]


def router_z_loss(logits):
    """Compute the mean square of the log of the sum of exponentials, in fp32 (arXiv:2202.08906).

    logits: (..., E).

    Examples:
        >>> liger_hw.router_z_loss(torch.rand(6, 4)).shape
        torch.Size([])
    """
    return widen(logits).logsumexp(-1).square().mean()


# Sorting --------------------------------------------------------------------------------------------------------------


@tuned
def sorted_pairs_config(device):
    return Config({"BLOCK": device.warp_size}, 1)  # a lane for each pair, whose accesses are scattered


@triton.jit(do_not_specialize=["pairs", "k", "experts", "blocks", "steps"])
def sorted_pairs(
    CHOSEN, ORDER, W, TOKENS, POSITION, ROW_WEIGHTS, OFFS, pairs, k, experts, blocks, steps, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) < blocks:
        mask = at < pairs
        pair, chosen = tl.load(ORDER + at, mask, other=0), tl.load(CHOSEN + at, mask, other=0)
        w = tl.load(W + pair, mask, other=0.0).to(tl.float32)
        tl.store(TOKENS + at, pair // k, mask)
        tl.store(POSITION + pair, at, mask)
        tl.store(ROW_WEIGHTS + at, tl.where((chosen >= 0) & (chosen < experts), w, float("nan")), mask)
    else:  # each lane searches the end of one expert's pairs; the last expert ends with all, so all rows are written
        expert = at - blocks.to(tl.int64) * BLOCK
        low = tl.zeros([BLOCK], tl.int32)
        high = low + pairs
        for _ in range(steps):
            middle = (low + high) // 2
            chosen = tl.load(CHOSEN + middle, (expert < experts) & (middle < pairs), other=2147483647)
            low, high = tl.where(chosen <= expert, middle + 1, low), tl.where(chosen <= expert, high, middle)
        tl.store(OFFS + expert, tl.where(expert == experts - 1, pairs, low), expert < experts)


def _empty_pairs(order, weights, experts):
    return (
        torch.empty_like(order), torch.empty_like(order), weights.new_empty(order.shape),
        order.new_empty(experts, dtype=torch.int32),
    )  # fmt: skip


@raw(_empty_pairs)
def _sorted_pairs(
    chosen: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, experts: int, k: int,
    *, tokens, position, row_weights, offs,
):  # fmt: skip
    config = sorted_pairs_config(device_of(chosen))
    pairs, block = len(order), config["BLOCK"]
    blocks = -(-pairs // block)
    launch(
        sorted_pairs, (blocks - (-experts // block), 1, 1), config, chosen, order, weights, tokens, position,
        row_weights, offs, pairs, k, experts, blocks, (pairs + 1).bit_length(),
    )  # fmt: skip


def sort_pairs(
    top_k_index: torch.Tensor, top_k_weights: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the pairs of (T, k) by expert, then token, with kernels.

    Returns:
        tokens: (S,) int64, the token of each sorted pair.
        place: (T, k) int64, the sorted row of each pair.
        row_weights: (S,), the routing weights, NaN where the expert is not one of 0 to E - 1.
        offs: (E,) int32, the row after each expert's last. Rows of unknown experts are the first or the last one's.
    """
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    weights = top_k_weights.reshape(-1).contiguous()  # a slice of a sorted row reshapes to a view with a stride
    tokens, position, row_weights, offs = _sorted_pairs(chosen, order, weights, experts, top_k_index.shape[1])
    return tokens, position.view(top_k_index.shape), row_weights, offs
