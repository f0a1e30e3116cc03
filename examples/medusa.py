"""Train Medusa heads (arXiv:2401.10774) without their logits, on a frozen model or together with it.

python examples/medusa.py                           # stage 1, three heads
python examples/medusa.py --stage 2 --heads 5       # the model learns, too
accelerate launch --config_file examples/fsdp2.yaml examples/medusa.py     # two GPUs, or by torchrun
"""

import common
import torch
from torch import nn
from torch.nn.functional import cross_entropy, silu

import liger_hw

DECAY, BESIDE, IGNORED = 0.8, 0.2, -100  # BESIDE: the weight of Medusa's loss beside the model's own


def shifted(labels, ahead):
    return nn.functional.pad(labels[:, ahead:], (0, ahead), value=IGNORED).reshape(-1)


def plain_loss(states, weights, labels, shifts, shares):
    return sum(
        share * cross_entropy((x @ w.T).float().flatten(0, 1), shifted(labels, ahead), ignore_index=IGNORED)
        for x, w, ahead, share in zip(states, weights, shifts, shares)
    )


def liger_hw_loss(states, weights, labels, shifts, shares):
    return liger_hw.multi_token_loss(states, weights, labels, shifts=shifts, head_weights=shares).loss


def peer_loss(states, weights, labels, shifts, shares):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)
    return sum(
        share * loss(w, x.flatten(0, 1), shifted(labels, ahead))
        for x, w, ahead, share in zip(states, weights, shifts, shares)
    )


LOSSES = {common.PLAIN: plain_loss, common.OURS: liger_hw_loss, common.PEER: peer_loss}


class Medusa(nn.Module):
    """Add heads to a language model, which stage 1 freezes.

    Each head is a residual block and an output layer, a copy of the model's at first.
    """

    def __init__(self, base, args):
        super().__init__()
        self.loss, self.together = LOSSES[args.provider], args.stage == 2
        self.base = base.requires_grad_(self.together)
        self._no_split_modules = base._no_split_modules  # the layers, which accelerate shards one by one
        weight = base.lm_head.weight
        hidden, like = weight.shape[1], {"dtype": weight.dtype, "device": weight.device}
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden, **like) for _ in range(args.heads))
        for block in self.blocks:
            nn.init.zeros_(block.weight), nn.init.zeros_(block.bias)
        self.outputs = nn.ParameterList(nn.Parameter(weight.detach().clone()) for _ in range(args.heads))

    def forward(self, input_ids, labels):
        with torch.set_grad_enabled(self.together):
            hidden = self.base.model(input_ids, use_cache=False).last_hidden_state
        states, weights = [hidden + silu(block(hidden)) for block in self.blocks], list(self.outputs)
        shifts, shares = range(2, len(states) + 2), [DECAY**k for k in range(len(states))]
        if self.together:
            states, weights = [hidden, *states], [self.base.lm_head.weight, *weights]
            shifts, shares = range(1, len(states) + 1), [1.0, *(BESIDE * share for share in shares)]
        return {"loss": self.loss(states, weights, labels, shifts, shares)}


def main():
    args = common.arguments(__doc__, stage=1, heads=3)
    base, tokenizer = common.model_and_tokenizer(args)
    common.provide(args, base)  # liger_hw.patch(model)
    return common.train(args, "medusa", Medusa(base, args), common.sequences(args, tokenizer))


if __name__ == "__main__":
    main()
