"""Let the head of a model, its output layer, return logits without memory.

`heads_armed` lets them do so during one call of their model in one thread. Every other call, and one that a program may
watch, runs the head's own forward.

Under sharding the loss needs the whole weight of the head after the head's own forward. `HeadMatch` tells FSDP2 to keep
it until the backward, which comes next; under ZeRO-3 the logits keep it. A head that FSDP1 wraps by itself computes
its logits, because FSDP1 frees the weight. Under tensor parallelism each rank keeps its part of the vocabulary
(`column_parallel`).
"""

import contextlib
import sys
import threading
import warnings

import torch

from liger_hw import _torch
from liger_hw.checks import KERNEL_DTYPES
from liger_hw.dispatch import autocasts, uncast
from liger_hw.patching.column_parallel import column_parallel_logits
from liger_hw.patching.head_call import recording_and_hooks
from liger_hw.patching.hooks import only_gathers
from liger_hw.patching.lazy_logits import lazy_logits
from liger_hw.patching.lora import HELPERS, dropout_rate, layer_pins, variant
from liger_hw.patching.match import Match
from liger_hw.patching.swapping import ARMED, patched_class, swap
from liger_hw.patching.traced_logits import TracedLogits

NOT_LINEAR_ANY_MORE = (
    "a program replaced the model's head by a {}, not a plain linear layer: its logits are computed as without the "
    "patch"
)


@contextlib.contextmanager
def heads_armed(model, heads, forward):
    """Let the heads leave their logits uncomputed during `forward`; None disarms.

    A nested call of the same model, such as a teacher's pass in a hook, arms the heads for itself. With None it does
    not disarm heads that another model armed: an image model computes the loss of the text model that it calls.
    """
    name = _entry_name()
    before = [head.__dict__.get(name) for head in heads]
    for head, entry in zip(heads, before):
        if forward is not None or entry is not None and entry[0] is model:
            head.__dict__[name] = model, forward, id(head)
    try:
        yield
    finally:
        if forward is not None:
            forward.recording = False  # also after an error: a program may hold logits of the forward that failed
            _torch.reshard_again(forward.unsharded)
        for head, entry in zip(heads, before):
            if entry is None and not torch.compiler.is_compiling():  # torch 2.11 cannot trace `pop`
                head.__dict__.pop(name, None)
            else:
                head.__dict__[name] = entry


def _armed_forward(head):
    """Return the `Forward` for which `head` is armed, or None.

    It is not within a checkpoint that the model's forward enters, which calls the head again in the backward.
    """
    entry = head.__dict__.get(_entry_name())  # with an id, which that of a replica differs from
    if entry is None or entry[1] is None or entry[2] != id(head):
        return None
    return entry[1] if torch.compiler.is_compiling() or entry[1].within == recording_and_hooks() else None


def _entry_name():
    """Return the attribute by which this thread arms heads; copies leave it out."""
    return f"{ARMED}{0 if torch.compiler.is_compiling() else threading.get_ident()}"


def _only_multiplies(head):
    """Tell whether a call of `head` only computes F.linear of its weight and bias.

    Hooks may read logits or gather the weight (offloading); only FSDP2's and ZeRO-3's hooks are known to be safe.
    Within `allow_mutation_on_saved_tensors` torch copies saved tensors, which it cannot do for logits without memory.
    """
    unwatched = all(only_gathers(hook) for hook in _torch.forward_hooks(head))
    return "forward" not in head.__dict__ and unwatched and not _is_observed(head)


def _is_observed(head):
    """Tell whether a program may see calls of `head` without forward hooks."""
    return (
        hasattr(head, "parametrizations")
        or not all(only_gathers(hook) for hook in _torch.backward_hooks(head))
        or _torch.has_global_module_hooks()
        or _torch.saved_tensors_may_change()
        or _torch.transforms_active()  # torch.func needs autograd functions of another form
        or torch.jit.is_tracing()  # which records tensors with memory
    )


class HeadMatch(Match):
    """Match of a linear head, whose logits may stay uncomputed."""

    kind = "head"

    def members(self, original, unchanged):
        def call(self, *args, **kwargs):
            """Skip the forward of a column-parallel head, whose hooks or own forward gather the logits."""
            # the attribute may be a parametrization, such as a spectral norm, which every read changes
            weight = self._parameters.get("weight")
            sharded = weight is not None and not _torch.is_plain(weight) and not torch.compiler.is_compiling()
            forward = _armed_forward(self) if sharded and len(args) == 1 and not kwargs else None
            fits = forward is not None and unchanged(self) and forward.takes_objects()
            if fits and not _is_observed(self) and _ops_compute(self, args[0]):
                logits = column_parallel_logits(self, args[0])
                if logits is not None:
                    return logits
            return original.__call__(self, *args, **kwargs)

        def forward(self, *args, **kwargs):
            armed_forward = _armed_forward(self)
            if armed_forward is None or len(args) != 1 or kwargs or not _only_multiplies(self) or not unchanged(self):
                return original.forward(self, *args, **kwargs)
            hidden, weight = args[0], self.weight
            if not _ops_compute(self, hidden) or not _torch.is_plain(hidden, weight, self.bias):
                return original.forward(self, hidden)
            if torch.compiler.is_compiling() and not armed_forward.takes_objects():
                return original.forward(self, hidden)
            if hasattr(self, "set_reshard_after_forward"):  # FSDP2: the loss, which comes next, needs the weight whole
                armed_forward.unsharded.extend(_torch.keep_unsharded(self))
            if torch.compiler.is_compiling():
                return TracedLogits.after(self, hidden)
            return lazy_logits(hidden, *armed_forward.cast(weight, self.bias), armed_forward)

        return {"__call__": call, "forward": forward, "liger_is_head": True}


