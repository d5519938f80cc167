"""The DCP user's own call, `dcp.async_save`, with DCP's stagers and folders, and with ours.

All of them save `{"model": state}`: DCP logs a line for every key of the outermost dict, and with 20,000 of those this
would be what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.save.contenders import KEEP, Contender, DcpAsync, Wait
from benchmarks.states import State
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

import evergrad as eg
from evergrad.integrations.dcp import ArenaStager, TierReader, TierWriter

__all__ = ["CACHED", "DEFAULT", "OURS", "RIVALS", "Folders", "Tiers", "contenders"]

OURS = "evergrad"
DEFAULT, CACHED = "DCP async_save", "DCP async_save, cached"
RIVALS = (DEFAULT, CACHED)


class Folders(DcpAsync):
    """`dcp.async_save(state, checkpoint_id=folder)`."""

    def start(self, path: Path) -> Wait:
        """Blocks while staging."""
        future: Any = async_save({"model": self.state}, checkpoint_id=path, async_stager=self._stager, no_dist=True)
        return partial(_result, future)

    def load(self, state: State) -> None:
        """`dcp.load`."""
        load({"model": state}, checkpoint_id=self.path, no_dist=True)


class Tiers(Contender):
    """`dcp.async_save(state, async_stager=ArenaStager(ck), storage_writer=TierWriter(ck, step))`."""

    background = True

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self._run = folder / "run"
        self._local = eg.Local(str(folder / "local"), keep=KEEP)
        self._checkpointer = eg.Checkpointer(self._run, [eg.Memory(), self._local], reserve={"model": state})
        self._stager = ArenaStager(self._checkpointer)

    def save(self, step: int) -> Wait:
        """Its future resolves when the version is on the disk."""
        writer = TierWriter(self._checkpointer, step=step)
        future: Any = async_save({"model": self.state}, async_stager=self._stager, storage_writer=writer, no_dist=True)
        return partial(_result, future)

    def load(self, state: State) -> None:
        """`dcp.load`, from the disk, past what is in memory."""
        with eg.Checkpointer(self._run, tiers=[self._local], agent=False) as other:
            load({"model": state}, storage_reader=TierReader(other), no_dist=True)

    def close(self) -> None:
        """And the agent ends."""
        self._stager.close()
        self._checkpointer.close()


def contenders() -> dict[str, Callable[[State, Path], Contender]]:
    """By name, in the order of the tables."""
    return {OURS: Tiers, DEFAULT: Folders, CACHED: partial(Folders, cached=True)}


def _result(future: Any) -> None:
    future.result()
