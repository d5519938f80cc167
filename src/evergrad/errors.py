"""Every error a user can meet, as one tree.

    EvergradError
    ├── UsageError            what was asked for cannot be done: a wrong index, a bad pattern
    │   ├── AmbiguousMatch    tensors of two files that cannot be told apart
    │   ├── UnknownTensor     a name or pattern that matches nothing; suggests the nearest
    │   └── ConversionLoss    a conversion that would lose something; lists what
    ├── StateError            a live state holds something that cannot be named and stored, or does not fit a checkpoint
    ├── CheckpointError       a running job could not save or restore
    │   ├── SaveRefused       both arenas are in use, or another trainer took over
    │   ├── TierError         a tier that cannot be written or read: full, read-only, gone
    │   ├── AgentError        the agent cannot be started or reached
    │   └── RestoreError      versions exist, and none of them can be restored
    ├── RecoveryError         a job could not go on after a failure
    │   └── RankLost          another rank is gone, and here only a restart helps
    ├── StudyError            a study could not go on: its workers, its folder or its golden run
    └── FormatError           a file or folder that cannot be served
        ├── FileAccessError   missing, not readable, not writable, disk full
        ├── UnknownFormat     no format recognises the content
        ├── DamagedFile       truncated, inconsistent or outside its own bounds
        ├── LimitExceeded     would take more memory or time than any real checkpoint needs
        └── UnsupportedContent  sound, but of a kind that is not served

Each message is one line: what, where, expected, found, next step. On the command line every one of them
is that line on stderr and exit code 2, never a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from os import PathLike


class EvergradError(Exception):
    """The root: catch this to catch everything that Evergrad raises on purpose. Its message is one printable line."""

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


class UsageError(EvergradError):
    """What was asked for cannot be done as asked."""


class UnknownTensor(UsageError):
    """A name or a pattern that matches no tensor."""

    def __init__(
        self, asked: object, known: Iterable[str], *, where: str = "", what: str = "tensor", near: str = ""
    ) -> None:
        asked, known = str(asked)[:200], list(known)
        close = [near] if near else nearest(asked, known)
        if close:
            hint = "Did you mean " + " or ".join(repr(name) for name in close) + "?"
        elif known:
            hint = f"There are {len(known)}, the first is {known[0]!r}."
        else:
            hint = "There are none."
        place = f"{where}: " if where else ""
        super().__init__(f"{place}unknown {what} {asked!r}. {hint}")


class AmbiguousMatch(UsageError):
    """Tensors of two checkpoints that names, order and shapes do not tell apart."""


class ConversionLoss(UsageError):
    """A conversion that could not keep everything; `losses` says what."""

    def __init__(self, message: str, losses: list[str]) -> None:
        super().__init__(message)
        self.losses = losses


class StateError(EvergradError):
    """A live state holds something that has no name, or no form that can be stored."""


class CheckpointError(EvergradError):
    """A running job could not save or restore."""


class SaveRefused(CheckpointError):
    """Nothing was captured: both arenas are still in use, or another trainer has taken the job over."""


class TierError(CheckpointError):
    """A tier cannot be written or read: full, read-only, gone. Training may go on."""


class AgentError(CheckpointError):
    """The agent cannot be started or reached."""


class RestoreError(CheckpointError):
    """Versions exist, and none of them can be restored; starting anew must be decided by a person."""


class RecoveryError(EvergradError):
    """A job could not go on after a failure."""


class RankLost(RecoveryError):
    """Another rank is gone, and whoever started this one has to start all of them again."""


class StudyError(EvergradError):
    """A study could not go on; what it has is kept, and the same command goes on from there."""


class FormatError(EvergradError):
    """A file or folder that cannot be served.

    >>> print(FormatError("a.pt", "zip directory cut short", expected="46 bytes", found="12"))
    a.pt: zip directory cut short (expected 46 bytes, found 12)
    """

    def __init__(
        self,
        path: str | PathLike[str],
        what: str,
        *,
        expected: object = None,
        found: object = None,
        hint: str = "",
    ) -> None:
        parts = []
        if expected is not None:
            parts.append(f"expected {expected}")
        if found is not None:
            parts.append(f"found {found}")
        detail = f" ({', '.join(parts)})" if parts else ""
        tail = f". {hint}" if hint else ""
        super().__init__(f"{path}: {what}{detail}{tail}")


class FileAccessError(FormatError):
    """The file system refuses: missing, not permitted, full."""


class UnknownFormat(FormatError):
    """No format recognises the content."""


class DamagedFile(FormatError):
    """The file contradicts itself: truncated, altered, or made to mislead."""


class LimitExceeded(FormatError):
    """Reading on would take more memory or time than a real checkpoint needs."""


class UnsupportedContent(FormatError):
    """The content is sound, but of a kind that is not served."""


def nearest(asked: str, known: Iterable[str], count: int = 2) -> list[str]:
    """The known names most like the asked one, best first; none if nothing is alike."""
    known = list(known)
    # difflib is quadratic in the worst case: on very long lists, compare with names of a similar length only.
    if len(known) > 5_000:
        known = [name for name in known if abs(len(name) - len(asked)) <= 8][:5_000]
    found = difflib.get_close_matches(asked, known, n=count, cutoff=0.6)
    tail = asked.rsplit("/", 1)[-1]
    for name in known:
        if len(found) >= count:
            break
        begun = len(asked) > 2 and name.startswith(asked)
        if name not in found and (begun or name.rsplit("/", 1)[-1] == tail):
            found.append(name)
    return found


def reason(error: OSError) -> str:
    """Why the system refuses, as error lines end.

    >>> reason(FileNotFoundError(2, "No such file or directory"))
    'no such file or directory'
    """
    return (error.strerror or str(error)).lower()


def said(error: BaseException) -> str:
    """The text of an error that reading a file gave; where bytes are no text, in words that say what was expected.

    >>> said(ValueError("no comma")), said(UnicodeDecodeError("utf-8", b"ab\\xff", 2, 3, "invalid start byte"))
    ('no comma', 'expected UTF-8 text, found the byte 0xff at offset 2')
    """
    if not isinstance(error, UnicodeDecodeError):
        return str(error)
    # Python takes JSON whose first bytes are 0 for UTF-16 or UTF-32, and UTF-8 is what all files have.
    kind = "ASCII" if error.encoding == "ascii" else "UTF-8"
    return f"expected {kind} text, found the byte {error.object[error.start]:#04x} at offset {error.start}"


def _one_line(text: str, limit: int = 600) -> str:
    """Keep a message to one printable line, whatever a hostile file put into its names."""
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
