"""Who restores: each wrote the same state, and brings it back into the same live tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import sleep

from benchmarks.restore import loads
from benchmarks.save.contenders import Dcp, Evergrad, Rival, Safetensors, TorchSave, Torchsnapshot
from benchmarks.states import LINGER_S, State

import evergrad as eg

__all__ = ["Contender", "Files", "contenders"]


class Files:
    """The checkpoints, each library's own; written once, when someone asks for them."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state, self.folder = state, folder
        self._rivals: dict[type[Rival], Rival] = {}
        self._evergrad: Evergrad | None = None

    def of(self, kind: type[Rival]) -> Path:
        """What a rival wrote."""
        if kind not in self._rivals:
            self._rivals[kind] = kind(self.state, self.folder / kind.__name__)
            self._rivals[kind].save(1)()
        return self._rivals[kind].path

    @property
    def evergrad(self) -> Evergrad:
        """A live Checkpointer with a version in memory and on the disk."""
        if self._evergrad is None:
            self._evergrad = Evergrad(self.state, self.folder / "Evergrad")
            self._evergrad.save(1)()
        return self._evergrad

    def close(self) -> None:
        """Let go."""
        if self._evergrad is not None:
            self._evergrad.close()


class Contender(ABC):
    """One way to restore."""

    path: Path | None = None
    """What is on the disk; None for what never gets there."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Open, read, and leave the values in the live tensors."""

    def ready(self) -> None:  # noqa: B027 - most have nothing to do here
        """Before each; not timed."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do here
        """Let go."""


class Library(Contender):
    """A file or folder, and a function that reads it."""

    def __init__(self, files: Files, kind: type[Rival], load: loads.Load) -> None:
        self.path, self._load = files.of(kind), load

    def restore(self, state: State) -> None:
        """Everything anew."""
        assert self.path is not None
        self._load(self.path, state)


class FromMemory(Contender):
    """`ck.restore` of the Checkpointer that saved: the nearest tier is shared memory."""

    def __init__(self, files: Files) -> None:
        self._checkpointer = files.evergrad.checkpointer

    def restore(self, state: State) -> None:
        """Digests first."""
        _restored(self._checkpointer, state, "memory")


class FromLocal(Contender):
    """`ck.restore` of a live Checkpointer that knows only the disk."""

    def __init__(self, files: Files) -> None:
        self._files = files.evergrad
        self.path = self._files.folder / "local"
        self._checkpointer: eg.Checkpointer | None = self._open()

    def _open(self) -> eg.Checkpointer:
        return eg.Checkpointer(self._files.run, [self._files.local])

    def restore(self, state: State) -> None:
        """Digests first."""
        assert self._checkpointer is not None
        _restored(self._checkpointer, state, "local")

    def close(self) -> None:
        """And the agent ends."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None


class Anew(FromLocal):
    """The same with a new Checkpointer each time: it finds the job, and starts an agent."""

    def __init__(self, files: Files) -> None:
        # A run folder of its own: here no agent may be there already.
        self._files = Evergrad(files.state, files.folder / "Anew")
        self._files.save(1)()
        self._files.close()
        self.path = self._files.folder / "local"
        self._checkpointer = None

    def ready(self) -> None:
        """Wait until the last agent has gone."""
        self.close()
        sleep(3 * LINGER_S)

    def restore(self, state: State) -> None:
        """All of it."""
        self._checkpointer = self._open()
        super().restore(state)


def contenders() -> dict[str, Callable[[Files], Contender]]:
    """By name, in the order of the tables."""

    def library(kind: type[Rival], load: loads.Load) -> Callable[[Files], Contender]:
        return partial(Library, kind=kind, load=load)

    return {
        "evergrad, memory": FromMemory,
        "evergrad": FromLocal,
        "evergrad, new Checkpointer": Anew,
        "torch.load": library(TorchSave, loads.torch_load),
        "torch.load, mmap": library(TorchSave, loads.torch_load_mmap),
        "safetensors": library(Safetensors, loads.safetensors_load),
        "DCP load": library(Dcp, loads.dcp_load),
        "torchsnapshot": library(Torchsnapshot, loads.torchsnapshot_restore),
    }


def _restored(checkpointer: eg.Checkpointer, state: State, tier: str) -> None:
    step = checkpointer.restore(state)
    found = checkpointer.restored
    if found is None or found.tier != tier:
        raise RuntimeError(f"step {step}: expected it from tier {tier}, found {found}")
