"""Draw the results of a benchmark as charts and write them into one HTML file."""

import html
import io
from pathlib import Path

from liger_lab.bench import formatting, pages
from liger_lab.bench.formatting import model_size, size
from liger_lab.bench.peers import FLOOR, LOSS_ALONE, LOSS_COMPILED, OURS

GIB = 2**30
COLOURS = {
    OURS: "#e4572e", LOSS_ALONE: "#f0a78f", LOSS_COMPILED: "#b5651d", "liger": "#3d7ea6", "compile": "#5b9e6f",
    "torch": "#b08fc7", "eager": "#8b93a1", "cce": "#c9a227", "quack": "#2f4b6e", "loss_parallel": "#5b9e6f",
    "unsloth": "#7a9e3d", FLOOR: "#d5d9e0",
}  # fmt: skip
WIDE = """
main { max-width: 76rem; } td, th { padding: .3rem .55rem; font-size: .85rem; white-space: nowrap; }
td:nth-child(-n+3), th:nth-child(-n+3) { text-align: left; }
.bad { color: #b3261e; white-space: pre-wrap; } img { max-width: 100%; width: auto; }
"""


def pictures_style():
    """Import matplotlib.pyplot, without a display and in the style of our pages."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({
        "font.family": "sans-serif", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
        "axes.edgecolor": "#c3c8d1", "axes.labelcolor": "#4a5160", "xtick.color": "#4a5160", "ytick.color": "#4a5160",
        "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlecolor": "#1d2430",
        "axes.grid.axis": "y", "grid.color": "#eceef2", "axes.axisbelow": True, "savefig.dpi": 160,
    })  # fmt: skip
    return pyplot


def figures(benchmark: dict):
    """Yield the name and matplotlib figure of each chart.

    The charts are the roofline, each op's times and memory, and host times; of a sweep, its lines.
    """
    if "sweep" in benchmark:
        yield from sweep_figures(benchmark)
        return
    pyplot = pictures_style()
    grouped = formatting.by_shape(benchmark)
    points = {key: records[OURS] for key, records in grouped.items() if key[2] in ("fwd", "full") and OURS in records}
    if points:
        yield "roofline", _roofline(points, benchmark["ceilings"], pyplot)
    for op in dict.fromkeys(op for op, _, _ in grouped):
        for mode, title in (("full", "forward + backward"), ("fwd", "forward"), ("bwd", "backward")):
            shapes = {shape: records for (o, shape, m), records in grouped.items() if (o, m) == (op, mode)}
            if shapes:
                yield f"{op} {mode}", _shares(f"{op}, {title}", shapes, pyplot)
            if shapes and mode == "full":
                yield f"{op} memory", _memories(f"{op}, {title}", shapes, pyplot)
    hosts = {f"{op} {shape}, {mode.removeprefix('host ')}": records
             for (op, shape, mode), records in grouped.items() if mode.startswith("host")}  # fmt: skip
    if hosts:
        yield "host", bars(
            "Host time of one call (shorter is better)", hosts, pyplot,
            lambda record: record["median"], lambda record: f"{record['median']:.1f} us",
        )  # fmt: skip


def overview(full: dict):
    """Yield the charts of times and of memory of several ops.

    Args:
        full: label -> provider -> record.
    """
    pyplot = pictures_style()
    yield "times", _shares("Forward + backward", full, pyplot)
    yield "memory", _memories("Forward + backward", full, pyplot)


def _shares(title, shapes, pyplot):
    return bars(
        f"{title}, kernels alone: share of this machine's limit (longer is better)", shapes, pyplot,
        lambda record: formatting.kernels_share(record) or 0.0,
        lambda record: f"{formatting.kernels_time(record)}  {formatting.percent(formatting.kernels_share(record))}",
    )  # fmt: skip


def _memories(title, shapes, pyplot):
    return bars(
        f"{title}: peak memory above the inputs, of each shape's largest", shapes, pyplot,
        lambda record: record["peak_bytes"], lambda record: size(record["peak_bytes"]), scaled=True,
    )  # fmt: skip


def _roofline(points, ceilings, pyplot):
    figure, axis = pyplot.subplots(figsize=(10, 5.4), layout="constrained")
    copy, product = ceilings["bytes_per_second"], ceilings["flops_per_second"]
    palette = pyplot.get_cmap("tab10").colors
    ops, intensities = list(dict.fromkeys(op for op, _, _ in points)), []
    for (op, _, mode), record in points.items():
        moved, done = record["bytes"], record["flops"]
        intensities.append(done / moved)
        colour, seconds = palette[ops.index(op) % len(palette)], formatting.kernels(record) / 1e3
        face = colour if mode == "full" else "none"
        axis.plot(done / moved, done / seconds / 1e12, "o", color=colour, markerfacecolor=face, markersize=6)
    ridge = product / copy
    low, high = min(*intensities, ridge) / 3, max(*intensities, ridge) * 3
    axis.plot([low, ridge, high], [low * copy / 1e12, product / 1e12, product / 1e12], color="#1d2430", linewidth=1.6)
    axis.text(
        ridge, 1.25 * product / 1e12, f"{product / 1e12:.3g} TFLOP/s matrix product", ha="center", color="#1d2430"
    )
    middle = (low * ridge) ** 0.5 * 2
    axis.annotate(
        f"{copy / 1e12:.3g} TB/s copy", (middle, middle * copy / 1e12), (10, -8), textcoords="offset points",
        color="#1d2430",
    )  # fmt: skip
    axis.set(
        xscale="log", yscale="log", title="Roofline: the op's operations over the time of its kernels",
        xlabel="operations for each byte that must move", ylabel="TFLOP/s", xlim=(low, high),
    )  # fmt: skip
    axis.set_ylim(top=4 * product / 1e12)
    handles = [pyplot.Line2D([], [], marker="o", linestyle="", color=palette[i % len(palette)], label=op)
               for i, op in enumerate(ops)]  # fmt: skip
    for mode, label, face in (("full", "forward + backward", "#4a5160"), ("fwd", "forward", "none")):
        if any(key[2] == mode for key in points):
            marks = {"marker": "o", "linestyle": "", "color": "#4a5160", "markerfacecolor": face}
            handles.append(pyplot.Line2D([], [], label=label, **marks))
    axis.legend(handles=handles, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axis.grid(True, which="major", axis="both")
    return figure


def bars(title, shapes, pyplot, value, label, scaled=False):
    """Draw a group of horizontal bars for each shape, one bar for each provider."""
    providers = [name for name in COLOURS if any(name in records for records in shapes.values())]
    count = sum(len(records) for records in shapes.values())
    height = 0.19 * count + 0.16 * len(shapes) + 0.9
    figure, axis = pyplot.subplots(figsize=(10, height), layout="constrained")
    at, ticks, longest = 0.0, [], 0.0
    for shape, records in shapes.items():
        names = [name for name in providers if name in records]
        most = max(value(records[name]) for name in names) if scaled else 1
        ticks.append((at + (len(names) - 1) / 2, shape))
        for name in names:
            width = value(records[name]) / most if most else 0
            longest = max(longest, width)
            bar = axis.barh(at, width, 0.86, color=COLOURS[name])
            axis.bar_label(
                bar, [label(records[name])], padding=4, fontsize=8, color="#1d2430",
                fontweight="bold" if name == OURS else "normal",
            )  # fmt: skip
            at += 1
        at += 0.8
    axis.set_yticks([y for y, _ in ticks], [shape for _, shape in ticks])
    axis.set_ylim(at - 0.8 + 0.2, -0.9)
    axis.set_xlim(0, 1.22 * longest or 1)
    axis.set_xticks([])
    figure.suptitle(title, x=0.005, ha="left", fontsize=11, fontweight="bold", color="#1d2430")
    axis.spines[["bottom"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in providers]
    figure.legend(handles, providers, frameon=False, ncols=len(providers), loc="outside lower left", fontsize=9)
    return figure


def columns(panels: dict, colours: dict, width: float = 9):
    """Draw vertical bars side by side, in one panel for each quantity.

    Args:
        panels: title -> name of a bar -> (value, its text).
        colours: name of a bar -> colour.
        width: inches of the figure.
    """
    figure, axes = pictures_style().subplots(1, len(panels), figsize=(width, 3.2), layout="constrained")
    figure.get_layout_engine().set(wspace=0.1)
    for axis, (title, bars) in zip(axes, panels.items()):
        values, texts = zip(*bars.values())
        drawn = axis.bar(list(bars), values, 0.62, color=[colours[name] for name in bars])
        axis.bar_label(drawn, texts, padding=3, color="#1d2430")
        axis.set_title(title)
        axis.set_ylim(0, 1.15 * max(values))
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.tick_params(axis="x", length=0)
    return figure


def picture(figure, kind: str) -> bytes:
    """Return `figure` as the bytes of a "png" or "svg" file, and close it."""
    from matplotlib import pyplot

    data = io.BytesIO()
    figure.savefig(data, format=kind)
    pyplot.close(figure)
    return data.getvalue()


def write(benchmark: dict, file: Path) -> Path:
    """Write the HTML page of `operations`' results."""
    limit = "The limit of a time is the time of the bytes at this machine's copy rate or of the operations at its " \
        "matrix product rate: the longer of the two."  # fmt: skip
    grouped = formatting.by_shape(benchmark)
    every = [[*key, name, *_numbers(record)] for key, records in grouped.items() for name, record in records.items()]
    header = ["op", "shape", "mode", "provider", "median", "p20", "p80", "rounds", "kernels alone", "of the limit",
              "memory", "how"]  # fmt: skip
    number_tables = f"""
<h2>Against the fastest peer</h2>{pages.table(formatting.HEADER, formatting.rows(benchmark))}
<h2>Every number</h2><p class="lead">Milliseconds; microseconds for the host's times.</p>{pages.table(header, every)}"""
    notes = {name: note for name, note in benchmark["providers"].items() if note}
    return _page(benchmark, file, limit, (), figures(benchmark), number_tables, notes)


