"""State of a model's forward and of its head's call.

Logits that are not computed (`lazy_logits.py`), and the nodes of their graph, share it.
"""

import threading
import weakref

import torch
from torch.nn.functional import linear  # as now: a program may replace it between the forward and a read

from liger_hw import _torch
from liger_hw.dispatch import autocast_as, kept_casts
from liger_hw.patching.record import apply_steps, autocast_dtype

ADVICE = "call the model with skip_logits=False, which computes the logits in the forward"
TENSOR_NAMES = "hidden states", "weight", "bias"
CHANGED = f"changed since (an optimizer step, or a write in place?). Read the logits before that, or {ADVICE}"
GONE = f"lost memory after the forward (sharded again, or freed): {ADVICE}"


class Forward:
    """A call of a patched model, whose heads may leave their logits uncomputed.

    Attributes:
        recording: whether it still runs. Later steps compute at once: a program that divides the logits and reads the
            quotient after the optimizer's step gets the logits of this forward.
        unsharded: what FSDP2 has to shard again at its end.
        within: whether autograd records it, and the hooks for saved tensors around it.
        takes_objects: function that tells whether the logits may be an object that is no tensor (`TracedLogits`).
        casts: whether autocast casts the head's weights, which fp32 logits do not want.
        has_cast: whether a head computes with such casts.
    """

    def __init__(self, takes_objects=lambda: False, casts=True):
        self.casts, self.has_cast = casts, False
        self.recording, self.unsharded, self.takes_objects = True, [], takes_objects
        self.within = None if torch.compiler.is_compiling() else recording_and_hooks()

    def cast(self, *weights):
        """Return the casts of weights that autocast keeps for F.linear, where it keeps any."""
        casts = kept_casts(*weights) if self.casts else weights
        self.has_cast |= any(cast is not weight for cast, weight in zip(casts, weights))
        return casts


def recording_and_hooks():
    """Return whether autograd records, and the innermost hooks for saved tensors."""
    return torch.is_grad_enabled(), _torch.saved_tensors_hooks()


class Source:
    """Hidden states, weight and bias of one call of a head.

    Attributes:
        tensors: (hidden (..., H), weight (V, H), bias (V,) or None), without their graph.
        autocast_dtype: the dtype in which the head computes, or None outside autocast.
    """

    def __init__(self, *tensors, parts=()):
        self.tensors = tuple(None if t is None else t.detach() for t in tensors)
        self.autocast_dtype = autocast_dtype(tensors[0].device.type)
        # parts: weights that `weight` is a copy of
        named = [*zip(TENSOR_NAMES, self.tensors), *(("weights", part.detach()) for part in parts)]
        self._seen = [(name, t, *_fingerprint(t)) for name, t in named if t is not None]

    def changes(self, names, sums_too=True):
        """Yield (name, what happened) of the head's tensors that changed since the forward.

        Some programs write without a new version number (fused AdamW, `p.data`, `p.numpy()`), so this also compares
        sums over all values, for which the host waits for a GPU.
        """
        for name, tensor, version, sums in self._seen:
            if name not in names:
                continue
            if tensor.untyped_storage().nbytes() == 0 < tensor.numel():
                yield name, GONE
                continue
            version_now = None if version is None else _torch.tensor_version(tensor)
            if version_now != version or sums_too and not torch.equal(_fingerprint(tensor)[1], sums):
                yield name, CHANGED

    def check_unchanged(self, names=TENSOR_NAMES, sums_too=True):
        """Raise a RuntimeError if the head's tensors have changed since the forward."""
        for name, change in self.changes(names, sums_too):
            raise RuntimeError(
                f"the logits of this forward were not computed and cannot be now: the head's {name} {change}"
            )

    def logits(self, steps):
        """Compute all rows, as fewer may round differently, then apply `steps`."""
        self.check_unchanged()
        with autocast_as(self.tensors[0].device.type, self.autocast_dtype):
            return apply_steps(linear(*self.tensors), steps)


class HeadCall:
    """State of one call of a head, shared by its logits and their nodes.

    It refers weakly to the `Source`, which the logits own, so that on a GPU a loss does not keep hidden states.

    Attributes:
        forward: the `Forward` of the model.
        learns: whether each tensor of the Source needs a gradient.
        by_products: the other results of the loss, by name.
        has_a_loss: whether a fused loss computed from the logits. The backward adds the gradient of a second one to
            its gradient, which needs the values of both.
        kept: the Source, once a backward may need it: an operation read the logits or may read their gradient. The
            head's backward lets go of it, unless the graph is retained.
        gradient_stays: whether the gradient of the logits outlives the backward, so that it must have values.
    """

    def __init__(self, forward, source, learns):
        self.forward, self.learns, self._source = forward, learns, weakref.ref(source)
        self.by_products, self.has_a_loss, self.kept, self.gradient_stays = {}, False, None, False
        # in anomaly mode torch reads every gradient, in search of NaN; on a CPU see `is_scalable`
        if torch.is_anomaly_enabled() or any(learns) and source.tensors[0].device.type == "cpu":
            self.kept = source
        self.lock = threading.RLock()

    def keep(self, gradient_stays=False):
        self.kept = self.kept or self._source()
        self.gradient_stays |= gradient_stays

    def source(self):
        source = self.kept or self._source()
        if source is None:
            raise RuntimeError(f"something reads the gradient of logits that are gone and were not computed: {ADVICE}")
        return source


WORDS_PER_SUM = 65536  # at most so many words lie between two of the same sum


def _fingerprint(tensor):
    """Return a tensor's version (None in inference mode) and exact sums of its bits.

    The sums are those of words at equal distances. The distance is odd, so that rows or columns that change places
    change the sums, too. They read the weight once, and the host does not wait.
    """
    flat = tensor if tensor.is_contiguous() else tensor.contiguous()  # a weight may be every second column
    # not `nbytes`, which Dynamo cannot trace: a compiled function may be the first to read the logits
    wide = flat.shape[-1] * flat.itemsize % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0
    words = flat.view(torch.int64 if wide else {2: torch.int16, 4: torch.int32}[flat.itemsize])
    count = words.numel()
    rows = count // WORDS_PER_SUM + 1
    distance = (count // rows - 1) | 1  # of two rows of words: the last ones of a row begin the next one
    sums = words.as_strided((rows, count - distance * (rows - 1)), (distance, 1)).sum(0)
    return None if tensor.is_inference() else _torch.tensor_version(tensor), sums
