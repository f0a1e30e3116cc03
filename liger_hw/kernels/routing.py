r"""Sort pairs of a token and one of its experts by expert, without a wait for the device.

    order = argsort(index, stable)          tokens[i]   = order[i] / k              position[order[i]] = i
    weights[i] = w[order[i]]                offs[e]     = pairs whose expert is at most e

`torch.sort` is the first launch and one kernel the second, instead of eight of torch's. Letters: S = T k pairs.
"""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.dispatch import raw
from liger_hw.launch import launch
from liger_hw.tuning import Config, row_warps, tuned


@tuned
def sorted_pairs_config(device):
    return Config({"BLOCK": 512}, row_warps(512, device, 4))


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
    else:  # each lane searches the end of one expert's pairs
        expert = at - blocks.to(tl.int64) * BLOCK
        low = tl.zeros([BLOCK], tl.int32)
        high = low + pairs
        for _ in range(steps):
            middle = (low + high) // 2
            chosen = tl.load(CHOSEN + middle, (expert < experts) & (middle < pairs), other=2147483647)
            low, high = tl.where(chosen <= expert, middle + 1, low), tl.where(chosen <= expert, high, middle)
        tl.store(OFFS + expert, low, expert < experts)


def _fake(chosen, order, weights, experts, k):
    return (
        torch.empty_like(order), torch.empty_like(order), weights.new_empty(order.shape),
        order.new_empty(experts, dtype=torch.int32),
    )  # fmt: skip


@raw(_fake)
def _sorted_pairs(
    chosen: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, experts: int, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, position, row_weights, offs = _fake(chosen, order, weights, experts, k)
    config = sorted_pairs_config(device_of(chosen))
    pairs, block = len(order), config["BLOCK"]
    blocks = -(-pairs // block)
    launch(
        sorted_pairs, (blocks - (-experts // block), 1, 1), config, chosen, order, weights, tokens, position,
        row_weights, offs, pairs, k, experts, blocks, (pairs + 1).bit_length(),
    )  # fmt: skip
    return tokens, position, row_weights, offs


def sort_pairs(
    top_k_index: torch.Tensor, top_k_weights: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the pairs of (T, k) by expert, then token, with kernels.

    Returns:
        tokens: (S,) int64, the token of each sorted pair.
        place: (T, k) int64, the sorted row of each pair.
        row_weights: (S,), the routing weights, NaN where the expert is not one of 0 to E - 1.
        offs: (E,) int32, the row after each expert's last.
    """
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    weights = top_k_weights.reshape(-1)
    tokens, position, row_weights, offs = _sorted_pairs(chosen, order, weights, experts, top_k_index.shape[1])
    return tokens, position.view(top_k_index.shape), row_weights, offs
