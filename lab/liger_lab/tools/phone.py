"""Check that the built site fits a phone, and that no link is broken.

    python -m liger_lab.tools.phone [--site site] [--chromium /usr/bin/chromium] [--report report]

It writes a screenshot of each of `PAGES`, in the dark, and fails with a list of faults. It needs the package playwright
and a Chromium.
"""

import argparse
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

PAGES = (
    "", "start", "guides/patch", "guides/small_gpu", "trainers", "from_liger_kernel", "hardware", "models_speed", "faq",
    "ops",
)  # fmt: skip
WIDTH, HEIGHT = 390, 844
# elements that leave the screen and have no scroll of their own, and pictures that did not load
FAULTS = """() => [...document.querySelectorAll("table, pre, img, p, h1, h2, h3")].filter(element => {
    if (element.tagName == "IMG" && element.complete && !element.naturalWidth) return true
    if (element.getBoundingClientRect().right <= innerWidth + 1) return false
    for (let parent = element; parent; parent = parent.parentElement)
        if (["auto", "scroll", "hidden"].includes(getComputedStyle(parent).overflowX)) return false
    return true
}).map(element => element.tagName + " " + (element.src || element.textContent.trim().slice(0, 60)))"""


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


def looks(site: Path, chromium: str, report: Path) -> list[str]:
    """Take the screenshots; return the faults of the pages."""
    from playwright.sync_api import sync_playwright

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    lines = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="dark")
        for name in PAGES:
            page.goto(f"http://127.0.0.1:{server.server_port}/{name}")
            lines += [f"{name or 'index'}: {fault} does not fit or load" for fault in page.evaluate(FAULTS)]
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                lines.append(f"{name or 'index'}: wider than {WIDTH} pixels")
            page.screenshot(path=report / f"{(name or 'index').replace('/', '-')}.png", full_page=True)
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
    faults = broken_links(args.site.resolve()) + looks(args.site, args.chromium, args.report)
    print("\n".join(faults) or f"{len(PAGES)} pages fit a phone; no link is broken")
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
