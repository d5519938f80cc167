"""Parts of lines for people: what was found, what there is, how many, what may have been meant, what to install."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from evergrad.errors import UsageError, nearest


def checked_choice(name: str, value: Any, known: Sequence[str], near: Sequence[str] = ()) -> str:
    """One of those that are known; a wrong one may be near to others too."""
    if not isinstance(value, str) or value not in known:
        found = short_repr(value) if value != "" else "nothing"
        raise UsageError(
            f"{name}: expected {join_with_or(known)}, found {found}.{did_you_mean(str(value), [*known, *near])}"
        )
    return value


def count_of(number: int, one: str, many: str = "") -> str:
    """A number of things in words.

    >>> count_of(1, "rank"), count_of(0, "rank"), count_of(2000, "process", "processes")
    ('1 rank', '0 ranks', '2,000 processes')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def first_line(error: BaseException, longest: int = 100) -> str:
    """What a library says of an error, without the rest; never empty.

    >>> first_line(RuntimeError("no room\\nin frame 3")), first_line(KeyboardInterrupt())
    ('no room', 'KeyboardInterrupt')
    """
    return next(iter(str(error).splitlines()), "")[:longest] or type(error).__name__


def install_hint(extra: str = "") -> str:
    """The command that installs this package, with one of its extras, into the environment that is running.

    A clone, whether installed (`pip install -e .`) or on the path, is installed again from its folder; a package that
    pip has from another source, from there; everything else by its name.
    """
    extra = f"[{extra}]" if extra else ""
    package = Path(__file__).resolve().parent
    root = package.parents[1]
    if package.parent.name == "src" and (root / "pyproject.toml").is_file():
        return f"pip install -e {_folder_with(extra, root)}"
    origin = _origin()
    url, is_folder = str(origin.get("url", "")), isinstance(origin.get("dir_info"), Mapping)
    if is_folder and url.startswith("file://"):
        folder = Path(unquote(urlsplit(url).path))
        if (folder / "pyproject.toml").is_file():
            return f"pip install {_folder_with(extra, folder)}"
    elif url:
        vcs = origin.get("vcs_info")
        if isinstance(vcs, Mapping):
            url = f"{vcs.get('vcs', 'git')}+{url}@{vcs.get('commit_id', 'HEAD')}"
        return f"pip install {shlex.quote(f'evergrad{extra} @ {url}')}"
    return f"pip install {shlex.quote(f'evergrad{extra}')}"


def _folder_with(extra: str, folder: Path) -> str:
    """A folder and an extra, as pip reads them, from wherever the command is typed."""
    try:
        is_here = Path.cwd() == folder
    except OSError:  # the working directory was removed
        is_here = False
    return shlex.quote(f".{extra}" if is_here else f"{folder}{extra}")


def _origin() -> Mapping[str, Any]:
    """The origin of this package as pip recorded it (PEP 610); nothing if it came from an index."""
    from importlib import metadata

    try:
        told = json.loads(metadata.distribution("evergrad").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return {}
    return told if isinstance(told, Mapping) else {}


def join_with_or(names: Sequence[str]) -> str:
    """`a, b or c`; of no names, `none`."""
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else "".join(names) or "none"


def did_you_mean(asked: str, known: Iterable[str], more: str = "") -> str:
    """A question after what was meant, if anything is near."""
    close = nearest(asked[:100].lower(), known, count=1)
    return f" Did you mean '{close[0]}{more}'?" if close else ""


def short_repr(value: object) -> str:
    """What was found, short enough to leave room for the rest of the line."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:118]}…{text[-1]}"


def signal_name(number: int) -> str:
    """`SIGTERM`, for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"
