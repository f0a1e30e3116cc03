"""Tables, progress, and which packages are installed: what every command prints and asks."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def table(header, rows) -> str:
    """Columns as wide as their widest cell, two spaces apart: no terminal is so narrow that it cuts one."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells)


def parameters(meta: dict) -> str:
    """A configuration's meta-parameters in a cell of a table."""
    return ", ".join(f"{name} {value}" for name, value in meta.items())


def progress(console=None):
    """What happens now, how much of it is done, and a note beside it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def require(*packages: str) -> None:
    """A ValueError that names those of `packages` that are not installed, unless all are."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        source = "liger-kernel" if missing == ["liger_kernel"] else "'liger_hw[bench]'"
        raise ValueError(f"needs {', '.join(missing)}, which is not installed here: pip install {source}")
