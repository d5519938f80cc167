"""Is this machine fit for Evergrad? What is installed, how large and fast memory and disk are, what else there is.

Nothing is changed, nothing is left behind, nothing goes over a network. Torch is imported in a process of its own,
which may fail as it likes. Every check says `ok`, `degraded`, `failed` or `unknown`, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from evergrad.doctor import disk, environment, machine, shared_memory, software, torch_probe
from evergrad.doctor.check import VERDICTS, Check, worst

__all__ = ["VERDICTS", "Check", "examine", "worst"]


def examine(folder: Path, *, tell: Callable[[str], None] = lambda what: None) -> Iterator[tuple[str, list[Check]]]:
    """Every check, group by group; `tell` hears what is looked at, before it is."""
    tell("importing torch")
    probe = torch_probe.probe()
    yield "software", [*software.look(probe)]
    yield "extras", [*software.look_at_extras()]
    yield "devices", [*torch_probe.look(probe)]
    tell("looking at memory and cores")
    yield "machine", [*machine.look()]
    tell("measuring the disk")
    yield "storage", [*shared_memory.look(), *disk.look(folder)]
    yield "around", [*environment.look(folder)]
