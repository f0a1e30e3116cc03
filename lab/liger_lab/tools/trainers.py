"""Run the tests of trainers, each framework in an environment of its own.

    python -m liger_lab.tools.trainers                       all of them
    python -m liger_lab.tools.trainers axolotl ms-swift -x

The frameworks require versions of transformers and TRL that exclude each other. Each environment has the torch of this
one. Options go to pytest.
"""

import argparse
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
AS_DOCUMENTED = "tests/integrations/test_trainers_as_documented.py"
FRAMEWORKS = {  # name -> requirements, arguments of pytest
    "llama-factory": (["llamafactory==0.9.5"], ["-k", "llama_factory", AS_DOCUMENTED]),
    "ms-swift": (["ms-swift==4.6.0"], ["-k", "ms_swift", AS_DOCUMENTED]),
    "axolotl": (["axolotl==0.19.0"], ["-k", "axolotl", AS_DOCUMENTED]),
    "trl-1.12": (["trl==1.12.0", "peft", "requests", "bitsandbytes"], ["-k", "trl", AS_DOCUMENTED]),
    "trl-1.16": (["trl==1.16.0", "peft", "requests", "bitsandbytes"], ["-k", "trl", AS_DOCUMENTED]),
    "lightning": (["transformers", "accelerate", "lightning"], ["-k", "lightning", AS_DOCUMENTED]),
}
# PyPI's wheels of these need a CUDA build of torch, and break the import of transformers beside another. No test has
# pictures or sound.
MEDIA = ("torchvision", "torchaudio")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help=", ".join(FRAMEWORKS))
    parser.add_argument("--into", type=Path, default=ROOT / ".versions", help="their folder (./.versions)")
    options, chosen = parser.parse_known_args()
    if unknown := set(options.frameworks) - set(FRAMEWORKS):
        parser.error(f"got {', '.join(sorted(unknown))}, allowed: {', '.join(FRAMEWORKS)}")
    names = options.frameworks or list(FRAMEWORKS)
    failed = [name for name in names if test(name, installed(name, options.into), chosen)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def installed(name, into):
    """Return the Python of a framework's environment, which its first use makes."""
    folder = into / name
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        constraints = folder / "constraints.txt"
        constraints.write_text(f"torch=={version('torch')}\n")
        index = ["--extra-index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        packages = ["torch", "packaging", "pytest", *FRAMEWORKS[name][0]]
        subprocess.run([*pip, "install", *index, "--constraint", constraints, *packages], check=True)
        subprocess.run([*pip, "uninstall", "--yes", *MEDIA], check=True)
        (place,) = folder.glob("lib/python*/site-packages")
        (place / "torchaudio.py").touch()  # LLaMA-Factory imports it before it knows whether there is sound
        (folder / "installed").touch()
    return python


def test(name, python, chosen):
    """Run the tests of a framework; return pytest's status."""
    print(name, flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "lab"), os.environ.get("PYTHONPATH")]))
    command = [python, "-m", "pytest", "-rs", *FRAMEWORKS[name][1], *chosen]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}).returncode


if __name__ == "__main__":
    main()
