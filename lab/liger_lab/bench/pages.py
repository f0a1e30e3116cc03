"""Write the HTML pages of results: each one file, with its pictures inside."""

import base64
import html
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2430; background: #f6f7f9; margin: 0; }
main { max-width: 60rem; margin: 2.5rem auto; padding: 2rem 2.5rem; background: #fff; border-radius: 12px; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
p.lead { color: #4a5160; margin: .3rem 0 1.6rem; }
img { width: 100%; height: auto; margin: .4rem 0; }
table { border-collapse: collapse; width: 100%; } th, td { padding: .5rem .7rem; border-bottom: 1px solid #eceef2; }
th, td { text-align: right; font-variant-numeric: tabular-nums; } th { font-weight: 600; color: #4a5160; }
th:first-child, td:first-child { text-align: left; } .scroll { overflow-x: auto; }
pre { font-size: .85rem; background: #f6f7f9; border-radius: 8px; padding: .8rem 1rem; overflow-x: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.5rem; margin: 0; }
dt { color: #4a5160; } dd { margin: 0; overflow-wrap: anywhere; }
"""


def write(file: Path, title: str, content: str, style: str = "", after: str = "") -> Path:
    """Write a page; return its path.

    Args:
        content: HTML below the heading. style: CSS beside STYLE. after: HTML after the content, such as scripts.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{STYLE}{style}</style>
<main><h1>{title}</h1>
{content}
</main>{after}</html>
""", encoding="utf-8")  # fmt: skip
    return file


def table(header, rows) -> str:
    """Return an HTML table of text."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def definitions(items: dict) -> str:
    """Return names and their values as an HTML list."""
    lines = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in items.items())
    return f"<dl>{lines}</dl>"


def image(name: str, data: bytes, kind: str) -> str:
    """Return a picture of type "png" or "svg+xml" as HTML."""
    return f'<img alt="{html.escape(name)}" src="data:image/{kind};base64,{base64.b64encode(data).decode()}">\n'
