"""Train on preferences by ORPO (arXiv:2403.07691) with the Hugging Face Trainer, without logits.

python examples/orpo.py
accelerate launch --config_file examples/fsdp2.yaml examples/orpo.py     # two GPUs, or by torchrun
"""

import common
import torch
from torch.nn.functional import logsigmoid

import liger_hw

BETA, IGNORED = 0.1, -100


def plain_loss(hidden, weight, labels):
    logits = (hidden @ weight.T).float()
    answered = labels != IGNORED
    log_probs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * answered
    chosen, rejected = (log_probs.sum(1) / answered.sum(1)).chunk(2)
    odds = chosen - rejected - torch.log(-torch.expm1(chosen)) + torch.log(-torch.expm1(rejected))
    pairs = len(labels) // 2
    return -log_probs[:pairs].sum() / answered[:pairs].sum() - BETA * logsigmoid(odds).mean()


def liger_hw_loss(hidden, weight, labels):
    return liger_hw.preference_loss(
        hidden, weight, labels, loss_type="orpo", beta=BETA, alpha=1.0, average_log_prob=True
    ).loss


def peer_loss(hidden, weight, labels):
    from liger_kernel.chunked_loss import LigerFusedLinearORPOLoss

    return LigerFusedLinearORPOLoss(beta=BETA)(weight, hidden, labels)[0]


LOSSES = {common.PLAIN: plain_loss, common.OURS: liger_hw_loss, common.PEER: peer_loss}


class ORPO(torch.nn.Module):
    """Compute ORPO's loss; a batch has the chosen answers, then the rejected ones.

    The loss is a part of the forward, because FSDP shows the head's weight to the forward of a whole module alone.
    """

    def __init__(self, model, provider):
        super().__init__()
        self.model, self.loss = model, LOSSES[provider]
        self._no_split_modules = model._no_split_modules  # the layers, which accelerate shards one by one

    def forward(self, labels, **inputs):
        hidden = self.model.model(**inputs).last_hidden_state
        return {"loss": self.loss(hidden[:, :-1], self.model.lm_head.weight, labels[:, 1:])}


def collator(tokenizer, longest):
    """Make a collator of rows to a batch: chosen answers, then rejected ones."""

    def collate(rows):
        answers = []
        for name in ("chosen", "rejected"):
            for row in rows:
                prompt = tokenizer(row["prompt"])["input_ids"][: longest // 2]
                answer = tokenizer(row[name])["input_ids"] + [tokenizer.eos_token_id]
                answers.append((prompt, answer[: longest - len(prompt)]))
        ids = torch.full((len(answers), longest), tokenizer.pad_token_id)
        labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
        for i, (prompt, answer) in enumerate(answers):
            end = len(prompt) + len(answer)
            ids[i, :end] = torch.tensor(prompt + answer)
            labels[i, len(prompt) : end] = torch.tensor(answer)
            mask[i, :end] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return collate


def main():
    args = common.arguments(__doc__, batch=2)
    model, tokenizer = common.model_and_tokenizer(args)
    common.provide(args, model)  # liger_hw.patch(model)
    model, collate = ORPO(model, args.provider), collator(tokenizer, args.seq)
    return common.train(args, "orpo", model, common.preferences(args), collate, 2 * args.batch * args.seq)


if __name__ == "__main__":
    main()
