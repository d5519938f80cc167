"""A real browser for pages: headless Chromium, one for all tests of a worker, and nothing may leave it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import Opened, OpenPage

CHROMIUM = os.environ.get("EVERGRAD_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, if it is installed."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium, or name it in EVERGRAD_CHROMIUM")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Open a file in a window of its own: `open_page(path, width=390, dark=True)`."""
    contexts: list[Any] = []

    def opened(path: Path, *, width: int = 1200, dark: bool = False) -> Opened:
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        found = Opened(context.new_page())

        def watch(route: Any) -> None:
            if route.request.url.startswith(("file:", "data:", "blob:")):
                route.continue_()
            else:
                found.requests.append(route.request.url)
                route.abort()

        context.route("**/*", watch)
        found.page.on("console", lambda said: found.errors.append(said.text) if said.type == "error" else None)
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        found.page.on("dialog", lambda dialog: (found.errors.append("dialog"), dialog.dismiss()))
        found.page.goto(path.absolute().as_uri())
        return found

    yield opened
    for context in contexts:
        context.close()
