"""Look at the built pages: ``python docs/screenshots.py docs/_build/html sheets`` writes sheets of them as PNG.

A sheet shows some pages side by side, from their top, as a headless Chromium lays them out at 1400 or 400 pixels, on a
light or a dark ground. What is wider than its page is listed, and the exit status is 1 then: it would have to be
scrolled sideways. Long tables and long lines of code scroll within themselves.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = {1400: (4, 0.5), 400: (8, 0.75)}
"""Width of a page -> pages of a sheet, and by how much they are made smaller."""
HEIGHT = 3000
"""Pixels of each page that a sheet shows."""
LEFT_OUT = {"genindex", "search", "py-modindex"}
WAIT = 25_000
"""Milliseconds that Chromium has for a sheet, by its own clock."""
DEADLINE = 300.0

SHEET = """<!doctype html><meta charset="utf-8"><title>sheet</title>
<style>
  body {{ margin: 8px; background: #888; font: 20px sans-serif; display: flex; gap: 8px }}
  div {{ width: {shown}px; height: {height}px; overflow: hidden }}
  iframe {{ width: {width}px; height: {tall}px; border: 0; transform: scale({scale}); transform-origin: 0 0 }}
</style>
{frames}
<script>
  const frames = [...document.querySelectorAll("iframe")];
  const wide = (frame) => {{
    const page = frame.contentDocument, found = [];
    const room = page.documentElement.clientWidth;
    if (page.documentElement.scrollWidth > room + 1)
      for (const each of page.querySelectorAll("article *"))
        if (each.getBoundingClientRect().right > room + 1 && !each.closest(".table-wrapper, pre, .highlight"))
          found.push(each.tagName.toLowerCase() + ": " + each.textContent.trim().slice(0, 60));
    const size = [page.documentElement.scrollWidth, room, page.documentElement.scrollHeight];
    return {{ page: frame.dataset.page, size, found: found.slice(0, 5) }};
  }};
  addEventListener("load", () => fetch("/seen", {{ method: "POST", body: JSON.stringify(frames.map(wide)) }}));
</script>
"""


@dataclass
class Sheet:
    """Some pages at one width.

    Args:
        name: Of its picture.
        pages: Their paths.
        width: Of each.
        is_dark: Whether the ground is.
    """

    name: str
    pages: list[str]
    width: int
    is_dark: bool

    @property
    def size(self) -> tuple[int, int]:
        """Of the picture."""
        count, scale = WIDTHS[self.width]
        return 8 + count * (int(self.width * scale) + 8), 60 + int(HEIGHT * scale)

    def html(self) -> str:
        """The page that shows them."""
        scale = WIDTHS[self.width][1]
        frames = "\n".join(
            f'<div>{each}<iframe data-page="{each}" src="/{each}"></iframe></div>' for each in self.pages
        )
        shown, height = int(self.width * scale), 30 + int(HEIGHT * scale)
        return SHEET.format(frames=frames, shown=shown, height=height, width=self.width, tall=HEIGHT, scale=scale)


class Pages(SimpleHTTPRequestHandler):
    """Serves the pages, a sheet of them, and takes what the sheet has measured."""

    sheet = ""
    seen: list[dict[str, Any]] = []  # noqa: RUF012 - of all sheets

    def do_GET(self) -> None:
        """Answer with the sheet or a file."""
        if urlsplit(self.path).path != "/sheet":
            return super().do_GET()
        body = Pages.sheet.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def do_POST(self) -> None:
        """Take what the sheet has measured."""
        Pages.seen += json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


def sheets_of(site: Path, only: list[str]) -> list[Sheet]:
    """What is to be looked at.

    Args:
        site: The built pages.
        only: Beginnings of the pages that are wanted; none for all.
    """
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html")) if path.stem not in LEFT_OUT]
    pages = [name for name in names if not name.startswith("_") and (not only or name.startswith(tuple(only)))]
    found = []
    for width, (count, _) in WIDTHS.items():
        for dark in (False, True):
            for number, start in enumerate(range(0, len(pages), count)):
                name = f"{width}_{'dark' if dark else 'light'}_{number:02}"
                found.append(Sheet(name, pages[start : start + count], width, dark))
    return found


def take(program: str, sheet: Sheet, port: int, target: Path) -> None:
    """Write the picture of a sheet.

    Args:
        program: Chromium.
        sheet: The pages.
        port: Of the server.
        target: The folder.
    """
    Pages.sheet = sheet.html()
    with tempfile.TemporaryDirectory() as profile:
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={0 if sheet.is_dark else 1}", f"--virtual-time-budget={WAIT}",
            "--window-size={},{}".format(*sheet.size), f"--screenshot={target.absolute() / sheet.name}.png",
            f"http://127.0.0.1:{port}/sheet",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE)


def main() -> int:
    """Take them all; returns 1 if a page is too wide."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--only", nargs="*", default=[], metavar="PAGE", help="beginnings of pages, such as cookbook/")
    parser.add_argument("--sheets", nargs="*", default=[], metavar="NAME", help="beginnings of sheets: 400, 1400_dark")
    given = parser.parse_args()
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        sys.exit(f"none of {', '.join(PROGRAMS)} is on this machine")
    given.target.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=str(given.site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sheets = [each for each in sheets_of(given.site, given.only) if each.name.startswith(tuple(given.sheets) or "")]
    for sheet in sheets:
        take(program, sheet, server.server_port, given.target)
        print(f"{sheet.name}.png: {', '.join(sheet.pages)}", flush=True)
    server.shutdown()
    wide = [each for each in Pages.seen if each["size"][0] > each["size"][1] + 1]
    for each in wide:
        print("{page}: {size[0]} pixels are needed and {size[1]} there: {found}".format(**each))
    print(f"{len(Pages.seen)} pages looked at, of {sum(len(each.pages) for each in sheets)}; {len(wide)} too wide")
    return int(bool(wide) or not Pages.seen)


if __name__ == "__main__":
    sys.exit(main())
