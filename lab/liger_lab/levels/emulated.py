"""Execute and check AMD machine code of every op without an AMD GPU.

`run` is `liger-hw emulate`. Each parity case compiles its launches for the architecture, with the
configurations that it would use there, and `emulation` executes the code objects. The parity rule judges outputs and
gradients. No hardware is involved: execution is in order, so nothing about waits, hazards or time is shown.

`removals` is the control: it removes one executed instruction at a time, and the parity rule should notice.
"""

import collections
import contextlib
import itertools
import json
import math
import random
import time
from concurrent.futures import as_completed
from dataclasses import replace
from pathlib import Path

import torch

from liger_hw import console
from liger_hw.dispatch import OPS
from liger_hw.kernels import load_all
from liger_hw.spelling import check_known
from liger_hw.testing import parity
from liger_lab import terminal
from liger_lab.bench import run_file
from liger_lab.cases import small_cases, training_cases, wide_cases
from liger_lab.levels import compile_cache, crosscompile
from liger_lab.levels.compiled import DTYPES, coarse_class
from liger_lab.levels.crosscompile import DEVICES
from liger_lab.levels.workers import Died

NOP = 0xBF800000  # s_nop 0 on every architecture
_WIDE_ELEMENTS = 2**17  # of the largest tensor: 16 rows of 8,192
_REMOVED_LIMIT = 20_000  # instructions of a wave, after which a removal has made a loop endless


