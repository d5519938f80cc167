"""What tests see of a page in the browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["OpenPage", "Opened"]


@dataclass
class Opened:
    """A page in the browser, what it complained of, and what it asked the network for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def until(self, expression: str) -> None:
        """Wait until it holds. Playwright's own way would have the page evaluate texts, which its policy forbids."""
        limit = time.monotonic() + 100
        while not self.page.evaluate(expression):
            assert time.monotonic() < limit, f"never: {expression}"
            self.page.wait_for_timeout(20)

    def drawn(self) -> int:
        """How many figures hold marks, once all of them are drawn."""
        self.until("!document.querySelector('figure.plot:not([data-drawn])')")
        marks = ".trace path, .trace .point, .trace.bars path, .hm image, .heatmaplayer image, .boxlayer path"
        return int(
            self.page.evaluate(
                "(marks) => [...document.querySelectorAll('figure.plot')]"
                ".filter((one) => one.querySelector('svg.main-svg') && one.querySelector(marks)).length",
                marks,
            )
        )

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


OpenPage = Callable[..., Opened]
