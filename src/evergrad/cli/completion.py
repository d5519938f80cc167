"""What the shell offers after Tab where a word is one of a few: cheap, without a library of ours that is heavy.

`evergrad --install-completion` puts it into bash, zsh or fish; files and folders are the shell's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources

from evergrad.errors import UsageError

_OPTIONS = ("--install-completion", "--show-completion")
_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def check_shell(words: Sequence[str]) -> None:
    """`UsageError` if completion is asked for in a shell that it is not made for; the parser has no next step then."""
    if not words or words[0] not in _OPTIONS:
        return
    import shellingham  # type: ignore[import-untyped]

    try:
        shell = str(shellingham.detect_shell()[0])
    except shellingham.ShellDetectionFailure:
        shell = ""
    if shell not in _SHELLS:
        found = shell or "none"
        raise UsageError(f"{words[0]}: expected to be started by bash, zsh or fish, found {found}. Start one of them.")


def one_of(*words: str) -> Callable[[str], list[str]]:
    """Offers those of some words that begin as typed.

    >>> one_of("rollback", "forward", "restart")("r")
    ['rollback', 'restart']
    """

    def offer(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return offer


def studies(incomplete: str) -> list[str]:
    """Offers the studies of the gallery; a plan in a file is the shell's to offer."""
    names = [entry.name for entry in resources.files("evergrad").joinpath("study", "gallery").iterdir()]
    return sorted(name[:-5] for name in names if name.endswith(".toml") and name.startswith(incomplete))
