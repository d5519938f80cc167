"""Who saves: each says when the tensors may be changed again, and waits until the data is on the disk."""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.restore import loads
from benchmarks.states import State, make_durable, removed, size_of

import evergrad as eg

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

__all__ = ["KEEP", "Contender", "Evergrad", "contenders"]

KEEP = 2
"""So many saves stay on the disk, whoever writes them."""

Wait = Callable[[], None]


class Contender(ABC):
    """One way to save one state, from the first save to the last."""

    background = False
    """Whether something is still to be done when `save` returns."""
    only_copies = False
    """Whether nothing ever reaches the disk."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state, self.folder = state, folder
        folder.mkdir()

    @abstractmethod
    def save(self, step: int) -> Wait:
        """Return when the tensors may be changed again; what is returned waits until the data is on the disk."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Bring the last save back."""

    def ready(self) -> None:  # noqa: B027 - most have nothing to do here
        """Before a save; not timed."""

    def tidy(self) -> None:  # noqa: B027 - most have nothing to do here
        """After a save; not timed."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do here
        """Give back what was taken."""


class BareCopy(Contender):
    """The floor: the same bytes into a warm map in /dev/shm, and nothing else.

    Large tensors go by one `torch._foreach_copy_`. For tensors of 4 KB the fastest way found is a `memoryview` of
    each, made beforehand: it can only be had by someone who knows that no tensor will ever move.
    """

    only_copies = True

    def __init__(self, state: State, folder: Path, *, known: bool) -> None:
        super().__init__(state, folder)
        size = size_of(state)
        path = Path("/dev/shm") / f"evergrad-bare-copy-{os.getpid()}"
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        path.unlink()
        os.posix_fallocate(opened, 0, size)
        self._map = mmap.mmap(opened, size)
        os.close(opened)
        arena = torch.frombuffer(self._map, dtype=torch.uint8)
        arena.zero_()
        self._views: list[torch.Tensor] = []
        at = 0
        for tensor in state.values():
            self._views.append(arena[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            at += tensor.nbytes
        self._known: list[tuple[memoryview, memoryview]] = []
        if known:
            self._known = [
                (there.numpy().data.cast("B"), here.numpy().data.cast("B"))
                for there, here in zip(self._views, state.values(), strict=True)
            ]

    def save(self, step: int) -> Wait:
        """Copy."""
        if self._known:
            for there, here in self._known:
                there[:] = here
        else:
            torch._foreach_copy_(self._views, list(self.state.values()))
        return _nothing

    def load(self, state: State) -> None:
        """Copy back."""
        torch._foreach_copy_(list(state.values()), self._views)

    def close(self) -> None:
        """The map goes with its last view."""
        self._known.clear()
        self._views.clear()


class Evergrad(Contender):
    """`eg.Checkpointer`: the copy blocks; the agent, or a thread of this process, does the rest."""

    background = True

    def __init__(self, state: State, folder: Path, *, agent: bool = True) -> None:
        super().__init__(state, folder)
        self.run = folder / "run"
        self.local = eg.Local(str(folder / "local"), keep=KEEP)
        self.checkpointer = eg.Checkpointer(self.run, [eg.Memory(), self.local], reserve=state, agent=agent)

    def save(self, step: int) -> Wait:
        """`wait()`: on the first tier that survives a reboot."""
        pending = self.checkpointer.save(step, self.state)

        def wait() -> None:
            pending.wait()

        return wait

    def load(self, state: State) -> None:
        """The newest version on the disk, past what is in memory."""
        with eg.Checkpointer(self.run, tiers=[self.local], agent=False) as other:
            other.restore(state)

    def close(self) -> None:
        """And the agent ends."""
        self.checkpointer.close()


class Rival(Contender):
    """A library that writes a file or a folder a save; what it does not make durable itself is made so here."""

    read: loads.Load = staticmethod(loads.dcp_load)
    suffix = ""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self._written: list[Path] = []

    @property
    def path(self) -> Path:
        """What was written last."""
        return self._written[-1]

    def save(self, step: int) -> Wait:
        """To a new place each time."""
        self._written.append(self.folder / f"{step}{self.suffix}")
        written = self.path
        finish = self.start(written)

        def wait() -> None:
            finish()
            make_durable(written)

        return wait

    @abstractmethod
    def start(self, path: Path) -> Wait:
        """Save as the library does it; what is returned waits for the library."""

    def load(self, state: State) -> None:
        """As the restore benchmark does it."""
        self.read(self.path, state)

    def tidy(self) -> None:
        """Delete all but the last ones."""
        while len(self._written) > KEEP:
            removed(self._written.pop(0))


class TorchSave(Rival):
    """`torch.save`."""

    read, suffix = staticmethod(loads.torch_load), ".pt"

    def start(self, path: Path) -> Wait:
        """Blocks until all is written."""
        torch.save(self.state, path)
        return _nothing


class Safetensors(Rival):
    """`safetensors.torch.save_file`."""

    read, suffix = staticmethod(loads.safetensors_load), ".safetensors"

    def start(self, path: Path) -> Wait:
        """Blocks until all is written."""
        from safetensors.torch import save_file

        save_file(self.state, path)
        return _nothing


class Dcp(Rival):
    """`torch.distributed.checkpoint.save`."""

    def start(self, path: Path) -> Wait:
        """Blocks until all is written."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self.state, checkpoint_id=path, no_dist=True)
        return _nothing


