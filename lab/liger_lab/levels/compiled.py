"""Compile every kernel for every architecture and judge the compiled code.

`run` is `liger-hw compile`. A kernel gets the configuration that a launch on the architecture would choose.
The matrix covers each op's forward and backward, in fp32, bf16 and fp16, at
- the shapes of real models and wide and odd shapes (`model_cases` and `wide_cases` of `liger_lab.cases`),
- samples: one shape of each class of `small_cases`. Launches of one class share kernel, tensors, dtypes and flags, one
  block or a loop, and rows of whole vectors or not; they differ in sizes alone.
fp16 is compiled at the shapes of models only, as its code differs from bf16's in conversions alone. Samples of one
block are compiled in bf16 only, as the gates for fp32 matter at large tiles.
Two widths that agree in all that the code depends on (one block or a loop, whole blocks or not, the same whole vectors)
give the same code but for a constant. The matrix compiles one of them.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from liger_hw import console
from liger_hw.backends import ARCHITECTURES
from liger_hw.dispatch import OPS
from liger_hw.kernels import load_all
from liger_hw.spelling import check_known
from liger_lab import terminal
from liger_lab.bench import run_file
from liger_lab.cases import model_cases, small_cases, wide_cases
from liger_lab.levels import compile_cache, crosscompile
from liger_lab.levels.assembly import expected_width
from liger_lab.levels.crosscompile import DEVICES, Launch, Resources
from liger_lab.levels.occupancy import occupancy

ARCHS = tuple(row.device.arch for row in ARCHITECTURES.values() if row.in_matrix)
DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8, "uint8": torch.uint8,
}  # fmt: skip
MODEL, WIDE, SAMPLE = "model", "wide", "sample"
BLOCKS = {"cols": "COLS", "depth": "DEPTH", "tall": "ROWS"}  # a constant size -> the block that spans it


@dataclass
class Use:
    """A launch and the cases that launch it.

    Attributes:
        op, dtype, shapes: of these cases.
        backward: whether the launch is part of the backward.
        origin: "model", "wide" or "sample": the first list with such a case.
    """

    launch: Launch
    op: str
    dtype: str
    backward: bool
    origin: str
    shapes: list = field(default_factory=list)


# What is compiled -----------------------------------------------------------------------------------------------------


def uses(
    arch: str, ops: Iterable[str] = (), dtypes: Iterable[str] = DTYPES, origins=(MODEL, WIDE, SAMPLE)
) -> list[Use]:
    """Return the launches of the ops on `arch`, one for each class of shapes."""
    load_all()  # the recorder sees launches in loaded modules only
    by_class, sampled = {}, set()
    with crosscompile.launches_on(DEVICES[arch]) as launches:
        for origin in origins:
            for dtype in dtypes:
                if dtype == "fp16" and origin != MODEL:
                    continue
                for op, label, inputs, options in _cases(origin, ops or OPS, DTYPES[dtype]):
                    launches.clear()
                    forward = _run(op, inputs, options, launches)
                    for i, launch in enumerate(launches):
                        key = op, i >= forward, *_class(launch)
                        coarse = op, i >= forward, *coarse_class(launch)
                        if key not in by_class:
                            one_block_in_fp32 = dtype == "fp32" and not loops_over_row(launch)
                            if origin == SAMPLE and (coarse in sampled or one_block_in_fp32):
                                continue
                            by_class[key] = Use(launch, op, dtype, i >= forward, origin)
                        sampled.add(coarse)
                        if label not in by_class[key].shapes:
                            by_class[key].shapes.append(label)
    return list(by_class.values())


def _cases(origin: str, ops, dtype) -> Iterator[tuple]:
    ops = [op for op in ops if dtype in OPS[op].dtypes]
    if origin == MODEL:
        for case in model_cases(ops) if ops else ():
            yield case.op, case.label, case.make("meta", dtype), case.options
        return
    for op in ops:
        for inputs, options in wide_cases(op, dtype) if origin == WIDE else small_cases(op, dtype, "meta"):
            yield op, _label(inputs, options), inputs, options


def _label(inputs, options) -> str:
    sizes = "x".join(map(str, inputs[0].shape))
    named = ", ".join(f"{k}={'...' if torch.is_tensor(v) else v}" for k, v in options.items())
    return f"{sizes} {named}".strip()


def _run(op, inputs, options, launches: list) -> int:
    """Run the forward and backward of `op`; return the number of forward launches."""
    outputs = OPS[op](*inputs, **options)
    forward = len(launches)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = [y for y in outputs if y is not None and y.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    return forward


def loops_over_row(launch: Launch) -> bool:
    """Tell whether the kernel loops over several blocks of a row."""
    cols, block = launch.constants.get("cols"), launch.constants.get("COLS")
    return None not in (cols, block) and cols > block


def _class(launch: Launch) -> tuple:
    """Return an equal key for launches whose code differs in widths alone."""
    rest = {name: value for name, value in launch.constants.items() if name not in BLOCKS}
    sizes = ((launch.constants.get(name), launch.constants.get(block)) for name, block in BLOCKS.items())
    block_facts = [
        (size <= block, size % block == 0, math.gcd(size, 16)) for size, block in sizes if None not in (size, block)
    ]
    return launch.what[:3], str(rest), *launch.what[4:], *block_facts


def coarse_class(launch: Launch) -> tuple:
    """Return an equal key for launches that differ in sizes alone."""
    flags = {name: value for name, value in launch.constants.items() if value is None or isinstance(value, (bool, str))}
    return launch.what[:3], str(flags), launch.aligned, loops_over_row(launch)


# How it is judged -----------------------------------------------------------------------------------------------------

GATES = ("builds", "fits", "spills", "widths", "atomics", "fp64", "calls", "races")


def judge(launch: Launch, result: Resources | str) -> dict[str, str]:
    """Return the gates that a compiled launch misses, each with value and limit.

    Args:
        result: the resources from `crosscompile.compiled`, or the message of its exception.
    """
    if isinstance(result, str):
        return {"builds": result}
    device, warps, missed = DEVICES[launch.arch], launch.options["num_warps"], {}
    too_large = []
    if warps > device.max_warps:
        too_large.append(f"{warps} warps, allowed {device.max_warps}")
    if result.shared > device.shared_memory:
        too_large.append(f"{result.shared} bytes of shared memory, allowed {device.shared_memory}")
    if too_large:
        missed["fits"] = "; ".join(too_large)
    if result.scratch:  # 0 where AMD's compiler spills scalar registers to lanes of a vector register, not to memory
        missed["spills"] = f"{result.spills} spilled, {result.scratch} bytes of scratch a lane, allowed 0"
    narrow = [f"{access.kind} of {access.pointer} at {access.at}: {width} bytes, needed: at least {required}"
              for access, width, required in widths(launch, result) if width < required]  # fmt: skip
    if narrow:
        missed["widths"] = "; ".join(narrow)
    if result.atomics or result.loops:
        missed["atomics"] = f"{result.atomics} atomics, {result.loops} compare-and-swap loops, allowed 0"
    if result.doubles:
        missed["fp64"] = f"{result.doubles} instructions, allowed 0"
    if result.calls or result.library:
        missed["calls"] = f"{result.calls} calls, {', '.join(result.library) or 'no'} library functions, allowed 0"
    if result.overwritten:
        missed["races"] = f"{result.overwritten} tiles overwritten while a product reads them, allowed 0"
    return missed


def widths(launch: Launch, resources: Resources) -> Iterator[tuple]:
    """Yield the accesses that must be wide: (access, bytes a lane, bytes a lane required).

    These are the accesses of the kernel's largest tiles. If no instruction has an access's source line, it gets the
    narrowest width of its kind among the instructions without a source line.

    A kernel with the constant ALIGNED finds the vectors of a row itself, so the rule holds for it at any width. For any
    other kernel the rule holds if Triton knows that rows begin at a vector.
    If rows are not aligned, the rule covers matrices only: the kernel then reads a vector shared by all rows (class
    weights) out of step, and from the cache.
    The rule excludes the store of a matrix product (DEPTH), a small part of its time: AMD stores 2 or 8 bytes
    a lane from the layout of its matrix cores, and saves the way through shared memory.
    """
    if "ALIGNED" not in launch.constants and not _rows_known(launch):
        return
    largest = max((access.elements for access in resources.accesses), default=1)
    for access in resources.accesses:
        if access.kind == "store" and "DEPTH" in launch.constants:
            continue
        if access.elements == largest > 1 and (launch.aligned or access.pointer in launch.matrices):
            lost = [int(width) for other in resources.accesses
                    if (other.at, other.kind) == ("?", access.kind) for width in other.widths]  # fmt: skip
            yield access, access.widest or min(lost, default=0), expected_width(access, DEVICES[launch.arch].warp_size)


def _rows_known(launch: Launch) -> bool:
    """Tell whether Triton knows that rows begin at multiples of 16 values.
    Strides and constant sizes show it, at every model's shapes. Memory without gaps is one row, with a stride of 0."""
    sizes = [launch.constants.get(name) or 0 for name in ("cols", "rotary_dim")]
    strides = [i for i, name in enumerate(launch.signature) if name.endswith("stride") and name not in launch.constants]
    strides_known = all(launch.attributes.get(i) for i in strides) if strides else launch.aligned
    return strides_known and not any(size % 16 for size in sizes)


