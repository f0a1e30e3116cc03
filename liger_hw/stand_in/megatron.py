"""Define the names of `liger_kernel.megatron`: three modules, and a function that patches Megatron-Core.

    liger_hw.integrations.apply_liger_kernel_to_megatron(cross_entropy=True, swiglu=True)   # before the model is built

The modules round where the classes and functions of Megatron-Core that they replace round.
"""

import functools
import importlib
import logging
import numbers

import torch
from torch import nn

from liger_hw.checks import check
from liger_hw.kernels.norms.rms_norm import rms_norm
from liger_hw.stand_in.function_class import function_class
from liger_hw.stand_in.ops import LigerFusedGateUpSiLUMulFunction
from liger_hw.transformers.op_modules import LigerVocabParallelCrossEntropy
from liger_hw.transformers.vocab_parallel import vocab_parallel_cross_entropy

logger = logging.getLogger(__name__)

# of an object: its definition, then the names under which other modules of Megatron import it; each version has some
FUSED_LOSS = (
    ("megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy"),
    ("megatron.core.models.common.language_module.language_module", "fused_vocab_parallel_cross_entropy"),
    ("megatron.core.models.backends", "_fused_ce"),
)
UNFUSED_LOSS = (
    ("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy"),
    ("megatron.core.tensor_parallel", "vocab_parallel_cross_entropy"),
)
BLOCK_NORM = (
    ("megatron.core.transformer.transformer_block", "LayerNormImpl"),
    ("megatron.core.models.gpt.gpt_layer_specs", "LNImpl"),
)
SWIGLU = "megatron.core.fusions.fused_bias_swiglu", "SwiGLUFunction"
MARK = "patched_by_liger_hw"


class LigerMegatronRMSNorm(nn.Module):
    """`liger_hw.rms_norm` in place of Megatron's `WrappedTorchNorm`, with the one rounding of torch.nn.RMSNorm.

    Args:
        config: a TransformerConfig, of which `normalization`, `sequence_parallel` (marks the weight, whose gradient
            Megatron then sums over the ranks) and `layernorm_zero_centered_gamma` are read.
        hidden_size: width of the rows, an integer or (width,).
        eps: added to the mean square.
        persist_layer_norm: without effect.
        zero_centered_gamma: scale by 1 + weight, which starts at 0; `config.layernorm_zero_centered_gamma` does too.
        normalization: "RMSNorm".

    Raises:
        ValueError: a normalization other than "RMSNorm", or a `hidden_size` of several dimensions.
    """

    def __init__(
        self, config, hidden_size, eps=1e-5, persist_layer_norm=False, zero_centered_gamma=False,
        normalization="RMSNorm",
    ):  # fmt: skip
        super().__init__()
        configured = getattr(config, "normalization", "RMSNorm")
        check(configured == "RMSNorm", "config.normalization", repr(configured), "'RMSNorm'")
        check(normalization == "RMSNorm", "normalization", repr(normalization), "'RMSNorm'")
        self.hidden_size = torch.Size([hidden_size] if isinstance(hidden_size, numbers.Integral) else hidden_size)
        check(len(self.hidden_size) == 1, "hidden_size", hidden_size, "one dimension")
        self.config, self.eps = config, eps
        self.zero_centered_gamma = bool(zero_centered_gamma or getattr(config, "layernorm_zero_centered_gamma", False))
        self.weight = nn.Parameter(torch.empty(self.hidden_size))
        self.weight.sequence_parallel = bool(getattr(config, "sequence_parallel", False))
        self.reset_parameters()

    def reset_parameters(self):
        """Set the weight to a scale of 1."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps, 1.0 if self.zero_centered_gamma else 0.0, "gemma")

    def extra_repr(self):
        return f"hidden_size={tuple(self.hidden_size)}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """`LigerVocabParallelCrossEntropy` that smooths labels as Megatron does: arguments as there."""

    def __init__(
        self, ignore_index=-100, label_smoothing=0.0, reduction="none", label_smoothing_formula="megatron",
        label_smoothing_mode="partition",
    ):  # fmt: skip
        super().__init__(ignore_index, label_smoothing, reduction, label_smoothing_formula, label_smoothing_mode)


class LigerMegatronSwiGLU(nn.Module):
    """`liger_hw.swiglu` of the halves of one tensor, called as Megatron's `bias_swiglu_impl`.

    Args:
        fallback_impl: function for calls with a bias, fp8 storage or CPU offloading, such as Megatron's own
            `bias_swiglu_impl`; None makes them errors.
        in_place: without effect: nothing writes over the input.

    Raises:
        RuntimeError: the forward got such a call and has no `fallback_impl`.
        ValueError: the forward got an input of other than two or three dimensions, or of odd width.
    """

    def __init__(self, fallback_impl=None, in_place=False):
        super().__init__()
        self.fallback_impl, self.in_place = fallback_impl, in_place

    def forward(self, input, bias=None, fp8_input_store=False, cpu_offload_input=False):
        """Return silu(first half) * second half of input (..., 2 F): (..., F)."""
        reason = _reason_for_megatron(bias, fp8_input_store, cpu_offload_input)
        if reason is not None:
            if self.fallback_impl is None:
                raise RuntimeError(
                    f"LigerMegatronSwiGLU does not serve {reason}: pass "
                    "fallback_impl=megatron.core.fusions.fused_bias_swiglu.bias_swiglu_impl, or use "
                    "apply_liger_kernel_to_megatron(swiglu=True), which leaves such calls to Megatron"
                )
            _log_once(f"SwiGLU stays Megatron's: {reason}")
            return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)
        check(input.ndim in (2, 3), "input", input, "(tokens, 2 F) or (sequence, batch, 2 F)")
        check(input.shape[-1] % 2 == 0, "input", input, "an even width: gate and up (config.gated_linear_unit=True)")
        return LigerFusedGateUpSiLUMulFunction.apply(input, self.in_place)


def _reason_for_megatron(bias, fp8_input_store, cpu_offload_input):
    """Return why Megatron's own function must compute a SwiGLU, or None."""
    if bias is not None:
        return "a bias (add_bias_linear=True)"
    if fp8_input_store:
        return "an input stored in fp8 (activation_func_fp8_input_store=True)"
    return "CPU offloading of activations" if cpu_offload_input else None


