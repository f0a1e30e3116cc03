"""Show evidence as tables for terminals and documents, and as one HTML file."""

import html
from collections.abc import Iterable
from pathlib import Path

from liger_hw import dispatch
from liger_hw.backends import ARCHITECTURES, VENDORS
from liger_hw.kernels import load_all
from liger_lab.bench import pages
from liger_lab.levels.evidence import DTYPES, LEVELS, SAYS, EvidenceCell, total


def backends_of(cells: Iterable[EvidenceCell]) -> list[str]:
    """Return the backends with evidence: those of `ARCHITECTURES` in its order, then others."""
    seen = {cell.backend for cell in cells}
    return [name for name in ARCHITECTURES if name in seen] + sorted(seen - set(ARCHITECTURES))


HEADER = ["GPU", "cards", *LEVELS]
NAMED = 3  # ops that failed


def newer(cells: Iterable[EvidenceCell]) -> list[str]:
    """Return the ops of this package that no run has seen."""
    load_all()
    return sorted(set(dispatch.OPS) - {cell.op for cell in cells})


def rows(cells: list[EvidenceCell]) -> list[list[str]]:
    """Return one row for each GPU: the ops, cases and dtypes proven at each level."""
    totals = total(cells)
    lines = []
    for backend in backends_of(cells):
        vendor, _, arch = backend.partition(":")
        levels = (_cell([c for key, c in totals.items() if key[1] == backend and key[3] == level]) for level in LEVELS)
        lines.append([f"{_vendor(vendor)} {arch}", _cards(backend), *levels])
    return lines


SUMMARY = ["vendor", "GPUs", *LEVELS]


def summary(cells: list[EvidenceCell]) -> list[list[str]]:
    """Return one row for all GPUs of a vendor with equal numbers of proven ops.

    The row names the first card of each architecture.
    """
    totals = total(cells)
    gpus = {}
    for backend in backends_of(cells):
        vendor, _, arch = backend.partition(":")
        levels = (_ops([c for key, c in totals.items() if key[1] == backend and key[3] == level]) for level in LEVELS)
        gpus.setdefault((_vendor(vendor), *levels), []).append(_cards(backend).partition(", ")[0] or arch)
    return [[vendor, ", ".join(cards), *levels] for (vendor, *levels), cards in gpus.items()]


def _vendor(name: str) -> str:
    return VENDORS[name].NAME if name in VENDORS else name


def _cards(backend: str) -> str:
    return ARCHITECTURES[backend].cards if backend in ARCHITECTURES else ""


def _ops(cells: list[EvidenceCell]) -> str:
    """Count the ops with all tests passing; name a few that failed."""
    if not cells:
        return "-"
    load_all()
    failed = sorted({cell.op for cell in cells if cell.failed})
    passed = {cell.op for cell in cells if cell.passed}.difference(failed)
    which = f" ({', '.join(failed)} failed)" if 0 < len(failed) <= NAMED else ""
    return f"{len(passed)} of {len(dispatch.OPS)} ops{which}"


def _cell(cells: list[EvidenceCell]) -> str:
    if not cells:
        return "-"
    dtypes = [name for name in DTYPES.values() if any(cell.dtype == name for cell in cells)]
    failed = sum(cell.failed for cell in cells)
    text = f"{_ops(cells)}, {sum(cell.passed for cell in cells):,} cases, {' '.join(dtypes)}"
    return f"{text}, {failed:,} FAILED" if failed else text


def problems(cells: Iterable[EvidenceCell], runs: dict | None = None) -> list[str]:
    """Describe failed cases, and other failed tests of `runs`."""
    lines = [
        f"{op} on {backend} in {dtype}, {level}: {cell.failed} of {cell.passed + cell.failed} cases failed: "
        + "; ".join(cell.failures)
        for (op, backend, dtype, level), cell in sorted(total(cells).items())
        if cell.failed
    ]
    for facts in (runs or {}).values():
        tests = facts.get("tests", {})
        failed = sum(number for result, number in tests.items() if result not in ("passed", "skipped"))
        if failed:
            lines.append(f"{failed} tests failed in the run of {facts['date']}: {facts.get('command', '')}")
    return lines


