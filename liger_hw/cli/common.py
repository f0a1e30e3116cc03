"""Share devices, dtypes and argument types among commands."""

import argparse

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
META = torch.device("meta")


def positive(text: str) -> int:
    """Return the positive integer in `text`; argparse shows the error."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: a positive integer")
    return int(text)


def accelerators() -> list[torch.device]:
    """Return every accelerator that torch sees."""
    kind = torch.accelerator.current_accelerator()
    return [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())] if kind else []


def here() -> torch.device:
    """Return the first accelerator, or the CPU."""
    return next(iter(accelerators()), torch.device("cpu"))
