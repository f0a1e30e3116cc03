"""Train Medusa heads (arXiv:2401.10774) on a frozen model, without their logits."""

import common
import torch
from torch import nn
from torch.nn.functional import cross_entropy, silu
from transformers import Trainer, TrainingArguments, default_data_collator

import liger_hw

HEADS, DECAY, IGNORED = 3, 0.8, -100


def shifted(labels, ahead):
    return nn.functional.pad(labels[:, ahead:], (0, ahead), value=IGNORED).reshape(-1)


def plain_loss(states, weights, labels):
    return sum(
        DECAY**k * cross_entropy((x @ w.T).float().flatten(0, 1), shifted(labels, k + 2), ignore_index=IGNORED)
        for k, (x, w) in enumerate(zip(states, weights))
    )


def liger_hw_loss(states, weights, labels):
    shifts, shares = range(2, HEADS + 2), [DECAY**k for k in range(HEADS)]
    return liger_hw.multi_token_loss(states, weights, labels, shifts=shifts, head_weights=shares).loss


def peer_loss(states, weights, labels):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)
    return sum(
        DECAY**k * loss(w, x.flatten(0, 1), shifted(labels, k + 2)) for k, (x, w) in enumerate(zip(states, weights))
    )


LOSSES = {common.PLAIN: plain_loss, common.OURS: liger_hw_loss, common.PEER: peer_loss}


class Medusa(nn.Module):
    """Add heads to a frozen language model.

    Each head is a residual block and an output layer, a copy of the model's at first.
    """

    def __init__(self, base, provider):
        super().__init__()
        self.base, self.loss = base.requires_grad_(False), LOSSES[provider]
        weight = base.lm_head.weight
        hidden, like = weight.shape[1], {"dtype": weight.dtype, "device": weight.device}
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden, **like) for _ in range(HEADS))
        for block in self.blocks:
            nn.init.zeros_(block.weight), nn.init.zeros_(block.bias)
        self.outputs = nn.ParameterList(nn.Parameter(weight.detach().clone()) for _ in range(HEADS))

    def forward(self, input_ids, labels):
        with torch.no_grad():
            hidden = self.base.model(input_ids).last_hidden_state
        states = [hidden + silu(block(hidden)) for block in self.blocks]
        return {"loss": self.loss(states, list(self.outputs), labels)}


def main():
    args = common.arguments(__doc__)
    base, tokenizer = common.model_and_tokenizer(args)
    common.provide(args, base)  # liger_hw.patch(model)
    model, meter = Medusa(base, args.provider), common.Meter(args)
    Trainer(
        model,
        TrainingArguments(**common.trainer_arguments(args)),
        train_dataset=common.sequences(args, tokenizer),
        data_collator=default_data_collator,
        callbacks=[meter],
    ).train()
    return meter.finish("medusa", model)


if __name__ == "__main__":
    main()
