"""A runner without its device fails here, loudly: `python ci/device.py amd`."""

import sys

import torch

import liger_hw
from liger_hw import backends


def main(vendor: str) -> None:
    build = f"torch {torch.__version__} (CUDA {torch.version.cuda}, HIP {torch.version.hip}, XPU {torch.version.xpu})"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        raise SystemExit(f"{build} finds no accelerator here; this runner is for one of {vendor}")
    for index in range(torch.accelerator.device_count()):
        found = backends.detected(torch.device(accelerator.type, index))
        print(f"{accelerator.type}:{index}: {found.name}, {found.vendor} {found.arch}, {found.num_cores} cores")
        if found.vendor != vendor:
            raise SystemExit(f"{build} finds a GPU of {found.vendor}; this runner is for one of {vendor}")
    # a vendor's Triton may be missing its compiler, or be PyPI's, which has taken its place
    with liger_hw.use_backend(vendor):
        x = torch.randn(8, 256, device=accelerator, requires_grad=True)
        liger_hw.rms_norm(x).sum().backward()
    if not bool(x.grad.isfinite().all()):
        raise SystemExit(f"{build} compiled a kernel whose gradient is not finite")
    print(f"{build} and Triton compiled a kernel and ran it")


if __name__ == "__main__":
    main(sys.argv[1])
