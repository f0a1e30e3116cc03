"""Write the README's table and pictures from results: `python tools/readme.py benchmarks/h200.json ...`.

The results are those of `liger-hw bench` and `liger-hw bench train`. The pictures lie beside them; what stands between
the two markers of the README is replaced.
"""

import json
import sys
from pathlib import Path

from liger_hw.bench import page, tables
from liger_hw.bench.peers import OURS

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- measured: begin, by tools/readme.py -->", "<!-- measured: end -->"
SHAPES = {  # what the README shows of each op; everything is in the JSON
    "rms_norm": ("32768x1024", "16384x4096", "16384x8192"),
    "fused_add_rms_norm": ("16384x4096", "16384x8192"),
    "layer_norm": ("16384x4096", "16384x8192"),
    "swiglu": ("16384x14336 in place",),
    "geglu": ("16384x14336 in place",),
    "rope": ("4x4096x32/8x128",),
    "cross_entropy": ("8192x32000 in place", "8192x128256 in place"),
    "fused_linear_cross_entropy": ("8192x4096x128256", "16384x2048x128256", "8192x2304x256000", "8192x896x151936"),
}


def chosen(found: dict, mode: str) -> dict:
    """ "op shape" -> provider -> record, of what the README shows."""
    return {
        f"{op} {shape}": records
        for (op, shape, m), records in tables.by_shape(found).items()
        if m == mode and shape in SHAPES.get(op, ()) and OURS in records
    }


def markdown(header, rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def operations(found: dict, stem: Path) -> str:
    full = chosen(found, "full")
    kept = [record for records in full.values() for record in records.values()]
    rows = []
    for label, records in full.items():
        ours, peer = records[OURS], tables.fastest_peer(records)
        op, _, shape = label.partition(" ")
        rows.append([
            f"`{op}`", shape, f"{tables.number(ours['median'])} ms", tables.percent(ours["share"]),
            f"{peer['provider']}, {tables.number(peer['median'])} ms" if peer else "",
            f"{peer['median'] / ours['median']:.2f}x" if peer else "", tables.memory(ours), tables.memory(peer),
        ])  # fmt: skip
    pictures = []
    for name, figure in page.figures(found | {"results": kept}):
        if name == "roofline":
            pictures.append(_save(figure, stem, name))
    for name, figure in page.overview(full):
        pictures.append(_save(figure, stem, name))
    header = ["op", "shape", "liger_hw", "of the limit", "fastest peer", "speed-up", "peak memory", "the peer's"]
    facts = tables.facts(found)
    lead = f"Forward and backward, {found['dtype']}, {facts['device']}, {found['date']}: medians of one run with the " \
        f"peers, interleaved, with a cold L2. The limit is this machine's own copy rate ({facts['copy']}) or matrix " \
        f"product rate ({facts['matrix product']}). {facts['versions']}."  # fmt: skip
    return "\n\n".join([lead, markdown(header, rows), *pictures])


def training(found: dict, stem: Path) -> str:
    rows = [[cell or " " for cell in row] for row in tables.training_rows(found)]
    pictures = [_save(figure, stem, name) for name, figure in page.training_figures(found)]
    return "\n\n".join(
        ["Training steps, every run in a process of its own:", markdown(tables.TRAINING, rows), *pictures]
    )


def _save(figure, stem: Path, name: str) -> str:
    file = stem.with_name(f"{stem.name}-{name.replace(' ', '-')}.png")
    file.write_bytes(page.picture(figure, "png"))
    return f"![{name}]({file.resolve().relative_to(ROOT).as_posix()})"


def main(files) -> None:
    parts = []
    for file in map(Path, files):
        found = json.loads(file.read_text())
        parts.append((operations if "ceilings" in found else training)(found, file.with_suffix("")))
    readme = ROOT / "README.md"
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"README.md: got no markers, allowed: {BEGIN} and later {END}")
    readme.write_text(f"{before}{BEGIN}\n" + "\n\n".join(parts) + f"\n{END}{after}")


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    main(sys.argv[1:])