class DcpAsync(Rival):
    """`async_save`; with a stager that is kept, its buffers are used again.

    A second save before the first upload has ended would overwrite them under the upload: every save waits.
    """

    background = True

    def __init__(self, state: State, folder: Path, *, cached: bool = False, shared: bool = False) -> None:
        super().__init__(state, folder)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        # Pinned memory and copies that do not block are for CUDA; staging in a thread frees the tensors no earlier.
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=shared, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options) if cached else None

    def start(self, path: Path) -> Wait:
        """Blocks while staging."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        future = async_save(self.state, checkpoint_id=path, async_stager=self._stager, no_dist=True)
        return partial(_result, future)

    def close(self) -> None:
        """Its buffers too."""
        if self._stager is not None:
            self._stager.close()


class DcpProcess(DcpAsync):
    """The same with a shared stager, and a second process that writes; it asks for a process group."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder, cached=True, shared=True)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        self._started = False

    def ready(self) -> None:
        """The group is there only while this one saves: others would use it too."""
        from torch._C._distributed_c10d import HashStore

        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def start(self, path: Path) -> Wait:
        """Blocks while staging."""
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        with contextlib.nullcontext() if self._started else _silent():
            future = async_save(
                self.state,
                checkpoint_id=path,
                async_stager=self._stager,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            if not self._started:
                # The process inherits standard error, and would log every save there.
                _result(future)
                self._started = True
        return partial(_result, future)

    def tidy(self) -> None:
        """And the group goes."""
        torch.distributed.destroy_process_group()
        super().tidy()

    def close(self) -> None:
        """And the process ends."""
        from torch.distributed.checkpoint import _async_process_executor

        super().close()
        _async_process_executor._CHECKPOINT_PROCESS = None  # its destructor ends the process


class Torchsnapshot(Rival):
    """`Snapshot.async_take`."""

    background = True
    read = staticmethod(loads.torchsnapshot_restore)

    def start(self, path: Path) -> Wait:
        """Blocks until all is copied, or written where memory is short."""
        from torchsnapshot import Snapshot, StateDict

        pending = Snapshot.async_take(str(path), {"state": StateDict(**self.state)})

        def wait() -> None:
            pending.wait()

        return wait


def contenders(many: bool) -> dict[str, Callable[[State, Path], Contender]]:
    """By name, in the order of the tables."""
    bare: dict[str, Callable[[State, Path], Contender]] = {"bare copy": partial(BareCopy, known=many)}
    if many:
        bare["bare _foreach_copy_"] = partial(BareCopy, known=False)
    return bare | {
        "evergrad": Evergrad,
        "evergrad, agent=False": partial(Evergrad, agent=False),
        "torch.save": TorchSave,
        "safetensors": Safetensors,
        "DCP save": Dcp,
        "DCP async_save": DcpAsync,
        "DCP async_save, cached": partial(DcpAsync, cached=True),
        "DCP async_save, shared": partial(DcpAsync, cached=True, shared=True),
        "DCP async_save, process": DcpProcess,
        "torchsnapshot": Torchsnapshot,
    }


def _nothing() -> None:
    """All is done already."""


def _result(response: Future[Any] | AsyncSaveResponse) -> None:
    assert isinstance(response, Future)  # nobody stages in a thread here
    response.result()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Standard error of this process, and of those it starts meanwhile, goes nowhere."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