def run(archs: list[str], ops: list[str], jobs: int | None, report: Path, few: bool = False, remove: int = 0) -> int:
    """Run `liger-hw emulate`: execute, judge, print the table, write emulated.json and emulated_kernels.json.

    Args:
        archs: names in `emulation.instructions.FAMILIES`; none means all.
        ops: names in `dispatch.OPS`; none means all.
        jobs: processes; None means one for each core.
        report: the folder to write to.
        few: only the cases that reach a kernel, a loop or a tail that the op's earlier cases did not, in fp32 and bf16,
            and the wide case.
        remove: also remove this many instructions of each op's kernels, one at a time.

    Returns:
        0 if all cases passed, and nine of ten removals that change a result were noticed, else 1; 130 if interrupted:
        the files hold the cases so far.

    Raises:
        ValueError: the emulation does not know an architecture, an op is unknown, or a package is not installed.
    """
    from liger_lab.levels import evidence

    console.require("rich", "triton", "tinygrad", "elftools", "yaml")
    from liger_lab.levels.emulation.instructions import FAMILIES

    for arch in archs:
        check_known("architecture", arch, FAMILIES, "The emulation executes")
    for op in ops:
        check_known("op", op, OPS)
    load_all()
    began, rows, controls, interrupted = time.monotonic(), [], [], False
    dtypes = [dtype for dtype in DTYPES if not few or dtype != "fp16"]
    work = [
        (op, arch, dtype) for op in ops or OPS for arch in archs or FAMILIES for dtype in dtypes
        if DTYPES[dtype] in OPS[op].dtypes
    ]  # fmt: skip
    kernels = [(op, arch) for op in ops or OPS for arch in archs or FAMILIES if remove]
    try:
        with compile_cache.processes(jobs) as pool, terminal.progress() as progress:
            task = progress.add_task("executing", total=len(work), note="")
            futures = {pool.submit(_cases_of, *item, few): item for item in work}
            for future in as_completed(futures):
                rows += _result(future, *futures[future])
                progress.update(task, advance=1, note=" ".join(futures[future]))
            task = progress.add_task("removing", total=len(kernels), note="", visible=bool(remove))
            for future in as_completed([pool.submit(removals, op, arch, remove) for op, arch in kernels]):
                controls.append(future.result())
                progress.update(task, advance=1)
    except KeyboardInterrupt:
        interrupted = True
    run_id, facts = evidence.about(evidence.EMULATED)
    files = (
        evidence.write(report / "emulated.json", {run_id: facts}, _cells(rows, run_id), waves=_waves(rows)),
        run_file.replace(report / "emulated_kernels.json", _json({"kernels": _kernels(rows), "removals": controls})),
    )
    print(*files, sep=", ", end="\n\n")
    print(_show(rows, controls))
    failed = [row for row in rows if row["error"]]
    for row in failed:
        print(f"{row['op']} on {row['arch']} in {row['dtype']}, {row['case']}: {row['error']}")
    executed = sum(row["instructions"] for row in rows)
    print(f"{len(rows) - len(failed):,} of {len(rows):,} cases passed, {executed:,} instructions of waves, "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
    if interrupted:
        print(f"interrupted: {len(rows)} cases were executed")
        return 130
    changed = sum(control["removed"] - control["same bits"] for control in controls)
    noticed = sum(control["noticed"] for control in controls)
    if controls:
        missed = sum((collections.Counter(control["missed"]) for control in controls), collections.Counter())
        print(f"removals: {noticed} noticed of {changed} that change a result; missed: {dict(missed.most_common())}")
    return 1 if failed or noticed < 0.9 * changed else 0


def _result(future, op, arch, dtype) -> list[dict]:
    """Return the rows of a finished task; a compiler's crash is a failed case."""
    try:
        return future.result()
    except Died as crash:
        row = {"case": "all cases", "error": str(crash), "launches": 0, "instructions": 0, "kernels": [],
               "waves": []}  # fmt: skip
        return [{"op": op, "arch": arch, "dtype": dtype} | row]


@contextlib.contextmanager
def _uninitialized_is_nan():
    """Fill uninitialised memory with NaN within, so that what no launch writes is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@_uninitialized_is_nan()
def _cases_of(op: str, arch: str, dtype: str, few: bool) -> list[dict]:
    """Execute the op's cases: one row for each."""
    load_all()
    torch.manual_seed(0)
    rows, classes = [], set()
    for inputs, options in small_cases(op, DTYPES[dtype]):
        if few and not _adds(op, inputs, options, arch, classes):
            continue
        # both orders of waves between barriers must compute the same: fp32 runs in the descending one
        row = execute(op, inputs, options, arch, reverse=dtype == "fp32")
        rows.append({"op": op, "arch": arch, "dtype": dtype} | row)
    for inputs, options in _wide_sample(op, few) if dtype in ("bf16", "int8", "uint8") else ():
        rows.append({"op": op, "arch": arch, "dtype": dtype} | execute(op, inputs, options, arch, traced=True))
    return rows


def _wide_sample(op, few):
    """Yield a wide case, whose launches are those of a model's rows.

    None if all are too large: 6 million elements take a minute.
    """
    sizes = [(_has_whole_vectors(sample), _size(sample)) for sample in wide_cases(op, torch.bfloat16)]
    size = max((size for size in sizes if size[1] <= _WIDE_ELEMENTS), default=min(sizes, key=lambda size: size[1]))
    if size[1] < (10 if few else 100) * _WIDE_ELEMENTS:
        yield next(itertools.islice(wide_cases(op, torch.bfloat16, "cpu"), sizes.index(size), None))


def _adds(op, inputs, options, arch, classes) -> bool:
    """Tell whether a case reaches new code or has NaN; add that to `classes`."""
    if op == "experts":  # its launches depend on results
        shape = str([x.shape for x in inputs if torch.is_tensor(x)]), str(options)
        reached = {shape} if len(classes) < 2 else set()
    else:
        with crosscompile.launches_on(DEVICES[arch]) as launches:
            parity.run(OPS[op], inputs, options)
        reached = {str((*coarse_class(launch), _tail(launch))) for launch in launches}
    if not all(x.isfinite().all() for x in inputs if torch.is_tensor(x) and x.is_floating_point()):
        reached.add(f"not finite: {options}")
    added = not reached <= classes
    classes |= reached
    return added


def _tail(launch) -> bool:
    """Tell whether the kernel's last block of a row is not whole."""
    cols, block = launch.constants.get("cols"), launch.constants.get("COLS")
    return None not in (cols, block) and bool(cols % block)


def execute(op, inputs, options, arch, reverse=False, traced=False) -> dict:
    """Run one parity check on emulated waves; return what happened, with `facts` if `traced`."""
    from liger_lab.levels.emulation import executed_on, facts

    error, executed = "", []
    try:
        with executed_on(DEVICES[arch], reverse, traced=traced) as executed:
            parity.check(OPS[op], inputs, options, f"amd:{arch}")
    except Exception as raised:
        notes = " ".join(getattr(raised, "__notes__", ()))
        error = f"{type(raised).__name__}: {raised} {notes}"[:500].strip()
    shapes = [tuple(x.shape) for x in inputs if torch.is_tensor(x)]
    return {
        "case": f"{shapes} { {k: v for k, v in options.items() if not torch.is_tensor(v)} }", "error": error,
        "launches": len(executed), "instructions": sum(one.instructions for one in executed),
        "kernels": [_counts(one) for one in executed],
        "waves": [facts.facts_of(one) for one in executed if traced],
    }  # fmt: skip


def _counts(executed) -> dict:
    """Return how often one executed launch executed each instruction."""
    return {
        "kernel": executed.launch.kernel, "key": executed.launch.key, "programs": math.prod(executed.grid),
        "warps": executed.launch.options["num_warps"], "instructions": executed.instructions,
        "counts": executed.run.counts,
    }  # fmt: skip


# The control ----------------------------------------------------------------------------------------------------------


@_uninitialized_is_nan()
def removals(op: str, arch: str, count: int) -> dict:
    """Remove random executed instructions, one at a time, and count what notices.

    The samples are those of `_control_samples`. An instruction is noticed if the parity rule, a fault or an endless
    loop tells. Waits, hints and fillers are not removed.

    Returns:
        the op, the architecture, the numbers "removed", "noticed", "same bits" (removals that change nothing on these
        samples), and "missed": how many removals of each instruction changed bits within the rule.
    """
    from liger_lab.levels.emulation import executed_on
    from liger_lab.levels.emulation.instructions import IGNORED

    load_all()
    torch.manual_seed(0)
    samples, places = [], []
    for inputs, options in _control_samples(op):
        with executed_on(DEVICES[arch]) as executed:
            outputs = parity.run(OPS[op], inputs, options)
        exact, reference = parity.expected(OPS[op], inputs, options)
        with contextlib.suppress(AssertionError):  # of extreme values the op may promise less
            parity.compare(exact, reference, outputs, op)
            samples.append((inputs, options, exact, reference, outputs))
        for one in executed:
            for offset, instruction in one.run.visited.items():
                if not instruction.name.startswith(IGNORED) and instruction.kind in ("step", "branch"):
                    places.append((one.launch.key, offset, instruction.size, instruction.name))
    chosen = sorted(set(places))
    random.Random(0).shuffle(chosen)
    result = {"op": op, "arch": arch, "removed": 0, "noticed": 0, "same bits": 0}
    missed = collections.Counter()
    for key, offset, size, name in chosen[:count]:
        result["removed"] += 1
        verdict = _without(op, arch, samples, key, offset, size)
        if verdict == "missed":
            missed[name] += 1
        else:
            result[verdict] += 1
    return result | {"missed": dict(missed)}


def _control_samples(op):
    """Yield the three largest bf16 cases, whole vectors first, and the largest with other values.

    Scaled by powers of two, exponentials leave their usual range; infinities and NaN stand in the first row.
    """
    largest = sorted(training_cases(op, torch.bfloat16), key=_whole_vectors_first)[:3]
    yield from largest
    (inputs, options), shape = largest[0], largest[0][0][0].shape
    powers = torch.randint(-8, 7, shape).float().exp2()
    extremes = torch.ones(shape)
    extremes.view(-1, shape[-1])[0, :64:16] = torch.tensor([math.inf, -math.inf, math.nan, 0.0])[: -(-shape[-1] // 16)]
    for factor in (powers, extremes):
        changed = [
            (x.detach() * factor).to(x.dtype).requires_grad_(x.requires_grad)
            if torch.is_tensor(x) and x.is_floating_point() and x.shape == shape
            else x
            for x in inputs
        ]
        yield tuple(changed), options


def _whole_vectors_first(sample):
    first = sample[0][0]
    return -first.numel() * (1.01 if _has_whole_vectors(sample) else 1)


def _has_whole_vectors(sample) -> bool:
    return sample[0][0].shape[-1] % 8 == 0


def _size(sample) -> int:
    return max(x.numel() for x in sample[0] if torch.is_tensor(x))


def removed(code, offset: int, size: int):
    """Return a `CodeObject` without the instruction of `size` bytes at `offset`."""
    image = code.image.copy()
    at = code.first - code.start + offset
    image[at : at + size].view("u4")[:] = NOP
    return replace(code, image=image)


def _without(op, arch, samples, key, offset, size) -> str:
    """Return "noticed", "same bits" or "missed" for the removal of one instruction."""
    from liger_lab.levels.emulation import executed_on

    def patch(launch, code):
        return removed(code, offset, size) if launch.key == key else code

    same = True
    for inputs, options, exact, reference, whole in samples:
        try:
            with executed_on(DEVICES[arch], patch=patch, limit=_REMOVED_LIMIT):
                outputs = parity.run(OPS[op], inputs, options)
            parity.compare(exact, reference, outputs, op)
        except Exception:  # a wrong number, a fault, an unknown instruction or an endless loop
            return "noticed"
        same = same and all(_same(a, b) for a, b in zip(outputs, whole))
    return "same bits" if same else "missed"


def _same(a, b):
    return a is b or (a is not None and b is not None and torch.equal(a.nan_to_num(), b.nan_to_num()))


# What is shown --------------------------------------------------------------------------------------------------------


def _cells(rows, run_id) -> list:
    from liger_lab.levels import evidence

    recorder = evidence.Recorder()
    recorder.load([
        [row["op"], f"amd:{row['arch']}", row["dtype"], evidence.EMULATED, not row["error"], bool(row["error"]),
         [f"{row['case']}: {row['error']}"[:300]] if row["error"] else []]
        for row in rows
    ])  # fmt: skip
    return recorder.cells(run_id)


def _waves(rows) -> list[dict]:
    """Return the facts of each op's launches in the wide case."""
    return [
        {"arch": row["arch"], "op": row["op"], "case": row["case"]} | facts
        for row in sorted(rows, key=lambda row: (row["arch"], row["op"]))
        for facts in row["waves"]
    ]


def _kernels(rows) -> list[dict]:
    """Return an entry for each code object, of its first launch."""
    known = {}
    for row in rows:
        for kernel in row["kernels"]:
            known.setdefault(kernel["key"], {"op": row["op"], "arch": row["arch"], "dtype": row["dtype"]} | kernel)
    return sorted(known.values(), key=lambda kernel: (kernel["arch"], kernel["op"], kernel["kernel"], kernel["key"]))


def _json(facts: dict) -> str:
    """Write a line for each entry."""
    parts = [f'"{name}": [\n ' + ",\n ".join(map(json.dumps, entries)) + "\n]" for name, entries in facts.items()]
    return "{" + ",\n".join(parts) + "}\n"


def _show(rows, controls) -> str:
    lines = []
    for op, arch in sorted({(row["op"], row["arch"]) for row in rows}):
        mine = [row for row in rows if (row["op"], row["arch"]) == (op, arch)]
        kernels = {kernel["key"] for row in mine for kernel in row["kernels"]}
        failed = sum(bool(row["error"]) for row in mine)
        control = next((c for c in controls if (c["op"], c["arch"]) == (op, arch)), None)
        lines.append([
            op, arch, f"{len(mine) - failed:,}", f"{failed:,}" if failed else "", f"{len(kernels):,}",
            f"{sum(row['instructions'] for row in mine):,}",
            f"{control['noticed']} of {control['removed'] - control['same bits']}" if control else "",
        ])  # fmt: skip
    head = ["op", "GPU", "passed", "failed", "code objects", "instructions", "removals noticed"]
    return console.table(head, lines)
