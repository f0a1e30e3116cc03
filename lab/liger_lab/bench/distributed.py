"""Measure training steps of one model sharded over several accelerators: `liger-hw bench distributed`.

Each provider at each number of processes has its own process group, so none inherits another's memory. A group measures
the lengths in ascending order until one does not fit. A process without enough memory reports to the driver, which ends
the whole group, because the other processes may wait in a collective.
"""

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from statistics import mean

import torch

from liger_hw.checkpointing.budget import bytes_of
from liger_hw.spelling import check_known
from liger_lab.bench import formatting, sharded, training
from liger_lab.bench.formatting import model_size
from liger_lab.bench.measure import spread
from liger_lab.bench.peers import OURS
from liger_lab.bench.run_file import environment, saved_at_end, write
from liger_lab.bench.sharded import LOSS_PARALLEL
from liger_lab.bench.training import EAGER, LIGER

PEERS = dict.fromkeys(("fsdp2", "zero2", "zero3"), (EAGER, LIGER)) | {"vocabulary": (EAGER, LOSS_PARALLEL)}
SEQS = (2048, 4096, 8192, 16384, 32768)
TEXT_MODELS = [name for name, setting in training.SETTINGS.items() if not setting.images]
LEAD = "Steps of sharded training, random weights and tokens, activation checkpointing, fused AdamW (of the engine \
vocabulary: forward and backward of the head's loss alone); tokens/s and memory of one process. Every provider at \
every number of processes has its own process group."


def plan(
    model, gpus, engine, providers, batch, seqs, steps, device, objective=None, activations=None, offload=None
) -> list[list[dict]]:
    """List the cells of each process group.

    Args:
        model: name of a text model of training.SETTINGS.
        gpus: numbers of processes; empty means one for each accelerator, or 2 on a CPU.
        engine: "fsdp2", "zero2", "zero3", or "vocabulary" for the loss of a head alone, sharded by vocabulary.
        providers: "eager" and "liger", of a head alone "eager" and "loss_parallel"; empty means the installed ones.
            liger_hw is always included.
        batch: sequences of one process.
        seqs: tokens of a sequence.
        steps: timed steps of a cell; fewer if they take longer than sharded.SECONDS.
        objective: "dpo" or "grpo", or None for cross entropy of the next token.
        activations: budget of `liger_hw.activations` for the model that liger_hw patches, or None.
        offload: what the host holds, "optimizer" or "parameters" and the optimizer, or None.

    Raises:
        ValueError: a name is unknown, a package is missing, there are too few accelerators, the engine has no such
            option, the budget has no known form, or the batch of DPO has no pairs.
    """
    check_known("model", model, TEXT_MODELS)
    for option, value in {"--loss": objective, "--activations": activations}.items():
        if value and engine != "fsdp2":
            raise ValueError(f"{option}: got {value} with --engine {engine}, allowed: with fsdp2")
    bytes_of(activations or "auto", None)
    if objective == "dpo" and batch % 2:
        raise ValueError(f"--batch: got {batch}, allowed: an even number, because DPO compares pairs of sequences")
    zero = engine.startswith("zero")
    if zero and find_spec("deepspeed") is None:
        raise ValueError(f"--engine: got {engine}, which needs deepspeed: pip install deepspeed, or use fsdp2")
    if offload and (not zero or (offload, engine) == ("parameters", "zero2")):
        raise ValueError(
            f"--offload: got {offload} with --engine {engine}, allowed: optimizer with zero2, any with zero3"
        )
    peers = PEERS[engine]
    for provider in providers:
        check_known("peer", provider, (*peers, OURS))
    if engine == "vocabulary":
        providers = [*dict.fromkeys([*(providers or peers), OURS])]
    else:
        providers = [provider for provider in training.choose(providers, device) if provider in (*peers, OURS)]
    available = 2 if device.type == "cpu" else torch.accelerator.device_count()
    for count in gpus:
        if device.type != "cpu" and count > available:
            raise ValueError(f"--gpus: got {count}, allowed: at most {available}, the number of accelerators here")
    return [
        [
            {
                "model": model, "engine": engine, "gpus": count, "provider": provider, "batch": batch, "seq": seq,
                "steps": steps, "objective": objective, "activations": activations, "offload": offload,
            }
            for seq in sorted(set(seqs))
        ]
        for count in sorted(set(gpus or [available])) for provider in providers
    ]  # fmt: skip


def run(groups, device, progress, file: Path) -> dict:
    """Measure every group of a `plan`; write the results to `file` after each cell."""
    benchmark = environment(device) | {"results": [], "complete": False}
    benchmark["device"]["clock"] = "wall"
    benchmark["dtype"] = str(sharded.compute_dtype(device)).removeprefix("torch.")
    bar = progress.add_task("distributed", total=sum(map(len, groups)), note="")
    with saved_at_end(benchmark, file):
        for cells in groups:
            progress.update(bar, note=f"{formatting.setting(cells[0])}, {cells[0]['provider']}")
            for cell, result in zip(cells, _results(cells)):
                benchmark["results"].append(cell | result)
                write(benchmark, file)
                progress.update(bar, advance=1, note=f"{formatting.setting(cell)}, {cell['provider']}")
    return benchmark