def training_figures(benchmark: dict):
    """Yield the name and figure of each chart of `training`'s results."""
    pyplot = pictures_style()
    runs = {label: {name: record for name, record in records.items() if "error" not in record}
            for label, records in formatting.by_setting(benchmark).items()}  # fmt: skip
    yield from _sweeps(benchmark, pyplot)
    yield from memory_figures(benchmark)
    timed = {label: records for label, records in runs.items()
             if any("median" in r and "sweep" not in r for r in records.values())}  # fmt: skip
    longest = {label: records for label, records in runs.items() if any("longest" in r for r in records.values())}
    if timed:
        yield "tokens per second", bars(
            "Tokens per second, of each setting's fastest (longer is better)", timed, pyplot,
            lambda record: record["tokens_per_second"], lambda record: f"{record['tokens_per_second']:,.0f}",
            scaled=True,
        )  # fmt: skip
    with_memory = {label: measured for label, records in timed.items()
                   if (measured := {name: r for name, r in records.items() if r["peak_bytes"]})}  # fmt: skip
    if with_memory:
        yield "training memory", bars(
            "Peak memory of a step, of each setting's largest (shorter is better)", with_memory, pyplot,
            lambda record: record["peak_bytes"], lambda record: model_size(record["peak_bytes"]), scaled=True,
        )  # fmt: skip
    if longest:
        yield "longest context", bars(
            "Longest context of one sequence that trains (longer is better)", longest, pyplot,
            lambda record: record["longest"], lambda record: f"{record['longest']:,} tokens", scaled=True,
        )  # fmt: skip


