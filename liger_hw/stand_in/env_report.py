"""Print the versions for a bug report by `python -m liger_kernel.env_report`; `liger-hw info` prints more."""

import platform

from liger_hw.console import installed_version

PACKAGES = ("liger_hw", "torch", "triton", "transformers", "trl", "peft", "accelerate", "deepspeed", "liger_kernel")


def print_env_report():
    """Print the system, Python, the relevant packages and the accelerators."""
    import torch

    rows = [("Operating system", platform.platform()), ("Python", platform.python_version())]
    rows += [(package, installed_version(package) or "not installed") for package in PACKAGES]
    rows += [("CUDA", torch.version.cuda or "none"), ("HIP", torch.version.hip or "none")]
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if kind else 0
    names = [getattr(torch, kind.type).get_device_name(i) for i in range(count)]
    rows += [("Accelerators", ", ".join(names) or "none")]
    print("\n".join(f"{name}: {value}" for name, value in rows))


main = print_env_report

if __name__ == "__main__":
    main()
