"""Check the ops and this machine's properties, for `liger-hw doctor`.

On an accelerator it runs the parity cases of every op in every dtype. It compares the driver's facts with the table of
architectures, spilled registers with a limit, the copy rate with the data sheet, and each op's time with the time to
move its bytes at that rate. On a CPU it checks plain torch, and the kernels in Triton's interpreter. The report is one
file, which `liger-hw evidence` also reads as evidence.
"""

import functools
import os
from contextlib import contextmanager
from pathlib import Path

import torch

from liger_hw import backends, dispatch
from liger_hw._triton import AVAILABLE, interpreting
from liger_hw.hooks import hooks
from liger_hw.kernels import load_all
from liger_hw.spelling import check_known
from liger_hw.testing import parity
from liger_lab.cases import model_cases, small_cases
from liger_lab.levels import evidence
from liger_lab.levels.occupancy import occupancy
from liger_lab.levels.workers import Died, Workers

SPILLS = 1 / 6  # share of its registers that a kernel may spill: versions of Triton other than the evidence's do
# without a measurable cost (H200, Triton 3.6: 24 of 168 registers of glu_backward on one warp; swiglu reaches 97%)
COPY = 0.6  # least share of the data sheet's bandwidth; an H200 copies at 0.88 of its bandwidth
SHARE = 0.5  # least share of the copy rate, by bytes that must move; an H200's kernels reach 0.6 to 1.0 at most shapes
LEAST = 2**28  # bytes; the doctor times shapes that move at least this many, so that memory decides their time
PLAIN = "plain torch"
SEND = "docs/guides/your_gpu.md says where"
CODE = set("ptx cubin amdgcn hsaco spv zebin".split())  # outputs of Triton that a report may hold


def examine(ops: list[str], device: torch.device, info: dict, say=print, binaries: Path | None = None) -> dict:
    """Run all checks and return the findings as plain data.

    Args:
        ops: names of ops.
        device: the accelerator, or a CPU.
        info: the output of `liger-hw info --json`, for the report.
        say: called with each line of progress.
        binaries: a folder for the machine code of each kernel; None keeps none.

    Returns:
        "info"; "runs" and "cells", the evidence; "plain", the failures of plain torch on a CPU by op; "checks", each
        with "expected", "found" and "as_expected"; "times"; "kernels"; "advice"; "interrupted", None or, after Ctrl-C,
        the progress so far.
    """
    on_cpu = device.type == "cpu"
    run, facts = evidence.about(evidence.INTERPRETED if on_cpu else evidence.EXECUTED, device)
    findings = {"info": info, "checks": [], "times": [], "kernels": [], "plain": {}, "advice": [], "interrupted": None}
    recorder, done = evidence.Recorder(), 0
    try:
        for op, result in _each(ops, device, binaries):
            recorder.load(result["cells"])
            findings["kernels"] += result["kernels"]
            findings["plain"] |= {op: result["plain"]} if result["plain"] else {}
            say(f"{op}: {_told(result)}")
            done += 1
    except KeyboardInterrupt:
        findings["interrupted"] = f"interrupted: {done} of {len(ops)} ops were checked, and nothing was timed"
    findings |= {"runs": {run: facts}, "cells": recorder.cells(run)}
    if findings["interrupted"]:
        return findings
    if not on_cpu:
        here = backends.detected(device)
        for kernel in findings["kernels"] if here.core else ():
            taken = kernel["registers"], kernel["shared"], kernel["num_warps"]
            kernel["occupancy"] = round(occupancy(here.core, *taken).share, 3)
        findings["checks"] = [*_facts(device), *_spills(findings["kernels"])]
        say("timing")
        try:
            _time(ops, device, findings)
        except KeyboardInterrupt:
            findings["interrupted"] = (
                f"interrupted: every op was checked, {len(findings['times'])} of {len(ops)} were timed"
            )
    findings["advice"] = _advice(findings, device)
    return findings


def failures(findings: dict) -> list[str]:
    """List the wrong results, in words."""
    from liger_lab.levels import page

    return page.problems(findings["cells"]) + [
        f"{op} as plain torch: {error}" for op, error in findings["plain"].items()
    ]


def write(findings: dict, folder: Path) -> Path:
    """Write the report, doctor.json, into `folder`."""
    more = {key: value for key, value in findings.items() if key not in ("runs", "cells")}
    return evidence.write(folder / "doctor.json", findings["runs"], findings["cells"], **more)


# right or wrong -------------------------------------------------------------------------------------------------------


