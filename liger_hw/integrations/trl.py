"""The chunked log-probabilities of TRL 1.15 and later, by this library's `fused_linear_selective_log_softmax`.

    liger_hw.integrations.accelerate_trl()      # before or after the trainer is built, before it trains

It serves SFT, DPO, KTO, GRPO and RLOO with all that they ask for: log-probabilities, entropy, mean logits, whether a
token is the likeliest, and sums of squared probabilities. Weights that ZeRO-3 has sharded stay with TRL's own function,
as do 16-bit hidden states with a head in another dtype, which TRL rounds to theirs.
"""

import functools
import importlib

import torch

from liger_hw.kernels.vocabulary.chunked_head import MiB
from liger_hw.kernels.vocabulary.cross_entropy.formula import check_accum_dtype
from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import fused_linear_selective_log_softmax
from liger_hw.kernels.vocabulary.selective_log_softmax import SelectedLogProbs
from liger_hw.losses.arguments import check_numbers

OPTIONAL_OUTPUTS = ("entropy", "is_top1", "mean_logits", "log_sum_sq_probs")  # also names of `SelectedLogProbs`
FUNCTION = "_ChunkedLogProbFunction"  # the name under which `trl.trainer.utils` calls it


class ChunkedLogProbs:
    """Serves in place of TRL's autograd function.

    Args:
        original: TRL's own, for calls that the op does not serve.
        options: of `fused_linear_selective_log_softmax`, in every call.
    """

    def __init__(self, original, options):
        self.original, self.options = original, options

    def apply(
        self, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0,
        outputs=("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ):  # fmt: skip
        """Compute log-probabilities of hidden (N, H) under weight (V, H), with TRL's arguments.

        Args:
            chunk_size: without effect: `chunk_memory` decides.
            others: TRL's.

        Returns:
            (log-probabilities, entropy, log of the sum of squared probabilities, mean logits, is likeliest), (N,) each,
            fp32 but for the bool; each but the first None unless `outputs` names it. The last three have no gradient.
        """
        whole = all(type(x) in (torch.Tensor, torch.nn.Parameter) and not hasattr(x, "ds_id") for x in (hidden, weight))
        fits = hidden.dtype in (weight.dtype, torch.float32) and (bias is None or bias.dtype == weight.dtype)
        fits = fits or torch.is_autocast_enabled(hidden.device.type)
        if not (fits and whole and set(outputs) <= {"log_probs", *OPTIONAL_OUTPUTS}):
            return self.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )
        asked = {f"return_{name}": name in outputs for name in OPTIONAL_OUTPUTS}
        output = fused_linear_selective_log_softmax(
            hidden, weight, targets, bias, temperature, final_logit_softcapping, logit_scale, **self.options, **asked
        )
        output = output if any(asked.values()) else SelectedLogProbs(output)
        return output.log_probs, output.entropy, output.log_sum_sq_probs, output.mean_logits, output.is_top1


@functools.cache
def original_function():
    """(module, its own function) of the TRL that is installed."""
    module = importlib.import_module("trl.trainer.utils")
    function = getattr(module, FUNCTION, None)
    if function is None:
        trl = importlib.import_module("trl")
        raise RuntimeError(f"trl {trl.__version__} has no {FUNCTION} in trl.trainer.utils: 1.15 and later have")
    return module, function


def accelerate_trl(chunk_memory: float = 512 * MiB, accum_dtype: torch.dtype | None = None):
    """Let TRL's trainers compute log-probabilities by this library, until `restore_trl`.

    Args:
        chunk_memory: bytes that a chunk of logits may take.
        accum_dtype: torch.float32 adds up the chunks' gradients of the head in fp32, as TRL does, for 4 bytes a value.

    Raises:
        RuntimeError: this TRL does not compute them in a function of its own; 1.15 and later do.
        ValueError: an option is out of its range.

    Examples:
        >>> liger_hw.integrations.accelerate_trl()  # doctest: +SKIP
    """
    check_numbers("a positive number of bytes", above=0, chunk_memory=chunk_memory)
    check_accum_dtype(accum_dtype)
    module, function = original_function()
    setattr(module, FUNCTION, ChunkedLogProbs(function, {"chunk_memory": chunk_memory, "accum_dtype": accum_dtype}))


def restore_trl():
    """Undo `accelerate_trl`.

    Examples:
        >>> liger_hw.integrations.restore_trl()  # doctest: +SKIP
    """
    module, function = original_function()
    setattr(module, FUNCTION, function)
