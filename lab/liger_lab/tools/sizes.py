"""Count lines for each room, and compare code and docstrings with a budget.

    python -m liger_lab.tools.sizes              print the table; fail where a room exceeds its budget
    python -m liger_lab.tools.sizes --raise      write the present sizes as the budget, with 3% of room for repairs
    python -m liger_lab.tools.sizes DIRECTORY    print the table of another checkout, without a budget

A room is a folder or a file of liger_hw/ or of lab/liger_lab/. The budget is lab/budget.json; a commit that raises it
says why. `make lint` prints the rooms that exceed it, and the totals.
"""

import argparse
import ast
import io
import json
import math
import sys
import tokenize
from pathlib import Path

from liger_hw.console import table

ROOT = Path(__file__).resolve().parents[3]
BUDGET = ROOT / "lab" / "budget.json"
PACKAGES = ("liger_hw", "lab/liger_lab")
KINDS = ("code", "docstrings", "comments", "blank")
SLACK, STEP = 1.03, 10  # of a new budget: the share of the present lines; a multiple of STEP
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}

HAVE_DOCSTRINGS = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def count(text: str) -> dict[str, int]:
    """Count the lines of a file by kind."""
    docstrings, comments, code = set(), set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, HAVE_DOCSTRINGS) and ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in LAYOUT:
            code |= set(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    comments -= code | docstrings
    lines = len(text.splitlines())
    return {
        "code": len(code), "docstrings": len(docstrings), "comments": len(comments),
        "blank": lines - len(code | docstrings | comments),
    }  # fmt: skip


def sizes(root: Path) -> dict[str, dict[str, int]]:
    """Count the lines of each room of a checkout."""
    rooms = {}
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            inside = file.relative_to(root / package)
            room = f"{package}/{inside.parts[0]}" + ("/" if len(inside.parts) > 1 else "")
            total = rooms.setdefault(room, dict.fromkeys(KINDS, 0))
            for kind, lines in count(file.read_text()).items():
                total[kind] += lines
    return rooms


def rows(rooms: dict, budget: dict) -> list[list]:
    """Return a line of the table for each room, and the sum of each package."""
    lines = [[room, *counts.values(), budget.get(room, "")] for room, counts in rooms.items()]
    for package in PACKAGES:
        inside = [counts for room, counts in rooms.items() if room.startswith(f"{package}/")]
        lines.append([f"{package}, all", *(sum(counts[kind] for counts in inside) for kind in KINDS), ""])
    return lines


def problems(rooms: dict, budget: dict) -> list[str]:
    """List as sentences the rooms that exceed their budget or have none."""
    lines = [f"{room}: has a budget and no file: delete its line" for room in budget if room not in rooms]
    for room, counts in rooms.items():
        lines_now = counts["code"] + counts["docstrings"]
        if room not in budget:
            lines.append(f"{room}: got no budget, allowed: a line of {BUDGET.name}, such as {_rounded(counts)}")
        elif lines_now > budget[room]:
            lines.append(f"{room}: got {lines_now} lines of code and docstrings, allowed: {budget[room]}. Make it "
                         f"smaller, or raise {BUDGET.name} in a commit that says why")  # fmt: skip
    return lines


def _rounded(counts: dict) -> int:
    return math.ceil((counts["code"] + counts["docstrings"]) * SLACK / STEP) * STEP


def main(argv: list[str]) -> int:
    """Print the table; return 1 if a room of this checkout exceeds its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, help="another checkout, which is held to no budget")
    parser.add_argument("--raise", dest="raised", action="store_true", help="write the present sizes as the budget")
    parser.add_argument("--brief", action="store_true", help="print only the totals and the rooms that exceed it")
    args = parser.parse_args(argv)
    rooms = sizes(args.checkout or ROOT)
    if args.raised:
        BUDGET.write_text(json.dumps({room: _rounded(counts) for room, counts in rooms.items()}, indent=1) + "\n")
    budget = {} if args.checkout else json.loads(BUDGET.read_text())
    lines = rows(rooms, budget)
    print(table(["room", *KINDS, "budget"], lines[-len(PACKAGES) :] if args.brief else lines))
    over = [] if args.checkout else problems(rooms, budget)
    print("\n".join(over), end="\n" if over else "")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
