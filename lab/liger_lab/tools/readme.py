"""Write the tables and pictures of a page from benchmark results.

    python -m liger_lab.tools.readme README.md lab/results/{llama-1b,longest,train}-h200.json
                                                                                 of `liger-hw bench train`
    python -m liger_lab.tools.readme docs/speed.md lab/results/h200.json  ops, of `liger-hw bench`
    python -m liger_lab.tools.readme docs/models_speed.md \
        lab/results/{models-,llama-?b-,train-,longest-,sweep-*}h200*.json
                                                                                 models, of `liger-hw bench train`
    python -m liger_lab.tools.readme docs/losses.md lab/results/h200-losses.json  losses, of `liger-hw bench losses`
    python -m liger_lab.tools.readme docs/distributed.md \
        lab/results/distributed-{4xh200,2xh200,2xh200-{activations{-72,,-130},zero3,dpo,grpo,vocabulary}}.json
                                                                                 of `liger-hw bench distributed`

The text between the page's two markers is replaced. Pictures go beside the results.
"""

import json
import os
import sys
from pathlib import Path

from liger_lab.bench import charts, formatting, losses
from liger_lab.bench.peers import OURS

BEGIN, END = "<!-- measured: begin, by {} -->", "<!-- measured: end -->"
TOOL = "liger_lab.tools.readme"
TRAINED = ("eager", "liger", OURS)  # the providers in the table of whole models
NAMES = {"eager": "plain", "compile": "plain under torch.compile", "liger": "liger-kernel", OURS: OURS}
SHAPES = {  # the shapes of each op on the page; the JSON has all
    "rms_norm": ("32768x1024", "16384x4096", "16384x8192"),
    "fused_add_rms_norm": ("16384x4096", "16384x8192"),
    "layer_norm": ("16384x4096", "16384x8192"),
    "swiglu": ("16384x14336 in place",),
    "geglu": ("16384x14336 in place",),
    "rope": ("4x4096x32/8x128",),
    "cross_entropy": ("8192x32000 in place", "8192x128256 in place"),
    "fused_linear_cross_entropy": ("8192x4096x128256", "16384x2048x128256", "8192x2304x256000", "8192x896x151936"),
}


def chosen(benchmark: dict, mode: str) -> dict:
    """Return "op shape" -> provider -> record of the page's shapes."""
    return {
        f"{op} {shape}": records
        for (op, shape, m), records in formatting.by_shape(benchmark).items()
        if m == mode and shape in SHAPES.get(op, ()) and OURS in records
    }