def _each(ops, device, binaries=None):
    """Yield (op, result of a worker process): a broken device context ends one process."""
    on_cpu = device.type == "cpu"
    workers = max(min((os.cpu_count() or 2) // (1 if on_cpu else 2), 8, len(ops)), 1)
    with _environment(TRITON_INTERPRET="1" if on_cpu else None), Workers(workers) as pool:
        for op, future in [(op, pool.submit(_examine, op, device, binaries)) for op in ops]:
            try:
                yield op, future.result()
            except Died as crash:
                yield op, _crashed(op, device, crash)


@contextmanager
def _environment(**values):
    """Set environment variables for processes that start inside; None removes one."""
    before = {name: os.environ.get(name) for name in values}

    def put(those):
        for name, value in those.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(values)
    try:
        yield
    finally:
        put(before)


def _crashed(op, device, crash) -> dict:
    here = backends.detected(device)
    cell = [op, f"{here.vendor}:{here.arch}", "fp32", evidence.EXECUTED, 0, 1, [str(crash)]]
    return {"cells": [cell], "plain": None, "kernels": []}


def _examine(op: str, device: torch.device, binaries: Path | None = None) -> dict:
    """Check one op here; a CPU runs plain torch and every vendor's kernels, fp32."""
    load_all()
    recorder, plain = evidence.Recorder(), None
    with hooks.observe_checks(recorder.add), hooks.collect_kernels() as kernels:
        if device.type != "cpu":
            for dtype in dispatch.OPS[op].dtypes:
                _cases(op, dtype, device, backends.forced())
            try:
                torch.accelerator.synchronize(device)
            except Exception:  # a kernel broke the context: all later work of this process would fail too
                os._exit(1)
        else:
            for dtype in dispatch.OPS[op].dtypes:
                plain = plain or _cases(op, dtype, device, None)
            if interpreting():
                for backend in [backends.forced()] if backends.forced() else backends.VENDORS:
                    _cases(op, dispatch.OPS[op].dtypes[0], device, backend)
    return {"cells": recorder.dump(), "plain": plain, "kernels": [_about(op, kernel, binaries) for kernel in kernels]}


def _cases(op, dtype, device, backend) -> str | None:
    """Check every parity case; return the first failure in words. The observer counts them."""
    torch.manual_seed(0)
    first = None
    for inputs, options in small_cases(op, dtype, device):
        try:
            parity.check(dispatch.OPS[op], inputs, options, backend)
        except Exception as error:  # the doctor reports any failure, so it catches every exception
            first = first or f"{type(error).__name__}: {error}"[:300]
    return first


def _told(result: dict) -> str:
    passed, failed = (sum(cell[i] for cell in result["cells"]) for i in (4, 5))
    where = ", ".join(dict.fromkeys(cell[1] for cell in result["cells"]))
    dtypes = ", ".join(dict.fromkeys(cell[2] for cell in result["cells"]))
    level = "in the interpreter as on" if interpreting() else "on"
    kernels = f"{passed} cases of its kernels passed {level} {where} ({dtypes})" + (
        f", {failed} FAILED" if failed else ""
    )
    return (
        (kernels if passed + failed else f"right as {PLAIN}") if not result["plain"] else f"WRONG as {PLAIN}, {kernels}"
    )


# as expected or not ---------------------------------------------------------------------------------------------------


def _check(what, expected, measured, good) -> dict:
    return {"what": what, "expected": expected, "found": measured, "as_expected": bool(good)}


def _facts(device):
    """Compare the driver's facts with the architecture's, except cores, which differ by product."""
    here = backends.detected(device)
    known = backends.VENDORS[here.vendor].ARCHS
    yield _check("architecture", f"one of {', '.join(known)}", here.arch, here.arch in known)
    like = known.get(here.arch) or backends.VENDORS[here.vendor].nearest(here.arch)
    for fact in ("warp_size", "max_threads", "core_threads", "shared_memory"):
        yield _check(fact, getattr(like, fact), getattr(here, fact), getattr(like, fact) == getattr(here, fact))


def _about(op, built, binaries) -> dict:
    """Return a compiled kernel's resources, and write its code to the folder `binaries`."""
    about = {"op": op, "kernel": built.metadata.name, "num_warps": built.metadata.num_warps,
             "shared": built.metadata.shared, "registers": built.n_regs, "spills": built.n_spills}  # fmt: skip
    if binaries:
        about["file"] = f"{built.metadata.name}-{built.hash[:12]}"
        binaries.mkdir(parents=True, exist_ok=True)
        for stage in CODE & built.asm.keys():
            code = built.asm[stage]
            (binaries / f"{about['file']}.{stage}").write_bytes(code.encode() if isinstance(code, str) else code)
    return about


def _spills(kernels):
    spilled = sorted({f"{k['kernel']} ({k['num_warps']} warps, {k['registers']} registers): {k['spills']}"
                      for k in kernels if k["spills"]})  # fmt: skip
    good = all(k["spills"] <= SPILLS * k["registers"] for k in kernels)
    expected = f"at most {SPILLS:.0%} of a kernel's registers"
    yield _check(f"spills of {len(kernels)} kernels", expected, "; ".join(spilled) or "none", good)


def _time(ops, device, findings) -> None:
    """Add the copy rate and each op's time at one shape to `findings`."""
    from liger_lab.bench import operations
    from liger_lab.bench.measure import Clock

    def moved(case):
        return sum(operations.cost(case)[:2])

    clock = Clock(device)
    ceilings = clock.ceilings(torch.bfloat16)
    copy, sheet = ceilings["bytes_per_second"] / 1e9, _bandwidth(backends.detected(device))
    least_rate = f"at least {COPY:.0%} of {sheet} GB/s (data sheet of this card, in liger_hw/backends)"
    if sheet:
        findings["checks"].append(_check("copy rate", least_rate, f"{copy:.0f} GB/s", copy >= COPY * sheet))
    for op in ops:
        cases = model_cases([op])
        case = min((case for case in cases if moved(case) >= LEAST), key=moved, default=None) or max(cases, key=moved)
        needs, here = operations.cost(case), {"op": op, "shape": case.label}
        try:
            seconds = _seconds(case, device, clock)
        except torch.OutOfMemoryError:
            findings["times"].append(here | {"skipped": "out of memory"})
            continue
        finally:
            operations.clean(device)
        ideal = max(sum(needs[:2]) / ceilings["bytes_per_second"], sum(needs[2:]) / ceilings["flops_per_second"])
        findings["times"].append(here | {"ms": seconds * 1e3, "share": ideal / seconds})
        findings["checks"].append(
            _check(f"{op} {case.label}, forward and backward", f"at least {SHARE:.0%} of this machine's limit",
                   f"{ideal / seconds:.0%}, {seconds * 1e3:.3f} ms", ideal / seconds >= SHARE)
        )  # fmt: skip


# Name of a card, as the driver has it -> memory bandwidth of its data sheet in GB/s. The whole name counts: an RTX 3080
# has two memories under one name, laptop parts have others, and "A10" is also in "A100" and "RTX A1000".
CARDS = {
    "NVIDIA H100 80GB HBM3": 3350, "NVIDIA H100 PCIe": 2000, "NVIDIA H100 NVL": 3900, "NVIDIA H20": 4000,
    "NVIDIA H200": 4800, "NVIDIA H200 NVL": 4800, "NVIDIA GH200 480GB": 4000, "NVIDIA A100-SXM4-80GB": 2039,
    "NVIDIA A100 80GB PCIe": 1935, "NVIDIA A100-SXM4-40GB": 1555, "NVIDIA A100-PCIE-40GB": 1555, "NVIDIA A30": 933,
    "NVIDIA RTX A6000": 768, "NVIDIA A40": 696, "NVIDIA A10": 600, "NVIDIA GeForce RTX 3090": 936,
    "NVIDIA GeForce RTX 4090": 1008, "NVIDIA GeForce RTX 4080": 717, "NVIDIA RTX 6000 Ada Generation": 960,
    "NVIDIA L40": 864, "NVIDIA L40S": 864, "NVIDIA L4": 300, "NVIDIA B200": 8000, "NVIDIA GB200": 8000,
    "NVIDIA GeForce RTX 5090": 1792, "NVIDIA GeForce RTX 5080": 960,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 1792, "NVIDIA GB10": 273,
}  # fmt: skip


def _bandwidth(here) -> int:
    """Return the data sheet's bandwidth of this card in GB/s, or 0 if unknown."""
    if not here.name:
        return here.bandwidth
    return CARDS.get(here.name, 0)


def _seconds(case, device, clock) -> float:
    """Time one forward and backward, the kernels alone if a graph can be captured."""
    from liger_lab.bench import operations

    op = functools.partial(dispatch.OPS[case.op], **case.options)
    subject = operations.Subject(op, case.make(device, torch.bfloat16))
    subject.full()
    return clock.seconds(clock.graph(subject.full) or subject.full)


# what to do -----------------------------------------------------------------------------------------------------------


def _advice(findings, device) -> list[str]:
    lines = []
    if failures(findings):
        lines.append(f"wrong results: please send the report ({SEND})")
    if device.type == "cpu":
        seen = (
            "the kernels in Triton's interpreter" if AVAILABLE else "no kernel, because the package triton is missing"
        )
        lines += [
            f"no accelerator is here: checked were plain torch, which serves on a CPU, and {seen}; not whether a GPU "
            "compiles and runs the kernels",
            "`liger-hw compile` builds every kernel for NVIDIA's and AMD's GPUs without one",
        ]
        return lines
    slow = [time["op"] for time in findings["times"] if time.get("share", 1) < SHARE]
    if not all(check["as_expected"] for check in findings["checks"]):
        lines.append(f"not everything is as expected: the report says what; please send it ({SEND})")
    lines.append(f"`liger-hw tune{''.join(f' {op}' for op in slow)} --contribute` searches better launches for this "
                 "machine and writes a table that can be shipped")  # fmt: skip
    return lines


def rows(findings: dict) -> list[list[str]]:
    """Return the checks as a table: a header, unexpected results, then the others."""
    ordered = sorted(findings["checks"], key=lambda check: check["as_expected"])
    lines = [["" if c["as_expected"] else "DIFFERS", c["what"], str(c["expected"]), str(c["found"])] for c in ordered]
    return [["", "what", "expected", "found"], *lines]


def ops_here(names: list[str]) -> list[str]:
    """Return `names`, or all ops if it is empty.

    Raises:
        ValueError: one is unknown.
    """
    every = sorted(dispatch.OPS)
    for name in names:
        check_known("op", name, every)
    return names or every
