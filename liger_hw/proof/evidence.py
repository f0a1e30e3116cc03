"""Evidence: which op was found right for which GPU, by what kind of run.

A file of it is {"evidence": 1, "runs": {id: facts of the run}, "cells": [...]}; a cell counts the cases of one op,
backend and dtype that one run saw pass and fail, and how it saw them. `liger-hw bench` writes no such file, but its
results are read as the level "measured". Files from any number of machines, tiers and vendors are read together.
"""

import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from liger_hw import backends, dispatch, use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels import load_all

MEASURED, EXECUTED, INTERPRETED, COMPILED = LEVELS = ("measured", "executed", "interpreted", "compiled")
SAYS = {
    MEASURED: "timed on the device at the shapes of real models, after its parity cases passed there",
    EXECUTED: "its parity cases passed on the device: values and gradients against float64",
    INTERPRETED: "its parity cases passed in Triton's interpreter, with the launch configurations of that GPU",
    COMPILED: "its kernels were built by that GPU's compiler at real widths; registers, memory and accesses checked",
}
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
FAILURES = 3  # what a cell keeps of the messages
FORMAT = 1


@dataclass(frozen=True)
class Cell:
    """The cases of one op, backend and dtype that one run saw.

    Attributes:
        op: its name in `dispatch.OPS`.
        backend: "amd:gfx942".
        dtype: "fp32", "bf16" or "fp16".
        level: one of LEVELS.
        passed, failed: numbers of cases.
        failures: what the first few that failed said.
        run: the id of the run in the same file.
    """

    op: str
    backend: str
    dtype: str
    level: str
    passed: int
    failed: int
    failures: list = field(default_factory=list)
    run: str = ""

    @property
    def key(self) -> tuple:
        return self.op, self.backend, self.dtype, self.level


def about(level: str, device: torch.device | None = None) -> tuple[str, dict]:
    """A new run's id, and its facts: level, device, versions, date, commit, command (of paths, the last part alone)."""
    from liger_hw.bench import results

    facts = results.about(device or torch.device("cpu"))
    return uuid.uuid4().hex[:12], {"level": level} | facts | {"command": re.sub(r"\S*/", "", facts["command"])}


