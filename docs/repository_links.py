"""A hook of mkdocs: links from the documentation to other files of the repository lead to copies in the site.

On a forge `../benchmarks/save/README.md` is a link as any other. A site has only what is in `docs/`, so every file
that is linked to, and every file that *it* links to, becomes part of the site: Markdown as a page, source and text as
a page that shows it, a folder as a page that lists it, everything else as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

__all__ = ["headings", "links", "on_files", "on_page_markdown", "rewritten"]

_ROOT = Path(__file__).resolve().parent.parent
_DOCS = "docs/"
_COPIES = "repository/"
_SHOWN = {".py": "python", ".toml": "toml", ".txt": "text", ".sh": "bash", ".yml": "yaml"}
_LINK = re.compile(r"(\]\()([^()\s]+)(\))")
_FENCE = re.compile(r" {0,3}(```+|~~~+)")


def links(text: str) -> Iterator[str]:
    """Where a page links to, in order; what stands in code is no link.

    >>> list(links("[a](b.md#c) `[x](y)`\\n```\\n[d](e)\\n```\\n![f](g.svg)"))
    ['b.md#c', 'g.svg']
    """
    found: list[str] = []
    _each_link(text, lambda target: found.append(target) or target)
    yield from found


def rewritten(text: str, target_of: Callable[[str], str]) -> str:
    """The page with every link replaced."""
    return _each_link(text, target_of)


def headings(text: str) -> list[str]:
    """The anchors of a page's headings, as forges make them: letters and digits, a hyphen for a space.

    >>> headings("# A job's `end`\\n## End\\n## End\\n```\\n# no\\n```")
    ['a-jobs-end', 'end', 'end-1']
    """
    anchors: list[str] = []
    for line, is_code in _lines(text):
        title = re.match(r"#{1,6} +(.*?)(?: +#+)? *$", line)
        if title and not is_code:
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title[1]).replace("`", "").replace("*", "")
            slug = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
            count = sum(1 for anchor in anchors if re.fullmatch(re.escape(slug) + r"(-\d+)?", anchor))
            anchors.append(f"{slug}-{count}" if count else slug)
    return anchors


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside of the documentation, and what that links to."""
    from mkdocs.structure.files import File, InclusionLevel

    waiting = [
        path for file in files.documentation_pages() for path in _linked(_DOCS + file.src_uri, file.content_string)
    ]
    done: set[str] = set()
    while waiting:
        path = waiting.pop(0)
        if path in done:
            continue
        done.add(path)
        text = _as_page(path)
        source: dict[str, Any] = {"abs_src_path": str(_ROOT / path)} if text is None else {"content": text}
        files.append(File.generated(config, _in_site(path), inclusion=InclusionLevel.NOT_IN_NAV, **source))
        waiting += [] if text is None else _linked(path, text)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that leave the documentation into links to the copies."""
    here = page.file.src_uri
    path = page.meta.get("path") or (here.removeprefix(_COPIES) if here.startswith(_COPIES) else _DOCS + here)

    def target_of(link: str) -> str:
        to = _path_of(str(path), link)
        if to is None:
            return link
        anchor = link.partition("#")[2]
        relative = os.path.relpath(_in_site(to), os.path.dirname(here) or ".")
        return relative + (f"#{anchor}" if anchor else "")

    return rewritten(markdown, target_of)


def _linked(path: str, text: str) -> list[str]:
    """The files of the repository outside of the documentation that a page links to."""
    found = (_path_of(path, link) for link in links(text))
    return [to for to in found if to is not None and not to.startswith(_DOCS)]


def _path_of(path: str, link: str) -> str | None:
    """The file that a link on a page means, from the root of the repository; None if it is none of ours."""
    target = link.partition("#")[0]
    if not target or re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    to = os.path.normpath(os.path.join(path if (_ROOT / path).is_dir() else os.path.dirname(path), target))
    return to if not to.startswith("..") and (_ROOT / to).exists() else None


def _in_site(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith(_DOCS):
        return path.removeprefix(_DOCS)
    if (_ROOT / path).is_dir():
        return f"{_COPIES}{path}/folder.md"
    return _COPIES + path + (".md" if Path(path).suffix in _SHOWN else "")


def _as_page(path: str) -> str | None:
    """The text of the page that shows a file or a folder; None if it is to be copied as it is."""
    file = _ROOT / path
    head = f"---\npath: {path}\nsearch: {{exclude: true}}\n---\n"
    if file.is_dir():
        inside = sorted(child.name + "/" * child.is_dir() for child in file.iterdir() if child.name[0] not in "._")
        return f"{head}# {path}/\n\n" + "".join(f"- [{name}]({name})\n" for name in inside)
    if file.suffix in _SHOWN:
        text = file.read_text("utf-8")
        fence = "`" * (max(map(len, re.findall("`+", text)), default=2) + 1)
        return f"{head}# {path}\n\n{max(fence, '```')}{_SHOWN[file.suffix]}\n{text}{max(fence, '```')}\n"
    return file.read_text("utf-8") if file.suffix == ".md" else None


def _each_link(text: str, replace: Callable[[str], str]) -> str:
    lines = []
    for line, is_code in _lines(text):
        if not is_code:
            # Parts in backticks are every second one.
            parts = re.split(r"(`+[^`]*`+)", line)
            parts[::2] = [_LINK.sub(lambda m: m[1] + replace(m[2]) + m[3], part) for part in parts[::2]]
            line = "".join(parts)
        lines.append(line)
    return "\n".join(lines)


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Every line, and whether it is in a fenced block."""
    fence = ""
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        if fence:
            yield line, True
            if mark and mark[1].startswith(fence) and line.strip() == mark[1]:
                fence = ""
        else:
            yield line, mark is not None
            fence = mark[1] if mark else ""
