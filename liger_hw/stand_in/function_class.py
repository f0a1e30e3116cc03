"""Make classes under the names of liger_kernel's autograd functions.

Such a class has `apply` alone. It refuses other parts and derived classes: one that overrides another part would
compute the original's result.
"""


class FunctionClass(type):
    """Class of these classes; `advice` says what to use instead of another part."""

    advice = "call its apply, or write a torch.autograd.Function around the op of liger_hw"

    def __init__(cls, name, bases, members):
        super().__init__(name, bases, members)
        for base in bases:
            raise TypeError(f"{name} derives from {base.__name__}, whose parts liger_hw lacks: {base.advice}")

    def __getattr__(cls, name):
        raise AttributeError(f"{cls.__name__}.{name} is not served by liger_hw: {cls.advice}")


def function_class(function, name=None, advice=FunctionClass.advice):
    """Return a class whose static method `apply` is `function`; torch differentiates it.

    Args:
        name: of the class; by default the function's, whose docstring it then has.
        advice: what to use instead of another part.
    """
    doc = f"Call `{function.__name__}` by `apply`." if name else function.__doc__
    members = {"apply": staticmethod(function), "__doc__": doc, "__module__": function.__module__, "advice": advice}
    return FunctionClass(name or function.__name__, (), members)
