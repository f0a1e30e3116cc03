"""Execute the notebook of the examples in a kernel of its own.

    python -m liger_lab.tools.notebook [--output FILE.ipynb]

It runs in about a minute on two cores. It prints what the cells print, and fails where one fails. The
committed notebook has no outputs; --output writes a copy with them. It needs nbclient and ipykernel.
"""

import argparse
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[3] / "examples" / "finetune.ipynb"
LIMIT = 300  # seconds for a cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE", help="a copy with outputs")
    args = parser.parse_args()
    notebook, begin = nbformat.read(NOTEBOOK, as_version=4), time.monotonic()
    NotebookClient(notebook, timeout=LIMIT, kernel_name="python3").execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            print(output.get("text", ""), end="")
    print(f"{NOTEBOOK.name}: {len(notebook.cells)} cells in {time.monotonic() - begin:.0f} s")
    if args.output:
        nbformat.write(notebook, args.output)


if __name__ == "__main__":
    main()
