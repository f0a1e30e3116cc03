"""Build both wheels and the sdist, check their files, run the wheels in fresh environments.

    python -m liger_lab.tools.package  build the tracked files into dist/, check them
    python -m liger_lab.tools.package --tag v0.1.0  fail unless the tag names the package's version, too
    python -m liger_lab.tools.package --nightly  build X.Y.Z.devDATE, which pip installs with --pre alone
    python -m liger_lab.tools.package --repository URL  add project URLs, make the README's links absolute

`make package` runs it. It takes two to four minutes, most of them to install torch, and needs `build`, `twine`
and the package index. The fresh environment gets the torch of this one; TORCH_INDEX names a further index for it.
"""

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def tracked() -> list[str]:
    """Return the files of this checkout that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file())


def nightly(release: str, day: datetime.date) -> str:
    """Return the version of a build of `day` on the way to `release`."""
    return f"{release}.dev{day:%Y%m%d}"


def absolute_links(text: str, repository: str, revision: str) -> str:
    """Point the relative links and pictures of a page at `revision` of a repository."""

    def absolute(match):
        kind = "raw" if match[1] == "!" else "blob"
        return f"{match[1]}[{match[2]}]({repository}/{kind}/{revision}/{match[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)", absolute, text)


def with_urls(pyproject: str, repository: str) -> str:
    """Add the project URLs of a repository to the text of pyproject.toml."""
    urls = {"Repository": "", "Issues": "/issues", "Changelog": "/blob/HEAD/CHANGELOG.md"}
    return f"{pyproject}\n[project.urls]\n" + "".join(f'{name} = "{repository}{at}"\n' for name, at in urls.items())


def unexpected(name: str, files: set[str], expected: set[str]) -> list[str]:
    """List the files that an archive lacks or should not have, as sentences."""
    lines = [f"{name}: lacks {file}" for file in sorted(expected - files)]
    return lines + [f"{name}: has {file}, which does not belong there" for file in sorted(files - expected)]


def wheel_files(release: str) -> set[str]:
    """Return the files that the product's wheel must have: the package and its metadata."""
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    package = {name for name in tracked() if name.startswith("liger_hw/")}
    return package | {f"liger_hw-{release}.dist-info/{name}" for name in about}


def lab_wheel_files(release: str) -> set[str]:
    """Return the files that the laboratory's wheel must have: its package and metadata."""
    package = {name.removeprefix("lab/") for name in tracked() if name.startswith("lab/liger_lab/")}
    return package | {f"liger_hw_lab-{release}.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL")}


def sdist_files(release: str) -> set[str]:
    """Return the files that the sdist must have: the repository and its metadata."""
    return {f"liger_hw-{release}/{name}" for name in [*tracked(), "PKG-INFO"]}


def build(args, copy: Path, output: Path) -> str:
    """Build the tracked files from a copy of them; return the version."""
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    source = copy / "liger_hw" / "__init__.py"
    (release,) = VERSION.findall(source.read_text())
    if args.tag and args.tag != f"v{release}":
        raise SystemExit(f"--tag: got {args.tag}, allowed: v{release}, the version in liger_hw/__init__.py")
    if args.nightly:
        release = nightly(release, datetime.datetime.now(datetime.UTC).date())
        source.write_text(VERSION.sub(f'__version__ = "{release}"', source.read_text()))
    if args.repository:
        page = copy / "README.md"
        page.write_text(absolute_links(page.read_text(), args.repository, args.tag or "HEAD"))
        project = copy / "pyproject.toml"
        project.write_text(with_urls(project.read_text(), args.repository))
    run(sys.executable, "-m", "build", "--outdir", output, copy)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", output, copy / "lab")
    return release


def run(*command, **options) -> None:
    """Print a command and run it; end with its status if it fails."""
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    status = subprocess.run(words, **options).returncode
    if status:
        raise SystemExit(status)


def smoke(wheel: Path, lab: Path, folder: Path) -> None:
    """Run smoke.py in a fresh environment: the product alone, with transformers, with the laboratory."""
    run(sys.executable, "-m", "venv", folder / "venv")
    python, constraints = folder / "venv" / "bin" / "python", folder / "constraints.txt"
    constraints.write_text(f"torch=={version('torch')}\n")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", constraints]
    if index := os.environ.get("TORCH_INDEX"):
        install += ["--extra-index-url", index]
    check = shutil.copy(Path(__file__).with_name("smoke.py"), folder)
    for packages in ([wheel], [f"{wheel}[transformers]"], [f"{wheel}[lab]", lab]):
        run(*install, *packages)
        run(python, "-I", check, cwd=folder)  # -I: neither this folder nor PYTHONPATH can hide the installed package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default="", help="the tag of a release")
    parser.add_argument("--nightly", action="store_true", help="build a development version of today")
    parser.add_argument("--repository", default="", metavar="URL", help="of the project URLs and the README's links")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="folder (dist)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy, output = Path(folder, "copy"), Path(folder, "dist")
        release = build(args, copy, output)
        (wheel,), (lab,), (sdist,) = map(output.glob, ("liger_hw-*.whl", "liger_hw_lab-*.whl", "*.tar.gz"))
        problems = []
        for file, expected in ((wheel, wheel_files(release)), (lab, lab_wheel_files(release))):
            with zipfile.ZipFile(file) as archive:
                problems += unexpected(file.name, set(archive.namelist()), expected)
        with tarfile.open(sdist) as archive:
            problems += unexpected(sdist.name, {f.name for f in archive if f.isfile()}, sdist_files(release))
        if problems:
            raise SystemExit("\n".join(problems))
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
        smoke(wheel, lab, Path(folder))
        args.output.mkdir(parents=True, exist_ok=True)
        for file in (wheel, lab, sdist):
            print(shutil.copy(file, args.output))


if __name__ == "__main__":
    main()
