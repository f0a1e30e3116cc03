"""Measure every loss beside plain torch, liger_kernel and its matrix products alone.

The command is `liger-hw bench losses`.
"""

import contextlib
import functools
from concurrent.futures import as_completed
from importlib.util import find_spec
from pathlib import Path

import torch

from liger_lab.bench import formatting, memory
from liger_lab.bench.loss_cases import LIGER, REAL, SMALL, TORCH, cases
from liger_lab.bench.measure import Clock
from liger_lab.bench.operations import clean, compiling_workers
from liger_lab.bench.peers import FLOOR, OURS, Products
from liger_lab.bench.run_file import environment, new_benchmark, record_skip, saved_at_end, write

PROVIDERS = {
    OURS: "",
    TORCH: "whole logits, log-softmax in fp32, autograd",
    LIGER: "liger_kernel with its default options: torch.compile compiles its chunks",
    FLOOR: "torch.mm of the same sizes: the logits of every model, both gradients of the trained one",
}
SECONDS = 1.0  # the aim for all rounds of one loss


def choose(names) -> list[str]:
    """Return the providers to measure, ours first; by default all installed ones.

    Raises:
        ValueError: a name is unknown, or not installed.
    """
    for name in names:
        if name not in (TORCH, LIGER):
            raise ValueError(f"--against: got {name}, allowed: {TORCH}, {LIGER}")
    installed = find_spec("liger_kernel") is not None
    if LIGER in names and not installed:
        raise ValueError("--against: got liger, which is not installed here: pip install liger-kernel")
    names = names or [TORCH] + [LIGER] * installed
    return [OURS, *dict.fromkeys(names), FLOOR]


def select(texts, device) -> list:
    """Return the cases whose name or label contains one of `texts`; by default all.

    On a CPU the cases are small.

    Raises:
        ValueError: no case remains.
    """
    return cases(texts, _sizes(device))


def _sizes(device):
    return SMALL if device.type == "cpu" else REAL


class Step:
    """Run forward and backward of one provider's implementation of a loss."""

    def __init__(self, case, name, inputs):
        self.function, self.inputs = case.providers[name], inputs
        self.leaves = [x for x in inputs if x.requires_grad]

    def __call__(self):
        return torch.autograd.grad(self.function(*self.inputs), self.leaves)


def run(chosen, providers, dtype, device, progress, file: Path) -> dict:
    """Measure the cases `chosen`; write the results to `file` after each and return them.

    Args:
        providers: from `choose`.
        progress: a visible `rich.progress.Progress`.

    Returns:
        Plain data; `complete` is False after Ctrl-C. Times are milliseconds of forward and backward; `gradient_bytes`
        is the gradients' part of `peak_bytes`; `loss` is each provider's loss.
    """
    benchmark = environment(device) | new_benchmark(dtype, {name: PROVIDERS[name] for name in providers})
    with saved_at_end(benchmark, file):
        if device.type != "cpu":
            _compile(chosen, providers, dtype, device, progress)
        clock = Clock(device)
        benchmark["ceilings"] = clock.ceilings(dtype)
        bar = progress.add_task("losses", total=len(chosen), note="")
        for case in chosen:
            progress.update(bar, note=f"{case.op} {case.label}")
            _measure(case, providers, dtype, clock, benchmark)
            write(benchmark, file)
            progress.advance(bar)
    return benchmark


def _measure(case, providers, dtype, clock, benchmark) -> None:
    inputs = case.make(clock.device, dtype)
    gradients = sum(x.nbytes for x in inputs if x.requires_grad)
    calls, memory_of = {}, {}
    for name in [name for name in providers if name in case.providers]:
        try:
            if name == TORCH and clock.device.type == "cuda" and case.plain_bytes > torch.cuda.mem_get_info()[0]:
                raise torch.OutOfMemoryError
            with torch.no_grad():
                loss = case.providers[name](*inputs).item()
            calls[name] = step = Step(case, name, inputs)
            step()
            peak = memory.peak(step, clock.device)
            memory_of[name] = {"loss": loss, "peak_bytes": peak, "gradient_bytes": gradients}
        except Exception as error:  # a peer may fail in any way; the others still run
            calls.pop(name, None)
            record_skip(benchmark, case, name, error)
        clean(clock.device)
    if FLOOR in providers and case.products:
        calls[FLOOR] = functools.partial(Products(case.products), *inputs)
    for name, took in clock.interleave(calls, SECONDS).items():
        times = {key: value * 1e3 if key != "rounds" else value for key, value in took.items()}
        record = {"op": case.op, "shape": case.label, "mode": "full", "provider": name}
        benchmark["results"].append(record | times | memory_of.get(name, {}))
    calls.clear()
    clean(clock.device)


def _compile(chosen, providers, dtype, device, progress) -> None:
    """Compile the kernels of the cases in several processes, into the compilers' caches."""
    bar = progress.add_task("compiling", total=len(chosen), note="")
    # without plain torch, which does not run here, six losses fit an accelerator's memory at once
    with compiling_workers(6) as workers:
        jobs = [workers.submit(_warm, case.op, case.label, providers, dtype, device) for case in chosen]
        for _ in as_completed(jobs):
            progress.advance(bar)


def _warm(name, label, providers, dtype, device) -> None:
    (case,) = (case for case in cases(sizes=_sizes(device)) if (case.op, case.label) == (name, label))
    inputs = case.make(device, dtype)
    for provider in (OURS, LIGER):
        if provider in providers and provider in case.providers:
            with contextlib.suppress(Exception):  # the measurement meets the same error and records it
                Step(case, provider, inputs)()
    del inputs
    clean(device)


# text -----------------------------------------------------------------------------------------------------------------

HEADER = [
    "loss", "rows x features x classes", "liger_hw", "over its matrix products", "plain torch", "liger_kernel",
    "memory beside the gradients", "plain torch's", "liger_kernel's", "saved of plain torch's",
]  # fmt: skip


def rows(benchmark: dict) -> list[list[str]]:
    """Return a line for each loss: times, and memory without inputs and gradients."""
    skipped = {(s["op"], s["shape"], s["provider"]): s["why"] for s in benchmark["skipped"]}
    lines = []
    for (name, label, _), records in formatting.by_shape(benchmark).items():

        def time(provider, name=name, label=label, records=records):
            if provider in records:
                return f"{formatting.number(records[provider]['median'])} ms"
            why = skipped.get((name, label, provider), "")
            return why if why == "out of memory" else "fails" if why else ""

        ours, floor = records.get(OURS), records.get(FLOOR)
        over = f"{ours['median'] / floor['median']:.2f}x" if ours and floor else ""
        spaces = [_without_gradients(records.get(provider)) for provider in (OURS, TORCH, LIGER)]
        saved = f"{1 - spaces[0] / spaces[1]:.0%}" if spaces[0] is not None and spaces[1] else ""
        shown = ["" if space is None else f"{space / 2**20:,.0f} MiB" for space in spaces]
        lines.append([name, label, time(OURS), over, time(TORCH), time(LIGER), *shown, saved])
    return lines


def _without_gradients(record) -> int | None:
    return record["peak_bytes"] - record["gradient_bytes"] if record else None