def _sweeps(benchmark, pyplot):
    """Yield a figure of lines for each model that was swept over batches or sequences.

    Sharded training is swept over sequences if it was measured at several lengths.
    """
    groups = {}
    for record in benchmark["results"]:
        if "sweep" in record:
            more = (", checkpointing" if record["checkpointing"] else "") + formatting.options(record)
            groups.setdefault((record["model"], record["sweep"], more), []).append(record)
        elif "engine" in record:
            more = f", {record['engine']} on {record['gpus']} GPUs{formatting.options(record)}"
            groups.setdefault((record["model"], "seq", more), []).append(record)
    for (model, swept, more), records in groups.items():
        ticks = sorted({record[swept] for record in records})
        if len(ticks) == 1 and "engine" in records[0]:
            continue
        fixed = {"batch": f"{records[0]['seq']:,} tokens each", "seq": f"batch of {records[0]['batch']}"}[swept]
        end = "lines that end early ran out of memory" if "engine" in records[0] else "lines end where the memory does"
        title = f"{model}, {fixed}{more}{chr(10) + end if benchmark.get('complete') else ''}"
        panels = {
            panel: [(r["provider"], r[swept], r[name] / unit) for r in records if r.get(name)]
            for panel, name, unit in (
                ("tokens per second", "tokens_per_second", 1), ("peak memory, GiB", "peak_bytes", GIB)
            )
        }  # fmt: skip
        xlabel = {"batch": "sequences in a batch", "seq": "tokens in a sequence"}[swept]
        yield f"{model} by {swept}{more.replace(',', '')}", _lines(title, panels, xlabel, ticks, pyplot)


