"""Define liger_kernel's norms and MLPs of single families: general modules with other defaults."""

import torch
from torch import nn

from liger_hw.kernels.moe.experts import experts
from liger_hw.patching.projection import project_down
from liger_hw.transformers.modules import GatedProjections, LigerGEGLUMLP, LigerRMSNorm, LigerSwiGLUMLP, require_silu
from liger_hw.transformers.tiled_mlp import tiled


class LigerRMSNormForGemma(LigerRMSNorm):
    """`LigerRMSNorm` with 1 + weight and one rounding."""

    def __init__(
        self, hidden_size, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=True, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNorm):
    """`LigerRMSNormForGemma` under Gemma 2's name."""

    def __init__(
        self, hidden_size, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma2):
    """`LigerRMSNormForGemma2`."""


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma2):
    """`LigerRMSNormForGemma2`."""


class LigerRMSNormForGemma3(LigerRMSNorm):
    """`LigerRMSNormForGemma` with the width argument `dim`."""

    def __init__(self, dim, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """`LigerRMSNorm` with one rounding; `with_scale=False` leaves out the weight."""

    def __init__(
        self, dim, eps=1e-6, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True
    ):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """`LigerRMSNormForGemma4` that needs no width if it has no weight."""

    def __init__(
        self, dim=None, eps=1e-6, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True
    ):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, with_scale)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """`LigerRMSNorm`."""

    def __init__(
        self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    """`LigerRMSNorm`."""


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP`."""


class LigerMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP`."""

    def __init__(self, config):
        super().__init__(config)


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` that keeps its layer's index as an attribute."""

    def __init__(self, config, layer_idx=None, is_shared_mlp=False):
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` of a config with `hidden_activation` instead of `hidden_act`."""

    def __init__(self, config):
        super().__init__(config)

    @staticmethod
    def activation_of(config):
        return getattr(config, "hidden_activation", None) or config.hidden_act


class LigerFalconH1SwiGLUMLP(GatedProjections):
    """down_proj(silu(gate_proj(x) * a) * up_proj(x)) * b, with (a, b) = config.mlp_multipliers.

    Args:
        config: has hidden_size, intermediate_size, hidden_act ("silu" or "swish"), mlp_multipliers and mlp_bias or not.

    Raises:
        ValueError: another hidden_act.
    """

    def __init__(self, config):
        super().__init__(config, bias=getattr(config, "mlp_bias", False))
        require_silu(config.hidden_act)
        self.gate_multiplier, self.down_multiplier = (float(number) for number in config.mlp_multipliers)

    def forward(self, x):
        return self.gated(self.gate_proj(x) * self.gate_multiplier, x, "silu") * self.down_multiplier


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """`LigerFalconH1SwiGLUMLP`."""


class LigerPhi3SwiGLUMLP(nn.Module):
    """down_proj(silu(gate) * up), gate and up the halves of gate_up_proj(x).

    Raises:
        ValueError: config.hidden_act is not "silu" or "swish".
    """

    def __init__(self, config):
        super().__init__()
        require_silu(config.hidden_act)
        self.config, self.hidden_size, self.intermediate_size = config, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return project_down(self.down_proj, gate, up, "silu", (self.gate_up_proj,))


class LigerBlockSparseTop2MLP(nn.Module):
    """w2(silu(w1(x)) * w3(x)).

    Raises:
        ValueError: config.hidden_act is not "silu" or "swish".
    """

    def __init__(self, config):
        super().__init__()
        require_silu(config.hidden_act)
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x):
        return project_down(self.w2, self.w1(x), self.w3(x), "silu", (self.w1, self.w3))


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """`LigerGEGLUMLP`, twice as wide in KV-sharing layers with config.use_double_wide_mlp."""

    def __init__(self, config, layer_idx=None):
        super().__init__(config)
        shared = getattr(config, "num_kv_shared_layers", 0) or 0
        is_shared = layer_idx is not None and shared > 0 and layer_idx >= config.num_hidden_layers - shared
        if is_shared and getattr(config, "use_double_wide_mlp", False):
            self.make_projections(2 * config.intermediate_size)


class LigerExperts(nn.Module):
    """Mixture of SwiGLU experts: gate_up_proj (E, 2I, H), down_proj (E, H, I).

    Args:
        config: has hidden_size, hidden_act ("silu" or "swish"), num_experts (or num_local_experts or n_routed_experts)
            and moe_intermediate_size (or intermediate_size).

    Raises:
        ValueError: another hidden_act.
    """

    def __init__(self, config):
        super().__init__()
        require_silu(config.hidden_act)
        counts = ("num_experts", "num_local_experts", "n_routed_experts")
        self.num_experts = next(getattr(config, name) for name in counts if hasattr(config, name))
        self.intermediate_dim = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        self.hidden_dim = config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """Apply to hidden_states (..., H) the experts (..., K) with weights (..., K)."""
        k = top_k_index.shape[-1]
        x, index, weights = hidden_states.flatten(0, -2), top_k_index.reshape(-1, k), top_k_weights.reshape(-1, k)
        return experts(x, self.gate_up_proj, self.down_proj, index, weights).view_as(hidden_states)


class _Tiled:
    """Apply the MLP of the next class to pieces of a sequence."""

    def __init__(self, config, num_shards=None):
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x):
        return tiled(_Tiled.piece, self, x, self.num_shards)

    def piece(self, x):
        return super().forward(x)


class LigerTiledSwiGLUMLP(_Tiled, LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` on `num_shards` pieces of the sequence, recomputed in the backward.

    Args:
        num_shards: ceil(length / hidden_size) by default.
    """


class LigerTiledGEGLUMLP(_Tiled, LigerGEGLUMLP):
    """`LigerGEGLUMLP` in pieces: as `LigerTiledSwiGLUMLP`."""
