"""Show the demo's comparison as a table, as pictures and as one HTML file."""

import base64
import html
from pathlib import Path

from liger_hw.bench.demo import LAST, PATCHED, PEER, PLAIN, Comparison, difference, final_loss

COLOURS = {PLAIN: "#8b93a1", PATCHED: "#e4572e", PEER: "#3d7ea6"}
MiB = 2**20


def size(bytes_: float) -> str:
    """Format a number of bytes: "184 MiB", "16.9 GiB"."""
    return f"{bytes_ / MiB:,.0f} MiB" if bytes_ < 10 * 1024 * MiB else f"{bytes_ / MiB / 1024:,.1f} GiB"


def rows(comparison: Comparison) -> list[list[str]]:
    """Return the header and a row for each quantity.

    The last columns are the ratios of liger_hw to each other run.
    """
    plain, patched, *peers = comparison.runs
    others = [plain, *peers]

    def line(title, value, show):
        shares = [f"{value(patched) / value(other):.2f}x" for other in others]
        return [title, *(show(value(run)) for run in comparison.runs), *shares]

    return [
        ["", *(run.name for run in comparison.runs), *(f"{patched.name} / {other.name}" for other in others)],
        [
            f"mean loss of last {min(LAST, len(plain.losses))} steps",
            *(f"{final_loss(run)[0]:.4f}" for run in comparison.runs),
            *("" for _ in others),
        ],
        ["their standard deviation", *(f"{final_loss(run)[1]:.4f}" for run in comparison.runs), *("" for _ in others)],
        [
            "greatest difference of the loss",
            "",
            *(f"{max(difference(plain, run)):.1e}" for run in comparison.runs[1:]),
            *("" for _ in others),
        ],
        line("tokens/s, median round", comparison.tokens_per_second, lambda speed: f"{speed:,.0f}"),
        line("peak memory of a step", lambda run: run.step_bytes, size),
        line("peak memory of the loss alone", lambda run: run.loss_bytes, size),
    ]


def facts(comparison: Comparison) -> dict[str, str]:
    """Return the facts of the whole comparison."""
    settings = comparison.settings
    model = f"Llama {settings['model']}, vocabulary {settings['vocabulary']:,}, {settings['dtype']}"
    return {
        "device": comparison.machine["device"],
        "backend": comparison.machine["backend"],
        "model": model,
        "batches": f"{settings['steps']} steps of {settings['batch']} x {settings['seq']} tokens",
    }


def caution(comparison: Comparison) -> str:
    """Return a warning that no kernel ran, or an empty text."""
    machine = comparison.machine
    if not machine["device"].startswith("CPU") or "(forced)" in machine["backend"]:
        return ""
    return (
        "No kernel ran: on a CPU the ops are their definitions in plain torch. Speed and memory here are not those of "
        "a GPU; the loss without logits saves its memory on both."
    )


def show(comparison: Comparison, console) -> None:
    """Print the table to a `rich.console.Console`."""
    from rich.table import Table

    header, *body = rows(comparison)
    table = Table(title="liger-hw demo" + ("" if comparison.complete else " (interrupted)"), title_justify="left")
    table.add_column(header[0])
    for name in header[1:]:
        table.add_column(name, justify="right")
    for row in body:
        table.add_row(*row)
    console.print(table)
    for name, value in facts(comparison).items():
        console.print(f"{name}: [bold]{value}[/bold]", highlight=False)
    if caution(comparison):
        console.print(caution(comparison), highlight=False)


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


def _figures(comparison: Comparison) -> dict:
    """Draw the pictures by file name: the loss curves with their difference, and the bars."""
    pyplot = pictures_style()
    return {"loss.png": _loss_figure(comparison, pyplot), "bars.png": _bar_figure(comparison, pyplot)}


