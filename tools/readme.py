"""Write the tables and pictures of a page from benchmark results.

    python tools/readme.py benchmarks/h200.json ...                     the README, of `liger-hw bench [train]`
    python tools/readme.py docs/models_speed.md benchmarks/models.json ...  whole models, of `liger-hw bench train`
    python tools/readme.py docs/losses.md benchmarks/h200-losses.json   losses, of `liger-hw bench losses`
    python tools/readme.py docs/distributed.md benchmarks/distributed-4xh200.json  of `liger-hw bench distributed`

The text between the page's two markers is replaced. Pictures go beside the results.
"""

import json
import sys
from pathlib import Path

from liger_hw.bench import charts, formatting, losses
from liger_hw.bench.peers import OURS

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- measured: begin, by {} -->", "<!-- measured: end -->"
TOOL = "tools/readme.py"
TRAINED = ("eager", "liger", OURS)  # the providers in the table of whole models
SHAPES = {  # the shapes of each op in the README; the JSON has all
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
    """Return "op shape" -> provider -> record of the README's shapes."""
    return {
        f"{op} {shape}": records
        for (op, shape, m), records in formatting.by_shape(benchmark).items()
        if m == mode and shape in SHAPES.get(op, ()) and OURS in records
    }


def markdown(header, rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def operations(benchmark: dict, stem: Path) -> str:
    full = chosen(benchmark, "full")
    shown = [record for records in full.values() for record in records.values()]
    rows = []
    for label, records in full.items():
        op, _, shape = label.partition(" ")
        rows.append([f"`{op}`", shape, *formatting.kernels_row(records)])
    pictures = []
    for name, figure in charts.figures(benchmark | {"results": shown}):
        if name == "roofline":
            pictures.append(_save(figure, stem, name))
    for name, figure in charts.overview(full):
        pictures.append(_save(figure, stem, name))
    header = ["op", "shape", *formatting.KERNELS]
    facts = formatting.facts(benchmark)
    lead = (
        f"Forward and backward, {benchmark['dtype']}, {facts['device']}, {benchmark['date']}: medians of one run with "
        f"the peers, interleaved, with a cold L2, of the kernels alone where a graph can capture a call. The limit is "
        f"this machine's own copy rate ({facts['copy']}) or matrix product rate ({facts['matrix product']}). "
        f"{facts['versions']}."
    )
    return "\n\n".join([lead, markdown(header, rows), *pictures])


def training(benchmark: dict, stem: Path, sharded: list[dict]) -> str:
    """Return the table and pictures of training steps.

    Of each sharded run it shows the longest sequence that all libraries can train.
    """
    rows = formatting.training_rows(benchmark)
    pictures = [_save(figure, stem, name) for name, figure in charts.training_figures(benchmark)]
    lead = (
        f"Training steps, {formatting.facts(benchmark)['device']}, {benchmark['date']}, every model in its own process"
    )
    for run in sharded:
        steps = formatting.by_setting(run)
        timed = [label for label, records in steps.items() if not any("error" in r for r in records.values())]
        rows += formatting.training_rows(run | {"results": list(steps[timed[-1]].values())})
        gpus = run["results"][0]["gpus"]
        lead += f"; on {gpus} of them, {run['date']}, tokens/s and memory of one"
    rows = [[cell or " " for cell in row] for row in rows]
    return "\n\n".join([f"{lead}:", markdown(formatting.TRAINING, rows), *pictures])


def sharded_table(benchmark: dict) -> str:
    """Return the table of a run of `liger-hw bench distributed`: a row for each length."""
    rows = []
    for records in formatting.by_setting(benchmark).values():
        ours, cells, gains = records[OURS], [], []
        for record in map(records.get, TRAINED):
            if "error" in record:
                cells.append("" if record["error"].startswith("not tried") else record["error"])
                gains.append("")
                continue
            cells.append(f"{record['tokens_per_second']:,.0f}, {formatting.memory(record)}")
            speed = ours["tokens_per_second"] / record["tokens_per_second"]
            gains.append(f"{speed:.3f}x, {(record['peak_bytes'] - ours['peak_bytes']) / 2**30:+.1f} GiB")
        rows.append([f"{ours['seq']:,}", *cells, *gains[:-1]])  # without ours over ours
    header = ["tokens of a sequence", "plain", "liger-kernel", "liger_hw", "over plain", "over liger-kernel"]
    return markdown(header, rows)


def _save(figure, stem: Path, name: str) -> str:
    file = stem.with_name(f"{stem.name}-{name.replace(' ', '-')}.png")
    file.write_bytes(charts.picture(figure, "png"))
    return f"![{name}]({file.resolve().relative_to(ROOT).as_posix()})"


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
        cells = [
            f"{record['tokens_per_second']:,.0f}, {formatting.memory(record)}" if name in timed else _failure(record)
            for name, record in kept.items()
        ]
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


def main(files) -> None:
    files = [Path(file) for file in files]
    if files[0].suffix == ".md":
        benchmarks = [json.loads(file.read_text()) for file in files[1:]]
        if "engine" in benchmarks[0]["results"][0]:
            return insert(files[0], "\n\n".join(map(sharded_table, benchmarks)), TOOL)
        of_losses = any("gradient_bytes" in record for record in benchmarks[0]["results"])
        return insert(files[0], losses_table(benchmarks) if of_losses else models(benchmarks), TOOL)
    benchmarks = {file.with_suffix(""): json.loads(file.read_text()) for file in files}
    parts = [operations(benchmark, stem) for stem, benchmark in benchmarks.items() if "ceilings" in benchmark]
    steps = {stem: benchmark for stem, benchmark in benchmarks.items() if "ceilings" not in benchmark}
    sharded = [benchmark for benchmark in steps.values() if "engine" in benchmark["results"][0]]
    training_runs = {stem: benchmark for stem, benchmark in steps.items() if benchmark not in sharded}
    if training_runs:
        stem, first = next(iter(training_runs.items()))
        results = [result for benchmark in training_runs.values() for result in benchmark["results"]]
        parts.append(training(first | {"results": results}, stem, sharded))
    insert(ROOT / "README.md", "\n\n".join(parts), TOOL)


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    main(sys.argv[1:])