def record(use: Use, result: Resources | str) -> dict:
    """Return all facts of a compiled launch, for JSON."""
    launch, missed = use.launch, judge(use.launch, result)
    device = DEVICES[launch.arch]
    row = {
        "op": use.op, "kernel": launch.kernel, "pass": "backward" if use.backward else "forward",
        "backend": f"{device.vendor}:{launch.arch}", "arch": launch.arch, "dtype": use.dtype, "origin": use.origin,
        "shapes": use.shapes, "aligned": launch.aligned, "config": launch.config,
        "constants": {name: value for name, value in launch.constants.items() if value is not None},
        "gates": {gate: gate not in missed for gate in GATES}, "missed": missed, "passed": not missed,
    }  # fmt: skip
    if isinstance(result, str):
        return row
    warps = launch.options["num_warps"]
    full = occupancy(device.core, result.registers, result.shared, warps) if warps <= device.max_warps else None
    resources = result.to_json()
    accesses = [access | {"widths": {str(width): n for width, n in access["widths"].items()}}
                for access in resources.pop("accesses")]  # fmt: skip
    return row | resources | {"occupancy": full and vars(full), "accesses": accesses}


# All of it ------------------------------------------------------------------------------------------------------------


def gather(archs, ops, jobs, dtypes=tuple(DTYPES), origins=(MODEL, WIDE, SAMPLE), further=None) -> tuple[list, dict]:
    """Record and compile all launches: (uses, key -> result). Ctrl-C keeps the results so far.

    Args:
        archs, ops, jobs: as in `run`.
        dtypes, origins: as in `uses`.
        further: (uses, results) -> more launches to compile.

    Raises:
        ValueError: as in `run`.
    """
    console.require("rich", "triton")
    archs = [arch.replace("sm_", "sm") for arch in archs] or list(ARCHS)
    for arch in archs:
        check_known("architecture", arch, DEVICES)
    for op in ops:
        check_known("op", op, OPS)
    cache, all_uses = compile_cache.Cache(), []
    with compile_cache.processes(jobs) as pool, terminal.progress() as progress:
        task = progress.add_task("what launches", total=len(archs), note="")
        for future in [pool.submit(uses, arch, ops, dtypes, origins) for arch in archs]:
            all_uses += future.result()
            progress.update(task, advance=1)
        results = compile_cache.compile_all((use.launch for use in all_uses), pool, cache, progress)
        if further:
            results |= compile_cache.compile_all(further(all_uses, results), pool, cache, progress)
    if not ops and len(archs) == len(ARCHS):
        cache.keep(set(results))
    return all_uses, results


