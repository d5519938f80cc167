"""A mistake that the parser finds, in the words of the others: what, expected, found, and where help is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from evergrad.errors import UsageError

_EXPECTED = (
    (r"Input should be a valid integer.*", "a whole number"),
    (r"Input should be a valid number.*", "a number"),
    (r"Input should be greater than or equal to (\S+?)\.?", r"\1 or more"),
    (r"Input should be less than or equal to (\S+?)\.?", r"\1 or less"),
)


def given_path(text: str) -> Path:
    """The path that was given; an empty one, which would be the current folder, is a variable that was never set."""
    if not text:
        raise UsageError("an empty path names no file or folder: is a variable of the shell not set? For here: '.'.")
    return Path(text)


given_path.__name__ = "path"  # the type that the help shows


def parser_line(error: Exception, words: Sequence[str]) -> str:
    """One line, and the command whose help says more; empty if the help itself has been shown.

    The parser's own words are kept where there is nothing to add.
    """
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    command = context.command_path if context is not None else "evergrad"
    message = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]
    if not message:
        return ""
    options = [*getattr(parameter, "opts", ())]
    for pattern, expected in _EXPECTED:
        told = re.fullmatch(rf"Invalid value for (.*?): {pattern}", message)
        if told and options:
            wanted = re.sub(rf".*?{pattern}", expected, message.partition(": ")[2])
            message = f"{'/'.join(options)}: expected {wanted}, found {_found(options, words)}"
    if message.startswith("Missing argument '"):  # by the name that the help has for it
        message = re.sub(r"'(\w+)'", lambda name: name.group().upper(), message)
    if message.endswith("?"):
        return f"{message} See '{command} --help'."
    return f"{message.rstrip('.')}. See '{command} --help'."


def _found(options: Sequence[str], words: Sequence[str]) -> str:
    """What was given for an option, as it was typed."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word in options:
            return repr(after)
        name, is_given, value = word.partition("=")
        if is_given and name in options:
            return repr(value)
        if re.match(r"-\w.", word) and word[:2] in options:  # -nX
            return repr(word[2:])
    return "something else"
