"""Run the tests of models and trainers on several versions of transformers.

    python -m liger_lab.tools.transformers_versions                    the oldest supported and the newest
    python -m liger_lab.tools.transformers_versions 5.6.0 5.16.1 -- -k loss
    python -m liger_lab.tools.transformers_versions --all

Each version is installed into a folder of its own, not into this environment. Arguments after -- replace pytest's
default, tests/transformers and tests/integrations.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
VERSIONS = ("4.57.3", "5.6.0", "5.16.1", "5.23.0", "5.24.0")
TESTS = ["tests/transformers", "tests/integrations"]


def main():
    arguments, separator, chosen = sys.argv[1:], "--", []
    if separator in arguments:
        at = arguments.index(separator)
        arguments, chosen = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "versions", nargs="*", metavar="VERSION", help=f"of transformers, for example {' '.join(VERSIONS)}"
    )
    parser.add_argument("--all", action="store_true", help=f"{', '.join(VERSIONS)}")
    parser.add_argument(
        "--into", type=Path, default=ROOT / ".versions", help="folder of the installations (./.versions)"
    )
    options = parser.parse_args(arguments)
    versions = options.versions or (VERSIONS if options.all else (VERSIONS[0], VERSIONS[-1]))
    failed = [version for version in versions if test(version, installed(version, options.into), chosen)]
    sys.exit(f"failed with transformers {', '.join(failed)}" if failed else 0)


def installed(version, into):
    """Install transformers `version` into a folder, without torch, at its first use."""
    folder = into / f"transformers-{version}"
    if not (folder / "installed").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
        subprocess.run([*command, "--target", str(folder), f"transformers=={version}"], check=True)
        (folder / "installed").touch()
    return folder


def test(version, folder, chosen):
    """Run pytest with that folder first on the path; return its status."""
    print(f"transformers {version}", flush=True)
    path = os.pathsep.join(filter(None, [str(folder), str(ROOT), str(ROOT / "lab"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", *(chosen or ["-n", "auto", *TESTS])]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}).returncode


if __name__ == "__main__":
    main()
