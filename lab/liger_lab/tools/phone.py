"""Check the built site: pages fit the screen, links lead somewhere, the search works.

    python -m liger_lab.tools.phone [--site site] [--chromium /usr/bin/chromium] [--report report]

It writes screenshots of each of `PAGES`, light and dark, and fails with a list of faults. It needs the package
playwright and a Chromium.
"""

import argparse
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from urllib.parse import unquote, urlsplit

PAGES = (
    "", "start", "guides/patch", "guides/small_gpu", "trainers", "from_liger_kernel", "hardware", "models_speed", "faq",
    "ops",
)  # fmt: skip
SIZES = (390, 844), (1280, 900)  # of a phone, of a desktop
SEARCHES = {  # words of a search -> the page that its first results have
    "RTX 4090": "hardware/", "MI300X": "hardware/", "out of memory": "faq/", "QLoRA": "guides/small_gpu/",
    "uninstall": "faq/",
}  # fmt: skip
FIRST = """() => [...document.querySelectorAll(".md-search-result__item > a")].slice(0, 3).map(a => a.href)"""
# elements that leave the screen and have no scroll of their own, and pictures that did not load
FAULTS = """() => [...document.querySelectorAll("table, pre, img, p, h1, h2, h3")].filter(element => {
    if (element.tagName == "IMG" && element.complete && !element.naturalWidth) return true
    if (element.getBoundingClientRect().right <= innerWidth + 1) return false
    for (let parent = element; parent; parent = parent.parentElement)
        if (["auto", "scroll", "hidden"].includes(getComputedStyle(parent).overflowX)) return false
    return true
}).map(element => element.tagName + " " + (element.src || element.textContent.trim().slice(0, 60)))"""

# blocks of code that are wider than their box
CUT = """() => [...document.querySelectorAll("pre > code")].filter(code => code.scrollWidth > code.clientWidth + 1)
    .map(code => code.textContent.trim().slice(0, 60))"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def broken_links(site: Path) -> list[str]:
    """List the relative links and pictures of all pages without a file or an anchor."""
    texts = {file: file.read_text() for file in sorted(site.rglob("*.html"))}
    anchors = {file: set(re.findall(r'\bid="([^"]+)"', text)) for file, text in texts.items()}
    lines = []
    for file, text in texts.items():
        for link in set(re.findall(r'(?:href|src)="([^"]+)"', text)):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("/"):
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in anchors and anchor not in anchors[target]):
                lines.append(f"{file.relative_to(site)}: broken link {link}")
    return lines


def looks(browser, address: str, report: Path) -> list[str]:
    """Take the screenshots; return the faults of the pages."""
    lines = []
    for (width, height), scheme in product(SIZES, ("light", "dark")):
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        for name in PAGES:
            label = f"{name or 'index'} at {width} pixels"
            if not page.goto(f"{address}/{name}").ok:
                lines.append(f"{label}: no such page")
            lines += [f"{label}: {fault} does not fit or load" for fault in page.evaluate(FAULTS)]
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                lines.append(f"{label}: wider than the screen")
            page.screenshot(path=report / f"{(name or 'index').replace('/', '-')}-{width}-{scheme}.png", full_page=True)
        page.close()
    return lines


def cut_code(browser, address: str, site: Path) -> list[str]:
    """List the blocks of code that are wider than their box on a desktop."""
    page, lines = browser.new_page(viewport={"width": 1280, "height": 900}), []
    for file in sorted(site.rglob("index.html")):
        page.goto(f"{address}/{file.parent.relative_to(site).as_posix()}/")
        lines += [f"{page.url}: 1280 pixels cut {code}" for code in page.evaluate(CUT)]
    return lines


def searches(browser, address: str) -> list[str]:
    """Return the words of `SEARCHES` whose first three results lack the page."""
    page = browser.new_page()
    lines = []
    for words, place in SEARCHES.items():
        page.goto(address)
        page.fill(".md-search__input", words)
        page.wait_for_selector(".md-search-result__item", timeout=60_000)
        links = page.evaluate(FIRST)
        if not any(f"{address}/{place}" in link for link in links):
            lines.append(f"search for {words!r}: {place} is not among the first three: {links}")
    return lines


def browsed(site: Path, chromium: str, report: Path) -> list[str]:
    """Serve the site to a browser; return what it finds."""
    from playwright.sync_api import sync_playwright

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        address = f"http://127.0.0.1:{server.server_port}"
        lines = looks(browser, address, report) + cut_code(browser, address, site) + searches(browser, address)
        browser.close()
    server.shutdown()
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=Path("site"), help="the built site (site)")
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="the browser (/usr/bin/chromium)")
    parser.add_argument("--report", type=Path, default=Path("report"), help="folder of the screenshots (report)")
    args = parser.parse_args()
    args.report.mkdir(parents=True, exist_ok=True)
    faults = broken_links(args.site.resolve()) + browsed(args.site, args.chromium, args.report)
    print(
        "\n".join(faults)
        or f"{len(PAGES)} pages fit two screens; no code is cut, no link broken; the search finds {', '.join(SEARCHES)}"
    )
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