@functools.cache
def _log_once(message):
    logger.info(message)


def apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=False, swiglu=False):
    """Make Megatron-Core build and call this library's RMSNorm, cross entropy and SwiGLU.

    Call it before the model is built: modules that exist stay as they are. A second call changes nothing. A call that
    raises an error has changed nothing.

    Args:
        rms_norm: `LocalSpecProvider.layer_norm`, which makes the norms of layers, gives `LigerMegatronRMSNorm` for
            RMSNorm; so do `transformer_block.LayerNormImpl` and `gpt_layer_specs.LNImpl`, which make the last norm,
            unless Transformer Engine or Apex provides them. Specs of Transformer Engine stay as they are.
        cross_entropy: `fused_vocab_parallel_cross_entropy`, `vocab_parallel_cross_entropy` (with its
            `label_smoothing`) and the names that other modules of Megatron imported. Without `tp_group` they use
            Megatron's tensor-parallel group. Labels of -100 have loss and gradient 0.
        swiglu: `SwiGLUFunction`, which dense MLPs and shared experts call (bias_activation_fusion=True). Calls with
            fp8 storage or CPU offloading stay Megatron's.

    Raises:
        ImportError: megatron-core is not installed, or lacks a name above.

    Examples:
        >>> liger_hw.integrations.apply_liger_kernel_to_megatron()  # doctest: +SKIP
    """
    replacements = []  # (module or class, name, replacement)
    if rms_norm:
        replacements += _norms()
    if cross_entropy:
        replacements += _losses()
    if swiglu:
        replacements += _swiglu()
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)


def _required(module, name, flag):
    """Return (its owner, object) of a name, such as "LocalSpecProvider.layer_norm", that Megatron must have."""
    try:
        owner = importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"apply_liger_kernel_to_megatron({flag}=True) needs {module}.{name}, and {module} cannot be imported: "
            f"install megatron-core ({error})"
        ) from error
    value = owner
    for part in name.split("."):
        owner, value, module = value, getattr(value, part, None), f"{module}.{part}"
        if value is None:
            raise ImportError(
                f"apply_liger_kernel_to_megatron({flag}=True) needs {module}, which the installed megatron-core "
                f"lacks: pass {flag}=False, or install a version that has it (0.16 does)"
            )
    return owner, value


