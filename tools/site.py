"""Add pages to the documentation site (mkdocs.yml) that follow from the code and from committed results.

These are the pages of the repository's root, one page for each op with its evidence and figures, the names under which
liger_kernel is served, and the help of every command. `<!-- evidence: VENDOR -->` in a page becomes the table of that
vendor's GPUs. The build fails if a page would load anything from another host.
"""

import contextlib
import importlib
import inspect
import io
import json
import os
import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

import liger_hw
from liger_hw import backends, cli, dispatch
from liger_hw.bench import formatting
from liger_hw.kernels import load_all
from liger_hw.proof import evidence, page

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks"
PAGES = {  # a page of the repository outside docs/ -> its place in the site
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "examples/README.md": "guides/examples.md",
    "benchmarks/converge-h200.md": "evidence/converge-h200.md",
    "benchmarks/loss-scale-h200.md": "evidence/loss-scale-h200.md",
}
MOVED = PAGES | {"README.md": "index.md", "examples": "guides/examples.md", "examples/": "guides/examples.md"}
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
HOST = r"""["']?(?:https?:)?//"""  # of another host, in a page or a style
LOADS = re.compile(
    rf"<(?:script|img|iframe|source)[^>]+src={HOST}|<link(?![^>]+rel=.?canonical)[^>]+href={HOST}|"
    rf"@import\s+(?:url\()?{HOST}|url\({HOST}"
)
COLUMNS = {  # a column of `formatting.HEADER` -> its title on an op's page
    1: "shape", 2: "mode", 5: "kernels, ms", 6: "of the limit", 7: "fastest peer", 9: "its kernels, ms", 10: "speed-up",
    11: "memory", 12: "the peer's",
}  # fmt: skip
LIMIT = (
    "The limit is the machine's own copy rate ({copy}) or matrix product rate ({matrix product}). Memory is the peak "
    "of a call beyond its inputs. [How numbers are made](../../guides/evidence.md#how-numbers-are-made)."
)


def markdown(header, rows) -> str:
    """Format a table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def first_line(thing) -> str:
    """Return the first line of a docstring, which is a sentence."""
    return (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def ops() -> dict:
    """Return the public ops by name, with the modules that define them."""
    load_all()
    return {name: dispatch.OPS[name].reference.__module__ for name in sorted(dispatch.OPS) if hasattr(liger_hw, name)}


# pages ----------------------------------------------------------------------------------------------------------------


def op_page(name: str, module: str, runs: dict, cells: list, benchmarks: dict) -> str:
    """Write the page of an op: signature, formulas, evidence and figures."""
    formulas = inspect.getdoc(importlib.import_module(module)) or ""
    parts = [f"# {name}", f"::: {module}.{name}\n    options: {{show_root_heading: false, show_root_toc_entry: false}}"]
    parts += ["## Formulas and bytes moved", f"*The text of the kernel file, `{module}`.*", formulas]
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
    return f"{text}\n\n{markdown(['GPU', *evidence.LEVELS], rows)}"


def level_cell(totals: dict, name: str, backend: str, level: str) -> str:
    """Describe one level of evidence: cases, dtypes and failures."""
    found = {dtype: totals.get((name, backend, dtype, level)) for dtype in evidence.DTYPES.values()}
    found = {dtype: cell for dtype, cell in found.items() if cell}
    if not found:
        return "-"
    failed = sum(cell.failed for cell in found.values())
    text = f"{sum(cell.passed for cell in found.values()):,}: {' '.join(found)}"
    return f"{text}, **{failed} failed**" if failed else text


def op_figures(name: str, benchmarks: dict) -> str:
    """Tabulate the times of an op in the committed benchmarks, each with its device and versions."""
    parts = []
    for file, benchmark in benchmarks.items():
        rows = [row for row in formatting.rows(benchmark) if row[0] == name and not row[2].startswith("host")]
        if rows:
            facts = formatting.facts(benchmark)
            about = f"{facts['device']}, {benchmark['dtype']}, {facts['date']}; {facts['versions']}. `{file}`."
            table = [[row[column] for column in COLUMNS] for row in rows]
            parts += [about, markdown(COLUMNS.values(), table), LIMIT.format(**facts)]
    return "\n\n".join(parts) or "No committed benchmark measures this op."


def index_page(cells: list) -> str:
    """Write the list of all ops and other functions."""
    load_all()
    rows = []
    for name, module in ops().items():
        executed = {c.backend.partition(":")[2] for c in cells if c.op == name and c.level == evidence.EXECUTED}
        executed -= {c.backend.partition(":")[2] for c in cells if c.op == name and c.failed}
        kind = module.removeprefix("liger_hw.kernels.").partition(".")[0]
        rows.append([f"[`{name}`](ops/{name}.md)", first_line(dispatch.OPS[name]), f"`{kind}`", ", ".join(executed)])
    others = [[f"`{name}`", first_line(getattr(liger_hw, name))] for name in ("router", "load_balancing_loss",
                                                                               "router_z_loss")]  # fmt: skip
    return "\n\n".join([
        "# Reference",
        "Every name below is a name of `liger_hw`. `import liger_hw` runs nothing: a name imports its module at its "
        "first use.",
        "- [Patching](patching.md): `patch`, `unpatch`, `use_backend`.\n- [Losses](losses.md): functions and modules "
        "of post-training losses.\n- [Plug-ins](integrations.md) of trainers.\n- [Names of liger-kernel]"
        "(liger_kernel.md) that this package serves.\n- [The command](command.md) `liger-hw`.",
        "## Ops",
        "*Executed* names the architectures on which every case of the op passed; each page has the other levels.",
        markdown(["op", "computation", "file of `kernels/`", "executed"], rows),
        "## Functions without a kernel",
        "Plain PyTorch, on every device.",
        markdown(["function", "computation"], others),
    ]) + "\n"  # fmt: skip


def liger_kernel_page() -> str:
    """List the names of liger_kernel that this package serves."""
    parts = [
        "# Names of liger-kernel",
        "These modules have the names, signatures and argument orders of `liger_kernel` 0.8.5. "
        "[Coming from liger-kernel](../from_liger_kernel.md) lists the differences.",
    ]
    for module in ("liger_hw.transformers", "liger_hw.chunked_loss", "liger_hw.transformers.functional"):
        package = importlib.import_module(module)
        names = getattr(package, "__all__", None) or [
            name for name, thing in vars(package).items()
            if name.startswith("liger_") and inspect.isfunction(thing)
        ]  # fmt: skip
        rows = [[f"`{name}`", first_line(getattr(package, name))] for name in sorted(names)]
        parts += [f"## `{module}`", markdown(["name", "description"], rows)]
    return "\n\n".join(parts) + "\n"


def command_page() -> str:
    """Write the help of every command."""
    parts = ["# The command", "`liger-hw COMMAND --help` prints these texts. `python -m liger_hw` is the same command."]
    width, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "100"
    for words in ([], *([name] for name in cli.make_parser()[1])):
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            cli.main([*" ".join(words).split(), "--help"])
        parts += [*(f"## {name}" for name in words), f"```text\n{text.getvalue().strip()}\n```"]
    os.environ.pop("COLUMNS") if width is None else os.environ.update(COLUMNS=width)
    return "\n\n".join(parts) + "\n"


# events of mkdocs -----------------------------------------------------------------------------------------------------


def on_config(config):
    """Fill the list of ops in the navigation."""
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    entry = next(item for item in reference if isinstance(item, dict) and "Ops" in item)
    entry["Ops"] = [{name: f"reference/ops/{name}.md"} for name in ops()]


def on_files(files, config):
    """Add the pages that follow from code, results and the repository's root."""
    runs, cells = evidence.read([RESULTS])
    benchmarks = {file.name: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}
    benchmarks = {name: content for name, content in benchmarks.items() if "ceilings" in content}
    pages = {place: (ROOT / name).read_text() for name, place in PAGES.items()}
    pages |= {
        f"reference/ops/{name}.md": op_page(name, module, runs, cells, benchmarks) for name, module in ops().items()
    }
    pages["reference/index.md"] = index_page(cells)
    pages["reference/liger_kernel.md"] = liger_kernel_page()
    pages["reference/command.md"] = command_page()
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    for picture in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    config.extra["cells"] = cells
    return files


