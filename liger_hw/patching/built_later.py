"""Run a function on every later model of a family."""

import sys

from liger_hw.checks import check

_replaced_post_init = {}  # base class of a family -> the post_init that it defines, None where it inherits one


def call_when_built(cls, function):
    """Call `function(model)` after each construction of a model of `cls`'s family.

    It replaces an earlier function. A family is all classes that derive from the same child of `PreTrainedModel`. After
    `importlib.reload` of the model's file, auto classes still build the older of two classes: the family has both.

    Raises:
        ValueError: `cls` is not a class of Hugging Face models.
    """
    stop_calling(cls)
    current = getattr(sys.modules.get(cls.__module__), cls.__name__, cls)
    for base in {_family_base(cls), _family_base(current)}:
        _wrap_post_init(base, function)


def stop_calling(cls):
    """Undo `call_when_built` for `cls`'s family.

    Raises:
        ValueError: `cls` is not a class of Hugging Face models.
    """
    family = _name(_family_base(cls))
    for base in [base for base in _replaced_post_init if _name(base) == family]:
        replaced = _replaced_post_init.pop(base)
        del base.post_init
        if replaced is not None:
            base.post_init = replaced


def _family_base(cls):
    from transformers import PreTrainedModel

    check(issubclass(cls, PreTrainedModel), "model", cls.__name__, "a class of Hugging Face models")
    return next(base for base in cls.__mro__ if PreTrainedModel in base.__bases__)


def _name(cls):
    return cls.__module__, cls.__qualname__


def _wrap_post_init(base, function):
    original = base.post_init

    def post_init(self):
        original(self)
        function(self)

    _replaced_post_init[base] = vars(base).get("post_init")
    base.post_init = post_init
