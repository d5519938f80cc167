"""Writes `cli.md` from the command line itself: `python docs/make_cli.py`.

With `--check` nothing is written, and the exit code is 1 if the page is not what the command line says. Nothing of it
depends on the terminal, on its width, or on how help is drawn.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from evergrad.cli import app

__all__ = ["PAGE", "cli_page", "is_fresh"]

PAGE = Path(__file__).resolve().parent / "cli.md"

_HEAD = """\
# The command line

*Made by `python docs/make_cli.py` from what `--help` says.*

Verbs are in the order of the workflow. Every one has `--help`; those that tell something have `--json`. A user's
mistake is one line on stderr and exit code 2. Nothing in a file is executed.
"""


def cli_page() -> str:
    """The whole page."""
    root = get_command(app)
    verbs = list(_verbs(root, ""))
    listed = [
        f"| [`{path}`](#{path.replace(' ', '-')}) | {_first(verb.help)} |"
        for path, verb in verbs
        if path.count(" ") == 1
    ]
    parts = [_HEAD, _codes(root.epilog), "\n".join(["| verb | |", "|---|---|", *listed]) + "\n"]
    parts += [_section(path, verb) for path, verb in verbs]
    return "\n".join(part for part in parts if part)


def is_fresh() -> bool:
    """Whether the page in the repository is what would be written now."""
    return PAGE.exists() and PAGE.read_text("utf-8") == cli_page()


def _verbs(group: Any, above: str) -> Iterator[tuple[str, Any]]:
    """Every verb below a group, those of groups after their group."""
    path = f"{above} {group.name}".strip()
    for name in group.list_commands(None):
        verb = group.commands[name]
        if verb.hidden:
            continue
        yield f"{path} {name}", verb
        if hasattr(verb, "commands"):
            yield from _verbs(verb, path)


def _section(path: str, verb: Any) -> str:
    arguments = [param for param in verb.params if param.param_type_name == "argument"]
    options = [
        param for param in verb.params if param.param_type_name == "option" and not getattr(param, "hidden", False)
    ]
    words = [path, *(["COMMAND …"] if hasattr(verb, "commands") else ["[OPTIONS]"]), *map(_usage, arguments)]
    parts = [
        f"{'#' * (1 + path.count(' '))} {path}\n",
        *(_prose(text) for text in _paragraphs(verb.help)),
        f"```console\n$ {' '.join(words)}\n```\n",
    ]
    if arguments:
        rows = [f"| `{_usage(param)}` | {_text(param.help)} |" for param in arguments]
        parts.append("\n".join(["| argument | |", "|---|---|", *rows]) + "\n")
    if options:
        rows = [f"| {_spelling(param)} | {_default(param)} | {_text(param.help)} |" for param in options]
        parts.append("\n".join(["| option | default | |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts) + "\n" + _epilog(verb.epilog)


def _epilog(text: str | None) -> str:
    """Examples as a block, exit codes as a table, everything else as text."""
    parts: list[str] = []
    examples: list[str] = []
    for paragraph in (text or "").split("\n\n"):
        single = re.match(r"Examples?:(.*)", paragraph, re.S)
        line = " ".join((single[1] if single else paragraph).split())
        if single or (paragraph.startswith("  ") and re.match(r"(evergrad|srun|eval|source) ", line)):
            examples += [line] if line else []
        elif paragraph.startswith("Exit codes:"):
            parts.append(_codes(paragraph))
        elif paragraph.startswith("  "):
            parts.append(f"- {_text(line)}\n")
        elif line:
            parts.append(_prose(line))
    shown = "```console\n" + "".join(f"$ {example}\n" for example in examples) + "```\n" if examples else ""
    return "\n".join(part for part in (shown, *parts) if part)


def _codes(text: str | None) -> str:
    found = re.search(r"Exit codes: (.*)", " ".join((text or "").split()))
    if not found:
        return ""
    rows = []
    for each in found[1].removesuffix(".").split(" · "):
        code = re.match(r"(\d+(?:, \d+)*) (.*)", each)
        rows.append(f"| {code[1]} | {_text(code[2])} |" if code else f"| | {_text(each)} |")
    return "\n".join(["| exit\u00a0code | |", "|---|---|", *rows]) + "\n"


def _usage(param: Any) -> str:
    name = (param.metavar or param.name).upper() + (" …" if param.nargs == -1 else "")
    return name if param.required else f"[{name}]"


def _spelling(param: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    return names if param.is_flag or getattr(param, "count", False) else f"{names} *{_kind(param)}*"


def _kind(param: Any) -> str:
    """What an option takes, in a word."""
    if hasattr(param, "type_descriptor"):
        taken = param.type_descriptor.annotation
        inner = getattr(taken, "__args__", ())
        name = getattr(inner[0] if inner else taken, "__name__", "text").lower()
    else:
        name = str(param.type.name).lower()
    known = {"str": "text", "string": "text", "int": "number", "integer": "number", "float": "number"}
    return known.get(name, name if name.isalpha() else "text")


def _default(param: Any) -> str:
    if param.is_flag or param.default is None or callable(param.default) or param.default in ([], ()):
        return "needed" if param.required else ""
    value = param.default
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", (text or "").strip()) if part.strip()]


def _first(text: str | None) -> str:
    return _text((_paragraphs(text) or [""])[0])


def _prose(text: str) -> str:
    return _text(text) + "\n"


def _text(text: str | None) -> str:
    """As Markdown that shows exactly this, but for backticks, which are meant; lines in a table stay lines."""
    parts = re.split(r"(`[^`]*`)", " ".join((text or "").split()))
    parts[::2] = [re.sub(r"([\\*<|\[\]])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if is_fresh() else "docs/cli.md is not what --help says: python docs/make_cli.py")
    PAGE.write_text(cli_page(), "utf-8")
    print(PAGE)
