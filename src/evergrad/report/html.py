"""A report as one self-contained HTML file: it needs no network, and no text in it can do anything.

The page carries its own style, its own script and, if it has a figure, plotly's, each once. A content security
policy names these scripts by their digests: nothing else runs, and nothing is fetched from anywhere.

>>> page = ReportPage("Flips", "study report", "What do flips do?", ["Nothing **yet**."],
...                   [Section("Data", [Prose("None.")])])
>>> "<strong>yet</strong>" in page_html(page)
True
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import importlib.util
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from evergrad._files import file_errors, replacing
from evergrad.errors import UsageError
from evergrad.report.page_model import (
    Commands,
    DataTable,
    Facts,
    Figure,
    Picture,
    Prose,
    ReportBlock,
    ReportPage,
    Section,
    TableCell,
    TableColumn,
)
from evergrad.wording import install_hint

# Blocks as HTML. Every text that comes from a file or a person goes through `escape_html`.

_SHORT = 24  # a text of so many characters stays on one line in a table
# Bold begins at the beginning of a word and ends at the end of one: the stars of model/** do neither.
_MARKUP = re.compile(
    r"\\(?P<literal>[\\*`])"
    r"|`(?P<code>(?:\\[\\*`]|[^`\n])+)`"
    r"|(?<![^\s(\[“‘])\*\*(?P<bold>(?=\w|\\)(?:\\[\\*`]|[^*\n])*(?<![\s/]))\*\*(?![\w/*])"
)
_ESCAPED = re.compile(r"\\([\\*`])")


def escape_html(text: object) -> str:
    r"""A text that is only text, in an element or an attribute; what steers (controls, direction marks) is spelt out.

    >>> escape_html('<b a="1">\x00\u202e')
    '&lt;b a=&quot;1&quot;&gt;\\x00\\u202e'
    """
    known = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in str(text))
    return html.escape(known, quote=True)


def escape_markup(text: object) -> str:
    """A name or a message as part of prose: nothing in it is taken for markup.

    >>> inline_html(f"**N-EV** of {escape_markup('**conv and fc**')}")
    '<strong>N-EV</strong> of **conv and fc**'
    """
    return re.sub(r"[\\*`]", r"\\\g<0>", str(text))


def inline_html(text: str) -> str:
    """One line of prose.

    >>> inline_html("**N-EV** of `a<b`")
    '<strong>N-EV</strong> of <code>a&lt;b</code>'
    """
    return "".join(
        {"code": f"<code>{escape_html(part)}</code>", "bold": f"<strong>{escape_html(part)}</strong>"}.get(
            kind, escape_html(part)
        )
        for kind, part in _parts(text)
    )


def plain_text(text: str) -> str:
    """One line of prose without its markup, for a terminal.

    >>> plain_text("**N-EV** of `role:model` and model/**")
    'N-EV of role:model and model/**'
    """
    return "".join(part for _, part in _parts(text))


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """The parts of a line of prose in order, each with its kind: `code`, `bold`, or nothing."""
    end = 0
    for found in _MARKUP.finditer(text):
        yield "", text[end : found.start()]
        kind = found.lastgroup or ""
        yield "" if kind == "literal" else kind, _ESCAPED.sub(r"\1", found[kind])
        end = found.end()
    yield "", text[end:]


def paragraphs_html(text: str) -> str:
    """Prose: paragraphs are parted by blank lines."""
    return "".join(f"<p>{inline_html(part.strip())}</p>\n" for part in re.split(r"\n\s*\n", text) if part.strip())


def anchors_of(sections: Sequence[Section]) -> list[str]:
    """A name for each section that a link can lead to; no two are alike.

    >>> anchors_of([Section("By bit", []), Section("By bit", []), Section("x", [], anchor="worst")])
    ['by-bit', 'by-bit-2', 'worst']
    """
    names: list[str] = []
    for section in sections:
        wanted = name = re.sub(r"[^a-z0-9]+", "-", (section.anchor or section.title).lower()).strip("-") or "section"
        count = 1
        while name in names:
            count += 1
            name = f"{wanted}-{count}"
        names.append(name)
    return names


def contents_html(page: ReportPage, anchors: Sequence[str]) -> str:
    """The list of contents, where there is more than one section."""
    if len(page.sections) < 2:
        return ""
    links = "".join(
        f'<li><a href="#{anchor}">{escape_html(section.title)}</a></li>'
        for section, anchor in zip(page.sections, anchors, strict=True)
    )
    return f'<nav class="contents" aria-label="Contents"><ol>{links}</ol></nav>\n'


def table_html(table: DataTable) -> str:
    """A table in a box of its own, which scrolls when it is wide; each head is a button that sorts."""
    heads = "".join(
        f'<th scope="col" class="{column.kind}"><button type="button">{escape_html(column.title)}</button></th>'
        for column in table.columns
    )
    rows = "\n".join(_row(table.columns, row) for row in table.rows)
    caption = f"<caption>{inline_html(table.caption)}</caption>" if table.caption else ""
    label = escape_html(plain_text(table.caption) or ", ".join(column.title for column in table.columns))
    helps = "".join(
        f"<dt>{escape_html(column.title)}</dt><dd>{inline_html(column.help)}</dd>"
        for column in table.columns
        if column.help
    )
    legend = f'<details class="help"><summary>What the columns mean</summary><dl>{helps}</dl></details>\n'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table class="data">{caption}'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n{legend if helps else ''}"
    )


def commands_html(commands: Commands) -> str:
    """Commands, each with a button that copies it."""
    rows = "".join(
        f'<div class="command"><p>{escape_html(what)}</p><pre><code>{escape_html(line)}</code></pre>'
        '<button type="button" class="copy">Copy</button></div>'
        for what, line in commands.lines
    )
    return f'<div class="commands">{rows}</div>\n'


def facts_html(facts: Facts) -> str:
    """Names and their values."""
    rows = "".join(f"<dt>{escape_html(name)}</dt><dd>{escape_html(value)}</dd>" for name, value in facts.pairs)
    return f'<dl class="facts">{rows}</dl>\n'


def _row(columns: Sequence[TableColumn], row: Sequence[TableCell]) -> str:
    made = []
    for column, cell in zip(columns, row, strict=True):
        key = cell.text if cell.sort == "" else cell.sort
        if isinstance(key, float) and not math.isfinite(key):  # not a number: last, as None
            key = None if math.isnan(key) else f"{'-' * (key < 0)}Infinity"
        sort = "" if key is None else f' data-sort="{escape_html(key)}"'
        short = "short" if len(cell.text) <= _SHORT else ""
        classes = " ".join(filter(None, (column.kind, cell.mark, short)))
        made.append(f'<td class="{escape_html(classes)}"{sort}>{escape_html(cell.text)}</td>')
    return f"<tr>{''.join(made)}</tr>"


# Figures in a page: plotly's JavaScript, found without importing plotly, and the data as JSON that is inert.

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
    label = escape_html(plain_text(figure.caption) or figure.name)
    caption = f"<figcaption>{inline_html(figure.caption)}</figcaption>" if figure.caption else ""
    return (
        f'<figure class="plot" id="figure-{number}" data-name="{escape_html(figure.name)}" '
        f'style="--height:{int(figure.height)}px"><div class="canvas" role="img" aria-label="{label}"></div>{caption}'
        f'<script type="application/json">{figure_json(figure)}</script></figure>\n'
    )


def picture_html(picture: Picture) -> str:
    """A drawing in a box of its own, which scrolls when it is wide, and its caption."""
    label = escape_html(plain_text(picture.caption) or picture.name)
    caption = f"<figcaption>{inline_html(picture.caption)}</figcaption>" if picture.caption else ""
    return (
        f'<figure class="picture" data-name="{escape_html(picture.name)}">'
        f'<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{label}">{picture.svg}</div>{caption}</figure>\n'
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


_PAGE = b"<!doctype html"
"""How a page begins."""


def page_html(page: ReportPage) -> str:
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
<title>{escape_html(page.title)}</title>
<style>{_ours("page.css")}</style>
</head>
<body>
<header>
<button type="button" id="theme" hidden>Dark</button>
<p class="kind">{escape_html(page.kind)}</p>
<h1>{escape_html(page.title)}</h1>
{f'<p class="question">{escape_html(page.question)}</p>' if page.question else ""}
<div class="answer">{"".join(f"<p>{inline_html(part)}</p>" for part in page.answer)}</div>
{missing}</header>
{contents_html(page, anchors)}<main>
{sections}</main>
<footer><p>{escape_html(page.made)}</p></footer>
{"".join(f"<script>{script}</script>" for script in scripts)}
</body>
</html>
"""


