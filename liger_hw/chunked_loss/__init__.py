"""The names of `liger_kernel.chunked_loss`: its signatures, defaults and outputs, thin over `liger_hw.losses`.

`compiled` and `chunk_size` are accepted without effect: nothing needs compiling, and a memory budget decides how many
tokens a chunk has. Any chunking gives the same numbers.
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
