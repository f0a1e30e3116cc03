"""Refuse parts of liger_kernel's autograd functions, and classes derived from these.

A class here has `apply` alone. A derived class that overrides another part would compute the original's result.
"""

ADVICE = "call its apply, or write a torch.autograd.Function around the op of liger_hw"


class Served(type):
    """Class of the autograd functions' names; `advice` says what to use instead of another part."""

    advice = ADVICE

    def __init__(cls, name, bases, members, **options):
        super().__init__(name, bases, members, **options)
        for base in bases:
            if isinstance(base, Served) and not cls.__module__.startswith("liger_hw."):
                raise TypeError(f"{name} derives from {base.__name__}, whose parts liger_hw lacks: {base.advice}")

    def __getattr__(cls, name):
        raise AttributeError(f"{cls.__name__}.{name} is not served by liger_hw: {cls.advice}")


def own_loss(base):
    """Return the advice for a loss whose base class is `base`, a name in `liger_kernel.chunked_loss`."""
    return f"call its apply, or derive from {base} and define its loss function"
