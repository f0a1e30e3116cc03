"""Fail unless this runner has a GPU of the vendor: `python lab/gpu/device.py amd`."""

import sys

import torch

import liger_hw
from liger_hw import backends


def main(vendor: str) -> None:
    build = f"torch {torch.__version__} (CUDA {torch.version.cuda}, HIP {torch.version.hip}, XPU {torch.version.xpu})"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise SystemExit(f"{build} finds no accelerator, expected one of {vendor}")
    for index in range(torch.accelerator.device_count()):
        gpu = backends.detected(torch.device(accelerator.type, index))
        print(f"{accelerator.type}:{index}: {gpu.name}, {gpu.vendor} {gpu.arch}, {gpu.num_cores} cores")
        if gpu.vendor != vendor:
            raise SystemExit(f"{build} finds a GPU of {gpu.vendor}, expected one of {vendor}")
    # the vendor's Triton may lack its compiler, or PyPI's Triton may have replaced it
    with liger_hw.use_backend(vendor):
        x = torch.randn(8, 256, device=accelerator, requires_grad=True)
        liger_hw.rms_norm(x).sum().backward()
    if not bool(x.grad.isfinite().all()):
        raise SystemExit(f"{build} compiled a kernel whose gradient is not finite")
    print(f"{build} and Triton compiled a kernel and ran it")


if __name__ == "__main__":
    main(sys.argv[1])
