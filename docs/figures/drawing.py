"""What diagrams are made of: boxes, arrows and words, as plain SVG.

800 wide, on a light ground of its own so that it can be read on dark pages too. Text is 12 px or more, and a box that
is too small for its words is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["BLUE", "GREEN", "GREY", "LINE", "ORANGE", "PLAIN", "PURPLE", "SOFT", "Drawing"]

INK, SOFT, GROUND = "#1f2933", "#52606d", "#fbfcfd"
# Okabe and Ito's colours, lightened for fills: told apart without red and green.
PLAIN, BLUE, ORANGE, GREEN, PURPLE, GREY = "#ffffff", "#d6eaf8", "#fde3c0", "#d3efe4", "#f3dcea", "#eceff2"
LINE = {PLAIN: "#7b8794", BLUE: "#0072b2", ORANGE: "#c77700", GREEN: "#00795c", PURPLE: "#a6477f", GREY: "#9aa5b1"}
WIDTH = 800
_EM = 0.56  # of a character, on average, in the fonts that browsers take for sans-serif


class Drawing:
    """Boxes, arrows and words, in the order in which they are drawn."""

    def __init__(self, height: int, title: str) -> None:
        self._height, self._title = height, title
        self._parts: list[str] = []

    def band(self, x: float, y: float, w: float, h: float, fill: str = GREY) -> None:
        """A coloured ground without a border."""
        self._parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{fill}"/>')

    def box(self, x: float, y: float, w: float, h: float, words: str | Sequence[str], fill: str = PLAIN) -> None:
        """A box; its first line is bold if there are several."""
        lines = [words] if isinstance(words, str) else list(words)
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}" stroke="{LINE[fill]}" '
            'stroke-width="1.4"/>'
        )
        top = y + h / 2 - (len(lines) - 1) * 8.5 + 4.5
        for number, line in enumerate(lines):
            first = number == 0 and len(lines) > 1
            size = 13 if number == 0 else 12
            needed = len(line) * size * _EM * (1.06 if first else 1)
            if needed > w - 6 or len(lines) * 17 > h + 2:
                raise ValueError(f"{line!r}: {needed:.0f} wide in a box of {w}x{h} with {len(lines)} lines")
            self.text(x + w / 2, top + 17 * number, line, size=size, bold=first, anchor="middle")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 12,
        bold: bool = False,
        anchor: str = "start",
        ink: str = INK,
    ) -> None:
        """A line of text."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{ink}"{weight}>'
            f"{escape(words)}</text>"
        )

    def arrow(self, *points: tuple[float, float], ink: str = SOFT, dashed: bool = False, head: bool = True) -> None:
        """A line through points, with a head at its end."""
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        style = ' stroke-dasharray="4 3"' if dashed else ""
        tip = ' marker-end="url(#tip)"' if head else ""
        self._parts.append(f'<path d="{path}" fill="none" stroke="{ink}" stroke-width="1.5"{style}{tip}/>')

    def cross(self, x: float, y: float) -> None:
        """Where something dies."""
        self._parts.append(
            f'<path d="M{x - 8} {y - 8} L{x + 8} {y + 8} M{x - 8} {y + 8} L{x + 8} {y - 8}" stroke="#b3261e" '
            'stroke-width="3.5" stroke-linecap="round"/>'
        )

    def bits(self, x: float, y: float, fills: Sequence[str], marked: int) -> None:
        """Numbered cells, a bit each, in what is left of the width; one of them is marked."""
        w = (WIDTH - x - 14) / len(fills)
        for bit, fill in enumerate(fills):
            stroke, thick = ("#b3261e", 3) if bit == marked else (LINE[fill], 1)
            self._parts.append(
                f'<rect x="{x + bit * w:.1f}" y="{y}" width="{w - 2:.1f}" height="30" rx="2" fill="{fill}" '
                f'stroke="{stroke}" stroke-width="{thick}"/>'
            )
            self.text(round(x + bit * w + w / 2 - 1, 1), y + 20, str(bit), anchor="middle")

    def svg(self) -> str:
        """The whole file."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" width="{WIDTH}" '
                f'height="{self._height}" font-family="Helvetica, Arial, sans-serif" role="img" '
                f'aria-label="{escape(self._title)}">',
                f"<title>{escape(self._title)}</title>",
                '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
                f'orient="auto-start-reverse"><path d="M0 1 L10 5 L0 9 z" fill="{SOFT}"/></marker></defs>',
                f'<rect width="{WIDTH}" height="{self._height}" rx="8" fill="{GROUND}"/>',
                *self._parts,
                "</svg>\n",
            ]
        )
