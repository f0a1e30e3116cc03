"""Which packages are installed, and an error that names those that are not."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


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
