"""The chunked log-probabilities of TRL 1.15 and later, by this library's `fused_linear_selective_log_softmax`.

    liger_hw.integrations.accelerate_trl()      # before or after the trainer is built, before it trains

Log-probabilities, entropy and the mean logit: GRPO, RLOO, KTO, and the reference models of DPO. Calls that also ask
for the likeliest token or the sum of squared probabilities (SFT, DPO) stay with TRL's own function, as do weights that
ZeRO-3 has sharded, and mean logits of a model with a softcap.
"""

import functools
import importlib

import torch

from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import fused_linear_selective_log_softmax

SERVED = {"log_probs", "entropy", "mean_logits"}
FUNCTION = "_ChunkedLogProbFunction"  # the name under which `trl.trainer.utils` calls it


class ChunkedLogProbs:
    """Serves in place of TRL's autograd function.

    Args:
        original: TRL's own, for calls that the op does not serve.
    """

    def __init__(self, original):
        self.original = original

    def apply(
        self, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0,
        outputs=("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ):  # fmt: skip
        """Compute log-probabilities of hidden (N, H) under weight (V, H), with TRL's arguments.

        Args:
            chunk_size: without effect: a memory budget decides.
            others: TRL's.

        Returns:
            (log-probabilities, entropy, None, mean logits, None), fp32 (N,) each; entropy and mean logits None unless
            `outputs` names them. The mean logits have no gradient.
        """
        whole = all(type(x) in (torch.Tensor, torch.nn.Parameter) and not hasattr(x, "ds_id") for x in (hidden, weight))
        alike = hidden.dtype == weight.dtype or torch.is_autocast_enabled(hidden.device.type)
        served = SERVED if final_logit_softcapping is None else SERVED - {"mean_logits"}
        if not (set(outputs) <= served and whole and alike):
            return self.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )
        wants_entropy = "entropy" in outputs
        output = fused_linear_selective_log_softmax(
            hidden, weight, targets, bias, temperature, final_logit_softcapping, logit_scale,
            return_entropy=wants_entropy,
        )  # fmt: skip
        log_probs, entropy = (output.log_probs, output.entropy) if wants_entropy else (output, None)
        mean = None
        if "mean_logits" in outputs:
            with torch.no_grad():  # the mean over the vocabulary commutes with the product
                mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
                mean = (mean if bias is None else mean + bias.float().mean()) * (logit_scale / temperature)
        return log_probs, entropy, None, mean, None


@functools.cache
def original_function():
    """(module, its own function) of the TRL that is installed."""
    module = importlib.import_module("trl.trainer.utils")
    function = getattr(module, FUNCTION, None)
    if function is None:
        trl = importlib.import_module("trl")
        raise RuntimeError(f"trl {trl.__version__} has no {FUNCTION} in trl.trainer.utils: 1.15 and later have")
    return module, function


def accelerate_trl():
    """Let TRL's trainers compute log-probabilities by this library, until `restore_trl`.

    Raises:
        RuntimeError: this TRL does not compute them in a function of its own; 1.15 and later do.
    """
    module, function = original_function()
    setattr(module, FUNCTION, ChunkedLogProbs(function))


def restore_trl():
    """Undo `accelerate_trl`."""
    module, function = original_function()
    setattr(module, FUNCTION, function)
