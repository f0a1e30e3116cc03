"""Add what follows from code and results to the documentation site (mkdocs.yml).

`python -m liger_lab.tools.documentation` writes the tables of docs/reference/liger_kernel.md.

The site gets the pages of the repository's root, and a page for each op with its evidence and figures. In pages of
docs/ `<!-- site: NAME -->` becomes a text of `TEXTS`. The build fails if a page would load anything from another host.
"""

import contextlib
import importlib
import inspect
import io
import json
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

import liger_hw
from liger_hw import backends, cli, dispatch
from liger_hw.kernels import load_all
from liger_hw.spelling import check_known
from liger_hw.stand_in.names import REPLACEMENTS
from liger_lab.bench import formatting
from liger_lab.bench.peers import OURS
from liger_lab.levels import evidence, page
from liger_lab.tools.readme import insert

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "lab/results"
PAGES = {  # a page of the repository outside docs/ -> its place in the site
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    ".github/SECURITY.md": "project/security.md",
    "examples/README.md": "guides/examples.md",
    "lab/results/converge-h200.md": "evidence/converge-h200.md",
    "lab/results/loss-scale-h200.md": "evidence/loss-scale-h200.md",
}
MOVED = PAGES | {"README.md": "index.md", "examples": "guides/examples.md", "examples/": "guides/examples.md"}
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<![\\$\w])\$([^$\n]+)\$(?![\w$])")
HOST = r"""["']?(?:https?:)?//"""  # of another host, in a page or a style
LOADS = re.compile(
    rf"<(?:script|img|iframe|source)[^>]+src={HOST}|<link(?![^>]+rel=.?canonical)[^>]+href={HOST}|"
    rf"@import\s+(?:url\()?{HOST}|url\({HOST}"
)
WITHOUT_KERNELS = ("pack_int2", "unpack_int2", "router", "load_balancing_loss", "router_z_loss")
PAIR = re.compile(  # "a, b: text" in a list of attributes, of which griffe takes b for the type of a
    r"<b><code><span[^>]*>([\w, ]+),</span></code></b>\s*\(<code><span[^>]*>(\w+)</span></code>\)"
)
BOOST = {"hardware.md": 4, "guides/small_gpu.md": 3, "faq.md": 2, "trainers.md": 2}  # pages that a search shows first
MODES = {"fwd": "forward", "full": "forward and backward"}
LIMIT = (
    f"{formatting.AXES} "
    "Times are those of the kernels alone. The limit is the machine's own copy rate ({copy}) or matrix product rate "
    "({matrix product}). Memory is the peak of a call beyond its inputs. "
    "[How numbers are made](../../guides/evidence.md#how-numbers-are-made)."
)


def markdown(header, rows) -> str:
    """Format a table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def with_mathml(text: str) -> str:
    """Turn formulas between $ and in blocks of `math` into MathML.

    Browsers render it without a script.
    """
    parts = FENCED.split(text)
    for i, part in enumerate(parts):
        if part.startswith("```math"):
            formula = part.removeprefix("```math").removesuffix("```").strip()
            parts[i] = f'<div class="formula">{convert(formula, display="block")}</div>'
        elif not part.startswith("```"):  # without the span, a <math> that begins a line would be a paragraph
            parts[i] = INLINE.sub(lambda match: f"<span>{convert(match[1])}</span>", part)
    return "".join(parts)


def formulas() -> dict[str, str]:
    """Return the text of docs/formulas.md for each op."""
    parts = re.split(r"^## `(\w+)`$", (ROOT / "docs" / "formulas.md").read_text(), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2])}


def first_line(thing) -> str:
    """Return the first line of a docstring, which is a sentence."""
    return (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def signature(thing) -> str:
    """Write a callable's arguments with their defaults, without annotations; "-" for other things."""
    if not callable(thing):
        return "-"
    parameters = inspect.signature(thing).parameters.values()
    named = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(named)).replace("|", "\\|")


def ops() -> dict:
    """Return the public ops by name, with the modules that define them."""
    load_all()
    return {name: dispatch.OPS[name].reference.__module__ for name in sorted(dispatch.OPS) if hasattr(liger_hw, name)}


# pages ----------------------------------------------------------------------------------------------------------------


def op_page(name: str, module: str, cells: list, benchmarks: dict) -> str:
    """Write the page of an op: signature, formula, gradients, evidence and figures."""
    kernel_text = inspect.getdoc(importlib.import_module(module)) or ""
    parts = [f"::: {module}.{name}\n    options: {{heading_level: 1, show_root_toc_entry: false}}"]
    parts += ["## Formula", formulas()[name]]
    parts += ["## Gradients and bytes moved", f"*The text of the kernel file, `{module}`.*", kernel_text]
    parts += ["## Evidence", op_evidence(name, cells), "## Figures", op_figures(name, benchmarks)]
    return "\n\n".join(parts) + "\n"