def _results(cells) -> Iterator[dict]:
    """Yield the result of each cell, from one process group; an error ends the group."""
    context = training.process_context(sharded.__name__)
    processes = {}  # the connection to each
    failed = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(cells[0]["gpus"]):
                receiver, sender = context.Pipe(duplex=False)
                arguments = rank, cells[0]["gpus"], cells, folder, sender
                processes[receiver] = context.Process(target=sharded.main, args=arguments)
                processes[receiver].start()
                sender.close()
            for cell in cells:
                if failed:
                    yield {"error": f"not tried: {failed}"}
                    continue
                answers = _answers(processes)
                if "error" in answers[-1]:
                    failed = f"{answers[-1]['error']} at {cell['seq']:,}"
                    yield answers[-1]
                else:
                    yield _result(cell, answers)
        finally:
            for process in processes.values():
                process.kill()
                process.join()


def _answers(processes) -> list[dict]:
    """Receive each process's answer for a cell; the list ends with the first error."""
    answers = {}
    while len(answers) < len(processes):
        for connection in wait(processes.keys() - answers.keys()):
            try:
                answers[connection] = connection.recv()
            except EOFError:
                processes[connection].join()
                answers[connection] = {"error": f"a process ended with status {processes[connection].exitcode}"}
            if "error" in answers[connection]:
                return list(answers.values())
    return list(answers.values())


def _result(cell, answers) -> dict:
    """Merge the answers of all processes; the slowest one sets the time of a step."""
    seconds = spread([max(rank_values) for rank_values in zip(*(answer["seconds"] for answer in answers))])
    most = {key: max((answer[key] for answer in answers if answer[key]), default=None)
            for key in ("peak_bytes", "reserved_bytes")}  # fmt: skip
    return {
        "tokens_per_second": cell["batch"] * cell["seq"] / seconds["median"],
        **{key: value * 1e3 if key != "rounds" else value for key, value in seconds.items()}, **most,
        "losses": [mean(rank_values) for rank_values in zip(*(answer["losses"] for answer in answers))],
    }  # fmt: skip


HEADER = [
    "", "", "tokens/s each", "step ms", "allocated", "reserved", "longest context", "scaling", "loss", "liger_hw is",
]  # fmt: skip


def rows(benchmark: dict) -> list[list[str]]:
    """Return a line for each cell: speed, memory and first loss of one process.

    Scaling is the ratio to the speed at the fewest processes. The last column is the ratio of liger_hw's speed and
    memory to this line's.
    """
    lines = []
    counts = sorted({record["gpus"] for record in benchmark["results"]})
    timed = [record for record in benchmark["results"] if "error" not in record]
    for label, records in formatting.by_setting(benchmark).items():
        ours = records.get(OURS, {"error": ""})
        for name, record in records.items():
            if "error" in record:
                lines.append([label, name, record["error"], *[""] * (len(HEADER) - 3)])
                continue
            same_run = [r for r in timed if (r["provider"], r["gpus"]) == (name, record["gpus"])]
            base = [r for r in timed if (r["provider"], r["seq"], r["gpus"]) == (name, record["seq"], counts[0])]
            scaling = ""
            if base and record["gpus"] > counts[0]:
                scaling = f"{record['tokens_per_second'] / base[0]['tokens_per_second']:.1%} of {counts[0]}"
            gain = []
            if name != OURS and "error" not in ours:
                gain.append(f"{ours['tokens_per_second'] / record['tokens_per_second']:.3f}x")
                if record["peak_bytes"]:
                    gain.append(f"with {ours['peak_bytes'] / record['peak_bytes']:.2f}x the memory")
            lines.append([
                label, name, f"{record['tokens_per_second']:,.0f}", f"{record['median']:,.1f}",
                *(model_size(record[key]) if record[key] else "" for key in ("peak_bytes", "reserved_bytes")),
                f"{max(r['seq'] for r in same_run):,}", scaling,
                f"{record['losses'][0]:.5f}", " ".join(gain),
            ])  # fmt: skip
    return lines


def disagreements(benchmark: dict) -> list[str]:
    """List settings whose first losses differ by more than a rounding."""
    allowed = 2**-8 if benchmark["dtype"] == "bfloat16" else 1e-5
    lines = []
    for label, records in formatting.by_setting(benchmark).items():
        first = {name: record["losses"][0] for name, record in records.items() if "error" not in record}
        if first and max(first.values()) - min(first.values()) > allowed * abs(mean(first.values())):
            losses = ", ".join(f"{name} {loss:.5f}" for name, loss in first.items())
            lines.append(f"RED: {label}: the losses of the same weights and tokens differ: {losses}")
    return lines
