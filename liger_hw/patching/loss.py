"""The loss of a language model without its logits.

`model.forward` arms the head; the armed head returns `LazyLogits`; the model's own code scales, caps and slices them;
the model's loss function, replaced, hands them to `fused_linear_cross_entropy`, and torch's cross entropy, where the
model calls that by itself, does too. The model's forward is not rewritten, so whatever else it does (labels of its own
making, auxiliary losses, other outputs) stays as it is.

Under sharding the loss needs the head's weight whole, after the head's own forward has ended. FSDP2 is told to keep
it until backward, which is next; ZeRO-3 gathers it again when it is looked up. A head that FSDP1 wraps by itself fails
with an error about the weight's size: leave it to the unit around it.
"""

import functools
import inspect

import torch

from liger_hw._torch import is_plain
from liger_hw.kernels.cross_entropy import cross_entropy
from liger_hw.kernels.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_hw.patching import swapping
from liger_hw.patching.lazy_logits import LazyLogits

# keyword arguments of a model's forward that the ops understand and Hugging Face's loss ignores
CE_OPTIONS = ("label_smoothing", "lse_square_scale", "return_token_accuracy", "return_predicted_tokens")
RENAMED = {"ce_weight": "weight"}  # of the linear op -> of the plain one
LINEAR_CE_OPTIONS = (*CE_OPTIONS, "accum_dtype", "use_token_scaling", "ce_weight")
BY_PRODUCTS = ("token_accuracy", "predicted_tokens")


