"""Compute the loss of a language model without its logits.

`model.forward` arms the head (the output layer, `head.py`). The armed head returns `LazyLogits`. The model's own code
scales, caps and slices them. The replaced loss function passes them to `fused_linear_cross_entropy`; so does torch's
cross entropy, where the model calls it. The rest of the model's forward (its own labels, auxiliary losses, other
outputs) runs unchanged.
"""

import dataclasses
import functools
import inspect
import numbers
import types
import warnings

import torch

from liger_hw._torch import (
    call_outside_graphs,
    is_exporting,
    is_replica,
    is_wrapped_by_fsdp1,
    traced,
    tree_map_only,
    without_modes,
    without_saved_tensors_hooks,
)
from liger_hw.checks import KERNEL_DTYPES, check, refuse
from liger_hw.kernels.vocabulary.cross_entropy import CrossEntropyOutput, cross_entropy, formula
from liger_hw.kernels.vocabulary.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_hw.kernels.vocabulary.selective_log_softmax import selective_log_softmax
from liger_hw.patching import probing
from liger_hw.patching.head import heads_armed, match_heads, patched_heads
from liger_hw.patching.head_call import Forward
from liger_hw.patching.lazy_logits import LazyLogits
from liger_hw.patching.lora import PeftConfig
from liger_hw.patching.match import Match
from liger_hw.patching.pins import replaced_linear_code
from liger_hw.patching.program_code import may_ask_for_class
from liger_hw.patching.reading import Pin, attributes_in, attributes_read, read, read_function
from liger_hw.patching.swapping import swapped_base
from liger_hw.patching.traced_logits import TracedLogits
from liger_hw.patching.values import package, replaced_function

UNCOMPUTED = LazyLogits, TracedLogits  # which share an interface: fits, fuse, computed, by_products
# keyword arguments of a model's forward that the ops understand and Hugging Face's loss ignores
CE_OPTIONS = ("label_smoothing", "lse_square_scale", "return_token_accuracy", "return_predicted_tokens")
# of the loss without logits; they change no value of a loss of logits
CHUNKS = ("accum_dtype", "chunk_memory", "counted_rows")
PRODUCTS = ("invariant", "logits_dtype")  # of the head's products: their loss needs hidden states
LINEAR_CE_OPTIONS = (
    *CE_OPTIONS, *CHUNKS, *PRODUCTS, "use_token_scaling", "ce_weight", "token_weights", "return_entropy",
)  # fmt: skip
WRAPPED_BY_FSDP1 = (
    "FSDP1 wraps the head by itself and frees its weight before the loss, so the logits are computed as without the "
    "patch: leave the head out of auto_wrap_policy, so that the root holds it"
)
SERVED_KEY = "liger_hw_served"  # keyword argument beside such options: a list, to which the loss adds
ASKED_IN_CALL = "None under autocast, which cast the head's weight: it is an option of the model's call"
UNSERVED = (
    "none here: the model's forward does not pass it to transformers' ForCausalLMLoss, a program replaced one of them "
    "or entered a mode of torch's functions or operations, or the patch left the loss"
)
NO_HUGGING_FACE_MODEL = (
    "no Hugging Face model, so its loss stays: call liger_hw.fused_linear_cross_entropy(hidden, weight of the head, "
    "targets) in place of the head and the loss"
)
WITHOUT_LOGITS = (
    "False or None where logits are in memory: the loss needs the head's hidden states, which a hook on the head, a "
    "second loss of the logits, a compiled forward, decorator or loss that is not transformers', FSDP1 around the head "
    "or fused_linear_cross_entropy=False of the patch keep from it"
)
# functions that only create tensors, which give no other number, and linear, which nn.Linear's pins hold; DeepSpeed
# replaces both
NOT_PINNED = ("empty", "full", "linear", "new_", "ones", "zeros")
CALLABLE = types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType
BY_PRODUCTS = ("token_accuracy", "predicted_tokens", "entropy")
NAME_FIELDS = ("__module__", "__name__", "__qualname__", "__doc__")  # annotations of Python 3.14 cannot be pickled
REFUSED = {  # other keyword arguments that would change the loss -> the values that change nothing
    **dict.fromkeys(("loss_weights", "weight"), (None,)),
    "return_z_loss": (False, None),
    "reduction": ("mean", None),
    "logit_scale": (1.0, None),
    "chunk_mem_const": (None,),
}


