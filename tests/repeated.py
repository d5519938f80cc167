"""What `make test` says about tests that it repeated, and the time limit of a repeat.

The options `--reruns 1` repeat a failed test once. The aim is that no test ever needs it: each is named at the end.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

__all__ = ["pytest_runtest_setup", "pytest_terminal_summary", "pytest_timeout_set_timer"]

_LIMIT = pytest.StashKey[Any]()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Note the time limit of a test, and leave the setting of its timer to pytest-timeout."""
    item.stash[_LIMIT] = settings


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give a repeat a time limit of its own: the timer is set once for both, and one that has fired is gone."""
    if getattr(item, "execution_count", 1) > 1 and _LIMIT in item.stash and not item.stash[_LIMIT].func_only:
        item.config.hook.pytest_timeout_cancel_timer(item=item)
        item.config.hook.pytest_timeout_set_timer(item=item, settings=item.stash[_LIMIT])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """Name each repeated test with its first error, right before the closing line."""
    yield
    if not terminalreporter.config.getoption("reruns", None):
        return
    first: dict[str, str] = {}
    for report in terminalreporter.getreports("rerun"):
        first.setdefault(report.nodeid, _first_line(report))
    again = {report.nodeid for kind in ("failed", "error") for report in terminalreporter.getreports(kind)}
    _section(terminalreporter, "tests that passed only when repeated", first, first.keys() - again)
    _section(terminalreporter, "tests that failed again when repeated", first, first.keys() & again)
    if not first:
        terminalreporter.write_line("repeated tests: none")


def _section(terminal: pytest.TerminalReporter, title: str, first: dict[str, str], named: set[str]) -> None:
    if named:
        terminal.write_line(f"{title}: {len(named)}", yellow=True)
        for nodeid in sorted(named):
            terminal.write_line(f"  {nodeid}: {first[nodeid]}")


def _first_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)  # a worker that died has left a string
    lines = str(crash.message if crash else report.longrepr).strip().splitlines()
    return lines[0] if lines else "no message"
