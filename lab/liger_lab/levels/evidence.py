"""Read, merge and write evidence of the cases that ops passed on each GPU.

An evidence file is {"evidence": 1, "runs": {id: facts of the run}, "cells": [...]}. A cell counts the cases of one op,
backend, dtype and level that passed and failed in one run. The results of `liger-hw bench` also count, as the level
"measured". `read` merges files from any number of machines, tiers and vendors.
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
from liger_lab.bench import run_file

MEASURED, EXECUTED, EMULATED, INTERPRETED, COMPILED = LEVELS = (
    "measured", "executed", "emulated", "interpreted", "compiled",
)  # fmt: skip
SAYS = {
    MEASURED: "timed on the device at the shapes of real models, after its parity cases passed there",
    EXECUTED: "its parity cases passed on the device: values and gradients against float64",
    EMULATED: "its machine code passed its parity cases on an emulation of that GPU, in order: no hardware ran",
    INTERPRETED: "its parity cases passed in Triton's interpreter, with the launch configurations of that GPU",
    COMPILED: "its kernels were built by that GPU's compiler at real widths, by one Triton or another; registers, "
    "memory and accesses checked",
}
DTYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8", torch.uint8: "uint8",
}  # fmt: skip
FAILURES = 3  # messages of failures that a cell keeps
FORMAT = 1


@dataclass(frozen=True)
class EvidenceCell:
    """Count the cases of one op, backend, dtype and level in one run.

    Attributes:
        op: its name in `dispatch.OPS`.
        backend: "amd:gfx942".
        dtype: "fp32", "bf16" or "fp16"; "int8" or "uint8" of an op of integers.
        level: one of LEVELS.
        passed, failed: numbers of cases.
        failures: messages of the first few failures.
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
    """Return a new run's id, and its level, device, versions, date, commit and command.

    Paths in the command lose their folders.
    """
    facts = run_file.environment(device or torch.device("cpu"))
    return uuid.uuid4().hex[:12], {"level": level} | facts | {"command": re.sub(r"\S*/", "", facts["command"])}


def write(file: Path, runs: dict, cells: Iterable[EvidenceCell], **more) -> Path:
    """Replace an evidence file in one step, a line for each entry of a list.

    Args:
        more: further keys of the file, which `read` ignores.
    """
    lists = {name: value for name, value in more.items() if isinstance(value, list)}
    lists["cells"] = [vars(cell) for cell in sorted(cells, key=lambda cell: (cell.key, cell.run))]
    others = {name: value for name, value in more.items() if name not in lists}
    text = json.dumps({"evidence": FORMAT, "runs": runs} | others, indent=1).removesuffix("\n}")
    for name, entries in lists.items():
        text += f',\n "{name}": [\n  ' + ",\n  ".join(map(json.dumps, entries)) + "\n ]"
    return run_file.replace(file, text + "\n}\n")


def read(paths: Iterable[Path]) -> tuple[dict, list[EvidenceCell]]:
    """Read runs and cells from files, and from the JSON files in folders.

    A cell that is in two files counts once.

    Raises:
        ValueError: a path is absent, or a named file is neither evidence nor a result of `liger-hw bench`.
    """
    runs, cells = {}, {}
    for path in paths:
        files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        for file in files:
            try:
                content = json.loads(file.read_text())
                new_runs, new_cells = _bench_content(content) if "ceilings" in content else _evidence_content(content)
            except (OSError, KeyError, TypeError, ValueError) as error:
                if path.is_dir() and not isinstance(error, OSError):  # a folder may also hold other results
                    continue
                reason = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                raise ValueError(f"PATH: got {file}, allowed: evidence, a bench.json, or a folder ({reason})") from None
            runs |= new_runs
            cells |= {(cell.key, cell.run): cell for cell in new_cells}
    return runs, list(cells.values())


def _evidence_content(content: dict) -> tuple[dict, list[EvidenceCell]]:
    if content["evidence"] != FORMAT:
        raise ValueError(f"evidence of format {content['evidence']!r}, allowed: {FORMAT}")
    cells = [EvidenceCell(**cell) for cell in content["cells"]]
    for cell in cells:
        if cell.level not in LEVELS or cell.run not in content["runs"]:
            raise ValueError(f"a cell of level {cell.level!r} and run {cell.run!r}")
    return content["runs"], cells


