"""Makes the pictures of a study's report: `python docs/screenshots/make.py DIR`, DIR being the folder of a study.

Light, dark and narrow, into this folder. Needs playwright and Chromium (EVERGRAD_CHROMIUM names another one).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from evergrad.report.study_page import write_study_report

__all__ = ["make"]

HERE = Path(__file__).resolve().parent
MOST_BYTES = 250_000

_VIEWS = {"light": (1120, 1000, "light"), "dark": (1120, 1000, "dark"), "narrow": (390, 844, "light")}


def make(study: Path) -> list[Path]:
    """One picture a view: the top of the page, as a reader meets it."""
    chromium = os.environ.get("EVERGRAD_CHROMIUM") or shutil.which("chromium") or "chromium"
    made = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        page_file = write_study_report(study, Path(folder) / "report.html")
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (width, height, scheme) in _VIEWS.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            page.goto(page_file.as_uri())
            while page.evaluate("document.querySelector('figure.plot:not([data-drawn])') !== null"):
                page.wait_for_timeout(50)
            made.append(HERE / f"study-{name}.png")
            page.screenshot(path=made[-1])
            context.close()
        browser.close()
    for path in made:
        assert path.stat().st_size < MOST_BYTES, (
            f"{path.name}: {path.stat().st_size:,} bytes, expected fewer than {MOST_BYTES:,}"
        )
    return made


if __name__ == "__main__":
    for picture in make(Path(sys.argv[1])):
        print(picture.name, f"{picture.stat().st_size:,} bytes")
