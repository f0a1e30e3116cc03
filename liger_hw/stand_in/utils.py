"""Define the names of `liger_kernel.utils`."""

from importlib.metadata import version
from importlib.util import find_spec

import torch
from packaging.version import Version

from liger_hw import backends


def is_peft_available():
    """Tell whether the package peft is installed."""
    return find_spec("peft") is not None


PEFT_AVAILABLE = is_peft_available()
MIN_SUPPORTED_TRANSFORMERS_VERSION = Version("5.0.0")  # of liger_kernel; this library also runs with older ones


def __getattr__(name):
    if name not in ("transformer_version", "IS_TRANSFORMERS_V5_OR_LATER"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    installed = Version(version("transformers"))
    return installed if name == "transformer_version" else installed >= MIN_SUPPORTED_TRANSFORMERS_VERSION


def is_npu_available():
    """Tell whether this PyTorch has Ascend devices."""
    return hasattr(torch, "npu") and torch.npu.is_available()


def infer_device():
    """Return this accelerator's kind, "cuda" (AMD too), "xpu" and others, or "cpu"."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if kind is None else kind.type


def infer_device_arch(device_id=0):
    """Return an accelerator's architecture, such as "sm90" or "gfx942", or "cpu"."""
    kind = infer_device()
    return kind if kind == "cpu" else backends.detected(torch.device(kind, device_id)).arch


def infer_comm_backend():
    """Return the torch.distributed backend: "nccl" (AMD too), "xccl" or "gloo"."""
    return torch.distributed.get_default_backend_for_device(infer_device())


def get_total_gpu_memory():
    """Return the memory of the first accelerator in whole GiB.

    Raises:
        RuntimeError: there is no accelerator.
    """
    kind = infer_device()
    if kind == "cpu":
        raise RuntimeError("no accelerator here")
    return getattr(torch, kind).get_device_properties(0).total_memory // 2**30


def transformers_version_dispatch(
    required_version, before_fn, after_fn, before_args=(), after_args=(), before_kwargs=None, after_kwargs=None
):
    """Call `before_fn(...)` before `required_version` of the installed transformers, else `after_fn(...)`."""
    import transformers

    if Version(transformers.__version__) < Version(required_version):
        return before_fn(*before_args, **before_kwargs or {})
    return after_fn(*after_args, **after_kwargs or {})
