"""Format tables for the terminal, and check for installed packages."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

# a package to import -> its name on the package index, and the version that liger_hw-lab needs
SOURCES = {
    "elftools": "pyelftools", "galore_torch": "galore-torch", "liger_kernel": "liger-kernel",
    "tinygrad": "tinygrad==0.14.0", "yaml": "pyyaml",
}  # fmt: skip


def table(header, rows) -> str:
    """Format rows as text: columns as wide as their widest cell, two spaces apart."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells)


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def require(*packages: str) -> None:
    """Raise a ValueError that names the missing packages, unless all of `packages` are installed."""
    missing = [SOURCES.get(package, package) for package in packages if find_spec(package) is None]
    if missing:
        raise ValueError(f"needs {', '.join(missing)}, which is not installed here: pip install {' '.join(missing)}")
