"""How calls and files are refused: the message, for the test to judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import evergrad as eg
from evergrad.errors import EvergradError, FormatError, UsageError


def refusal(call: Callable[[], object], kind: type[EvergradError] = UsageError) -> str:
    """The message of the error of this kind that a call raises; empty if it raises none."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def refusal_of_file(path: Path, kind: type[FormatError]) -> list[str]:
    """The lines of the error of this kind, which opening a file and reading all of it has to raise."""
    with pytest.raises(kind) as caught, eg.open_checkpoint(path) as ck:
        for name in ck.tensors:
            ck.read(name)
    return str(caught.value).split("\n")