def _places(names, original):
    """Yield (module, name) of the names of `original` that this version has."""
    for module, name in names:
        try:
            owner = importlib.import_module(module)
        except ImportError:
            continue
        if getattr(owner, name, None) is original:
            yield owner, name


def _marked(replacement, original):
    setattr(replacement, MARK, True)
    replacement.__wrapped__ = original
    return replacement


def _is_patched(current):
    return getattr(current, MARK, False)


def _norms():
    provider, layer_norm = _required("megatron.core.models.backends", "LocalSpecProvider.layer_norm", "rms_norm")
    _, torch_norm = _required("megatron.core.transformer.torch_norm", "WrappedTorchNorm", "rms_norm")
    _, block_norm = _required(*BLOCK_NORM[0], "rms_norm")
    if not _is_patched(layer_norm):
        yield provider, "layer_norm", _layer_norm(layer_norm)
    if block_norm is torch_norm:
        final_norm = _final_norm(torch_norm)
        yield from ((*place, final_norm) for place in _places(BLOCK_NORM, torch_norm))
    elif not _is_patched(block_norm):
        name = getattr(block_norm, "__name__", "")
        logger.info("%s.%s stays %s, which is not torch's norm", *BLOCK_NORM[0], name)


def _layer_norm(original):
    @functools.wraps(original)
    def layer_norm(self, rms_norm=False, *args, **options):
        norm = original(self, rms_norm, *args, **options)  # also remembers the choice for later calls
        return LigerMegatronRMSNorm if rms_norm else norm

    return _marked(layer_norm, original)


def _final_norm(original):
    class FinalNorm:  # a class, because Megatron does not call a function that it finds in a spec
        def __new__(cls, config, hidden_size, *args, **options):
            is_rms_norm = getattr(config, "normalization", None) == "RMSNorm"
            return (LigerMegatronRMSNorm if is_rms_norm else original)(config, hidden_size, *args, **options)

    return _marked(FinalNorm, original)


def _losses():
    def loss(vocab_parallel_logits, target, label_smoothing=0.0, tp_group=None):
        if tp_group is None:  # released versions pass none to the unfused loss, which looks the group up
            parallel_state = importlib.import_module("megatron.core.parallel_state")
            tp_group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
        logits = vocab_parallel_logits.reshape(-1, 1, vocab_parallel_logits.shape[-1])
        options = {"label_smoothing": label_smoothing, "formula": "megatron", "mode": "partition"}
        return vocab_parallel_cross_entropy(logits, target.reshape(-1, 1), tp_group, **options).view(target.shape)

    def fused_loss(vocab_parallel_logits, target, tp_group=None):
        return loss(vocab_parallel_logits, target, 0.0, tp_group)

    for names, replacement in ((FUSED_LOSS, fused_loss), (UNFUSED_LOSS, loss)):
        _, original = _required(*names[0], "cross_entropy")
        if _is_patched(original):
            continue
        places = list(_places(names, original))
        if names is FUSED_LOSS and len(places) == 1:
            logger.warning(
                "no known module of this megatron-core calls %s.%s: cross_entropy_loss_fusion=True may keep Megatron's "
                "loss", *names[0],
            )  # fmt: skip
        marked = _marked(functools.wraps(original)(replacement), original)
        yield from ((*place, marked) for place in places)


def _swiglu():
    owner, original = _required(*SWIGLU, "swiglu")
    if _is_patched(original):
        return

    def swiglu(input, fp8_input_store=False, cpu_offload_input=False):
        reason = _reason_for_megatron(None, fp8_input_store, cpu_offload_input)
        if reason is None:
            return LigerFusedGateUpSiLUMulFunction.apply(input)
        _log_once(f"SwiGLU stays Megatron's: {reason}")
        return original.apply(input, fp8_input_store, cpu_offload_input)

    yield owner, SWIGLU[1], _marked(function_class(swiglu, SWIGLU[1]), original)
