"""Staging into an arena: what `dcp.async_save` blocks for is one copy into shared memory.

The stager is called before the writer, and the step is the writer's. So a `TierWriter` that is made announces itself,
and the stager of the same checkpointer takes the one that waits.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from torch.distributed.checkpoint.staging import AsyncStager

from evergrad.checkpoint import Checkpointer
from evergrad.checkpoint.board import Pending
from evergrad.errors import StateError, UsageError
from evergrad.integrations.dcp.announced import Announced, waiting

STAGED = "evergrad.staged"
"""The only key of what the stager gives back. DCP plans for this one thing, and nothing of the state is left in the
trainer's process for its thread to walk."""


class Staged:
    """A state that lies in an arena."""

    def __init__(self, pending: Pending) -> None:
        self.pending = pending

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            f"step {self.pending.step}: what ArenaStager staged lies in an arena, and cannot be pickled: use it with "
            "storage_writer=TierWriter(…) and AsyncCheckpointerType.THREAD"
        )


class ArenaStager(AsyncStager):
    """Stages a state by `Checkpointer.save`. To be used with a `TierWriter` of the same checkpointer.

    May be kept for all saves of a run: it holds nothing. A version that is being written is never overwritten by the
    next: each of a rank's two arenas is used again only when the agent has let go of it.
    """

    def __init__(self, checkpointer: Checkpointer, *, synchronize: bool = True) -> None:
        """With `synchronize=False`, `async_save` does not wait for copies from a GPU.

        `optimizer.step()` then does; whatever else changes the state calls `synchronize_staging` first.
        """
        self._checkpointer = checkpointer
        self._synchronize_after_execute = synchronize
        self._last: weakref.ref[Pending] | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state into an arena, as the step of the `TierWriter` that waits for it."""
        pending = stage(self._checkpointer, self._writer().take(), state_dict)
        self._last = weakref.ref(pending)
        return {STAGED: Staged(pending)}

    def synchronize_staging(self) -> None:
        """Return when the state that was staged last may change."""
        pending = self._last() if self._last is not None else None
        if pending is not None:
            pending.captured()

    def close(self) -> None:
        """Nothing: the arenas are the checkpointer's."""

    def _writer(self) -> Announced:
        found = waiting(self._checkpointer)
        if not found:
            raise UsageError("ArenaStager: no TierWriter(checkpointer, step=…) of this checkpointer waits to be used")
        if len(found) > 1:
            steps = ", ".join(str(writer.step) for writer in found)
            raise UsageError(
                f"ArenaStager: TierWriters for steps {steps} wait to be used: make each right before its async_save"
            )
        return found[0]


def stage(checkpointer: Checkpointer, step: int, state: object) -> Pending:
    """Save a state; an error names what cannot be stored as DCP does."""
    try:
        return checkpointer.save(step, state)
    except StateError as error:
        path, colon, rest = str(error).partition(": ")
        if not colon or " " in path:
            raise
        raise StateError(f"{path.replace('/', '.')}: {rest}") from None
