"""Measure every registered op at the shapes of `model_cases`, beside its peers, in one run."""

import contextlib
import gc
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import torch

from liger_hw import backends, dispatch
from liger_hw.kernels import load_all
from liger_hw.testing import parity
from liger_hw.testing.case import Case
from liger_lab.bench import memory, op_sweeps
from liger_lab.bench.measure import Clock
from liger_lab.bench.peers import FLOOR, OURS, PEERS
from liger_lab.bench.run_file import environment, new_benchmark, record_skip, saved_at_end, write
from liger_lab.cases import CASES, model_cases, small_cases

MODES = ("fwd", "bwd", "full", "host")
SECONDS = 0.4  # the aim for all rounds of one mode at one shape
GRAPHS_BELOW = 5e-3  # seconds: above it the host does not matter, and a graph's own memory does
HOST_BELOW = 2**21  # bytes moved: above it the device may be slower than the host
CPU_BYTES, CPU_FLOPS = 2**25, 10**10  # the largest shape that runs on a CPU, unless --shapes names a larger one


def _cases(ops, sweep) -> list[Case]:
    if sweep:
        return list(chain.from_iterable(op_sweeps.cases(ops, *sweep).values()))
    return model_cases(ops, further=True)


def select(ops, texts, modes, device, sweep=None) -> list[Case]:
    """Return the cases to measure on `device`.

    Args:
        ops: names of ops; empty means all.
        texts: sizes, or parts of labels where no shape has these sizes; empty means all shapes (on a CPU, the small
            ones).
        modes: some of MODES.
        sweep: what grows and its sizes, which make the shapes, or None.

    Raises:
        ValueError: an op is unknown, or no case remains.
    """
    selected_cases = _cases(ops, sweep)
    if texts:
        sizes = {case.label.split()[0] for case in selected_cases}
        selected_cases = [
            case for case in selected_cases
            if any(text == case.label.split()[0] if text in sizes else text in case.label for text in texts)
        ]  # fmt: skip
    elif device.type == "cpu" and not (sweep and sweep[1]):
        selected_cases = [case for case in selected_cases if _bytes(case) <= CPU_BYTES and _flops(case) <= CPU_FLOPS]
    if set(modes) == {"host"}:
        selected_cases = [case for case in selected_cases if _bytes(case) <= HOST_BELOW]
    if not selected_cases:
        raise ValueError(f"--shapes: got {', '.join(texts) or 'none'}, which leaves no shape of these ops and modes")
    return selected_cases


def cost(case, dtype=torch.bfloat16) -> dispatch.Cost:
    """Return the bytes and operations that the op needs at least at this shape."""
    return dispatch.OPS[case.op].cost_of(*case.make("meta", dtype), **case.options)


def _bytes(case) -> int:
    return sum(cost(case)[:2])


def _flops(case) -> int:
    return sum(cost(case)[2:])


def run(cases, providers, modes, dtype, device, progress, file: Path, sweep=None) -> dict:
    """Measure `cases`; write the results to `file` after each and return them.

    Args:
        cases: from `select`.
        providers: names of `peers.PEERS`.
        modes: some of MODES.
        progress: a visible `rich.progress.Progress`.
        sweep: what grows, and its sizes, if `cases` are those of `op_sweeps.cases`.

    Returns:
        Plain data; `complete` is False after Ctrl-C.
    """
    benchmark = environment(device) | new_benchmark(dtype, {name: PEERS[name].note for name in providers})
    if sweep:
        grown = op_sweeps.cases(list(dict.fromkeys(case.op for case in cases)), *sweep)
        sizes = {f"{case.op} {case.label}": size for size, same_size in grown.items() for case in same_size}
        benchmark["sweep"] = {"grows": sweep[0], "sizes": sizes}
    with saved_at_end(benchmark, file):
        _prepare(cases, providers, dtype, device, benchmark, progress, sweep)
        clock = Clock(device)
        benchmark["ceilings"] = clock.ceilings(dtype)
        bar = progress.add_task("shapes", total=len(cases), note="")
        for case in cases:
            if benchmark["parity"][case.op]["error"] is None:
                progress.update(bar, note=f"{case.op} {case.label}")
                _measure(case, providers, modes, dtype, clock, benchmark)
                write(benchmark, file)
            progress.advance(bar)
    return benchmark


# before anything is timed ---------------------------------------------------------------------------------------------


