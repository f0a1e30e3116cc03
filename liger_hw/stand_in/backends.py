"""Define the names of `liger_kernel.backends`, which choose implementations.

Here only Triton's exists, for each device. `liger_hw.use_backend` forces a backend of this library.
"""

import inspect
import os

from liger_hw.checks import check
from liger_hw.stand_in import functional

IMPLEMENTATION = "triton"
LIGER_KERNEL_IMPL_ENV = "LIGER_KERNEL_IMPL"
_pinned = [os.environ.get(LIGER_KERNEL_IMPL_ENV) or None]  # what `get_impl` returns
IMPL_REGISTRY = {}  # `liger_kernel.ops.backends.registry` lists other implementations; this library has none


class ImplNotAvailableError(RuntimeError):
    """Error of an implementation that this library does not have."""


class NoImplAvailableError(RuntimeError):
    """Error that this library never raises, as every op has an implementation."""


class LigerImplFallbackWarning(UserWarning):
    """Warning that this library never gives, as no op falls back to another implementation."""


BackendNotAvailableError, NoBackendAvailableError = ImplNotAvailableError, NoImplAvailableError
LigerBackendFallbackWarning = LigerImplFallbackWarning


def set_impl(name):
    """Pin None or a name of Triton, which is the only implementation.

    Raises:
        ImplNotAvailableError: another name.
    """
    if name is not None and IMPLEMENTATION not in name:
        raise ImplNotAvailableError(
            f"implementation: got {name!r}, allowed: None or triton. liger_hw.use_backend forces a backend of liger_hw"
        )
    _pinned[0] = name


def get_impl():
    """Return the name that `set_impl` pinned, or the variable LIGER_KERNEL_IMPL; None without one."""
    return _pinned[0]


def available_impls(op_name, device=None):
    """List the implementations of a function of `liger_kernel.functional`, on any device.

    Raises:
        ValueError: there is no such function.
    """
    names = [name for name, member in vars(functional).items() if inspect.isfunction(member)]
    check(op_name in names, "op_name", repr(op_name), ", ".join(names))
    return [IMPLEMENTATION]


def all_impls(op_name):
    """Do the same as `available_impls`."""
    return available_impls(op_name)


def clear_available_cache():
    """Do nothing, as this library has no such cache."""


def dispatch(op_name, *args, impl=None, backend=None, **kwargs):
    """Call the function of `liger_kernel.functional` that `op_name` names."""
    available_impls(op_name)
    return getattr(functional, op_name)(*args, impl=impl, backend=backend, **kwargs)


set_backend, get_backend, available_backends, all_backends = set_impl, get_impl, available_impls, all_impls