def refuse_unserved(options, refused=REFUSED):
    """Refuse keyword arguments that would change a loss and that no op supports.

    Raises:
        ValueError: one of `refused` (name -> values that change nothing) has another value.
    """
    for name, defaults in refused.items():
        value = options.get(name)
        if value is not None and (torch.is_tensor(value) or value not in defaults):
            refuse(name, value, f"{' or '.join(map(repr, defaults))}: this loss has no such option")


def causal_lm_loss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, *, original, fused_ce,
    **kwargs,
):  # fmt: skip
    """Compute transformers' `ForCausalLMLoss` from logits with or without memory.

    Args:
        logits: (B, T, V).
        labels: (B, T), or None with `shift_labels`, which are the labels shifted by one position to the left.
        vocab_size: V.
        num_items_in_batch: divisor of the sum, instead of the number of labels that count; number or tensor.
        ignore_index: label that does not count.
        original: the model's own loss function, which gets arguments that the ops do not support.
        fused_ce: use the op `cross_entropy` for logits that have memory.
        kwargs: `LINEAR_CE_OPTIONS`, which include `CE_OPTIONS`, with the meaning that they have in the ops, in training
            and in evaluation; `PRODUCTS` for logits without memory alone. `ForCausalLMLoss` ignores them.
            `token_weights` are (B, T), shifted as `labels`; those beside `shift_labels` are shifted already. Others
            have no effect, as there, except those that ask for another loss (`REFUSED`).

    Returns:
        fp32 scalar; without a label that counts NaN, as the mean of transformers.

    Raises:
        ValueError: an option that no op supports, or labels that do not fit an option.
    """
    if torch.compiler.is_dynamo_compiling() and isinstance(logits, LazyLogits):  # a graph would lack their gradient
        arguments = logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels
        return call_outside_graphs(causal_lm_loss, *arguments, original=original, fused_ce=fused_ce, **kwargs)
    refuse_unserved(kwargs)
    served = kwargs.pop(SERVED_KEY, [])
    served.append({})
    targets, token_weights = shift_labels, kwargs.get("token_weights")
    if token_weights is not None:
        formula.check_token_weights(token_weights, (labels if targets is None else targets).shape)
    if targets is None:
        targets, token_weights = shift_left(labels, ignore_index), shift_left(token_weights, 0)
    fuses_head = isinstance(logits, UNCOMPUTED) and logits.fits
    if fuses_head:  # a backward that needs the logits reads them again, and a program may write to its own
        targets = targets if shift_labels is None else targets.clone()
    targets = targets.reshape(-1)
    fits = logits.shape[-1] == vocab_size and logits.numel() == targets.numel() * vocab_size
    options = {name: kwargs[name] for name in LINEAR_CE_OPTIONS if _is_given(kwargs.get(name))}
    fused_ce = fused_ce and logits.dtype in KERNEL_DTYPES  # for other dtypes `original` takes fp32 logits
    if not fits or targets.dtype != torch.int64 or not (fuses_head or fused_ce or options):
        check(not options, ", ".join(options), "this loss", "labels (B, T) of int64, one for each row of the logits")
        return original(_computed(logits), labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    options |= {"ignore_index": ignore_index}
    targets = targets.to(logits.device)
    if token_weights is not None:
        options["token_weights"] = token_weights.reshape(-1).to(logits.device)
    divisor = num_items_in_batch.to(logits.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch
    divides = _op_divides_by(divisor)
    options |= {"num_items": divisor} if divides else {"reduction": "sum"}
    if fuses_head:  # as the targets
        options = {name: value.clone() if torch.is_tensor(value) else value for name, value in options.items()}
    loss = _cross_entropy(logits, targets, vocab_size, options, fuses_head, served[-1])
    if divides and divisor is not None and not torch.is_tensor(divisor):
        return loss
    none_counts = (targets == ignore_index).all()
    with without_saved_tensors_hooks():  # the unfused loss saves no condition, which a hook may not expect
        if not divides:  # without a label that counts an infinite gradient, of a division by 0, would make NaN of 0
            return torch.where(none_counts, loss.detach(), loss) / divisor
        if divisor is None:  # the op's mean of no label is 0, transformers' is NaN
            return loss.masked_fill(none_counts, float("nan"))
        # the op divides the losses of rows, and adds them: 0 or NaN makes 0 of no row, NaN of infinite ones
        return torch.where((divisor > 0) | (divisor < 0), loss, (~none_counts).to(loss) / divisor)


def shift_left(by_token, fill):
    """Shift (B, T) to the left, with `fill` at the end; None stays None."""
    return None if by_token is None else torch.nn.functional.pad(by_token, (0, 1), value=fill)[..., 1:]


def _op_divides_by(divisor):
    """Tell whether the op may divide the losses of rows by `divisor`.

    A number must leave fp32 losses finite, and a tensor must be one whose quotient is fp32 and needs no gradient.
    It reads no tensor of a GPU, for which the host would wait.
    """
    if torch.is_tensor(divisor):
        if divisor.ndim or divisor.requires_grad or divisor.dtype == torch.float64:
            return False
        if divisor.device.type != "cpu" or traced(divisor):
            return True
        divisor = divisor.item()
    return divisor is None or not isinstance(divisor, numbers.Real) or 1e-30 < abs(divisor) < 1e30


def _is_given(option):
    return option is not None and option is not False


def _cross_entropy(logits, targets, vocab_size, options, fuses_head, by_products):
    """Compute the loss of rows, and store its other results.

    Args:
        by_products: dict for those of logits in memory; uncomputed logits have one of their own.
    """

    def fused(x, weight, bias, scale, softcap, group):
        return fused_linear_cross_entropy(
            x, weight, targets, bias, softcap=softcap, logit_scale=scale, group=group, **options
        )

    def ordinary(real):
        return _unfused_cross_entropy(real.reshape(-1, vocab_size), targets, **options)

    casts = options.get("logits_dtype") is None  # autocast casts nothing beside it
    if not casts and isinstance(logits, LazyLogits):
        check(not logits.cell.call.forward.has_cast, "logits_dtype", options["logits_dtype"], ASKED_IN_CALL)
    output = logits.fuse(fused, ordinary, casts) if fuses_head else ordinary(_computed(logits))
    if torch.is_tensor(output):
        return output
    stored = logits.by_products if isinstance(logits, UNCOMPUTED) else by_products
    for name in BY_PRODUCTS:
        value = getattr(CrossEntropyOutput(*output), name)
        if value is not None:
            stored[name] = value
    return output[0]


def _unfused_cross_entropy(
    logits, targets, ce_weight=None, use_token_scaling=False, accum_dtype=None, chunk_memory=1, counted_rows=None,
    token_weights=None, invariant=False, logits_dtype=None, return_entropy=False, **options,
):  # fmt: skip
    """Compute `fused_linear_cross_entropy`'s loss from logits in memory."""
    for name, value in (("invariant", invariant), ("logits_dtype", logits_dtype)):
        check(not value, name, value, WITHOUT_LOGITS)
    check(accum_dtype in (None, torch.float32), "accum_dtype", accum_dtype, "None or torch.float32")
    fits = isinstance(chunk_memory, numbers.Real) and 0 < chunk_memory < float("inf")
    check(fits, "chunk_memory", repr(chunk_memory), "a positive, finite number of bytes")
    formula.check_counted_rows(counted_rows, targets, options["ignore_index"])
    if return_entropy:
        ignored = options["ignore_index"]
        output = _unfused_cross_entropy(
            logits, targets, ce_weight, use_token_scaling, token_weights=token_weights, **options
        )
        with torch.no_grad():
            rows = selective_log_softmax(logits, targets, ignore_index=ignored, return_entropy=True).entropy
        by_name = {"loss": output} if torch.is_tensor(output) else output._asdict()
        return CrossEntropyOutput(**by_name | {"entropy": formula.mean_over_labels(rows, targets != ignored)})
    if not use_token_scaling and token_weights is None:
        return cross_entropy(logits, targets, ce_weight, **options)
    call = cross_entropy.arguments(logits, targets, ce_weight, **options)
    formula.check_call(call, "logits", "weight", logits.shape[1])
    tensors = formula.Targets.of(call, ce_weight, call.reduction)
    *losses, predicted = formula.row_losses(logits, tensors, formula.Formula.of(call, use_token_scaling))
    token_weights = formula.prepare_token_weights(token_weights, targets, call.ignore_index, losses[0].dtype)
    return formula.output_of(call, *formula.weighted(token_weights, *losses), predicted)


def _computed(logits):
    return logits.computed() if isinstance(logits, UNCOMPUTED) else logits


@dataclasses.dataclass(frozen=True)
class ModelMatch(Match):
    """Match of a whole model.

    Attributes:
        lora: patch the LoRA layers that PEFT adds later.
    """

    lora: bool = True

    def members_for_adapters(self):
        return {"peft_config": PeftConfig()} if self.lora else {}


class CausalLMMatch(ModelMatch):
    """Match of a model that computes a loss; `options` name the op."""

    kind = "causal_lm"

    def pins(self, original):
        replaced = [Pin(original, name, getattr(original, name)) for name in ("forward", "loss_function")]
        return [*replaced, *_loss_pins()], set()

    def members(self, original, unchanged):
        options = dict(self.options)
        linear, fused_ce = options["fused_linear_cross_entropy"], options["cross_entropy"]
        places = {name: i for i, name in enumerate(list(inspect.signature(original.forward).parameters)[1:])}
        names = [name for name in LINEAR_CE_OPTIONS if name not in places]  # a model's own options are its forward's
        takes_skip_logits = "skip_logits" in places

        def argument(name, args, kwargs):
            if name in kwargs:
                return kwargs[name]
            return args[places[name]] if places.get(name, len(args)) < len(args) else None

        matched = original.loss_function
        original_loss_function = matched.fget  # Dynamo cannot trace a look-up inside `loss_function`
        by_transformers, losses = _written_by_transformers(original.forward), _transformers_losses()

        def takes_objects(self):
            chosen = original_loss_function(self)
            return by_transformers and any(chosen is known for known in losses)

        def forward(self, *args, skip_logits=None, **kwargs):
            labelled = any(argument(name, args, kwargs) is not None for name in ("labels", "shift_labels"))
            if takes_skip_logits and skip_logits is not None:
                kwargs["skip_logits"], skip_logits = skip_logits, None
            skips = self.training if skip_logits is None else skip_logits
            asked = [name for name in names if labelled and _is_given(kwargs.get(name))]
            served = kwargs.setdefault(SERVED_KEY, []) if asked else [True]
            lazily = linear and labelled and (skips or not {*PRODUCTS}.isdisjoint(asked)) and unchanged(self)
            lazily = lazily and not is_exporting()  # which keeps no gradients from the forward
            layer = head_of(self)
            heads = patched_heads(layer, take_new=lazily)
            if lazily and heads and any(map(is_wrapped_by_fsdp1, layer.modules())):
                warnings.warn(WRAPPED_BY_FSDP1, stacklevel=2)
                heads = []
            armed = Forward(functools.partial(takes_objects, self), "logits_dtype" not in asked) if lazily else None
            with heads_armed(self, heads, armed):
                outputs = original.forward(self, *args, **kwargs)
            check(served, ", ".join(asked), "a value", UNSERVED)
            if not lazily:
                return _with_by_products(outputs, served[0] if asked and len(served) == 1 else {})
            return _finish(outputs, skips, is_replica(self))

        def loss_function(self):
            is_unchanged = unchanged(self)
            if not is_unchanged and original.loss_function is not matched:
                return super(swapped_base(type(self)), self).loss_function
            chosen = original_loss_function(self)
            if not is_unchanged or not _is_causal_lm_loss(chosen):
                return chosen
            served = functools.partial(causal_lm_loss, original=chosen, fused_ce=fused_ce)
            return served if torch.compiler.is_compiling() else functools.update_wrapper(served, chosen, NAME_FIELDS)

        return self.members_for_adapters() | {
            "_get_name": lambda self: type(self).__name__,  # a Trainer that smooths labels looks the name up
            "forward": forward,
            "loss_function": property(loss_function, original.loss_function.fset),
        }


class SkipLogitsMatch(ModelMatch):
    """Match of a model that only accepts `skip_logits`, without effect.

    Trainers pass it to every model that they patch (Hugging Face's in evaluation, with `use_liger_kernel=True`).
    """

    kind = "skip_logits"

    def pins(self, original):
        return [Pin(original, "forward", original.forward)], set()

    def members(self, original, unchanged):
        unknown = set(LINEAR_CE_OPTIONS) - inspect.signature(original.forward).parameters.keys()

        def forward(self, *args, skip_logits=None, **kwargs):
            asked = [name for name in LINEAR_CE_OPTIONS if name in unknown and _is_given(kwargs.get(name))]
            check(not asked, ", ".join(asked), "a value", UNSERVED)
            return original.forward(self, *args, **kwargs)  # looked up now, as a program may have replaced it

        members = {"_get_name": lambda self: type(self).__name__, "forward": forward}
        return self.members_for_adapters() | members


def _loss_pins():
    """Return the `Pin`s of functions that the loss without logits replaces or calls."""
    from transformers.loss import loss_utils

    loss = Pin(loss_utils, "ForCausalLMLoss", loss_utils.ForCausalLMLoss)
    return [*read(torch.nn.Linear).pins, loss, *read_function(loss.value).pins, *_op_pins()]


@without_modes()
def _loss_is_known():
    """Tell whether transformers' loss, whose code may have changed, is the ops' one."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    def definition(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None):
        targets = shift_left(labels, -100) if shift_labels is None else shift_labels
        return cross_entropy.reference(logits.view(-1, vocab_size), targets.reshape(-1), num_items=num_items_in_batch)

    labels = torch.tensor([[0, 3, -100, 6, 1], [-100, 2, 2, 5, 4]], device="cpu")
    logits = probing.random_rows(probing.generator(), 2, 5, 7)
    options = {}, {"num_items_in_batch": 3}, {"shift_labels": labels.flip(0)}

    def results(loss, x):
        return torch.stack([loss(logits=x, labels=labels, vocab_size=7, **option) for option in options])

    functions = (functools.partial(results, loss) for loss in (ForCausalLMLoss, definition))
    return probing.agree(*functions, [(logits,)], exact=False)


def _op_pins():
    attributes = _op_attributes()
    attributes_read.update(name for before, name in attributes if before != "torch")
    owners = {"torch": torch, "functional": torch.nn.functional}
    named = dict.fromkeys((owners.get(before, torch.Tensor), name) for before, name in attributes)
    pins = [Pin(owner, name, vars(owner)[name]) for owner, name in named if name in vars(owner)]
    return [pin for pin in pins if isinstance(pin.value, CALLABLE)]


@functools.cache
def _op_attributes():
    read = attributes_in("liger_hw.kernels.vocabulary", "liger_hw.kernels._", "liger_hw._torch", __name__)
    return sorted((str(before), name) for before, name in read if not name.startswith(("_", *NOT_PINNED)))


def _transformers_losses():
    from transformers.loss.loss_utils import LOSS_MAPPING

    return [loss for loss in LOSS_MAPPING.values() if _written_by_transformers(loss)]


def _written_by_transformers(function):
    """Tell whether transformers wrote `function` and those that it wraps.

    Other code may give its logits to an autograd function, or ask whether they are a tensor.
    """
    while function is not None:
        if package(function) not in ("transformers", "torch"):  # torch's decorators, such as no_grad
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _is_causal_lm_loss(loss_function):
    from transformers.loss.loss_utils import ForCausalLMLoss

    return loss_function is ForCausalLMLoss


def _finish(outputs, skips, in_replica):
    """Add the by-products of the loss to the outputs, whose logits may stay lazy.

    Args:
        skips: the caller reads no logits. nn.DataParallel gathers its replicas' outputs, so these then have none.
    """
    is_tuple = isinstance(outputs, tuple)
    if not isinstance(outputs, (tuple, dict)):  # of a model's own kind; logits in it stay lazy
        return tree_map_only(TracedLogits, TracedLogits.computed, outputs)
    values = outputs if is_tuple else (outputs.get("logits"),)
    lazy = next((value for value in values if isinstance(value, UNCOMPUTED)), None)
    extras = {} if lazy is None else lazy.by_products
    if in_replica and skips:
        outgoing = None
    elif lazy is not None and not (skips and (is_tuple or outputs.get("loss") is not None)):
        outgoing = lazy.computed()  # without a loss, the caller's own will read them
    else:
        outgoing = lazy.for_outputs() if isinstance(lazy, TracedLogits) else lazy
    if is_tuple:  # a named one stays one
        outputs = getattr(outputs, "_make", tuple)(outgoing if value is lazy else value for value in outputs)
    elif in_replica and skips:
        outputs = type(outputs)(**(dict(outputs) | {"logits": None}))
    elif lazy is not None:
        outputs["logits"] = outgoing
    return _with_by_products(outputs, extras)


def _with_by_products(outputs, extras):
    if not extras:
        return outputs
    if isinstance(outputs, tuple):
        return outputs + tuple(extras[name] for name in BY_PRODUCTS if name in extras)
    if type(outputs) is dict:
        return outputs | extras
    if torch.compiler.is_compiling():  # Dynamo cannot trace the creation of a class
        for name, value in extras.items():
            setattr(outputs, name, value)
        return outputs
    from liger_hw.patching.output_classes import with_by_products

    return with_by_products(type(outputs))(**dict(outputs), **extras)


def has_a_head(module):
    """Tell whether `module` is a Hugging Face model with a head."""
    try:
        from transformers import PreTrainedModel
    except ModuleNotFoundError:
        return False
    return isinstance(module, PreTrainedModel) and head_of(module) is not None


def has_foreign_head(model):
    """Tell whether `model` has a head, but is no Hugging Face model.

    A head is a linear layer with as many outputs as the widest embedding has rows.
    """
    modules = list(model.modules())
    if any(hasattr(module, "get_output_embeddings") for module in modules):
        return False
    vocabulary = max((m.num_embeddings for m in modules if isinstance(m, torch.nn.Embedding)), default=None)
    return any(m.out_features == vocabulary for m in modules if type(m) is torch.nn.Linear)


def models_refusing_skip_logits(model):
    """Return the outermost Hugging Face models in `model` whose forward would refuse `skip_logits`."""
    try:
        from transformers import PreTrainedModel
    except ModuleNotFoundError:
        return []
    if not isinstance(model, PreTrainedModel):
        return [refusing for child in model.children() for refusing in models_refusing_skip_logits(child)]
    is_fixed = "forward" in vars(model) or hasattr(type(model), "liger_original")
    return [] if is_fixed or "skip_logits" in inspect.signature(model.forward).parameters else [model]


def match_loss(model, lora, **losses):
    """Return ([(module, match)], reason or None for leaving the loss) of a model.

    Args:
        lora: as in `ModelMatch`.
        losses: the flags cross_entropy and fused_linear_cross_entropy.
    """
    if not any(losses.values()):
        return [], None
    if not computes_a_loss(model):
        return [], "its forward computes no cross entropy"
    if not isinstance(inspect.getattr_static(type(model), "loss_function", None), property):
        return [], "its class has a loss_function of its own: logits are computed as before"
    replaced = replaced_linear_code() or replaced_function(_loss_pins(), ("torch", "transformers"))
    if replaced or not _loss_is_known():
        name = replaced or "code of ForCausalLMLoss"
        return [], f"a program replaced {name}, which the loss calls: logits are computed as before"
    owner = model, CausalLMMatch(options=tuple(sorted(losses.items())), lora=lora)
    if losses["cross_entropy"]:
        return [owner], None
    head = head_of(model)
    if may_ask_for_class(model, head):
        return [], "its forward, or what it calls, may ask for the class of its logits: they are computed as before"
    matches = match_heads(head)
    if matches is None:
        return [], f"its head is a {type(head).__name__}, not a plain linear layer: logits are computed as before"
    return [*matches, owner], None


def head_of(model):
    """Return the head of `model`, or of its only child with a head, or None."""
    head = _output_embeddings(model)
    if head is not None:
        return head
    heads = [head for child in model.children() if (head := _output_embeddings(child)) is not None]
    return heads[0] if len(heads) == 1 and computes_a_loss(model) else None


def _output_embeddings(module):
    try:
        return module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    except Exception:  # a model's own code may raise any exception
        return None


def computes_a_loss(model):
    """Tell whether `model`'s own forward calls `self.loss_function` or torch's cross entropy."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return code is not None and not {"loss_function", "CrossEntropyLoss", "cross_entropy"}.isdisjoint(code.co_names)