def run(archs: list[str], ops: list[str], jobs: int | None, report: Path) -> int:
    """Run `liger-hw compile`: compile, judge, print the table, write the files.
    The files are compiled.json (evidence: the counts of passes), kernels.json (every `record`) and compiled.html.

    Args:
        archs: names in DEVICES, "sm_90" or "sm90"; none means ARCHS.
        ops: names in `dispatch.OPS`; none means all.
        jobs: processes; None means one for each core.
        report: the folder to write to.

    Returns:
        0 if all kernels pass every gate, else 1; 130 if interrupted: the cache keeps the kernels compiled so far.

    Raises:
        ValueError: an architecture or an op is unknown, or a package is not installed.
    """
    from liger_lab.levels import evidence, resources

    all_uses, results = gather(archs, ops, jobs)
    rows = [record(use, results[use.launch.key]) for use in all_uses]
    run_id, facts = evidence.about(evidence.COMPILED)
    files = (
        evidence.write(report / "compiled.json", {run_id: facts}, cells(rows, run_id)),
        run_file.replace(report / "kernels.json", "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"),
        resources.write(rows, facts, report / "compiled.html"),
    )
    print(*files, sep=", ", end="\n\n")
    print(resources.show(rows))
    return 0 if all(row["passed"] for row in rows) else 1


def cells(rows: list[dict], run_id: str) -> list:
    """Count passes and failures of each op, architecture and dtype, for `liger-hw evidence`."""
    from liger_lab.levels import evidence

    counts = {}
    for row in rows:
        key = row["op"], row["backend"], row["dtype"]
        passed, failed, failures = counts.get(key, (0, 0, []))
        counts[key] = [passed + row["passed"], failed + (not row["passed"]), failures]
        for gate, message in row["missed"].items():
            if len(failures) < evidence.FAILURES:
                failures.append(f"{row['kernel']} at {row['shapes'][0]}: {gate}: {message}"[:300])
    return [evidence.EvidenceCell(*key, evidence.COMPILED, *count, run_id) for key, count in counts.items()]
