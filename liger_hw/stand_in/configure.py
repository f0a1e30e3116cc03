"""Define `liger_kernel.ops.configure` without effect, as this library has no native kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FusedLinearCrossEntropyConfig:
    """Capacity of a native fused loss, without effect."""

    max_tokens: int
    hidden_size: int
    local_vocab_size: int
    group: str | None = None
    tiles_per_reduce: int = 1


@dataclass(frozen=True)
class MoEConfig:
    """Capacity of native experts, without effect."""

    max_tokens: int
    hidden_size: int
    num_experts: int
    top_k: int
    num_hosts: int
    gpus_per_host: int
    group: str | None = None
    max_inflight: int = 1


def configure(*, process_groups=None, bootstrap_group=None, device=None, flsce=None, moe=None):
    """Return False, as liger_kernel does without its native package."""
    return False
