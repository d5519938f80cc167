"""Makes the pictures of reports: `python docs/screenshots/make.py`, about two minutes.

Runs a study at scale tiny and a job that loses a rank, opens their pages, and takes the top of each as a reader meets
it: light, dark, narrow. A study that is there already can be named: `python docs/screenshots/make.py DIR`. Needs
playwright and Chromium (EVERGRAD_CHROMIUM names another one).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

__all__ = ["make"]

HERE = Path(__file__).resolve().parent
MOST_BYTES = 250_000

_VIEWS = {"light": (1120, 1000, "light"), "dark": (1120, 1000, "dark"), "narrow": (390, 844, "light")}
_JOB = ("run", "-n", "4", "--spares", "1", "--preload", "--fail", "kill rank=2 step=10 bucket=0")


def make(study: Path | None = None) -> list[Path]:
    """Three views of the study's report, and one of a run's timeline."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if study is None:
            study = place / "nev"
            _evergrad("study", "run", "bitflip-nev", "--scale", "tiny", "--out", study)
        _evergrad("study", "report", study, "--out", place / "report.html")
        _evergrad(*_JOB, "--out", place / "kill", HERE.parent.parent / "examples" / "ddp_evergrad.py")
        _evergrad("timeline", place / "kill")
        pages = {f"study-{view}": (place / "report.html", view) for view in _VIEWS}
        return _taken({**pages, "run-light": (place / "kill" / "timeline.html", "light")})


def _evergrad(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "evergrad", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def _taken(pages: dict[str, tuple[Path, str]]) -> list[Path]:
    chromium = os.environ.get("EVERGRAD_CHROMIUM") or shutil.which("chromium") or "chromium"
    made = []
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (page_file, view) in pages.items():
            width, height, scheme = _VIEWS[view]
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            page.goto(page_file.as_uri())
            while page.evaluate("document.querySelector('figure.plot:not([data-drawn])') !== null"):
                page.wait_for_timeout(50)
            made.append(HERE / f"{name}.png")
            page.screenshot(path=made[-1])
            context.close()
        browser.close()
    for path in made:
        if path.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{path}: {path.stat().st_size} bytes, expected at most {MOST_BYTES}")
    return made


if __name__ == "__main__":
    for picture in make(Path(sys.argv[1]) if len(sys.argv) > 1 else None):
        print(picture)
