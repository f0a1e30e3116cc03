"""Define liger_kernel's modules that no model of its list has, with their parameters.

modules.py has the others.
"""

import torch
from torch import nn

from liger_hw.checks import check
from liger_hw.kernels.attention.neighborhood_attention import neighborhood_attention
from liger_hw.kernels.vocabulary.embedding import embedding
from liger_hw.losses.options import OptionsModule
from liger_hw.transformers import functional
from liger_hw.transformers.modules import LigerLayerNorm
from liger_hw.transformers.vocab_parallel import check_smoothing, vocab_parallel_cross_entropy


class LigerReLUSquared(nn.Module):
    """relu(x) squared."""

    def __init__(self):
        super().__init__()

    def forward(self, x):
        return functional.liger_relu_squared(x)


class LigerSoftmax(nn.Module):
    """`liger_hw.softmax` as a module."""

    def __init__(self):
        super().__init__()

    def forward(self, x):
        return functional.liger_softmax(x)


class LigerSparsemax(OptionsModule):
    """`liger_hw.sparsemax` along `dim`."""

    def __init__(self, dim=-1):
        super().__init__(locals())

    def forward(self, x):
        return functional.liger_sparsemax(x, self.dim)


class LigerMultiTokenAttention(nn.Module):
    """Multi-token attention of scores (B, C, L, L); arguments as torch.nn.Conv2d."""

    def __init__(
        self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=True, sparse=False
    ):
        super().__init__()
        conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        self.in_channels, self.out_channels, self.groups, self.sparse = in_channels, out_channels, groups, sparse
        self.kernel_size, self.stride, self.padding = conv.kernel_size, conv.stride, conv.padding
        self.dilation, self.weight = conv.dilation, conv.weight
        self.register_parameter("bias", conv.bias)

    def reset_parameters(self):
        """Give weight and bias new random values, as torch.nn.Conv2d's constructor does."""
        nn.Conv2d.reset_parameters(self)

    def forward(self, scores):
        return functional.liger_multi_token_attention(
            scores, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.sparse
        )


