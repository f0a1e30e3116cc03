"""Define the ops as modules with the names and arguments of `liger_kernel.transformers`.

Arguments by which liger_kernel's kernels reuse memory (`in_place`, `row_mode`) become attributes without effect: these
modules never write over their caller's tensors.
"""

import torch
from torch import nn

from liger_hw.checks import check
from liger_hw.kernels.norms.dyt import dyt
from liger_hw.kernels.norms.gated_rms_norm import modulated_rms_norm
from liger_hw.kernels.norms.group_norm import group_norm
from liger_hw.kernels.norms.l2_norm import l2_norm
from liger_hw.kernels.norms.layer_norm import layer_norm
from liger_hw.kernels.norms.poly_norm import poly_norm
from liger_hw.kernels.norms.rms_norm import fused_add_rms_norm, rms_norm
from liger_hw.kernels.vocabulary.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_hw.losses.options import OptionsModule
from liger_hw.patching.projection import project_down
from liger_hw.transformers.functional import liger_cross_entropy, liger_rope

liger_rotary_pos_emb = liger_rope
INITIALISERS = {"ones": torch.ones, "zeros": torch.zeros}


class OptionError(ValueError, AssertionError):
    """Error of an option out of its range; also an AssertionError, as in liger_kernel."""


def check_option(condition, message):
    """Raise an `OptionError` unless `condition` holds."""
    if not condition:
        raise OptionError(message)


def initial_weight(init_fn, size):
    """Return a parameter of ones or zeros, as `init_fn` says."""
    check_option(init_fn in INITIALISERS, f"init_fn must be one of {list(INITIALISERS)}. Got: {init_fn!r}")
    return nn.Parameter(INITIALISERS[init_fn](size))


