"""Define TRL's ORPO trainer without logits in memory; needs the package trl."""

import torch
from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel

from liger_hw._torch import is_wrapped_by_fsdp1
from liger_hw.checks import check
from liger_hw.chunked_loss import LigerFusedLinearORPOLoss
from liger_hw.stand_in.fsdp import _FSDPForwardRedirection

try:
    from trl.experimental.orpo import ORPOTrainer
except ImportError:  # before TRL 1.0
    try:
        from trl import ORPOTrainer
    except ImportError as error:
        raise ImportError("LigerORPOTrainer needs the package trl: pip install trl") from error

PADDING = -100


class LigerORPOTrainer(ORPOTrainer):
    """TRL's ORPOTrainer with `LigerFusedLinearORPOLoss`: TRL's loss and metrics up to rounding.

    Raises:
        ValueError: the model's logits are not its head's product alone, as with a softcap, a scale, LoRA of the head or
            prompts of PEFT.
        NotImplementedError: an encoder-decoder model.
    """

    _checked = None

    def concatenated_forward(self, model, batch):
        """Compute (loss, metrics of `LigerFusedLinearORPOLoss`) of a batch of pairs."""
        if self.is_encoder_decoder:
            raise NotImplementedError("LigerORPOTrainer: got an encoder-decoder model, allowed: a decoder")
        pairs = self.concatenated_inputs(batch, padding_value=self.padding_value, device=self.accelerator.device)
        ids, mask = pairs["concatenated_input_ids"], pairs["concatenated_attention_mask"]
        loss = LigerFusedLinearORPOLoss(ignore_index=PADDING, beta=self.beta)

        def run():
            inner = core.get_base_model() if hasattr(core, "get_base_model") else core
            body, head = getattr(inner, inner.base_model_prefix), inner.get_output_embeddings()
            if self._checked != id(inner):
                with self.accelerator.autocast():
                    _check_logits(core, body, head, ids[:1, :2])
                torch.clear_autocast_cache()  # casts of the check have no gradient
                self._checked = id(inner)
            with self.accelerator.autocast():  # accelerate's is around the model's forward alone
                hidden, aux_loss = self._hidden_states(core, body, ids, attention_mask=mask, use_cache=False)
                # the NLL covers prompt and answer, the odds cover the answer
                prompt_and_answer = ids.masked_fill(mask != 1, PADDING)[:, 1:]
                value, metrics = loss(
                    head.weight, hidden[:, :-1], pairs["concatenated_labels"][:, 1:], head.bias, prompt_and_answer
                )
            return value if aux_loss is None else value + self.aux_loss_coef * aux_loss, metrics

        model = model.module if isinstance(model, DataParallel) else model
        wrapped = isinstance(model, DistributedDataParallel) or is_wrapped_by_fsdp1(model)
        core = model.module if wrapped else model
        return _FSDPForwardRedirection()(model, run) if wrapped else run()

    def _hidden_states(self, model, body, ids, **options):
        """Return the last hidden states, and the routers' loss or None."""
        if not self.aux_loss_enabled:
            return body(ids, **options).last_hidden_state, None
        hidden = []
        handle = body.register_forward_hook(lambda _, args, output: hidden.append(output.last_hidden_state))
        try:  # the whole model alone knows the routers' loss
            outputs = model(ids, output_router_logits=True, logits_to_keep=1, **options)
        finally:
            handle.remove()
        return hidden[0], outputs.aux_loss

    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        """Compute (loss, metrics under TRL's names)."""
        loss, outputs = self.concatenated_forward(model, batch)
        chosen, rejected, chosen_logits, rejected_logits, nll, chosen_rewards, rejected_rewards, ratio, odds = outputs
        metrics = {
            "rewards/chosen": chosen_rewards, "rewards/rejected": rejected_rewards,
            "rewards/accuracies": (chosen_rewards > rejected_rewards).float(),
            "rewards/margins": chosen_rewards - rejected_rewards, "logps/rejected": rejected, "logps/chosen": chosen,
            "logits/rejected": rejected_logits, "logits/chosen": chosen_logits, "nll_loss": nll,
            "log_odds_ratio": ratio, "log_odds_chosen": odds,
        }  # fmt: skip
        prefix = "eval_" if train_eval == "eval" else ""
        gather = self.accelerator.gather_for_metrics
        return loss, {f"{prefix}{name}": gather(value.detach()).mean().item() for name, value in metrics.items()}


def _check_logits(model, body, head, ids):
    """Raise a ValueError unless the logits are the head's product with the body's states."""
    devices = [] if ids.device.type == "cpu" else [ids.device]

    def run(module):
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=ids.device.type):  # equal dropout in each
            return module(ids, use_cache=False)

    hidden, logits = run(body).last_hidden_state, run(model).logits
    with torch.enable_grad():
        product = torch.nn.functional.linear(hidden, head.weight, head.bias)
        learning = [parameter for parameter in head.parameters() if parameter.requires_grad]
        reached = learning and product.requires_grad
        used = torch.autograd.grad(product.sum(), learning, allow_unused=True) if reached else [None] * len(learning)
    fits = torch.equal(logits.to(product.dtype), product) and all(gradient is not None for gradient in used)
    check(
        fits, "model", type(model).__name__, "one whose logits are its head's product with its last hidden states, "
        "without a softcap, a scale, LoRA or prompts: train another one by trl's ORPOTrainer, after liger_hw.patch",
    )  # fmt: skip
