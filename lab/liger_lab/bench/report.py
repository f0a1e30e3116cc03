"""Show the demo's comparison as a table, as pictures and as one HTML file."""

import html
from pathlib import Path

from liger_hw.console import table
from liger_lab.bench import pages
from liger_lab.bench.charts import columns, pictures_style
from liger_lab.bench.demo import LAST, PATCHED, PEER, PLAIN, Comparison, difference, final_loss
from liger_lab.bench.formatting import size

COLOURS = {PLAIN: "#8b93a1", PATCHED: "#e4572e", PEER: "#3d7ea6"}


def rows(comparison: Comparison) -> list[list[str]]:
    """Return the header and a row for each quantity, speed only where kernels ran.

    The last columns are the ratios of liger_hw to each other run.
    """
    plain, patched, *peers = comparison.runs
    others = [plain, *peers]
    empty = [""] * len(others)
    means, deviations = ([f"{number:.4f}" for number in losses] for losses in zip(*map(final_loss, comparison.runs)))
    differences = [f"{max(difference(plain, run)):.1e}" for run in comparison.runs[1:]]

    def line(title, value, show):
        shares = [f"{value(patched) / value(other):.2f}x" for other in others]
        return [title, *(show(value(run)) for run in comparison.runs), *shares]

    return [
        ["", *(run.name for run in comparison.runs), *(f"{patched.name} / {other.name}" for other in others)],
        line("peak memory of a step", lambda run: run.step_bytes, size),
        line("peak memory of the loss alone", lambda run: run.loss_bytes, size),
        [f"mean loss of last {min(LAST, len(plain.losses))} steps", *means, *empty],
        ["their standard deviation", *deviations, *empty],
        ["greatest difference of the loss", "", *differences, *empty],
        *([] if caution(comparison) else [
            line("tokens/s, median round", comparison.tokens_per_second, lambda speed: f"{speed:,.0f}"),
        ]),
    ]  # fmt: skip


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
        "No kernel ran: on a CPU the ops are their definitions in plain torch. Memory here is not that of a GPU, "
        "and speed is left out; the loss without logits saves its memory on both."
    )


def show(comparison: Comparison) -> str:
    """Return the text for a terminal."""
    header, *body = rows(comparison)
    title = "liger-hw demo" + ("" if comparison.complete else " (interrupted)")
    lines = [title, table(header, body), *(f"{name}: {value}" for name, value in facts(comparison).items())]
    return "\n".join([*lines, *filter(None, [caution(comparison)])])


def _figures(comparison: Comparison) -> dict:
    """Draw the pictures by file name: the loss curves with their difference, and the bars."""
    return {"loss.png": _loss_figure(comparison, pictures_style()), "bars.png": _bar_figure(comparison)}


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


def _bar_figure(comparison):
    panels = {
        "Peak memory of a step": (lambda run: run.step_bytes, size),
        "Peak memory of the loss alone": (lambda run: run.loss_bytes, size),
    }
    if not caution(comparison):
        panels["Tokens per second, median"] = comparison.tokens_per_second, lambda speed: f"{speed:,.0f}"
    return columns(
        {title: {run.name: (value(run), show(value(run))) for run in comparison.runs}
         for title, (value, show) in panels.items()}, COLOURS,
    )  # fmt: skip


def write(comparison: Comparison, folder: Path) -> Path:
    """Write report.html, loss.png and bars.png into `folder`; return the path of the HTML."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, figure in _figures(comparison).items():
        figure.savefig(folder / name)
        pictures.append(pages.image(name.removesuffix(".png"), (folder / name).read_bytes(), "png"))
    header, *body = rows(comparison)
    about = facts(comparison)
    settings = {name: str(comparison.settings[name]) for name in ("text", "order", "warm-up steps")}
    machine = {name: value for name, value in comparison.machine.items() if name not in about}
    content = f"""<p class="lead">{html.escape(about.pop("model"))}, trained from the same random weights on the same
text, plain and patched.{"" if comparison.complete else " Interrupted before its last step."}</p>
{pages.table(header, body)}
{f"<p>{caution(comparison)}</p>" if caution(comparison) else ""}
<h2>Memory{"" if caution(comparison) else " and speed"}</h2>{pictures[1]}
<h2>Loss</h2>{pictures[0]}
<h2>The run</h2>{pages.definitions(about | settings)}
<h2>Replaced modules</h2><pre>{html.escape(comparison.runs[1].patched)}</pre>
<h2>The machine</h2>{pages.definitions(machine)}"""
    return pages.write(folder / "report.html", "liger-hw demo", content)