def on_page_markdown(text, page, config, files):
    """Turn links of the repository into links of the site, and insert tables of evidence."""
    place = page.file.src_uri
    origin = next((name for name, where in PAGES.items() if where == place), f"docs/{place}")

    def moved(match):
        label, path, anchor = match.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        inside = MOVED.get(target) or target.removeprefix("docs/")
        if target.startswith("benchmarks/") and target.endswith(".png"):
            inside = f"pictures/{posixpath.basename(target)}"
        if files.get_file_from_path(inside) is None:
            if (ROOT / target).exists():
                return f"{label}" if label.startswith("`") else f"{label} (`{target}`)"  # a file of the checkout
            return match[0]  # mkdocs reports it
        return f"[{label}]({posixpath.relpath(inside, posixpath.dirname(place) or '.')}{anchor or ''})"

    text = LINK.sub(moved, text)
    return re.sub(r"<!-- evidence: (\w+) -->", lambda match: vendor_table(match[1], config.extra["cells"]), text)


def vendor_table(vendor: str, cells: list) -> str:
    """Tabulate the evidence for the GPUs of one vendor."""
    rows = page.rows([cell for cell in cells if cell.backend.startswith(f"{vendor}:")])
    if vendor not in backends.VENDORS or not rows:
        raise PluginError(f"<!-- evidence: {vendor} -->: there is none, allowed: {', '.join(backends.VENDORS)}")
    return markdown(page.HEADER, rows)


def on_page_content(html, page, config, files):
    """Link the papers that pages name by their arXiv number."""
    return re.sub(
        r"(?<![\w/\">])arXiv:(\d{4}\.\d{4,5})(?![^<]*</a>)", r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', html
    )


def on_post_build(config):
    """Fail if a page loads a script, a style, a font or a picture of another host."""
    for file in Path(config.site_dir).rglob("*"):
        if file.suffix in (".html", ".css") and (match := LOADS.search(file.read_text(errors="replace"))):
            raise PluginError(f"{file.relative_to(config.site_dir)} loads from another host: {match[0]}")