def check_parity(op: str, dtype, device) -> dict:
    """Run the parity cases of an op here; return their number and the first error."""
    torch.manual_seed(0)
    number, error = 0, None if op in CASES else "it has no parity cases"
    for inputs, options in small_cases(op, dtype, device) if op in CASES else ():
        number += 1
        try:
            parity.check(dispatch.OPS[op], inputs, options, backends.forced())
        except Exception as failure:  # after any failure the times of this op mean nothing
            error = f"{type(failure).__name__}: {failure}"
            break
    return {"cases": number, "error": error}


def _prepare(cases, providers, dtype, device, benchmark, progress, sweep) -> None:
    """Fill in `benchmark["parity"]`; on an accelerator, also compile the kernels of all shapes.

    Worker processes do both: a kernel that breaks the device's context breaks only the worker's. This process finds the
    compiled kernels in the caches of Triton and Inductor.
    """
    ops = list(dict.fromkeys(case.op for case in cases))
    bar = progress.add_task("parity", total=len(ops), note="")
    if device.type == "cpu":
        for op in ops:
            progress.update(bar, note=op)
            benchmark["parity"][op] = check_parity(op, dtype, device)
            progress.advance(bar)
        return
    compiled = [name for name in providers if name not in ("torch", "eager", FLOOR)]
    keys = [(case.op, case.label) for case in cases]
    warm = progress.add_task("compiling", total=len(keys), note="")
    workers = compiling_workers(8)
    try:
        parities = {workers.submit(check_parity, op, dtype, device): op for op in ops}
        warming = {workers.submit(_warm, key, compiled, dtype, device, sweep) for key in keys}
        for done in as_completed([*parities, *warming]):
            if done in warming:
                progress.advance(warm)
                continue
            broken = done.exception()
            op = parities[done]
            benchmark["parity"][op] = {"cases": 0, "error": f"{broken!r}"} if broken else done.result()
            progress.update(bar, advance=1, note=op)
    finally:
        workers.shutdown(cancel_futures=True)


