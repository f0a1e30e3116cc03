"""The names of `liger_kernel.chunked_loss`, with its signatures, defaults and outputs.

Each calls a loss of `liger_hw.losses`. `compiled` and `chunk_size` are accepted without effect: nothing needs
compiling, and a memory budget sets the number of tokens in a chunk. The chunk size does not change the numbers.
"""

from liger_hw._lazy import lazy_names

_NAMES = {
    "preference": (
        "LigerFusedLinearCPOLoss", "LigerFusedLinearDPOLoss", "LigerFusedLinearKTOLoss", "LigerFusedLinearORPOLoss",
        "LigerFusedLinearSimPOLoss",
    ),
    "grpo_loss": ("LigerFusedLinearGRPOLoss",),
    "distillation": ("LigerFusedLinearCosineSimilarityLoss", "LigerFusedLinearJSDLoss"),
}  # fmt: skip

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
