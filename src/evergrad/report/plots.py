"""Figures in a page: plotly's JavaScript, found without importing plotly, and the data as JSON that is inert."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

from evergrad.errors import UsageError
from evergrad.report.blocks import Figure
from evergrad.report.markup import escaped, inline, plain_text
from evergrad.wording import install_hint

# What plotly understands in texts and may not come from a name: links, above all.
_OTHER_TAG = re.compile(r"<(?!(?:br|/?b|/?i|/?sub|/?sup|/?extra)>)")


def missing_plotly() -> str:
    """Return one line that says why no figures can be drawn here, with the command that helps; empty if they can."""
    return "" if _script_file() else f"figures need plotly, which is not installed: {install_hint('report')}"


def plotly_script() -> str:
    """Plotly's JavaScript, to be put into a page once."""
    path = _script_file()
    if path is None:
        raise UsageError(missing_plotly())
    code = path.read_text(encoding="utf-8")
    # In a string of JavaScript a backslash before these changes nothing; in a page they would end the script.
    return re.sub(r"<(?=/script|!--)", r"<\\", code, flags=re.IGNORECASE)


def _script_file() -> Path | None:
    try:
        spec = importlib.util.find_spec("plotly")
    except (ImportError, ValueError):  # an import hook that forbids it, or a stand-in without a place
        return None
    places = spec.submodule_search_locations if spec else None
    path = Path(places[0]) / "package_data" / "plotly.min.js" if places else None
    return path if path is not None and path.is_file() else None


def figure_html(figure: Figure, number: int) -> str:
    """The place of a figure, its data, and its caption."""
    label = escaped(plain_text(figure.caption) or figure.name)
    caption = f"<figcaption>{inline(figure.caption)}</figcaption>" if figure.caption else ""
    return (
        f'<figure class="plot" id="figure-{number}" data-name="{escaped(figure.name)}" '
        f'style="--height:{int(figure.height)}px"><div class="canvas" role="img" aria-label="{label}"></div>{caption}'
        f'<script type="application/json">{figure_json(figure)}</script></figure>\n'
    )


def figure_json(figure: Figure) -> str:
    r"""Traces and layout as JSON in which no browser finds a tag.

    >>> print(figure_json(Figure("f", [{"name": "</script>", "y": [float("nan")]}], {})))
    {"traces": [{"name": "\u0026lt;/script\u003e", "y": [null]}], "layout": {}}
    """
    data = {"traces": _plain(figure.traces), "layout": _plain(figure.layout)}
    made = json.dumps(data, ensure_ascii=True, allow_nan=False)
    return made.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _plain(data: Any) -> Any:
    """What JSON has: no NaN, no tuples; and only those tags in texts that change how they look."""
    if isinstance(data, str):
        return _OTHER_TAG.sub("&lt;", data)
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    return data
