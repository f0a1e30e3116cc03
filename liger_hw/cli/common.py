"""What several commands share."""

import argparse
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
META = torch.device("meta")


def positive(text: str) -> int:
    """The integer in `text`, for argparse, which shows the error."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: a positive integer")
    return int(text)


def require(*packages: str) -> None:
    """A ValueError that names those of `packages` that are not installed, unless all are."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        source = "liger-kernel" if missing == ["liger_kernel"] else "'liger_hw[bench]'"
        raise ValueError(f"needs {', '.join(missing)}, which is not installed here: pip install {source}")


def package_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def accelerators() -> list[torch.device]:
    """Every accelerator that torch sees."""
    kind = torch.accelerator.current_accelerator()
    return [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())] if kind else []


def here() -> torch.device:
    """The first accelerator, or the CPU."""
    return next(iter(accelerators()), torch.device("cpu"))


def progress(console=None):
    """What happens now, how much of it is done, and a note beside it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)


def parameters(meta: dict) -> str:
    """A configuration's meta-parameters in a cell of a table."""
    return ", ".join(f"{name} {value}" for name, value in meta.items())
