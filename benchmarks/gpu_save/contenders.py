"""Who saves a training: each says what has to be waited for before the next update, and when it is on the disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_save.trainings import Training
from benchmarks.states import make_durable, removed

import evergrad as eg

__all__ = ["BEST_DCP", "CONTENDERS", "Contender"]

KEEP = 2
BEST_DCP = "DCP, cached"
Wait = Callable[[], None]


class Contender(ABC):
    """One way to save a training, from the first save to the last."""

    warm_ups = 1
    """Saves that are not counted."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.notes: list[str] = []
        folder.mkdir(parents=True)

    @abstractmethod
    def save(self, step: int) -> Wait:
        """As the library's documentation says; what is returned waits until the data is on the disk for good."""

    def before_update(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Parameters are about to change."""

    def tidy(self) -> None:  # noqa: B027 - most have nothing to do here
        """After a save; not timed."""

    def check(self) -> str:
        """Bring the last save back and compare, where that is done."""
        return ""

    def close(self) -> None:  # noqa: B027 - most have nothing to do here
        """Give back what was taken."""


class Evergrad(Contender):
    """`eg.Checkpointer`, with an agent; its arenas are made, and registered with the driver, beforehand."""

    warm_ups = KEEP + 1  # then there is a retired file to write over, and all is as it always will be

    def __init__(self, training: Training, folder: Path, *, memory: bool) -> None:
        super().__init__(training, folder)
        local = eg.Local(str(folder / "local"), keep=KEEP)
        tiers = [eg.Memory(), local] if memory else [local]
        self.checkpointer = eg.Checkpointer(folder / "run", tiers, reserve=self._state())

    def _state(self) -> dict[str, Any]:
        return {"model": self.training.model, "optimizer": self.training.optimizer}

    def save(self, step: int) -> Wait:
        """Optimizer steps wait by themselves."""
        pending = self.checkpointer.save(step, self._state())

        def wait() -> None:
            pending.wait()

        return wait

    def check(self) -> str:
        """The state of now, saved, overwritten and restored."""
        expected = {path: tensor.clone() for path, tensor in self.training.tensors().items()}
        self.checkpointer.save(1_000_000, self._state()).wait()
        for tensor in self.training.tensors().values():
            tensor.zero_()
        self.checkpointer.restore(self._state())
        found = self.training.tensors()
        wrong = [path for path, tensor in expected.items() if not torch.equal(tensor, found[path])]
        if wrong:
            raise RuntimeError(f"{len(wrong)} tensors do not come back, the first {wrong[0]}")
        return f"{len(expected)} tensors come back equal"

    def close(self) -> None:
        """And the agent ends."""
        self.checkpointer.close()


class Rival(Contender):
    """Writes a file or a folder a save; the last ones stay."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self._written: list[Path] = []

    def save(self, step: int) -> Wait:
        """To a new place each time; what the library does not make durable is made so here."""
        path = self.folder / f"{step}"
        self._written.append(path)
        finish = self.start(path)

        def wait() -> None:
            finish()
            make_durable(path)

        return wait

    @abstractmethod
    def start(self, path: Path) -> Wait:
        """Save; what is returned waits for the library."""

    def tidy(self) -> None:
        """Delete all but the last ones."""
        while len(self._written) > KEEP:
            removed(self._written.pop(0))


class TorchSave(Rival):
    """`torch.save`, then fsync: training stands still."""

    def start(self, path: Path) -> Wait:
        """Blocks until all is on the disk."""
        torch.save(self.training.tensors(), path)
        make_durable(path)
        return _nothing


class Dcp(Rival):
    """`async_save`, with the stager it takes by itself."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self._staging: Future[Any] | None = None
        self._stager: Any = None

    def start(self, path: Path) -> Wait:
        """Blocks while staging, unless that is done in a thread, too."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        response: Any = async_save(self.training.tensors(), checkpoint_id=path, async_stager=self._stager, no_dist=True)
        if isinstance(response, Future):
            return partial(_result, response)
        self._staging = response.staging_completion
        return partial(_result, response.upload_completion)

    def before_update(self) -> None:
        """Staging in a thread reads the parameters until it has ended."""
        if self._staging is not None:
            staging, self._staging = self._staging, None
            staging.result()

    def close(self) -> None:
        """Its buffers too."""
        if self._stager is not None:
            self._stager.close()


class DcpStager(Dcp):
    """The same with a stager that is kept: pinned and shared memory, copies that do not block; perhaps in a thread."""

    def __init__(self, training: Training, folder: Path, *, thread: bool) -> None:
        super().__init__(training, folder)
        self._thread = thread
        self._stager = self._make()

    def _make(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(
            StagingOptions(
                use_pinned_memory=True,
                use_shared_memory=True,
                use_async_staging=self._thread,
                use_non_blocking_copy=True,
            )
        )

    def start(self, path: Path) -> Wait:
        """Where a kept stager fails, a new one for each save."""
        if self.notes:
            self._stager.close()
            self._stager = self._make()
        with self._noting():
            return super().start(path)

    def before_update(self) -> None:
        """A thread's failure shows here."""
        with self._noting():
            super().before_update()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """A stager that fails at its second use is said so; what it should have saved is lost."""
        try:
            yield
        except Exception as error:
            self.notes.append(
                f"a kept stager fails ({type(error).__name__}: {error!s:.80}), so each save has a new one"
            )
            raise


class DcpCached(Dcp):
    """The same with the stager that keeps pinned memory of its own and copies into it: the fastest that works twice."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)


CONTENDERS: dict[str, Callable[[Training, Path], Contender]] = {
    "evergrad": partial(Evergrad, memory=True),
    BEST_DCP: DcpCached,
    "evergrad, disk only": partial(Evergrad, memory=False),
    "DCP, pinned and shared": partial(DcpStager, thread=False),
    "DCP, thread": partial(DcpStager, thread=True),
    "DCP": Dcp,
    "torch.save": TorchSave,
}
"""By name, the most telling ones first: where time runs out, the last are left out."""


def _nothing() -> None:
    """All is done already."""


def _result(future: Future[Any]) -> None:
    future.result()