def run_rows(runs: dict) -> list[list[str]]:
    """Return one row for each run: level, date, device, versions, commit and tests."""
    lines = []
    for facts in sorted(runs.values(), key=lambda facts: (LEVELS.index(facts["level"]), facts["date"])):
        versions = ", ".join(f"{name} {facts['versions'][name]}" for name in ("torch", "triton", "liger_hw")
                             if facts["versions"].get(name))  # fmt: skip
        tests = ", ".join(f"{number:,} {result}" for result, number in sorted(facts.get("tests", {}).items()))
        device = facts.get("device", {}).get("name", "")
        lines.append([facts["level"], facts["date"], device, versions, facts.get("commit") or "", tests])
    return lines


RUNS = ["level", "date", "on", "versions", "commit", "tests of that run"]
MARKS = """
main { max-width: 76rem; }
table.grid { width: auto; } table.grid th, table.grid td { padding: .2rem .7rem; white-space: nowrap; }
table.grid th, td.cell { text-align: center; }
i { display: inline-block; width: .8rem; height: .8rem; border-radius: 3px; margin: 0 1px; background: #eceef2; }
i.ok { background: #2f9e5b; } i.bad { background: #d6322d; } li { overflow-wrap: anywhere; } td { font-size: .9rem; }
"""


def write(runs: dict, cells: list[EvidenceCell], file: Path) -> Path:
    """Write the HTML page: summary, failures, each op on each GPU, and the runs."""
    totals = total(cells)
    failed = problems(cells, runs)
    grids = "".join(_grid(vendor, totals, cells) for vendor in VENDORS)
    bad = "<h2>Failed</h2><ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in failed) + "</ul>"
    content = f"""<p class="lead">{sum(cell.passed for cell in cells):,} cases passed,
{sum(cell.failed for cell in cells):,} failed, in {len(runs)} runs.
An op is counted at a level where every case of it passed.</p>
{pages.definitions(SAYS)}
{bad if failed else ""}
<h2>GPUs</h2>{pages.table(HEADER, rows(cells))}
{grids}
<h2>Runs</h2>{pages.table(RUNS, run_rows(runs))}"""
    return pages.write(file, "liger_hw: evidence for each GPU", content, MARKS)


def _grid(vendor: str, totals: dict, cells: list[EvidenceCell]) -> str:
    """Draw the table of one vendor: rows of op and dtype, columns of GPUs."""
    backends = [name for name in backends_of(cells) if name.partition(":")[0] == vendor]
    if not backends:
        return ""
    head = "".join(f"<th>{html.escape(name.partition(':')[2])}</th>" for name in backends)
    lines = []
    for op in sorted({cell.op for cell in cells}):
        for dtype in DTYPES.values():
            if not any((cell.op, cell.dtype) == (op, dtype) for cell in cells):
                continue
            marks = [[_mark(totals.get((op, name, dtype, level)), level) for level in LEVELS] for name in backends]
            squares = "".join(f'<td class="cell">{"".join(four)}</td>' for four in marks)
            lines.append(f"<tr><td>{html.escape(op)} {dtype}</td>{squares}</tr>")
    key = ", ".join(LEVELS)
    return f"""<h2>{VENDORS[vendor].NAME}</h2><p class="lead">Squares, from the left: {key}. Green: passed. Red: failed.
Grey: not run. Hover over a square for the number of cases.</p>
<div class="scroll"><table class="grid"><tr><th></th>{head}</tr>{"".join(lines)}</table></div>"""


def _mark(cell: EvidenceCell | None, level: str) -> str:
    if cell is None:
        return f'<i title="not {level}"></i>'
    about = f"{level}: {cell.passed} passed, {cell.failed} failed"
    return f'<i class="{"bad" if cell.failed else "ok"}" title="{html.escape(" ".join([about, *cell.failures]))}"></i>'
