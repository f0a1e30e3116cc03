"""Make classes under the names of liger_kernel's autograd functions."""


def function_class(function, name=None):
    """Return a class whose static method `apply` is `function`; torch differentiates it.

    Args:
        name: of the class; by default the function's, whose docstring it then has.
    """
    doc = f"Call `{function.__name__}` by `apply`." if name else function.__doc__
    apply = {"apply": staticmethod(function), "__doc__": doc, "__module__": function.__module__}
    return type(name or function.__name__, (), apply)