def _loss_figure(comparison, pyplot):
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(9, 5.2), sharex=True, height_ratios=[3, 1.1], layout="constrained"
    )
    plain = comparison.runs[0]
    steps = range(1, len(plain.losses) + 1)
    for run in comparison.runs:
        # the plain curve is broad and below, so that equal curves are both visible
        style = {"linewidth": 6, "alpha": 0.45} if run is plain else {"linewidth": 1.6}
        top.plot(steps, run.losses, color=COLOURS[run.name], label=run.name, solid_capstyle="round", **style)
    top.set(title="Training loss", ylabel="cross entropy")
    top.grid(True, axis="y")
    top.legend(frameon=False)
    for run in comparison.runs[1:]:
        bottom.plot(steps, difference(plain, run), color=COLOURS[run.name], linewidth=1.6)
    bottom.set(title="Difference from plain, absolute", xlabel="step")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    bottom.set_yscale("symlog", linthresh=1e-7)  # a logarithmic axis has no 0, the difference of equal losses
    bottom.set_yticks([0, 1e-7, 1e-5, 1e-3, 1e-1], ["0", "1e-7", "1e-5", "1e-3", "1e-1"])
    bottom.set_yticks([], minor=True)
    bottom.set_ylim(0, max(2e-5, *(3 * max(difference(plain, run)) for run in comparison.runs[1:])))
    bottom.grid(True, axis="y")
    return figure


def _bar_figure(comparison, pyplot):
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
    figure.get_layout_engine().set(wspace=0.1)
    panels = (
        ("Tokens per second, median", comparison.tokens_per_second, lambda speed: f"{speed:,.0f}"),
        ("Peak memory of a step", lambda run: run.step_bytes, size),
        ("Peak memory of the loss alone", lambda run: run.loss_bytes, size),
    )
    for axis, (title, value, show) in zip(axes, panels):
        values = [value(run) for run in comparison.runs]
        bars = axis.bar(
            [run.name for run in comparison.runs], values, 0.62, color=[COLOURS[run.name] for run in comparison.runs]
        )
        axis.bar_label(bars, [show(v) for v in values], padding=3, color="#1d2430")
        axis.set_title(title)
        axis.set_ylim(0, 1.15 * max(values))
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.tick_params(axis="x", length=0)
    return figure


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2430; background: #f6f7f9; margin: 0; }
main { max-width: 60rem; margin: 2.5rem auto; padding: 2rem 2.5rem; background: #fff; border-radius: 12px; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
p.lead { color: #4a5160; margin: .3rem 0 1.6rem; }
img { width: 100%; height: auto; margin: .4rem 0; }
table { border-collapse: collapse; width: 100%; } th, td { padding: .5rem .7rem; border-bottom: 1px solid #eceef2; }
th, td { text-align: right; font-variant-numeric: tabular-nums; } th { font-weight: 600; color: #4a5160; }
th:first-child, td:first-child { text-align: left; }
pre { font-size: .85rem; background: #f6f7f9; border-radius: 8px; padding: .8rem 1rem; overflow-x: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.5rem; margin: 0; }
dt { color: #4a5160; } dd { margin: 0; overflow-wrap: anywhere; }
"""


def write(comparison: Comparison, folder: Path) -> Path:
    """Write report.html, loss.png and bars.png into `folder`; return the path of the HTML."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, figure in _figures(comparison).items():
        figure.savefig(folder / name)
        data = base64.b64encode((folder / name).read_bytes()).decode()
        pictures.append(f'<img alt="{name.removesuffix(".png")}" src="data:image/png;base64,{data}">')
    header, *body = rows(comparison)
    table = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    about = facts(comparison)
    page = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>liger-hw demo</title><style>{STYLE}</style>
<main><h1>liger-hw demo</h1>
<p class="lead">{html.escape(about.pop("model"))}, trained from the same random weights on the same text,
plain and patched.{"" if comparison.complete else " Interrupted before its last step."}</p>
<table><tr>{"".join(f"<th>{html.escape(cell)}</th>" for cell in header)}</tr>{table}</table>
<h2>Loss</h2>{pictures[0]}
<h2>Speed and memory</h2>{f"<p>{caution(comparison)}</p>" if caution(comparison) else ""}{pictures[1]}
<h2>The run</h2>
{definitions(about | {name: str(comparison.settings[name]) for name in ("text", "order", "warm-up steps")})}
<h2>Replaced modules</h2>
<pre>{html.escape(comparison.runs[1].patched)}</pre>
<h2>The machine</h2>
{definitions({name: value for name, value in comparison.machine.items() if name not in about})}
</main></html>
"""
    file = folder / "report.html"
    file.write_text(page, encoding="utf-8")
    return file


def definitions(items: dict) -> str:
    """Return names and their values as an HTML list."""
    lines = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in items.items())
    return f"<dl>{lines}</dl>"