def op_evidence(name: str, cells: list) -> str:
    """Tabulate the cases of an op that passed on each GPU, at each level."""
    totals = evidence.total(cell for cell in cells if cell.op == name)
    if not totals:
        return "No committed run has evidence of this op's kernels; its tests run in `make test`."
    grouped = {}
    for backend in page.backends_of(totals.values()):
        row = tuple(level_cell(totals, name, backend, level) for level in evidence.LEVELS)
        grouped.setdefault(row, []).append(backend.partition(":")[2])
    rows = [[", ".join(gpus), *row] for row, gpus in grouped.items()]
    text = "Cases that passed. [The levels](../../guides/evidence.md#levels) say what each one proves."
    failed = "".join(f"\n- {line}" for line in page.problems(cell for cell in cells if cell.op == name))
    return f"{text}\n\n{markdown(['GPU', *evidence.LEVELS], rows)}\n{failed}"


def level_cell(totals: dict, name: str, backend: str, level: str) -> str:
    """Describe one level of evidence: cases, dtypes and failures."""
    counts = {dtype: totals.get((name, backend, dtype, level)) for dtype in evidence.DTYPES.values()}
    counts = {dtype: cell for dtype, cell in counts.items() if cell}
    if not counts:
        return "-"
    failed = sum(cell.failed for cell in counts.values())
    text = f"{sum(cell.passed for cell in counts.values()):,}: {' '.join(counts)}"
    return f"{text}, **{failed} failed**" if failed else text


def op_figures(name: str, benchmarks: dict) -> str:
    """Tabulate the times of an op in each committed benchmark that has it."""
    parts = []
    for file, benchmark in benchmarks.items():
        rows = [
            [shape, MODES[mode], *formatting.kernels_row(records)]
            for (op, shape, mode), records in formatting.by_shape(benchmark).items()
            if op == name and mode in MODES and OURS in records
        ]
        if rows:
            facts = formatting.facts(benchmark)
            about = f"{facts['device']}, {benchmark['dtype']}, {facts['date']}; {facts['versions']}. `{file}`."
            parts += [about, markdown(["shape", "", *formatting.KERNELS], rows), LIMIT.format(**facts)]
    return "\n\n".join(parts) or "No committed benchmark measures this op."


def op_table(cells: list) -> str:
    """List all ops, and the functions without a kernel."""
    rows = []
    for name in ops():
        op_cells = [cell for cell in cells if cell.op == name]
        executed = {cell.backend for cell in op_cells if cell.level == evidence.EXECUTED}
        executed -= {cell.backend for cell in op_cells if cell.failed}
        gpus = ", ".join(backend.partition(":")[2] for backend in sorted(executed))
        rows.append([f"[`{name}`](ops/{name}.md)", first_line(dispatch.OPS[name]), gpus])
    rows += [[f"`{name}`", f"{first_line(getattr(liger_hw, name))} Plain PyTorch.", "-"] for name in WITHOUT_KERNELS]
    return markdown(["op", "computation", "executed"], rows)


def gpu_table(vendor: str):
    """Return a function that tabulates the evidence for the GPUs of a vendor."""

    def table(cells: list) -> str:
        name = backends.VENDORS[vendor].NAME  # rows of all vendors: their counts are of all ops
        return markdown(page.HEADER, [row for row in page.rows(cells) if row[0].startswith(f"{name} ")])

    return table


def liger_kernel_names() -> str:
    """List the names of liger_kernel that this package serves, by module."""
    parts = []
    for module in ("liger_hw.transformers", "liger_hw.chunked_loss", "liger_hw.transformers.functional"):
        package = importlib.import_module(module)
        functions = [name for name, thing in vars(package).items() if name.startswith("liger_") and callable(thing)]
        things = {name: getattr(package, name) for name in getattr(package, "__all__", functions)}
        rows = [[f"`{name}`", first_line(thing), f"`{signature(thing)}`"] for name, thing in things.items()]
        parts += [f"## `{module}`", markdown(["name", "description", "arguments"], sorted(rows))]
    return "\n\n".join(parts)


