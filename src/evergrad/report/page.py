"""A report as one self-contained HTML file: it needs no network, and no text in it can do anything.

The page carries its own style, its own script and, if it has a figure, plotly's, each once. A content security
policy names these scripts by their digests: nothing else runs, and nothing is fetched from anywhere.

>>> page = Page("Flips", "study report", "What do flips do?", ["Nothing **yet**."], [Section("Data", [Prose("None.")])])
>>> "<strong>yet</strong>" in page_html(page)
True
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import itertools
from pathlib import Path

from evergrad.errors import UsageError
from evergrad.formats.data_file import file_errors
from evergrad.formats.durable import replacing
from evergrad.report.blocks import (
    Block,
    Commands,
    DataTable,
    Facts,
    Figure,
    Page,
    Prose,
    Section,
)
from evergrad.report.markup import (
    anchors_of,
    commands_html,
    contents_html,
    escaped,
    facts_html,
    inline,
    paragraphs,
    table_html,
)
from evergrad.report.plots import figure_html, missing_plotly, plotly_script

_PAGE = b"<!doctype html"
"""How a page begins."""


def page_html(page: Page) -> str:
    """The page as HTML."""
    figures = _figures(page)
    scripts = [plotly_script()] if figures else []
    scripts.append(_ours("page.js"))
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    anchors = anchors_of(page.sections)
    numbers = {id(figure): number for number, figure in enumerate(figures, 1)}
    sections = "".join(
        _section_html(section, anchor, numbers) for section, anchor in zip(page.sections, anchors, strict=True)
    )
    missing = "<noscript><p>The figures need JavaScript; text and tables do not.</p></noscript>" if figures else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escaped(page.title)}</title>
<style>{_ours("page.css")}</style>
</head>
<body>
<header>
<button type="button" id="theme" hidden>Dark</button>
<p class="kind">{escaped(page.kind)}</p>
<h1>{escaped(page.title)}</h1>
{f'<p class="question">{escaped(page.question)}</p>' if page.question else ""}
<div class="answer">{"".join(f"<p>{inline(part)}</p>" for part in page.answer)}</div>
{missing}</header>
{contents_html(page, anchors)}<main>
{sections}</main>
<footer><p>{escaped(page.made)}</p></footer>
{"".join(f"<script>{script}</script>" for script in scripts)}
</body>
</html>
"""


def missing_for(page: Page) -> str:
    """Return the reason why a page cannot be made here, in one line with the command that helps; empty if it can."""
    return missing_plotly() if _figures(page) else ""


def checked_target(path: Path) -> Path:
    """A path that a page may be written to: nothing is there, or an empty file, or a page; else `UsageError`."""
    with file_errors(path, "cannot be written"):
        if not path.exists():
            return path
        if not path.is_file():
            raise UsageError(f"{path}: is no file. Name one that a page can be written to: --out FILE.html")
        with open(path, "rb") as file:
            head = file.read(len(_PAGE) + 16).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head and not head.lower().startswith(_PAGE):
        raise UsageError(f"{path}: is no page, and is not overwritten by one. Name another file, or remove it first")
    return path


def write_page(page: Page, path: Path) -> Path:
    """Write the page to a file, which is whole at any time: the old one or the new one. Only a page is overwritten."""
    made = page_html(page).encode("utf-8")
    checked_target(path)
    with replacing(path) as temporary:
        temporary.write_bytes(made)
    return path


def _figures(page: Page) -> list[Figure]:
    return [block for section in page.sections for block in section.blocks if isinstance(block, Figure)]


def _section_html(section: Section, anchor: str, numbers: dict[int, int]) -> str:
    blocks = ""
    for is_half, run in itertools.groupby(section.blocks, lambda block: isinstance(block, Figure) and block.half):
        made = "".join(_block_html(block, numbers) for block in run)
        blocks += f'<div class="halves">{made}</div>' if is_half else made
    title = f"<h2>{escaped(section.title)}</h2>"
    content = f"<details><summary>{title}</summary>\n{blocks}</details>" if section.folded else f"{title}\n{blocks}"
    return f'<section id="{anchor}">{content}</section>\n'


def _block_html(block: Block, numbers: dict[int, int]) -> str:
    match block:
        case Prose():
            return paragraphs(block.text)
        case Figure():
            return figure_html(block, numbers[id(block)])
        case DataTable():
            return table_html(block)
        case Commands():
            return commands_html(block)
        case Facts():
            return facts_html(block)


def _ours(name: str) -> str:
    return (importlib.resources.files("evergrad.report") / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode()}'"
