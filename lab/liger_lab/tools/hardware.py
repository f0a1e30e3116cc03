"""Write the tables of evidence: `python -m liger_lab.tools.hardware [--check] [PATH ...]`.

The PATHs (default: lab/results) are evidence files of `pytest --evidence`, `liger-hw bench`, `liger-hw doctor` and
`liger-hw evidence` with --compile or --emulate. In docs/hardware.md and docs/compiled.md this replaces the text
between the lines

    <!-- proven NAME: begin, by liger_lab.tools.hardware -->
    <!-- proven: end -->

where NAME is a vendor in `VENDORS`, "levels", "runs" or "waves". With --check nothing is written, and the status is 1
if a table is stale.
"""

import json
import re
import sys
from pathlib import Path

from liger_hw.backends import VENDORS
from liger_lab.levels import evidence, page

ROOT = Path(__file__).resolve().parents[3]
FILES = "docs/hardware.md", "docs/compiled.md"
WAVES = "gfx942"  # of six architectures: 90 rows each are enough for a page
MARKED = re.compile(r"(<!-- proven (\w+): begin, by liger_lab.tools.hardware -->\n).*?(<!-- proven: end -->)", re.S)


def markdown(header, rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(runs: dict, cells: list) -> dict[str, str]:
    """Return the table of each marker: a vendor, "runs" or "levels"."""
    rows = page.rows(cells)
    names = {module.NAME: vendor for vendor, module in VENDORS.items()}
    texts = {vendor: markdown(page.HEADER, [row for row in rows if names[row[0].rpartition(" ")[0]] == vendor])
             for vendor in VENDORS}  # fmt: skip
    texts["levels"] = markdown(["level", "what it means"], [[level, text] for level, text in evidence.SAYS.items()])
    if newer := page.newer(cells):
        texts["levels"] += f"\n\nOf this package's ops no run has seen {', '.join(f'`{name}`' for name in newer)} yet."
    texts["runs"] = markdown(["level", "runs", "first", "last", "commits", "on", "versions"], _runs(runs))
    return texts


def waves(paths: list[Path]) -> str:
    """Return the table of one architecture's emulated machine code."""
    files = [file for path in paths for file in (sorted(path.rglob("emulated*.json")) if path.is_dir() else [path])]
    entries = [entry for file in files for entry in json.loads(file.read_text()).get("waves", ())]
    header = ["op", "kernel", "instructions an element", "accesses by bytes a lane", "LDS bytes an element", "banks",
              "load to wait", "registers", "occupancy"]  # fmt: skip
    rows = [
        [e["op"], f"{e['kernel']}, {e['warps']} waves", f"{e['per element']:,}",
         ", ".join(f"{width}: {share:.0%}" for width, share in e["widths"].items() if share),
         f"{e['lds']:,}" if e["lds"] else "-", f"{e['banks'] or '-'}", f"{e['wait'] or '-'}",
         str(e["registers"]), f"{e['occupancy']:.0%}"]
        for e in entries if e["arch"] == WAVES
    ]  # fmt: skip
    return markdown(header, [list(row) for row in dict.fromkeys(map(tuple, rows))])


def _runs(runs: dict) -> list[list[str]]:
    """Return one line for all runs that differ only in date, commit and tests."""
    runs_of = {}
    for level, date, on, versions, commit, _ in page.run_rows(runs):  # by date
        runs_of.setdefault((level, on, versions), []).append((date, commit))
    lines = []
    for (level, on, versions), entries in runs_of.items():
        (first, oldest), (last, newest) = entries[0], entries[-1]
        commits = oldest if oldest == newest else f"{oldest} to {newest}"
        lines.append([level, str(len(entries)), first, last, commits, on, versions])
    return lines


def main(arguments) -> int:
    check = "--check" in arguments
    paths = [Path(word) for word in arguments if word != "--check"]
    runs, cells = evidence.read(paths or [ROOT / "lab/results"])
    texts = tables(runs, cells) | {"waves": waves(paths or [ROOT / "lab/results"])}
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