class LigerRMSNorm(nn.Module):
    """`rms_norm` with its weight.

    Args:
        hidden_size: width of the rows.
        eps: added to the mean square.
        offset: added to the weight; 1.0 for Gemma, with init_fn="zeros".
        casting_mode: "llama", "gemma" or "none": see `liger_hw.rms_norm`.
        init_fn: "ones" or "zeros".
        in_place, row_mode: without effect.
        elementwise_affine: whether to have a weight.

    Examples:
        >>> liger_hw.LigerRMSNorm(8)(torch.rand(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=True, row_mode=None,
        elementwise_affine=True,
    ):  # fmt: skip
        super().__init__()
        self.register_parameter("weight", initial_weight(init_fn, hidden_size) if elementwise_affine else None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode, self.elementwise_affine = in_place, row_mode, elementwise_affine

    def forward(self, hidden_states):
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    def extra_repr(self):
        size = None if self.weight is None else tuple(self.weight.shape)
        return f"{size}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """`fused_add_rms_norm`, which returns (normalised sum, sum); arguments as `LigerRMSNorm`.

    Examples:
        >>> normed, residual = liger_hw.LigerFusedAddRMSNorm(8)(torch.rand(2, 8), torch.rand(2, 8))
    """

    def __init__(self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place)

    def forward(self, hidden_states, residual):
        eps, offset, mode = self.variance_epsilon, self.offset, self.casting_mode
        return fused_add_rms_norm(hidden_states, residual, self.weight, eps, offset, mode)


class LigerModulatedRMSNorm(LigerRMSNorm):
    """`modulated_rms_norm` with its weight; arguments as `LigerRMSNorm`."""

    def __init__(
        self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=True,
        elementwise_affine=True,
    ):  # fmt: skip
        super().__init__(
            hidden_size, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=elementwise_affine
        )

    def forward(self, hidden_states, scale, shift=None):
        eps, offset, mode = self.variance_epsilon, self.offset, self.casting_mode
        return modulated_rms_norm(hidden_states, self.weight, scale, shift, eps, offset, mode)


class LigerLayerNorm(nn.Module):
    """`layer_norm` with weight and bias.

    Args:
        hidden_size: width of the rows.
        eps: added to the variance.
        bias: no effect: the module always has a bias, which starts at zero.
        init_fn: "ones" or "zeros", of the weight.
        impl, mode, backend: None, or a name of Triton: one implementation serves each device.

    Examples:
        >>> liger_hw.LigerLayerNorm(8)(torch.rand(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(self, hidden_size, eps=1e-6, bias=False, init_fn="ones", impl=None, mode=None, backend=None):
        super().__init__()
        for name, value in {"impl": impl, "mode": mode, "backend": backend}.items():
            check(value is None or "triton" in str(value), name, repr(value), "None or triton")
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight, self.bias = initial_weight(init_fn, hidden_size), nn.Parameter(torch.zeros(hidden_size))

    def forward(self, hidden_states):
        return layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self):
        return f"{self.hidden_size}, eps={self.eps}"


class LigerGroupNorm(nn.Module):
    """`group_norm` with weight and bias: `torch.nn.GroupNorm`, with the number of channels first.

    Args:
        bias: no effect: the module always has a bias, which starts at zero.
        init_fn: "ones" or "zeros", of the weight.
    """

    def __init__(self, num_channels, num_groups, eps=1e-6, bias=False, init_fn="ones"):
        super().__init__()
        divides = num_channels % num_groups == 0
        check_option(divides, f"num_groups must divide the {num_channels} channels. Got: {num_groups}")
        self.num_channels, self.num_groups, self.eps, self.variance_epsilon = num_channels, num_groups, eps, eps
        self.weight, self.bias = initial_weight(init_fn, num_channels), nn.Parameter(torch.zeros(num_channels))

    def forward(self, hidden_states):
        return group_norm(hidden_states, self.weight, self.bias, self.num_groups, self.variance_epsilon)

    def extra_repr(self):
        return f"{self.num_channels}, {self.num_groups}, eps={self.eps}"


class LigerL2Norm(OptionsModule):
    """`l2_norm`.

    Args:
        eps: added to the sum of squares.
        casting_mode: "gemma" or "none": see `liger_hw.l2_norm`.
    """

    def __init__(self, eps=1e-6, casting_mode="gemma"):
        super().__init__(locals())

    def forward(self, hidden_states):
        return l2_norm(hidden_states, self.eps, self.casting_mode)

    def extra_repr(self):
        return f"eps={self.eps}, casting_mode={self.casting_mode!r}"


class LigerPolyNorm(nn.Module):
    """`poly_norm` with three weights, initially 1/3 each, and a bias, initially 1."""

    def __init__(self, eps=1e-6, in_place=True):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.full((3,), 1 / 3)), nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states):
        return poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)


class LigerDyT(nn.Module):
    """`dyt` with its parameters.

    Args:
        beta: whether to have beta.
        init_alpha: initial alpha; initially gamma is one and beta zero.
    """

    def __init__(self, hidden_size, beta=True, init_alpha=0.5):
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha, self.gamma = nn.Parameter(torch.ones(1) * init_alpha), nn.Parameter(torch.ones(hidden_size))
        self.register_parameter("beta", nn.Parameter(torch.zeros(hidden_size)) if beta else None)

    def forward(self, x):
        return dyt(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self):
        return f"{self.hidden_size}, init_alpha={self.init_alpha}, beta={self.beta is not None}"


def require_silu(activation):
    """Raise a ValueError unless `activation` is one of SiLU's two names."""
    check(activation in ("silu", "swish"), "config.hidden_act", repr(activation), "silu, swish")


class GatedProjections(nn.Module):
    """Hold the projections of a gated MLP."""

    def __init__(self, config, intermediate_size=None, bias=False):
        super().__init__()
        self.config, self.hidden_size = config, config.hidden_size
        self.make_projections(config.intermediate_size if intermediate_size is None else intermediate_size, bias)

    def make_projections(self, intermediate_size, bias=False):
        self.intermediate_size = intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias)

    def gated(self, gate, x, activation):
        """Return down_proj(f(gate) * up_proj(x)), of a gate that gate_proj has computed."""
        return project_down(self.down_proj, gate, self.up_proj(x), activation, (self.gate_proj, self.up_proj))