def _ops_compute(head, hidden):
    """Tell whether the ops compute the head in the dtypes and shapes of F.linear."""
    if hidden.device.type == "meta":
        return False  # it has no values to compute later
    fits = hidden.dtype == head.weight.dtype or autocasts(hidden.device.type)
    fits = fits and hidden.shape[-1:] == head.weight.shape[-1:]  # DeepSpeed's ZenFlow gathers weights transposed
    return fits and hidden.dtype in KERNEL_DTYPES and hidden.numel() > 0  # else Hugging Face's loss takes fp32 logits


class LoraHeadMatch(Match):
    """Match of PEFT's LoRA around a linear head.

    It computes base(x) + the sum over adapters of B(A(dropout(x))) scaling. The columns of B become further columns of
    the weight, and A's outputs further hidden states. So the logits are one product, which rounds once where PEFT's
    rounds each term and each sum.
    """

    kind = "lora_head"

    def pins(self, original):
        return layer_pins(original), set(HELPERS)

    def members(self, original, unchanged):
        def forward(self, x, *args, **kwargs):
            armed_forward = _armed_forward(self)
            if armed_forward is None or args or kwargs or not _is_one_product(self, x) or not unchanged(self):
                entry = self.base_layer.__dict__.get(_entry_name())
                is_armed = entry is not None and entry[1] is not None
                if not is_armed or self.disable_adapters or self.merged or not _adapters(self):
                    return original.forward(self, x, *args, **kwargs)
                with heads_armed(entry[0], [self.base_layer], None):  # peft may write to a part of its logits
                    return original.forward(self, x, *args, **kwargs)
            hidden, weight = [x], [self.base_layer.weight]
            for name in _adapters(self):
                lora_a = self.lora_A[name]
                states = lora_a(self.lora_dropout[name](x.to(lora_a.weight.dtype)))
                hidden.append(states * self.scaling[name])
                weight.append(self.lora_B[name].weight)
            *casts, bias = armed_forward.cast(*weight, self.base_layer.bias)
            kept = [w for rows, w, cast in zip(hidden, weight, casts) if rows.requires_grad and cast is w]  # by PEFT
            with uncast(x):  # autocast to the other dtype of 16 bits refuses to concatenate
                hidden, weight = torch.cat(hidden, -1), torch.cat(casts, 1)
            return lazy_logits(hidden, weight, bias, armed_forward, kept)

        return {"forward": forward, "liger_is_head": True}


def _adapters(lora):
    """Return the names of the active adapters that change this layer."""
    return [name for name in lora.active_adapters if name in lora.lora_A]


def _is_one_product(lora, x):
    """Tell whether PEFT's layer computes the sum of `LoraHeadMatch`, and nothing watches a part.

    The logits of few rows take less memory than the copy of the weight and its gradient.
    """
    if torch.compiler.is_compiling() or lora.disable_adapters or lora.merged or 2 * x.shape[:-1].numel() < x.shape[-1]:
        return False
    base, names = lora.base_layer, _adapters(lora)
    linears = [base, *(part[name] for name in names for part in (lora.lora_A, lora.lora_B))]
    return (
        bool(names)
        and not any(variant(lora, name) for name in names)  # such as DoRA
        and getattr(lora, "cast_input_dtype_enabled", True)
        and all(_is_linear(m) and m.weight.dtype == base.weight.dtype and _torch.is_plain(m.weight) for m in linears)
        and all(lora.lora_B[name].bias is None for name in names)
        and all(map(_only_multiplies, (lora, *linears)))  # a hook may also write to x, which the base reads first
        and all(dropout_rate(lora.lora_dropout[name]) is not None for name in names)
        and _torch.is_plain(x)
        and _ops_compute(base, x)
    )


def _is_linear(module):
    """Tell whether a module computes as a linear layer, plain or patched."""
    cls = type(module)
    patched = next((base for base in cls.__mro__ if "liger_is_head" in vars(base)), None)
    return cls is torch.nn.Linear or patched is not None and cls.forward is patched.forward


def match_head(head):
    """Return [(module, match)] of a head that can skip its logits, else None.

    The list is empty where the head is patched already.
    """
    peft_linear = getattr(sys.modules.get("peft.tuners.lora.layer"), "Linear", None)
    if type(head) is peft_linear and (base := match_head(head.base_layer)) is not None:
        return [*base, (head, LoraHeadMatch())]
    # another model around or inside this one may have patched the head already
    if type(head) is torch.nn.Linear:
        return [(head, HeadMatch())]
    return [] if getattr(head, "liger_is_head", False) else None


def match_heads(layer):
    """Return [(module, match)] of the heads in an output layer; None without any."""
    copies = getattr(layer, "modules_to_save", {})  # PEFT wraps a head that it trains
    matches = [match_head(module) for module in (layer, *copies.values())]
    return None if all(m is None for m in matches) else [pair for m in matches for pair in m or ()]


def patched_heads(layer, take_new):
    """Return the patched heads in a model's output layer.

    Args:
        layer: what `get_output_embeddings` of the program returns, a module or anything else.
        take_new: patch a head that the program set after `patch`, as `resize_token_embeddings` does.
    """
    modules = layer.modules() if isinstance(layer, torch.nn.Module) else ()
    heads = [module for module in modules if getattr(module, "liger_is_head", False)]
    if heads or not take_new or torch.compiler.is_compiling():
        return heads
    matches = match_heads(layer)
    if matches is None:
        warnings.warn(NOT_LINEAR_ANY_MORE.format(type(layer).__name__), stacklevel=3)
    for module, match in matches or ():
        swap(module, patched_class(type(module), match))
    return [module for module, _ in matches or ()]