def sweep_figures(benchmark: dict):
    """Yield a figure of lines for each op of `bench OP --sweep`."""
    pyplot, (grows, sizes) = pictures_style(), benchmark["sweep"].values()
    measured = [(record, sizes[f"{record['op']} {record['shape']}"]) for record in benchmark["results"]]
    for op in dict.fromkeys(record["op"] for record, _ in measured):
        modes = {mode: [(record, size) for record, size in measured if (record["op"], record["mode"]) == (op, mode)]
                 for mode in ("fwd", "full")}  # fmt: skip
        panels = {
            title: [(record["provider"], size, formatting.kernels(record)) for record, size in modes[mode]]
            for title, mode in (("forward, ms", "fwd"), ("forward + backward, ms", "full"))
        } | {"peak memory, GiB": [(r["provider"], size, r["peak_bytes"] / GIB)
                                                   for r, size in modes["full"] or modes["fwd"]]}  # fmt: skip
        panels = {title: points for title, points in panels.items() if points}
        ticks = sorted({size for _, size in modes["full"] or modes["fwd"]})
        if panels:
            first = next(record["shape"] for record, size in measured if record["op"] == op)
            title = f"{op} by {grows}, from {first}\nkernels alone where a graph captures them; memory without inputs"
            yield f"{op} by {grows}", _lines(title, panels, grows, ticks, pyplot)


def _lines(title, panels, xlabel, ticks, pyplot):
    """Draw a line for each provider in panels side by side.

    Args:
        panels: title -> points, (provider, x, y).
    """
    figure, axes = pyplot.subplots(1, len(panels), figsize=(10, 3.8), layout="constrained", squeeze=False)
    figure.suptitle(title, x=0.005, ha="left", fontsize=11, fontweight="bold", color="#1d2430")
    for axis, (panel, points) in zip(axes[0], panels.items()):
        for provider in dict.fromkeys(provider for provider, _, _ in points):
            line = [(x, y) for name, x, y in points if name == provider]
            axis.plot(*zip(*line), "o-", color=COLOURS[provider], label=provider, markersize=4)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axis.minorticks_off()
        if axis.get_ylim()[1] > 10:
            axis.yaxis.get_major_locator().set_params(integer=True)
            axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_ylim(bottom=0)
        axis.grid(True)
        axis.set(title=panel, xlabel=xlabel)
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, ncols=5, loc="outside lower left", fontsize=9)
    return figure


def memory_figures(benchmark: dict):
    """Yield the name and figure of each setting's memory over a step."""
    pyplot = pictures_style()
    for label, records in formatting.by_setting(benchmark).items():
        curves = {name: record["memory"] for name, record in records.items() if record.get("memory")}
        if not curves:
            continue
        figure, axis = pyplot.subplots(figsize=(10, 3.8), layout="constrained")
        for name, curve in curves.items():
            seconds, held = zip(*curve)
            shares = [s / seconds[-1] for s in seconds]  # the host's times say nothing of the GPU's
            axis.plot(shares, [h / GIB for h in held], color=COLOURS[name], linewidth=1.2, label=name)
        axis.set(title=f"{label}: memory over one step", xlabel="share of the host's step, no speed", ylabel="GiB")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False)
        yield f"memory {label}", figure


def write_training(benchmark: dict, file: Path, lead: str, header, rows, problems=()) -> Path:
    """Write the HTML page of results of training.

    Args:
        lead: the first sentence, which describes the results.
        header, rows: the table.
        problems: lines of warnings.
    """
    return _page(benchmark, file, lead, problems, training_figures(benchmark), pages.table(header, rows), {})


def _page(benchmark, file, lead, warnings, drawn, numbers, notes) -> Path:
    lines = (html.escape(line) for line in (*warnings, *formatting.problems(benchmark)))
    bad = "".join(f'<p class="bad">{line}</p>' for line in lines)
    about = formatting.facts(benchmark)
    pictures = "".join(pages.image(name, picture(figure, "svg"), "svg+xml") for name, figure in drawn)
    peers = f"<h2>The peers</h2>{pages.definitions(notes)}" if notes else ""
    content = f"""<p class="lead">{html.escape(about["device"])}, {html.escape(benchmark["date"])}. {lead}</p>
{bad}{pictures}{numbers}
<h2>The run</h2>{pages.definitions(about)}
{peers}"""
    return pages.write(file, "liger-hw bench", content, WIDE)


def _numbers(record) -> list:
    times = [formatting.number(record[key]) for key in ("median", "p20", "p80")]
    kernels = formatting.number(record["gpu"]) if record.get("gpu") else ""
    how = "full - fwd" if record.get("derived") else ""
    share = formatting.percent(record.get("share"))
    return [*times, record["rounds"], kernels, share, formatting.memory(record), how]
