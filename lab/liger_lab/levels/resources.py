"""Resources of the compiled kernels, as tables and as one self-contained HTML file."""

import html
import json
from pathlib import Path

from liger_hw import console
from liger_lab import terminal
from liger_lab.bench import pages

FAILURES = 40  # lines of the terminal's list


def show(rows: list[dict]) -> str:
    """Tabulate passes, or failures of all kernels, by op and architecture; list the missed gates."""
    archs, ops = _names(rows, "arch"), _names(rows, "op")
    counts = _counts(rows)

    def cell(op, arch):
        passed, failed = counts.get((op, arch), (0, 0))
        return f"{failed} of {passed + failed} FAIL" if failed else str(passed or "")

    lines = [console.table(["kernels that passed", *archs], [[op, *(cell(op, arch) for arch in archs)] for op in ops])]
    missed = failures(rows)
    lines += ["", *missed[:FAILURES]] if missed else []
    if len(missed) > FAILURES:
        lines.append(f"and {len(missed) - FAILURES} more, in the files")
    return "\n".join(lines)


def failures(rows: list[dict]) -> list[str]:
    """List each missed gate of a kernel in one line, with all its architectures."""
    archs_of = {}
    for row in rows:
        for gate, message in row["missed"].items():
            what = f"{row['kernel']} ({row['op']}, {row['dtype']}, {row['shapes'][0]}): {gate}: {message}"
            archs_of.setdefault(what, []).append(row["arch"])
    return [f"{', '.join(archs)}: {what}" for what, archs in archs_of.items()]


def _names(rows, key) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def _counts(rows) -> dict:
    counts = {}
    for row in rows:
        passed, failed = counts.get((row["op"], row["arch"]), (0, 0))
        counts[row["op"], row["arch"]] = passed + row["passed"], failed + (not row["passed"])
    return counts


def widths(row: dict) -> str:
    """Describe the largest tiles' accesses in bytes a lane: "LOGITS load 16, WEIGHT load 4"."""
    largest = max((access["elements"] for access in row["accesses"]), default=1)
    said = {}
    for access in row["accesses"]:
        if access["elements"] == largest > 1:
            widest = max(map(int, access["widths"]), default=0)
            name = f"{access['pointer']} {access['kind']}"
            said[name] = min(said.get(name, widest), widest)
    return ", ".join(f"{name} {width}" for name, width in said.items())


PAGE = """
main { max-width: 92rem; } table { font-size: .85rem; } td, th { padding: .3rem .5rem; white-space: nowrap; }
th.arch { writing-mode: vertical-rl; transform: rotate(180deg); text-align: left; }
#matrix td { text-align: center; padding: 0; border: 2px solid #fff; }
#matrix td:first-child { text-align: left; padding: .3rem .5rem; font-weight: 600; }
#matrix button { font: inherit; border: 0; width: 100%; padding: .35rem .4rem; cursor: pointer; border-radius: 4px; }
.good { background: #d6eedb; color: #14532d; } .bad { background: #f6c9c4; color: #7f1d1d; font-weight: 600; }
button:focus, button.on { outline: 2px solid #1d2430; }
#found td { text-align: right; } #found td.text { text-align: left; white-space: normal; }
#found tr.bad td { background: #fdecea; }
.bar { display: inline-block; width: 4rem; height: .6rem; background: #eceef2; border-radius: 3px; margin-left: .4rem; }
.bar i { display: block; height: 100%; background: #3d7ea6; border-radius: 3px; }
#heat td { text-align: center; font-variant-numeric: tabular-nums; } #heat td:first-child { text-align: left; }
select { font: inherit; } .missed { color: #b3261e; } .note { color: #4a5160; font-size: .85rem; }
"""

SCRIPT = """
const {words, rows} = JSON.parse(document.getElementById("data").textContent);
const name = (row, i) => words[row[i]];
const [OP, ARCH, KERNEL, PASS, DTYPE, SHAPES, CONFIG, REGISTERS, SPILLS, SHARED, SHARE, PROGRAMS, LIMIT, WIDTHS,
  MISSED] = [...Array(15).keys()];
const text = (parent, tag, value, style) => {
  const made = document.createElement(tag); made.textContent = value; if (style) made.className = style;
  parent.append(made); return made; };
function show(op, arch) {
  document.querySelectorAll("button.on").forEach(b => b.classList.remove("on"));
  document.querySelector(`button[data-op="${op}"][data-arch="${arch}"]`)?.classList.add("on");
  document.getElementById("which").textContent = `${op} on ${arch}`;
  const dtype = document.getElementById("dtype").value, body = document.getElementById("found");
  body.replaceChildren();
  const mine = rows.filter(r => name(r, OP) == op && name(r, ARCH) == arch && (!dtype || name(r, DTYPE) == dtype));
  mine.sort((a, b) => (b[MISSED] != 0) - (a[MISSED] != 0));
  for (const r of mine) {
    const line = text(body, "tr", "", r[MISSED] ? "bad" : "");
    text(line, "td", `${name(r, KERNEL)}`, "text"); text(line, "td", name(r, DTYPE), "text");
    text(line, "td", name(r, SHAPES), "text"); text(line, "td", name(r, CONFIG), "text");
    for (const i of [REGISTERS, SPILLS, SHARED, PROGRAMS]) text(line, "td", r[i] ?? "");
    const full = text(line, "td", r[SHARE] == null ? "" : `${Math.round(100 * r[SHARE])}%`);
    if (r[SHARE] != null) text(text(full, "span", "", "bar"), "i", "").style.width = `${100 * r[SHARE]}%`;
    text(line, "td", name(r, LIMIT), "text"); text(line, "td", name(r, WIDTHS), "text");
    text(line, "td", name(r, MISSED), "text missed");
  }
}
let at = null;
document.querySelectorAll("#matrix button").forEach(b => b.onclick = () => { at = b.dataset; show(at.op, at.arch); });
document.getElementById("dtype").onchange = () => at && show(at.op, at.arch);
(document.querySelector("#matrix button.bad") ?? document.querySelector("#matrix button"))?.click();
"""