def refused_names() -> str:
    """List the public names of liger_kernel that the stand-in refuses, by what to use instead."""
    public = json.loads((ROOT / "tests/integrations/liger_kernel.json").read_text())
    pairs, rows = [(module, name) for module in public for name in public[module]], {}
    for module, name in filter(REPLACEMENTS.get, pairs):
        names, modules = rows.setdefault(REPLACEMENTS[module, name], ({}, {}))
        names[f"`{name}`"] = None
        modules[f"`liger_kernel.{re.sub(r'(?<=^transformers.model.).+', 'FAMILY', module)}`"] = None
    table = [[", ".join(sorted(names)), ", ".join(modules), advice] for advice, (names, modules) in rows.items()]
    ops = [pair for pair in pairs if pair[0].partition(".")[0] == "ops"]
    every, refused = ({name for _, name in some} for some in (ops, filter(REPLACEMENTS.get, ops)))
    text = (
        f"Under the stand-in. Of the {len(every)} public names of `liger_kernel.ops` and the modules "
        f"below it these are {len(refused)}. No Triton kernel is served either: names with `_kernel` in modules "
        "of ops, and `MAX_FUSED_SIZE`."
    )
    return f"## Names that raise an ImportError\n\n{text}\n\n{markdown(['name', 'module', 'instead'], sorted(table))}"


def helps(cells: list) -> str:
    """Return the help of every command."""
    parser, names = cli.make_parser()
    texts = {"All commands": parser.format_help()}
    for name in names:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            cli.main([*name.split(), "--help"])
        texts[name] = text.getvalue()
    return "\n\n".join(f"## {name}\n\n```text\n{text.strip()}\n```" for name, text in texts.items())


TEXTS = {  # name in `<!-- site: NAME -->` -> function of the cells of evidence that returns the text
    "ops": op_table,
    "commands": helps,
    "evidence summary": lambda cells: markdown(page.SUMMARY, page.summary(cells)),
    **{f"evidence {vendor}": gpu_table(vendor) for vendor in backends.VENDORS},
}


# events of mkdocs -----------------------------------------------------------------------------------------------------


def on_config(config):
    """Fill the list of ops in the navigation."""
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    entry = next(item for item in reference if isinstance(item, dict) and "Ops" in item)
    entry["Ops"] = [{name: f"reference/ops/{name}.md"} for name in ops()]


def on_files(files, config):
    """Add the pages that follow from code, results and the repository's root."""
    _, cells = evidence.read([RESULTS])
    benchmarks = {file.name: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}
    benchmarks = {name: content for name, content in benchmarks.items() if content.get("parity")}  # of ops
    pages = {place: (ROOT / name).read_text() for name, place in PAGES.items()}
    pages |= {f"reference/ops/{name}.md": op_page(name, module, cells, benchmarks) for name, module in ops().items()}
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    for picture in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    config.extra["cells"] = cells
    return files


def on_page_markdown(text, page, config, files):
    """Insert tables of evidence, render formulas, and turn the repository's links into the site's."""
    place = page.file.src_uri
    page.meta["search"] = {"boost": BOOST.get(place, 1)}
    origin = next((name for name, where in PAGES.items() if where == place), f"docs/{place}")

    def moved(match):
        label, path, anchor = match.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        inside = MOVED.get(target) or target.removeprefix("docs/")
        if target.startswith("lab/results/") and target.endswith(".png"):
            inside = f"pictures/{posixpath.basename(target)}"
        if files.get_file_from_path(inside) is None:
            if (ROOT / target).exists():
                return f"{label}" if label.startswith("`") else f"{label} (`{target}`)"  # a file of the checkout
            return match[0]  # mkdocs reports it
        return f"[{label}]({posixpath.relpath(inside, posixpath.dirname(place) or '.')}{anchor or ''})"

    def inserted(match):
        check_known("text", match[1], TEXTS)
        return TEXTS[match[1]](config.extra["cells"])

    return with_mathml(re.sub(r"<!-- site: ([\w ]+) -->", inserted, LINK.sub(moved, text)))


def on_page_content(html, page, config, files):
    """Link papers by their arXiv number; repair attributes and results."""
    html = re.sub(r'(<li class="doc-section-item field-body">\s*)–\s', r"\1", html)
    html = PAIR.sub(r"<b><code>\1, \2</code></b>", html)
    return re.sub(
        r"(?<![\w/\">])arXiv:(\d{4}\.\d{4,5})(?![^<]*</a>)", r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', html
    )


def on_post_build(config):
    """Fail if a page loads something of another host."""
    for file in Path(config.site_dir).rglob("*"):
        if file.suffix in (".html", ".css") and (match := LOADS.search(file.read_text(errors="replace"))):
            raise PluginError(f"{file.relative_to(config.site_dir)} loads from another host: {match[0]}")


if __name__ == "__main__":
    text = f"{liger_kernel_names()}\n\n{refused_names()}"
    insert(ROOT / "docs/reference/liger_kernel.md", text, "liger_lab.tools.documentation")