def write(file: Path, runs: dict, cells: Iterable[Cell], **more) -> Path:
    """Write evidence in one step, a line for each cell; `more` stands beside it and is not read back here."""
    rows = [json.dumps(vars(cell)) for cell in sorted(cells, key=lambda cell: (cell.key, cell.run))]
    head = json.dumps({"evidence": FORMAT, "runs": runs} | more, indent=1).removesuffix("\n}")
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(head + ',\n "cells": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n")
    part.replace(file)
    return file


def read(paths: Iterable[Path]) -> tuple[dict, list[Cell]]:
    """The runs and cells of files, and of the JSON files in folders; what stands in two files counts once.

    Raises:
        ValueError: a path is absent, or a file named is neither evidence nor a result of `liger-hw bench`.
    """
    runs, cells = {}, {}
    for path in paths:
        files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        for file in files:
            try:
                found = json.loads(file.read_text())
                new_runs, new_cells = _of_bench(found) if "ceilings" in found else _of_evidence(found)
            except (OSError, KeyError, TypeError, ValueError) as error:
                if path.is_dir() and not isinstance(error, OSError):  # a folder may hold other results as well
                    continue
                reason = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                raise ValueError(f"PATH: got {file}, allowed: evidence, a bench.json, or a folder ({reason})") from None
            runs |= new_runs
            cells |= {(cell.key, cell.run): cell for cell in new_cells}
    return runs, list(cells.values())


def _of_evidence(found: dict) -> tuple[dict, list[Cell]]:
    if found["evidence"] != FORMAT:
        raise ValueError(f"evidence of format {found['evidence']!r}, allowed: {FORMAT}")
    cells = [Cell(**cell) for cell in found["cells"]]
    for cell in cells:
        if cell.level not in LEVELS or cell.run not in found["runs"]:
            raise ValueError(f"a cell of level {cell.level!r} and run {cell.run!r}")
    return found["runs"], cells


def _of_bench(found: dict) -> tuple[dict, list[Cell]]:
    """A result of `liger-hw bench`: an op that has times was right first, or it would have none."""
    device, dtype = found["device"], DTYPES[getattr(torch, found["dtype"])]
    if device["vendor"] not in backends.VENDORS:
        return {}, []
    run = f"bench {found['date']} {device['arch']} {found['commit']}"
    shapes = {}
    for record in found["results"]:
        if record["provider"] == "liger_hw":
            shapes.setdefault(record["op"], set()).add(record["shape"])
    backend = f"{device['vendor']}:{device['arch']}"
    cells = []
    load_all()
    for op, parity in found["parity"].items():
        if op not in dispatch.OPS:  # a loss that is made of ops
            continue
        error = parity["error"]
        cells.append(
            Cell(op, backend, dtype, MEASURED, len(shapes.get(op, ())), bool(error), [error] if error else [], run)
        )
    facts = {key: found[key] for key in ("device", "versions", "date", "commit", "command")}
    cells = [cell for cell in cells if cell.passed or cell.failed]
    return {run: {"level": MEASURED} | facts} if cells else {}, cells


def total(cells: Iterable[Cell]) -> dict[tuple, Cell]:
    """Cells of the same op, backend, dtype and level as one, by that key: what one run saw fail stays failed."""
    found = {}
    for cell in cells:
        before = found.get(cell.key, Cell(*cell.key, 0, 0))
        failures = (before.failures + cell.failures)[:FAILURES]
        found[cell.key] = Cell(*cell.key, before.passed + cell.passed, before.failed + cell.failed, failures)
    return found


def missing(cells: Iterable[Cell], ops: Iterable[str]) -> list[str]:
    """What a complete matrix of `ops` has and `cells` have not, as sentences.

    Each op must have a case that passed on every backend, in every dtype, at every level that any op has one at.
    """
    found = total(cells)
    columns = {(backend, dtype, level) for _, backend, dtype, level in found}
    return [
        f"{op} on {backend} in {dtype}: not {level}"
        for backend, dtype, level in sorted(columns)
        for op in sorted(ops)
        if not found.get((op, backend, dtype, level), Cell(op, backend, dtype, level, 0, 0)).passed
    ]


class Recorder:
    """Count passed and failed parity checks, within `hooks.observe_checks(recorder.add)`."""

    def __init__(self):
        self.found = {}  # (op, backend, dtype, level) -> [passed, failed, failures]

    def add(self, op, inputs, backend: str | None, error: Exception | None) -> None:
        """One case of `op` on `backend`, which failed if there is an `error`."""
        where = proven(op, inputs, backend)
        if where is None:
            return
        counts = self.found.setdefault(where, [0, 0, []])
        counts[error is not None] += 1
        if error is not None and len(counts[2]) < FAILURES:
            counts[2].append(f"{type(error).__name__}: {error}"[:300])

    def cells(self, run: str) -> list[Cell]:
        return [Cell(*where, *counts, run) for where, counts in self.found.items()]

    def dump(self) -> list:
        """The counts as plain data, for another process's `load`."""
        return [[*where, *counts] for where, counts in self.found.items()]

    def load(self, dumped: list) -> None:
        for op, backend, dtype, level, passed, failed, failures in dumped:
            counts = self.found.setdefault((op, backend, dtype, level), [0, 0, []])
            counts[0] += passed
            counts[1] += failed
            counts[2] = (counts[2] + failures)[:FAILURES]


def proven(op, inputs, backend: str | None) -> tuple | None:
    """(op, backend, dtype, level) that a check of `op` on `backend` speaks for; None where it speaks for no GPU.

    Another vendor's configurations on this device prove nothing of that vendor's, nor of this one's.
    """
    tensor = next(x for x in inputs if torch.is_tensor(x) and x.is_floating_point())
    with use_backend(backend):
        target, here = backends.device_of(tensor), backends.detected(tensor.device)
        if target.vendor == "cpu" or op.choose(tensor.device) == "reference":
            return None
    level = INTERPRETED if interpreting() else EXECUTED
    if level == EXECUTED and target is not here:
        return None
    return op.__name__, f"{target.vendor}:{target.arch}", DTYPES[tensor.dtype], level