def write(rows: list[dict], about: dict, file: Path) -> Path:
    """Write the page: op by architecture, each cell's kernels, and their occupancy."""
    archs, ops, counts = _names(rows, "arch"), _names(rows, "op"), _counts(rows)

    def cell(op, arch):
        passed, failed = counts.get((op, arch), (0, 0))
        if not passed + failed:
            return "<td></td>"
        label, style = (f"{failed} of {passed + failed}", "bad") if failed else (str(passed), "good")
        return f'<td><button class="{style}" data-op="{op}" data-arch="{arch}">{label}</button></td>'

    heads = "".join(f'<th class="arch">{html.escape(arch)}</th>' for arch in archs)
    body = "".join(f"<tr><td>{html.escape(op)}</td>{''.join(cell(op, arch) for arch in archs)}</tr>" for op in ops)
    failed = sum(not row["passed"] for row in rows)
    verdict = f"{failed} of {len(rows)} miss a gate." if failed else f"All {len(rows)} pass every gate."
    missed = "".join(f"<li>{html.escape(line)}</li>" for line in failures(rows))
    versions = {name: version for name, version in about["versions"].items() if version}
    facts = {"Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
             "Date": about["date"], "Commit": about["commit"] or "unknown", "Command": about["command"]}  # fmt: skip
    columns = ["kernel", "dtype", "shapes", "configuration", "registers a lane", "spills", "shared memory",
               "programs a core", "core full", "limited by", "bytes a lane", "missed"]  # fmt: skip
    content = f"""<p class="lead">{verdict} Each kernel was built by the architecture's own compiler
with the configuration a launch there would choose.
It passes if it builds, fits the shared memory and the warps of a program, spills nothing, reads and
writes its rows 16 bytes a lane, and has no atomics, no fp64 and no calls.</p>
{f'<h2>What misses</h2><ul class="missed">{missed}</ul>' if missed else ""}
<h2>Kernels that pass, by op and architecture</h2>
<div class="scroll"><table id="matrix"><tr><th></th>{heads}</tr>{body}</table></div>
<h2 id="which"></h2>
<p class="note">dtype <select id="dtype"><option value="">all</option>{
        "".join(f"<option>{dtype}</option>" for dtype in _names(rows, "dtype"))
    }</select>
Choose a cell above. Shapes that differ in nothing the code depends on are one line.</p>
<div class="scroll"><table><thead><tr>{"".join(f"<th>{name}</th>" for name in columns)}</tr></thead>
<tbody id="found"></tbody></table></div>
<h2>How full a core is</h2>
<p class="note">Warps that a core holds of those it could hold, in percent: the least of each kernel's shapes in bf16,
by its registers and shared memory and this library's model of the architecture.</p>
<div class="scroll"><table id="heat"><tr><th></th>{heads}</tr>{_heat(rows, archs)}</table></div>
<h2>How it was run</h2>{pages.definitions(facts)}"""
    scripts = f'<script id="data" type="application/json">{_data(rows)}</script><script>{SCRIPT}</script>'
    return pages.write(file, "Every kernel, compiled for every architecture", content, PAGE, scripts)


def _heat(rows, archs) -> str:
    least = {}
    for row in rows:
        if row["dtype"] == "bf16" and row.get("occupancy"):
            key = row["kernel"], row["arch"]
            least[key] = min(least.get(key, 1.0), row["occupancy"]["share"])
    lines = ""
    for kernel in dict.fromkeys(kernel for kernel, _ in least):
        cells = ""
        for arch in archs:
            share = least.get((kernel, arch))
            if share is None:
                cells += "<td></td>"
            else:
                light = 97 - 42 * share
                cells += f'<td style="background: hsl(205 45% {light:.0f}%)">{100 * share:.0f}</td>'
        lines += f"<tr><td>{html.escape(kernel)}</td>{cells}</tr>"
    return lines


def _data(rows) -> str:
    """Return the page's JSON: each word once, in a list, and "</" escaped."""
    words = {"": 0}

    def word(text):
        return words.setdefault(text, len(words))

    lines = []
    for row in rows:
        config, full = row["config"], row.get("occupancy") or {}
        launched = f"{terminal.parameters(config['meta'])}; {config['num_warps']} warps"
        more = len(row["shapes"]) - 3
        shapes = ", ".join(row["shapes"][:3]) + (f" and {more} more" if more > 0 else "")
        missed = "; ".join(f"{gate}: {message}" for gate, message in row["missed"].items())
        lines.append([
            word(row["op"]), word(row["arch"]), word(row["kernel"]), word(row["pass"]), word(row["dtype"]),
            word(shapes), word(launched), row.get("registers"), row.get("spills"), row.get("shared"),
            round(full["share"], 3) if full else None, full.get("programs"), word(full.get("limit", "")),
            word(widths(row) if "accesses" in row else ""), word(missed),
        ])  # fmt: skip
    return json.dumps({"words": list(words), "rows": lines}, separators=(",", ":")).replace("</", "<\\/")
