"""The choice of implementations in `liger_kernel.backends`. Here one, Triton's, serves each device.

`liger_hw.use_backend` forces a backend of this library.
"""

import inspect

from liger_hw.checks import check
from liger_hw.stand_in import functional

IMPLEMENTATION = "triton"
IMPL_REGISTRY = {}  # `liger_kernel.ops.backends.registry` lists other implementations here: there are none


class ImplNotAvailableError(RuntimeError):
    """Raised for an implementation that is not here."""


class NoImplAvailableError(RuntimeError):
    """Never raised: every op has an implementation."""


class LigerImplFallbackWarning(UserWarning):
    """Never given: no op falls back to another implementation."""


BackendNotAvailableError, NoBackendAvailableError = ImplNotAvailableError, NoImplAvailableError
LigerBackendFallbackWarning = LigerImplFallbackWarning


def set_impl(name):
    """Accept None or a name of Triton, which serves already.

    Raises:
        ImplNotAvailableError: another name.
    """
    if name is not None and IMPLEMENTATION not in name:
        raise ImplNotAvailableError(
            f"implementation: got {name!r}, allowed: None or triton. liger_hw.use_backend forces a backend of liger_hw"
        )


def get_impl():
    """None: no implementation is pinned."""


def available_impls(op_name, device=None):
    """The implementations of a function of `liger_kernel.functional`, on any device.

    Raises:
        ValueError: there is no such function.
    """
    names = [name for name, member in vars(functional).items() if inspect.isfunction(member)]
    check(op_name in names, "op_name", repr(op_name), ", ".join(names))
    return [IMPLEMENTATION]


def all_impls(op_name):
    """As `available_impls`."""
    return available_impls(op_name)


def clear_available_cache():
    """Do nothing: nothing is cached."""


def dispatch(op_name, *args, impl=None, backend=None, **kwargs):
    """Call the function of `liger_kernel.functional` that `op_name` names."""
    available_impls(op_name)
    return getattr(functional, op_name)(*args, impl=impl, backend=backend, **kwargs)


set_backend, get_backend, available_backends, all_backends = set_impl, get_impl, available_impls, all_impls