def causal_lm_loss(
    logits,
    labels,
    vocab_size,
    num_items_in_batch=None,
    ignore_index=-100,
    shift_labels=None,
    *,
    theirs,
    fused_ce,
    **kwargs,
):
    """`ForCausalLMLoss` of transformers, of lazy logits or of a tensor.

    Args:
        logits: (B, T, V), a tensor or `LazyLogits`.
        labels: (B, T), or None with `shift_labels`, which are the same one step to the left.
        vocab_size: V.
        num_items_in_batch: what to divide the sum by instead of the number of labels that count; number or tensor.
        ignore_index: label that does not count.
        theirs: the loss function that the model would have called; it gets what the ops cannot take.
        fused_ce: use the op `cross_entropy` for logits that are a tensor.
        kwargs: `CE_OPTIONS` and the rest of `LINEAR_CE_OPTIONS`, which mean what they mean in the ops; anything else is
            ignored, as `ForCausalLMLoss` does.

    Returns:
        fp32 scalar. 0 where no label counts, which Hugging Face's mean makes NaN.
    """
    targets = shift_labels
    if targets is None:
        targets = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = targets.reshape(-1)
    lazy = isinstance(logits, LazyLogits) and logits.value is None and logits.scale_and_softcap() is not None
    fits = logits.shape[-1] == vocab_size and logits.numel() == targets.numel() * vocab_size
    options = {name: kwargs[name] for name in LINEAR_CE_OPTIONS if kwargs.get(name) is not None}
    if not fits or targets.dtype != torch.int64 or not (lazy or fused_ce or options):
        real = logits.materialise() if isinstance(logits, LazyLogits) else logits
        return theirs(real, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    options |= {"ignore_index": ignore_index}
    targets = targets.to(logits.device)
    counted = num_items_in_batch is not None
    divisor = num_items_in_batch.to(logits.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch
    if counted and torch.is_tensor(divisor) and divisor.ndim:
        options |= {"reduction": "sum"}
    else:
        options |= {"num_items": divisor}
        divisor = None
    if lazy:
        x, weight, bias = logits.operands
        scale, softcap = logits.scale_and_softcap()
        x = x.reshape(-1, x.shape[-1])
        found = fused_linear_cross_entropy(x, weight, targets, bias, softcap=softcap, logit_scale=scale, **options)
    else:
        real = logits.materialise() if isinstance(logits, LazyLogits) else logits
        options = {RENAMED.get(name, name): option for name, option in options.items()}
        found = cross_entropy(real.reshape(-1, vocab_size), targets, **options)
    if not torch.is_tensor(found):
        if isinstance(logits, LazyLogits):
            logits.extras |= {name: getattr(found, name) for name in BY_PRODUCTS if getattr(found, name) is not None}
        found = found.loss
    return found if divisor is None else found / divisor


def _head(original, match):
    def forward(self, *args, **kwargs):
        armed = self.__dict__.get("liger_armed", False)
        if not armed or len(args) != 1 or kwargs:
            return original.forward(self, *args, **kwargs)
        hidden, weight = args[0], self.weight
        computes_alike = hidden.dtype == weight.dtype or torch.is_autocast_enabled(hidden.device.type)
        if not computes_alike or not is_plain(hidden, weight) or hidden.numel() == 0:
            return original.forward(self, hidden)
        if hasattr(self, "set_reshard_after_forward"):  # FSDP2: the loss, which comes next, needs the weight whole
            self.set_reshard_after_forward(False, recurse=False)
        return LazyLogits(hidden, self)

    return {"forward": forward, "liger_is_head": True}


def _causal_lm(original, match):
    options = dict(match.options)
    linear, plain = options["fused_linear_cross_entropy"], options["cross_entropy"]
    theirs = original.forward
    places = {name: i for i, name in enumerate(list(inspect.signature(theirs).parameters)[1:])}

    def argument(name, args, kwargs):
        if name in kwargs:
            return kwargs[name]
        return args[places[name]] if places.get(name, len(args)) < len(args) else None

    @functools.wraps(theirs)
    def forward(self, *args, skip_logits=None, **kwargs):
        labelled = any(argument(name, args, kwargs) is not None for name in ("labels", "shift_labels"))
        if skip_logits and not labelled:
            raise ValueError(
                "skip_logits: got True without labels, allowed: True with labels or shift_labels, False, None"
            )
        if not (linear and (self.training and labelled if skip_logits is None else skip_logits)):
            return theirs(self, *args, **kwargs)
        heads = [m for m in head_of(self).modules() if getattr(m, "liger_is_head", False)]
        for head in heads:
            head.liger_armed = True
        try:
            outputs = theirs(self, *args, **kwargs)
        finally:
            for head in heads:
                del head.liger_armed
        # nn.DataParallel gathers its replicas' outputs, and could gather tensors only
        return _finish(outputs, skip_logits or getattr(self, "_is_replica", False))

    their_loss_function = original.loss_function.fget  # not looked up below: Dynamo cannot trace that

    def loss_function(self):
        found = their_loss_function(self)
        return functools.partial(causal_lm_loss, theirs=found, fused_ce=plain) if _is_theirs(found) else found

    return {
        "__name__": original.__name__,  # save_pretrained writes it into the configuration
        "forward": forward,
        "loss_function": property(loss_function, original.loss_function.fset),
    }


def _is_theirs(loss_function):
    from transformers.loss.loss_utils import ForCausalLMLoss

    return loss_function is ForCausalLMLoss


def _finish(outputs, skip_logits):
    """The model's outputs with the by-products of the loss, and without logits where the caller asked for none."""
    if isinstance(outputs, tuple):
        extras = next((o.extras for o in outputs if isinstance(o, LazyLogits)), {})
        outputs = tuple(None if skip_logits and isinstance(o, LazyLogits) else o for o in outputs)
        return outputs + tuple(extras[name] for name in BY_PRODUCTS if name in extras)
    logits = outputs.get("logits")
    lazy = isinstance(logits, LazyLogits)
    if skip_logits:
        outputs = type(outputs)(**(dict(outputs) | {"logits": None}))
    elif lazy and outputs.get("loss") is None:
        outputs.logits = logits.materialise()
    return _with_by_products(outputs, logits.extras) if lazy and logits.extras else outputs


def _with_by_products(outputs, extras):
    if torch.compiler.is_compiling():  # which cannot trace the making of a class
        for name, value in extras.items():
            setattr(outputs, name, value)
        return outputs
    from liger_hw.patching.output_classes import with_by_products

    return with_by_products(type(outputs))(**dict(outputs), **extras)


def head_of(model):
    """The output layer of `model`, or where it has none that of the one model inside it that has one; or None."""
    own = model.get_output_embeddings()
    if own is not None:
        return own
    inner = [m.get_output_embeddings() for m in model.children() if hasattr(m, "get_output_embeddings")]
    heads = [head for head in inner if head is not None]
    return heads[0] if len(heads) == 1 and computes_a_loss(model) else None


def computes_a_loss(model):
    """Whether `model`'s own forward calls `self.loss_function` or torch's cross entropy, where the fused loss is."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return code is not None and not {"loss_function", "CrossEntropyLoss", "cross_entropy"}.isdisjoint(code.co_names)


swapping.MEMBERS |= {"head": _head, "causal_lm": _causal_lm}
