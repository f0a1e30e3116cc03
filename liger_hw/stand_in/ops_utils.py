"""Define the names of `liger_kernel.ops.utils` that other projects' kernels use."""

import contextlib
import functools

import torch
from packaging.version import Version

from liger_hw.checks import check
from liger_hw.console import installed_version
from liger_hw.stand_in.utils import infer_device

LARGEST_BLOCK = 65_536


def is_hip():
    """Tell whether this PyTorch is built for AMD."""
    return torch.version.hip is not None


def ensure_contiguous(fn):
    """Wrap `fn(ctx, ...)` so that it gets contiguous tensors."""

    def contiguous(x):
        return x.contiguous() if isinstance(x, torch.Tensor) else x

    @functools.wraps(fn)
    def wrapper(ctx, *args, **kwargs):
        return fn(ctx, *map(contiguous, args), **{name: contiguous(x) for name, x in kwargs.items()})

    return wrapper


def calculate_settings(n):
    """Return (block, warps) for a kernel with one row of `n` numbers per program.

    Raises:
        ValueError: n is more than 65,536.
    """
    check(n <= LARGEST_BLOCK, "n", n, f"up to {LARGEST_BLOCK}")
    block = 1 << max(n - 1, 0).bit_length()
    widest = 16 if is_hip() else 32  # AMD's warps have 64 lanes; a block has at most 1,024 threads everywhere
    return block, next((warps for least, warps in ((32_768, widest), (8_192, 16), (2_048, 8)) if block >= least), 4)


def device_context(device):
    """Return a context that launches kernels on `device`; a CPU needs none."""
    device = torch.device(device)
    return contextlib.nullcontext() if device.type == "cpu" else getattr(torch, device.type).device(device)


def get_amp_custom_fwd_bwd():
    """Return the decorators (custom_fwd, custom_bwd) of autograd functions for this accelerator."""
    kind = infer_device()
    return tuple(functools.partial(f, device_type=kind) for f in (torch.amp.custom_fwd, torch.amp.custom_bwd))


def compare_version(package, operator, target):
    """Return `operator(installed version, target)`; False where the package is not installed."""
    installed = installed_version(package)
    return installed is not None and operator(Version(installed), Version(target))


def __getattr__(name):
    if name in ("amp_custom_fwd", "amp_custom_bwd"):
        return get_amp_custom_fwd_bwd()[name == "amp_custom_bwd"]
    if name != "torch_to_triton_dtype":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