def _bench_content(benchmark: dict) -> tuple[dict, list[EvidenceCell]]:
    """Read a result of `liger-hw bench`, which times only ops that pass their parity cases."""
    device, dtype = benchmark["device"], getattr(torch, benchmark["dtype"])
    if device["vendor"] not in backends.VENDORS:
        return {}, []
    run = f"bench {benchmark['date']} {device['arch']} {benchmark['commit']}"
    shapes = {}
    for record in benchmark["results"]:
        if record["provider"] == "liger_hw":
            shapes.setdefault(record["op"], set()).add(record["shape"])
    backend = f"{device['vendor']}:{device['arch']}"
    cells = []
    load_all()
    for op, parity in benchmark["parity"].items():
        if op not in dispatch.OPS:  # a loss, which ops compute
            continue
        key, passed = (op, backend, dtype_of(op, dtype), MEASURED), len(shapes.get(op, ()))
        failures = [parity["error"]] if parity["error"] else []
        cells.append(EvidenceCell(*key, passed, len(failures), failures, run))
    facts = {key: benchmark[key] for key in ("device", "versions", "date", "commit", "command")}
    cells = [cell for cell in cells if cell.passed or cell.failed]
    return {run: {"level": MEASURED} | facts} if cells else {}, cells


def dtype_of(op: str, dtype: torch.dtype) -> str:
    """Return the name of `dtype`, or of the dtype of an op of integers."""
    dtypes = dispatch.OPS[op].dtypes
    return DTYPES[dtype if dtypes[0].is_floating_point else dtypes[0]]


def total(cells: Iterable[EvidenceCell]) -> dict[tuple, EvidenceCell]:
    """Add up the cells of the same op, backend, dtype and level over all runs."""
    totals = {}
    for cell in cells:
        before = totals.get(cell.key, EvidenceCell(*cell.key, 0, 0))
        failures = (before.failures + cell.failures)[:FAILURES]
        totals[cell.key] = EvidenceCell(*cell.key, before.passed + cell.passed, before.failed + cell.failed, failures)
    return totals


def missing(cells: Iterable[EvidenceCell], ops: Iterable[str]) -> list[str]:
    """List what `cells` lack of a complete matrix of `ops`, as sentences.

    Where one op has evidence for a backend, dtype and level, every op of that dtype needs a case that passed there.
    """
    totals = total(cells)
    columns = {(backend, dtype, level) for _, backend, dtype, level in totals}
    return [
        f"{op} on {backend} in {dtype}: not {level}"
        for backend, dtype, level in sorted(columns)
        for op in sorted(ops)
        if any(DTYPES[known] == dtype for known in dispatch.OPS[op].dtypes)
        if not totals.get((op, backend, dtype, level), EvidenceCell(op, backend, dtype, level, 0, 0)).passed
    ]


class Recorder:
    """Count passed and failed parity checks, within `hooks.observe_checks(recorder.add)`."""

    def __init__(self):
        self.counts = {}  # (op, backend, dtype, level) -> [passed, failed, failures]

    def add(self, op, inputs, backend: str | None, error: Exception | None) -> None:
        """Count one case of `op` on `backend`; it failed if there is an `error`."""
        key = proven(op, inputs, backend)
        if key is None:
            return
        counts = self.counts.setdefault(key, [0, 0, []])
        counts[error is not None] += 1
        if error is not None and len(counts[2]) < FAILURES:
            counts[2].append(f"{type(error).__name__}: {error}"[:300])

    def cells(self, run: str) -> list[EvidenceCell]:
        return [EvidenceCell(*key, *counts, run) for key, counts in self.counts.items()]

    def dump(self) -> list:
        """Return the counts as plain data, for another process's `load`."""
        return [[*key, *counts] for key, counts in self.counts.items()]

    def load(self, dumped: list) -> None:
        for op, backend, dtype, level, passed, failed, failures in dumped:
            counts = self.counts.setdefault((op, backend, dtype, level), [0, 0, []])
            counts[0] += passed
            counts[1] += failed
            counts[2] = (counts[2] + failures)[:FAILURES]


def proven(op, inputs, backend: str | None) -> tuple | None:
    """Return the (op, backend, dtype, level) that a check proves, or None.

    A check of another vendor's configurations on this device proves nothing of either device.
    """
    tensor = next(x for x in inputs if torch.is_tensor(x) and x.dtype in DTYPES)
    with use_backend(backend):
        target, here = backends.device_of(tensor), backends.detected(tensor.device)
        if target.vendor == "cpu" or op.choose(tensor.device) == "reference":
            return None
    level = INTERPRETED if interpreting() else EXECUTED
    if level == EXECUTED and target is not here:
        return None
    return op.__name__, f"{target.vendor}:{target.arch}", DTYPES[tensor.dtype], level
