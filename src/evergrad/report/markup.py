"""Blocks as HTML. Every text that comes from a file or a person goes through `escaped`."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence

from evergrad.report.blocks import Cell, Column, Commands, DataTable, Facts, Page, Section

_SHORT = 24  # a text of so many characters stays on one line in a table
# Bold begins at the beginning of a word and ends at the end of one: the stars of model/** do neither.
_MARKUP = re.compile(
    r"\\(?P<literal>[\\*`])"
    r"|`(?P<code>(?:\\[\\*`]|[^`\n])+)`"
    r"|(?<![^\s(\[“‘])\*\*(?P<bold>(?=\w|\\)(?:\\[\\*`]|[^*\n])*(?<![\s/]))\*\*(?![\w/*])"
)
_ESCAPED = re.compile(r"\\([\\*`])")


def escaped(text: object) -> str:
    r"""A text that is only text, in an element or an attribute; what steers (controls, direction marks) is spelt out.

    >>> escaped('<b a="1">\x00\u202e')
    '&lt;b a=&quot;1&quot;&gt;\\x00\\u202e'
    """
    known = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in str(text))
    return html.escape(known, quote=True)


def literal(text: object) -> str:
    """A name or a message as part of prose: nothing in it is taken for markup.

    >>> inline(f"**N-EV** of {literal('**conv and fc**')}")
    '<strong>N-EV</strong> of **conv and fc**'
    """
    return re.sub(r"[\\*`]", r"\\\g<0>", str(text))


def inline(text: str) -> str:
    """One line of prose.

    >>> inline("**N-EV** of `a<b`")
    '<strong>N-EV</strong> of <code>a&lt;b</code>'
    """
    return "".join(
        {"code": f"<code>{escaped(part)}</code>", "bold": f"<strong>{escaped(part)}</strong>"}.get(kind, escaped(part))
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


def paragraphs(text: str) -> str:
    """Prose: paragraphs are parted by blank lines."""
    return "".join(f"<p>{inline(part.strip())}</p>\n" for part in re.split(r"\n\s*\n", text) if part.strip())


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


def contents_html(page: Page, anchors: Sequence[str]) -> str:
    """The list of contents, where there is more than one section."""
    if len(page.sections) < 2:
        return ""
    links = "".join(
        f'<li><a href="#{anchor}">{escaped(section.title)}</a></li>'
        for section, anchor in zip(page.sections, anchors, strict=True)
    )
    return f'<nav class="contents" aria-label="Contents"><ol>{links}</ol></nav>\n'


def table_html(table: DataTable) -> str:
    """A table in a box of its own, which scrolls when it is wide; each head is a button that sorts."""
    heads = "".join(
        f'<th scope="col" class="{column.kind}"><button type="button">{escaped(column.title)}</button></th>'
        for column in table.columns
    )
    rows = "\n".join(_row(table.columns, row) for row in table.rows)
    caption = f"<caption>{inline(table.caption)}</caption>" if table.caption else ""
    label = escaped(plain_text(table.caption) or ", ".join(column.title for column in table.columns))
    helps = "".join(
        f"<dt>{escaped(column.title)}</dt><dd>{inline(column.help)}</dd>" for column in table.columns if column.help
    )
    legend = f'<details class="help"><summary>What the columns mean</summary><dl>{helps}</dl></details>\n'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table class="data">{caption}'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n{legend if helps else ''}"
    )


def commands_html(commands: Commands) -> str:
    """Commands, each with a button that copies it."""
    rows = "".join(
        f'<div class="command"><p>{escaped(what)}</p><pre><code>{escaped(line)}</code></pre>'
        '<button type="button" class="copy">Copy</button></div>'
        for what, line in commands.lines
    )
    return f'<div class="commands">{rows}</div>\n'


def facts_html(facts: Facts) -> str:
    """Names and their values."""
    rows = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in facts.pairs)
    return f'<dl class="facts">{rows}</dl>\n'


def _row(columns: Sequence[Column], row: Sequence[Cell]) -> str:
    made = []
    for column, cell in zip(columns, row, strict=True):
        key = cell.text if cell.sort == "" else cell.sort
        if isinstance(key, float) and not math.isfinite(key):  # not a number: last, as None
            key = None if math.isnan(key) else f"{'-' * (key < 0)}Infinity"
        sort = "" if key is None else f' data-sort="{escaped(key)}"'
        short = "short" if len(cell.text) <= _SHORT else ""
        classes = " ".join(filter(None, (column.kind, cell.mark, short)))
        made.append(f'<td class="{escaped(classes)}"{sort}>{escaped(cell.text)}</td>')
    return f"<tr>{''.join(made)}</tr>"