def missing_dependency(page: ReportPage) -> str:
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


def write_page(page: ReportPage, path: Path) -> Path:
    """Write the page to a file, which is whole at any time: the old one or the new one. Only a page is overwritten."""
    made = page_html(page).encode("utf-8")
    checked_target(path)
    with replacing(path) as temporary:
        temporary.write_bytes(made)
    return path


def _figures(page: ReportPage) -> list[Figure]:
    return [block for section in page.sections for block in section.blocks if isinstance(block, Figure)]


def _section_html(section: Section, anchor: str, numbers: dict[int, int]) -> str:
    blocks = ""
    for is_half, run in itertools.groupby(section.blocks, lambda block: isinstance(block, Figure) and block.half):
        made = "".join(_block_html(block, numbers) for block in run)
        blocks += f'<div class="halves">{made}</div>' if is_half else made
    title = f"<h2>{escape_html(section.title)}</h2>"
    content = f"<details><summary>{title}</summary>\n{blocks}</details>" if section.folded else f"{title}\n{blocks}"
    return f'<section id="{anchor}">{content}</section>\n'


def _block_html(block: ReportBlock, numbers: dict[int, int]) -> str:
    match block:
        case Prose():
            return paragraphs_html(block.text)
        case Figure():
            return figure_html(block, numbers[id(block)])
        case Picture():
            return picture_html(block)
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