def compiling_workers(most: int) -> ProcessPoolExecutor:
    """Start at most `most` processes that compile kernels into the compilers' caches."""
    return ProcessPoolExecutor(max(min((os.cpu_count() or 2) // 2, most), 1), get_context("spawn"), _start_worker)


def _start_worker() -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # or each worker starts one process for every core
    load_all()


def _warm(key, providers, dtype, device, sweep) -> None:
    (case,) = (case for case in _cases([key[0]], sweep) if case.label == key[1])
    for name in providers:
        with contextlib.suppress(Exception):  # the measurement meets the same error and records it
            if subject := _subject(name, case, None, dtype, device):
                with torch.no_grad():
                    subject.forward()
                subject.full()
        clean(device)


# measuring ------------------------------------------------------------------------------------------------------------


class Subject:
    """One provider's implementation of an op, with its inputs."""

    def __init__(self, function, inputs):
        self.function, self.inputs = function, inputs
        self.leaves = [x for x in inputs if x is not None and x.requires_grad]
        self.grads = None
        self.retained = None

    def forward(self):
        return self.function(*self.inputs)

    def full(self):
        outputs = self._outputs()
        if not outputs:  # the floor computes its gradients without autograd
            return None
        return torch.autograd.grad(outputs, self.leaves, self.grads)

    def keep(self):
        """Run the forward whose graph `backward` then uses any number of times."""
        self.retained = self._outputs()
        if not self.retained:
            raise RuntimeError("nothing to differentiate")

    def backward(self):
        return torch.autograd.grad(self.retained, self.leaves, self.grads, retain_graph=True)

    def _outputs(self):
        outputs = self.forward()
        outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]
        outputs = [y for y in outputs if y.requires_grad]
        if self.grads is None:
            self.grads = [torch.randn_like(y) if y.ndim else torch.ones_like(y) for y in outputs]
        return outputs


def _subject(name, case, inputs, dtype, device) -> Subject | None:
    """Return a provider at a shape, or None if it lacks the op.

    A provider that writes over its inputs gets its own.
    """
    peer = PEERS[name]
    if "chunk_memory" in case.options and name not in (OURS, FLOOR):
        return None  # only our op has this option; peers are measured at the case without it
    function = peer.make(case)
    if function is None:
        return None
    separate = inputs is None or peer.overwrites(case)
    return Subject(function, case.make(device, dtype) if separate else inputs)


def _measure(case, providers, modes, dtype, clock, benchmark) -> None:
    """Measure one shape into `benchmark["results"]`; failures go to `benchmark["skipped"]`."""
    subjects, inputs = {}, None
    for name in providers:
        try:
            inputs = inputs or case.make(clock.device, dtype)
            subject = _subject(name, case, inputs, dtype, clock.device)
            if subject is None:
                continue
            with torch.no_grad():
                subject.forward()
            subject.full()
            clock.synchronize()
            subjects[name] = subject
        except Exception as error:  # a peer may fail in any way; the others still run
            record_skip(benchmark, case, name, error)
            clean(clock.device)
    limits = _limits(case, dtype, benchmark["ceilings"])
    times = {}

    def record(mode, name, spread, scale, **more):
        benchmark["results"].append({
            "op": case.op, "shape": case.label, "mode": mode, "provider": name,
            **{key: value * scale if key != "rounds" else value for key, value in spread.items()}, **more,
        })  # fmt: skip

    passes = ("fwd", "full") if any(subject.leaves for subject in subjects.values()) else ("fwd",)  # of integers
    for mode in [mode for mode in passes if subjects and {mode, "bwd"} & set(modes)]:
        with torch.set_grad_enabled(mode == "full"):
            calls = {name: s.forward if mode == "fwd" else s.full for name, s in subjects.items()}
            times[mode] = clock.interleave(calls, SECONDS)
            if mode not in modes:
                continue
            kernels = _kernels_alone(case, calls, times[mode], clock)
            for name, call in calls.items():
                took, peak = times[mode][name], memory.peak(call, clock.device)
                limit = limits(mode, took["median"])
                record(mode, name, took, 1e3, gpu=kernels.get(name), peak_bytes=peak, **limit)
    if "bwd" in modes and "full" in passes:
        direct = _backwards(subjects, clock)
        for name in subjects:
            if name == FLOOR:
                continue
            took = direct.get(name) or _difference(times["full"][name], times["fwd"][name])
            record("bwd", name, took, 1e3, derived=name not in direct, **limits("bwd", took["median"]))
    if "host" in modes and _bytes(case) <= HOST_BELOW:
        for mode in passes:
            calls = {name: s.forward if mode == "fwd" else s.full for name, s in subjects.items() if name != FLOOR}
            with torch.set_grad_enabled(mode == "full"):
                for name, took in clock.host(calls).items():
                    record(f"host {mode}", name, took, 1e6)
    subjects.clear()
    clean(clock.device)


def clean(device) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _limits(case, dtype, ceilings):
    """Return a function of mode and seconds that gives bytes, operations and the limit's share.

    The limit is the time of the bytes at the machine's copy rate, or of the operations at its matrix product rate: the
    longer of the two.
    """
    forward_bytes, backward_bytes, forward_flops, backward_flops = cost(case, dtype)
    needs = {
        "fwd": (forward_bytes, forward_flops),
        "bwd": (backward_bytes, backward_flops),
        "full": (forward_bytes + backward_bytes, forward_flops + backward_flops),
    }

    def limits(mode, seconds):
        moved, done = needs[mode]
        ideal = max(moved / ceilings["bytes_per_second"], done / ceilings["flops_per_second"])
        return {"bytes": moved, "flops": done, "share": ideal / seconds if seconds > 0 else None}

    return limits


def _kernels_alone(case, calls, times, clock) -> dict:
    """Time the kernels without the host, for calls that a graph can capture; in milliseconds."""
    graphs = {}
    for name, call in calls.items():
        if times[name]["median"] < GRAPHS_BELOW and not PEERS[name].waits(case):
            replay = clock.graph(call)
            if replay is not None:
                graphs[name] = replay
    if not graphs:
        return {}
    return {name: took["median"] * 1e3 for name, took in clock.interleave(graphs, SECONDS / 2).items()}


def _backwards(subjects, clock) -> dict:
    """Time the backward alone, for providers that allow several through one forward."""
    direct = {}
    for name, subject in subjects.items():
        try:
            subject.keep()
            for _ in range(2):
                subject.backward()
            clock.synchronize()
            direct[name] = subject.backward
        except Exception:  # a library may refuse a second backward in any way, or run out of memory
            subject.retained = None
    took = clock.interleave(direct, SECONDS) if direct else {}
    for subject in subjects.values():
        subject.retained = None
    return took


def _difference(full, forward) -> dict:
    """Subtract the medians; keep the distances of the percentiles of the full step."""
    median = full["median"] - forward["median"]
    shifted = {key: full[key] - full["median"] + median for key in ("p20", "p80")}
    return {"median": median, **shifted, "rounds": full["rounds"]}