class LigerFusedNeighborhoodAttention(nn.Module):
    """Self-attention (B, L, H) of each position to its neighbourhood: see `neighborhood_attention`.

    Raises:
        ValueError: the heads do not divide the width, the kernel size is even, or the call has an attention mask.
    """

    def __init__(self, hidden_size, num_heads, kernel_size=7, dilation=1, bias=True, dropout=0.0, scale=None):
        super().__init__()
        check(hidden_size % num_heads == 0, "num_heads", num_heads, f"a divisor of hidden_size ({hidden_size})")
        check(kernel_size % 2 == 1, "kernel_size", kernel_size, "an odd number")
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.kernel_size, self.dilation, self.dropout_p = kernel_size, dilation, dropout
        self.scale = self.head_dim**-0.5 if scale is None else scale
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(hidden_size, hidden_size, bias))
        self.dropout = nn.Dropout(dropout) if dropout > 0 else None

    def forward(self, hidden_states, attention_mask=None):
        check(attention_mask is None, "attention_mask", type(attention_mask).__name__, "None")
        query, key, value = (
            project(hidden_states).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = neighborhood_attention(query, key, value, self.kernel_size, self.dilation, self.scale)
        attended = attended.transpose(1, 2).flatten(-2)
        return self.out_proj(attended if self.dropout is None else self.dropout(attended))


class LigerFusedNeighborhoodAttentionLayer(nn.Module):
    """x + attention(layer_norm(x))."""

    def __init__(
        self, hidden_size, num_heads, kernel_size=7, dilation=1, bias=True, dropout=0.0, layer_norm_eps=1e-5, scale=None
    ):
        super().__init__()
        self.attention = LigerFusedNeighborhoodAttention(
            hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale
        )
        self.layer_norm = LigerLayerNorm(hidden_size, layer_norm_eps)
        self.dropout = nn.Dropout(dropout) if dropout > 0 else None

    def forward(self, hidden_states, attention_mask=None):
        attended = self.attention(self.layer_norm(hidden_states), attention_mask)
        return hidden_states + (attended if self.dropout is None else self.dropout(attended))


class LigerFusedNeighborhoodAttentionConfig:
    """The arguments of `LigerFusedNeighborhoodAttentionLayer`."""

    def __init__(
        self, hidden_size=768, num_heads=12, kernel_size=7, dilation=1, bias=True, dropout=0.0, layer_norm_eps=1e-5,
        scale=None,
    ):  # fmt: skip
        self.hidden_size, self.num_heads, self.kernel_size = hidden_size, num_heads, kernel_size
        self.dilation, self.bias, self.dropout = dilation, bias, dropout
        self.layer_norm_eps, self.scale = layer_norm_eps, scale

    def to_dict(self):
        return dict(vars(self))


class LigerMHC(OptionsModule):
    """Hyper-connections of streams (..., hc, c) around `layer`: (..., c) -> (..., c).

    Args:
        tmax: Sinkhorn iterations.
        phi_dtype: dtype of the projection that computes the coefficients.
        allow_fp32: whether x may be wider than bf16 and fp16.
    """

    def __init__(
        self, layer, *, hc, c, tmax=20, rms_eps=1e-6, pre_eps=0.0, sinkhorn_eps=1e-6, post_mult=2.0,
        phi_dtype=torch.float16, allow_fp32=False,
    ):  # fmt: skip
        super().__init__(locals())
        parameter = next(layer.parameters(), None)
        device = None if parameter is None else parameter.device
        width = hc * hc + 2 * hc
        self.phi = nn.Parameter(torch.randn(hc * c, width, dtype=phi_dtype, device=device) * 0.02)
        self.b = nn.Parameter(torch.zeros(width, device=device))
        for name in ("alpha_pre", "alpha_post", "alpha_res"):
            setattr(self, name, nn.Parameter(torch.ones((), device=device)))

    def forward(self, x):
        check(x.shape[-2:] == (self.hc, self.c), "x", tuple(x.shape), f"(..., {self.hc}, {self.c})")
        return functional.liger_mhc_forward(
            x, self.layer, self.phi, self.b, self.alpha_pre, self.alpha_post, self.alpha_res,
            allow_fp32=self.allow_fp32, tmax=self.tmax, rms_eps=self.rms_eps, pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps, post_mult=self.post_mult,
        )  # fmt: skip

    def extra_repr(self):
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}"


class LigerEmbedding(OptionsModule):
    """`liger_hw.embedding` of a weight (num_embeddings, embedding_dim)."""

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None):
        super().__init__(locals())
        self.weight = nn.Parameter(torch.randn(num_embeddings, embedding_dim))
        if padding_idx is not None:
            self.weight.data[padding_idx] = 0

    def forward(self, indices):
        return embedding(self.weight, indices, self.padding_idx)


class LigerVocabParallelCrossEntropy(OptionsModule):
    """`vocab_parallel_cross_entropy` of logits (S, B, V / ranks) and targets (S, B): fp32 (S, B).

    Raises:
        ValueError: a reduction other than "none", or an option out of its range.
    """

    def __init__(
        self, ignore_index=-100, label_smoothing=0.0, reduction="none", label_smoothing_formula="pytorch",
        label_smoothing_mode="global",
    ):  # fmt: skip
        super().__init__(locals())
        if reduction != "none":
            raise ValueError(f"reduction must be 'none', the loss of each token, got {reduction!r}")
        check_smoothing(label_smoothing, label_smoothing_formula, label_smoothing_mode)

    def forward(self, vocab_parallel_logits, target, tp_group=None):
        return vocab_parallel_cross_entropy(
            vocab_parallel_logits, target, tp_group, self.ignore_index, self.label_smoothing,
            self.label_smoothing_formula, self.label_smoothing_mode,
        )  # fmt: skip

    def extra_repr(self):
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