class LigerSwiGLUMLP(GatedProjections):
    """down_proj(silu(gate_proj(x)) * up_proj(x)).

    The backward writes over the outputs of gate_proj and up_proj, which this module owns: a second backward through the
    same forward raises a RuntimeError. The backward recomputes the input of down_proj (`liger_hw.glu_linear`), unless
    down_proj has an adapter, a quantised or sharded weight, or hooks.

    Args:
        config: has hidden_size, intermediate_size and hidden_act, which must be "silu" or "swish".
        intermediate_size: replaces config's.

    Raises:
        ValueError: another hidden_act.

    Examples:
        >>> mlp = liger_hw.LigerSwiGLUMLP(model.config)
    """

    def __init__(self, config, intermediate_size=None):
        super().__init__(config, intermediate_size)
        require_silu(self.activation_of(config))

    @staticmethod
    def activation_of(config):
        return config.hidden_act

    def forward(self, x):
        return self.gated(self.gate_proj(x), x, "silu")


class LigerGEGLUMLP(GatedProjections):
    """down_proj(gelu(gate_proj(x)) * up_proj(x)), always with the tanh approximation of GELU.

    Backward as in `LigerSwiGLUMLP`.

    Args:
        config: has hidden_size and intermediate_size.

    Examples:
        >>> from transformers import GemmaConfig
        >>> mlp = liger_hw.LigerGEGLUMLP(GemmaConfig(hidden_size=32, intermediate_size=48))
    """

    def __init__(self, config):
        super().__init__(config)

    def forward(self, x):
        return self.gated(self.gate_proj(x), x, "gelu_tanh")


class LigerCrossEntropyLoss(OptionsModule):
    """`cross_entropy` of logits (N, V) and targets (N,).

    The backward writes the gradient to its own memory: the logits stay readable, and a second backward is correct.

    Args:
        as in `liger_hw.cross_entropy`.

    Returns:
        the loss in the dtype of the logits, or a `CrossEntropyOutput` where a `return_*` is True.

    Raises:
        OptionError: an option out of its range; a ValueError and an AssertionError.

    Examples:
        >>> liger_hw.LigerCrossEntropyLoss(label_smoothing=0.1)(torch.zeros(2, 10), torch.tensor([1, 2]))
        tensor(2.3026)
    """

    def __init__(
        self, weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean", softcap=None,
        return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False,
    ):  # fmt: skip
        super().__init__(locals())
        _check_loss(label_smoothing, reduction, softcap)

    def forward(self, _input, target):
        return liger_cross_entropy(_input, target, **self.options)


class LigerFusedLinearCrossEntropyLoss(OptionsModule):
    """`fused_linear_cross_entropy` of (lin_weight (V, H), _input (N, H), target (N,), bias (V,) or None).

    Args:
        as in `liger_hw.fused_linear_cross_entropy`.

    Returns:
        the loss in fp32, or a `CrossEntropyOutput` where a `return_*` is True.

    Raises:
        OptionError: an option out of its range; a ValueError and an AssertionError.

    Examples:
        >>> loss = liger_hw.LigerFusedLinearCrossEntropyLoss()
        >>> loss(torch.rand(10, 8), torch.zeros(2, 8), torch.tensor([1, 2]))  # head, hidden states, labels
        tensor(2.3026)
    """

    def __init__(
        self, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
        softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False, return_token_accuracy=False,
        return_predicted_tokens=False,
    ):  # fmt: skip
        super().__init__(locals())
        _check_loss(label_smoothing, reduction, softcap)

    def forward(self, lin_weight, _input, target, bias=None):
        return fused_linear_cross_entropy(_input, lin_weight, target, bias, **self.options)


def _check_loss(label_smoothing, reduction, softcap):
    check_option(0 <= label_smoothing <= 1, f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    known = reduction in ("mean", "sum", "none")
    check_option(known, f"reduction must be one of 'mean', 'sum', or 'none'. Got: {reduction}")
    check_option(softcap is None or softcap > 0, f"softcap must be greater than 0.0 or None. Got: {softcap}")
