"""Write the tables of evidence: `python tools/hardware.py [--check] [PATH ...]`.

The PATHs (default: benchmarks/) are evidence files of `pytest --evidence`, `liger-hw bench`, `liger-hw doctor` and
`liger-hw matrix --compile`. The text between markers in docs/hardware.md and README.md is replaced. With --check
nothing is written, and the status is 1 if a table is stale.
"""

import re
import sys
from pathlib import Path

from liger_hw.backends import VENDORS
from liger_hw.proof import evidence, page

ROOT = Path(__file__).resolve().parent.parent
FILES = "docs/hardware.md", "README.md"
MARKED = re.compile(r"(<!-- proven (\w+): begin, by tools/hardware.py -->\n).*?(<!-- proven: end -->)", re.S)


def markdown(header, rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(runs: dict, cells: list) -> dict[str, str]:
    """Return the table of each marker: a vendor, "runs", "levels" or "summary"."""
    rows = page.rows(cells)
    names = {module.NAME: vendor for vendor, module in VENDORS.items()}
    texts = {vendor: markdown(page.HEADER, [row for row in rows if names[row[0].split()[0]] == vendor])
             for vendor in VENDORS}  # fmt: skip
    texts["levels"] = markdown(["level", "what it means"], [[level, text] for level, text in evidence.SAYS.items()])
    texts["runs"] = markdown(["level", "runs", "last", "on", "versions"], _runs(runs))
    return texts | {"summary": markdown(page.SUMMARY, page.summary(cells))}


def _runs(runs: dict) -> list[list[str]]:
    """Return one line for all runs that differ only in date, commit and tests."""
    dates_of = {}
    for level, date, on, versions, *_ in page.run_rows(runs):
        dates_of.setdefault((level, on, versions), []).append(date)
    return [[level, str(len(dates)), max(dates), on, versions] for (level, on, versions), dates in dates_of.items()]


def main(arguments) -> int:
    check = "--check" in arguments
    paths = [Path(word) for word in arguments if word != "--check"]
    runs, cells = evidence.read(paths or [ROOT / "benchmarks"])
    texts = tables(runs, cells)
    stale = []
    for name in FILES:
        file = ROOT / name
        before = file.read_text()
        after = MARKED.sub(lambda match: f"{match[1]}{texts[match[2]]}\n{match[3]}", before)
        if after != before:
            stale.append(name)
            if not check:
                file.write_text(after)
    print(f"{'would change' if check else 'changed'}: {', '.join(stale) or 'nothing'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