def markdown(header, rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def headline(page: Path, benchmarks: dict) -> str:
    """Return the picture of the README and the sentence below it.

    Args:
        benchmarks: the path of each file without its suffix -> a run of one model at several settings, and its longest
            contexts; and a run of the same setting with torch.compile.
    """
    (stem, steps), *_ = benchmarks.items()
    timed, longest, compiled = (next(iter(formatting.by_setting(run).values())) for run in benchmarks.values())
    panels = {
        "Tokens per second": (timed, "tokens_per_second", lambda speed: f"{speed:,.0f}"),
        "Peak memory of a step": (timed, "peak_bytes", formatting.model_size),
        "Longest context": (longest, "longest", lambda tokens: f"{tokens:,}"),
    }
    figure = charts.columns(
        {title: {NAMES[name]: (records[name][key], show(records[name][key])) for name in TRAINED}
         for title, (records, key, show) in panels.items()},
        {NAMES[provider]: charts.COLOURS[provider] for provider in TRAINED}, width=7.5,
    )  # fmt: skip
    ours, versions = timed[OURS], steps["versions"]

    def gain(records, name):
        speed, memory = (records[OURS][key] / records[name][key] for key in ("tokens_per_second", "peak_bytes"))
        return f"{speed:.2f}x the tokens/s of {NAMES[name]} with {memory:.2f}x"

    lead = (
        f"{ours['model']} ({ours['batch']} x {ours['seq']:,} tokens, {ours['dtype']}, fused AdamW) on one "
        f"{steps['device']['name']}: {gain(timed, 'eager')} its memory, and {gain(timed, 'liger')}. In a second run it "
        f"has {gain(compiled, 'compile')}. {steps['date'].split()[0]}, torch {versions['torch']}, liger-kernel "
        f"{versions['liger-kernel']}; the longest context is of one sequence."
    )
    return f"{_save(page, figure, stem, 'speed and memory')}\n\n{lead}"


def operations(page: Path, benchmark: dict, stem: Path) -> str:
    full = chosen(benchmark, "full")
    shown = [record for records in full.values() for record in records.values()]
    rows = []
    for label, records in full.items():
        op, _, shape = label.partition(" ")
        rows.append([f"`{op}`", shape, *formatting.kernels_row(records)])
    pictures = []
    for name, figure in charts.figures(benchmark | {"results": shown}):
        if name == "roofline":
            pictures.append(_save(page, figure, stem, name))
    for name, figure in charts.overview(full):
        pictures.append(_save(page, figure, stem, name))
    header = ["op", "shape", *formatting.KERNELS]
    facts = formatting.facts(benchmark)
    lead = (
        f"Forward and backward, {benchmark['dtype']}, {facts['device']}, {benchmark['date']}: medians of one run with "
        f"the peers, interleaved, with a cold L2, of the kernels alone where a graph can capture a call. "
        f"{formatting.AXES} The limit is "
        f"this machine's own copy rate ({facts['copy']}) or matrix product rate ({facts['matrix product']}). "
        f"{facts['versions']}."
    )
    return "\n\n".join([lead, markdown(header, rows), *pictures])


def training(page: Path, benchmark: dict, stem: Path) -> str:
    """Return the table and pictures of training steps with their spreads, and of longest contexts."""
    rows = [[cell or " " for cell in row] for row in formatting.training_rows(benchmark)]
    pictures = [_save(page, figure, stem, name) for name, figure in charts.training_figures(benchmark)]
    device = formatting.facts(benchmark)["device"]
    lead = f"{device}, {benchmark['date']}, every model in a process of its own:"
    return "\n\n".join([lead, markdown(formatting.TRAINING, rows), *pictures])


def sweep(page: Path, benchmark: dict, stem: Path) -> str:
    """Return the pictures of a batch or a sequence that was doubled."""
    pictures = [_save(page, figure, stem, name) for name, figure in charts.training_figures(benchmark)]
    return "\n\n".join([f"`{benchmark['command']}`, {benchmark['date']}:", *pictures])


def _speed_and_memory(record: dict) -> str:
    return f"{record['tokens_per_second']:,.0f}, {formatting.model_size(record['peak_bytes'])}"


def sharded(page: Path, benchmark: dict, stem: Path) -> str:
    """Return the table of `liger-hw bench distributed`, and a picture if there are several lengths."""
    first, *_ = benchmark["results"]
    providers = dict.fromkeys(record["provider"] for record in benchmark["results"])
    rows = []
    for records in formatting.by_setting(benchmark).values():
        ours, cells, gains = records[OURS], [], []
        for record in map(records.get, providers):
            if "error" in record:
                cells.append("" if record["error"].startswith("not tried") else record["error"])
                gains.append("")
                continue
            cells.append(_speed_and_memory(record))
            speed = ours["tokens_per_second"] / record["tokens_per_second"]
            gains.append(f"{speed:.3f}x, {(record['peak_bytes'] - ours['peak_bytes']) / 2**30:+.1f} GiB")
        rows.append([f"{ours['seq']:,}", *cells, *gains[:-1]])  # without ours over ours
    peers = [NAMES.get(name, name) for name in providers]
    header = ["tokens of a sequence", *peers, *(f"over {name}" for name in peers[:-1])]
    lead = f"{first['gpus']} x {benchmark['device']['name']}, `{benchmark['command']}`, {benchmark['date'].split()[0]}:"
    pictures = [
        _save(page, figure, stem, "by sequence")
        for name, figure in charts.training_figures(benchmark)
        if " by seq" in name and "vocabulary" not in name
    ]
    return "\n\n".join([lead, markdown(header, rows), *pictures])


def _save(page: Path, figure, stem: Path, name: str) -> str:
    file = stem.with_name(f"{stem.name}-{name.replace(' ', '-')}.png")
    file.write_bytes(charts.picture(figure, "png"))
    return f"![{name}]({Path(os.path.relpath(file, page.parent)).as_posix()})"


def models(benchmarks: list[dict]) -> str:
    """Return the table of whole models: speed and peak memory of a step.

    A later run of the same setting replaces an earlier one.
    """
    benchmarks = sorted(benchmarks, key=lambda benchmark: benchmark["date"])
    runs = {}
    for benchmark in benchmarks:
        for label, records in formatting.by_setting(benchmark).items():
            runs.setdefault(label, {}).update(records)
    rows = []
    for label, records in runs.items():
        kept = {name: records.get(name, {"error": "not run"}) for name in TRAINED}
        timed = {name: record for name, record in kept.items() if "error" not in record}
        if OURS not in timed or "peak_bytes" not in timed[OURS]:
            continue
        cells = [_speed_and_memory(record) if name in timed else _failure(record) for name, record in kept.items()]
        ours = timed[OURS]
        ratios = [
            f"{ours['tokens_per_second'] / timed[name]['tokens_per_second']:.2f}x, "
            f"{ours['peak_bytes'] / timed[name]['peak_bytes']:.2f}x" if name in timed else ""
            for name in TRAINED[:2]
        ]  # fmt: skip
        rows.append([label, *cells, *ratios])
    facts = formatting.facts(benchmarks[0])
    dates = ", ".join(dict.fromkeys(benchmark["date"] for benchmark in benchmarks))
    lead = f"{facts['device']}, {dates}, {benchmarks[0]['results'][0]['dtype']}. {facts['versions']}."
    header = ["model", *(f"{name}: tokens/s, memory" for name in ("plain", *TRAINED[1:])), "over plain", "over liger"]
    return f"{lead}\n\n{markdown(header, rows)}"


def losses_table(benchmarks: list[dict]) -> str:
    parts = []
    for benchmark in benchmarks:
        facts = formatting.facts(benchmark)
        parts += [
            f"Forward and backward, {benchmark['dtype']}, {facts['device']}, {benchmark['date']}: medians of one run, "
            f"interleaved, with a cold L2. {facts['versions']}.",
            markdown(losses.HEADER, losses.rows(benchmark)),
            *([] if benchmark["complete"] else ["The run was interrupted: the other losses are missing."]),
        ]
    return "\n\n".join(parts)


def _failure(record) -> str:
    known = ("out of memory", "not run")
    return record["error"] if record["error"] in known else "does not run"


def insert(file: Path, text: str, tool: str) -> None:
    """Replace the text between the markers of a page."""
    start = BEGIN.format(tool)
    before, begin, rest = file.read_text().partition(start)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{file.name}: got no markers, allowed: {start} and later {END}")
    file.write_text(f"{before}{start}\n{text}\n{END}{after}")


def text_of(page: Path, benchmarks: dict) -> str:
    """Return the text of a page.

    Args:
        benchmarks: the path of each file without its suffix -> its content.
    """
    first = next(iter(benchmarks.values()))
    if any("gradient_bytes" in record for record in first["results"]):
        return losses_table(list(benchmarks.values()))
    if "ceilings" in first:
        return "\n\n".join(operations(page, benchmark, stem) for stem, benchmark in benchmarks.items())
    if "engine" in first["results"][0]:
        return "\n\n".join(sharded(page, benchmark, stem) for stem, benchmark in benchmarks.items())
    if page.name == "README.md":
        return headline(page, benchmarks)
    sweeps = {stem: run for stem, run in benchmarks.items() if "sweep" in run["results"][0]}
    benchmarks = {stem: run for stem, run in benchmarks.items() if stem not in sweeps}
    detailed = {
        stem: benchmark for stem, benchmark in benchmarks.items()
        if any(record["provider"] == "compile" or "longest" in record for record in benchmark["results"])
    }  # fmt: skip
    parts = [models([benchmark for stem, benchmark in benchmarks.items() if stem not in detailed])]
    if detailed:
        stem = next(iter(detailed))
        results = [result for benchmark in detailed.values() for result in benchmark["results"]]
        parts.append(training(page, detailed[stem] | {"results": results}, stem))
    parts += [sweep(page, run, stem) for stem, run in sweeps.items()]
    return "\n\n".join(parts)


def main(files) -> None:
    page, *files = (Path(file) for file in files)
    insert(page, text_of(page, {file.with_suffix(""): json.loads(file.read_text()) for file in files}), TOOL)


if __name__ == "__main__":
    if not sys.argv[2:]:
        raise SystemExit(__doc__)
    main(sys.argv[1:])
