"""The losses as modules: the constructor takes the options, a call the tensors."""

import functools
import inspect

from torch import nn

from liger_hw.losses.distillation import distillation_loss
from liger_hw.losses.multi_token import multi_token_loss
from liger_hw.losses.offline_distillation import offline_distillation_loss
from liger_hw.losses.policy import OPTION_NAMES, policy_loss
from liger_hw.losses.preference import preference_loss, unpaired_preference_loss
from liger_hw.losses.preference_formulas import PAIR_LOSSES, UNPAIRED_LOSSES
from liger_hw.spelling import check_known


def _options(losses):
    return dict.fromkeys(name for loss in losses.values() for name in loss.options)


def _names(cls):
    """Return the names of a loss module's options."""
    return dict.fromkeys([*_optional_arguments(cls.function), *cls.further()]).keys()


@functools.cache
def _optional_arguments(function):
    named = inspect.signature(function).parameters.values()
    return [p.name for p in named if p.default is not p.empty]


class _Loss(nn.Module):
    """Call `function(*tensors, **options, **more)` for `loss(*tensors, **more)`.

    The options are attributes, too: `loss.beta = 0.2` holds from the next call on, and so does a parameter, a buffer or
    a module of an option's name, and an attribute of a subclass, unless the subclass has a forward of its own.

    Raises:
        ValueError: the function has no such option.
    """

    function = None
    further = staticmethod(lambda: ())  # names of the options that the function takes by ** and passes on

    def __init__(self, **options):
        super().__init__()
        for name, value in options.items():
            check_known("option", name, _names(type(self)), f"Options of {self.function.__name__}")
            if hasattr(type(self), name) and self._uses_attributes():  # a property of a subclass would hide it
                setattr(self, name, value)
            else:  # unregistered, as the weight of a reference model belongs to that model
                self.__dict__[name] = value

    def _uses_attributes(self):
        return type(self).forward is _Loss.forward  # another may have a parameter of an option's name for itself

    def _options(self):
        names = _names(type(self))
        options = {name: self.__dict__[name] for name in names if name in self.__dict__}
        is_registered = self._parameters or self._buffers or self._modules
        if self._uses_attributes() and (type(self).__module__ != __name__ or is_registered):
            values = {name: getattr(self, name, None) for name in names}
            options |= {name: value for name, value in values.items() if value is not None}
        return options

    def forward(self, *tensors, **more):
        return self.function(*tensors, **{**self._options(), **more})

    def extra_repr(self):
        return ", ".join(f"{name}={value!r}" for name, value in self._options().items())


def _text(data, call):
    return f"{data}\n\n    {_Loss.__doc__}\n    Examples:\n        >>> loss = liger_hw.{call}\n    "


class PreferenceLoss(_Loss):
    __doc__ = _text("Of pairs of answers.", 'PreferenceLoss(loss_type="ipo", beta=0.2)')
    function = staticmethod(preference_loss)
    further = staticmethod(lambda: _options(PAIR_LOSSES))


class UnpairedPreferenceLoss(_Loss):
    __doc__ = _text("Of single answers, wanted or not.", 'UnpairedPreferenceLoss(loss_type="kto", beta=0.2)')
    function = staticmethod(unpaired_preference_loss)
    further = staticmethod(lambda: _options(UNPAIRED_LOSSES))


class PolicyLoss(_Loss):
    __doc__ = _text("Of sampled completions with advantages.", "PolicyLoss(softcap=30.0)")
    function = staticmethod(policy_loss)
    further = staticmethod(lambda: OPTION_NAMES)


class DistillationLoss(_Loss):
    __doc__ = _text("Of a student and its teacher.", 'DistillationLoss(soft_loss="kl", temperature=2.0)')
    function = staticmethod(distillation_loss)


class OfflineDistillationLoss(_Loss):
    __doc__ = _text("Of a student and a teacher's stored values.", "OfflineDistillationLoss(temperature=2.0)")
    function = staticmethod(offline_distillation_loss)


class MultiTokenLoss(_Loss):
    __doc__ = _text("Of several heads that look further ahead.", "MultiTokenLoss(ignore_index=-100)")
    function = staticmethod(multi_token_loss)
