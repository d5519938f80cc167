"""A storage writer that waits for a version; what was not staged by us it captures itself.

DCP's pickled `.metadata` is never written: the shards say all that is in it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from evergrad.checkpoint import Checkpointer
from evergrad.checkpoint.pending import Pending
from evergrad.errors import StateError, UsageError

# Writers that were made and not used yet: how a stager learns the step.


class WaitingWriter(Protocol):
    """A writer that waits to be used."""

    @property
    def step(self) -> int | None:
        """The step that it writes; None if that is not known yet."""
        ...

    def claim_step(self) -> int:
        """Use it: its step, or an error if it has none."""
        ...


_waiting: weakref.WeakKeyDictionary[Checkpointer, list[weakref.ref[WaitingWriter]]] = weakref.WeakKeyDictionary()


def add_waiting_writer(checkpointer: Checkpointer, writer: WaitingWriter) -> None:
    """A writer was made."""
    remove_waiting_writer(checkpointer, writer)
    _waiting.setdefault(checkpointer, []).append(weakref.ref(writer))


def remove_waiting_writer(checkpointer: Checkpointer, writer: WaitingWriter) -> None:
    """It is being used."""
    _waiting[checkpointer] = [ref for ref in _waiting.get(checkpointer, ()) if ref() not in (None, writer)]


def waiting_writers(checkpointer: Checkpointer) -> list[WaitingWriter]:
    """Those that still live, in the order in which they were made."""
    return [writer for ref in _waiting.get(checkpointer, ()) if (writer := ref()) is not None]


# Staging into an arena: what `dcp.async_save` blocks for is one copy into shared memory.
#
# The stager is called before the writer, and the step is the writer's. So a `TierWriter` that is made announces
# itself, and the stager of the same checkpointer takes the one that waits.

STAGED = "evergrad.staged"
"""The only key of what the stager gives back. DCP plans for this one thing, and nothing of the state is left in the
trainer's process for its thread to walk."""


class StagedState:
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
        pending = stage(self._checkpointer, self._writer().claim_step(), state_dict)
        self._last = weakref.ref(pending)
        return {STAGED: StagedState(pending)}

    def synchronize_staging(self) -> None:
        """Return when the state that was staged last may change."""
        pending = self._last() if self._last is not None else None
        if pending is not None:
            pending.captured()

    def close(self) -> None:
        """Nothing: the arenas are the checkpointer's."""

    def _writer(self) -> WaitingWriter:
        found = waiting_writers(self._checkpointer)
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


class TierWriter(StorageWriter, AsyncStager):
    """Writes one version through the tiers of a checkpointer. All ranks of the job use one alike.

    It also stages, as `ArenaStager` does: `dcp.async_save(state, storage_writer=TierWriter(ck, step=120))` is enough.
    """

    def __init__(self, checkpointer: Checkpointer, step: int | None = None) -> None:
        """Without a `step`, `dcp.save` takes it from its `checkpoint_id`; `dcp.async_save` needs it here."""
        self._checkpointer = checkpointer
        self._step = None if step is None else _step_of(step)
        self._is_fixed = step is not None
        self._pending: Pending | None = None
        add_waiting_writer(checkpointer, self)

    @property
    def step(self) -> int | None:
        """The step that is written; None while it is not known."""
        return self._step

    def claim_step(self) -> int:
        """Stop waiting for a stager; the step."""
        if self._step is None:
            raise UsageError("TierWriter: the step has to be known when the state is staged: TierWriter(ck, step=…)")
        remove_waiting_writer(self._checkpointer, self)
        return self._step

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state into an arena."""
        self._pending = stage(self._checkpointer, self.claim_step(), state_dict)
        return {STAGED: StagedState(self._pending)}

    def synchronize_staging(self) -> None:
        """Return when the state that was staged may change."""
        if self._pending is not None:
            self._pending.captured()

    def close(self) -> None:
        """Nothing: the arenas are the checkpointer's."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another write begins; a `checkpoint_id` is its step."""
        if checkpoint_id is None:
            return
        step = _step_of(checkpoint_id)
        if self._is_fixed and step != self._step:
            raise UsageError(f"checkpoint_id={checkpoint_id!r}: expected {self._step}, as TierWriter was told")
        self._step = step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: where things go is the checkpointer's."""
        remove_waiting_writer(self._checkpointer, self)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Wait until every rank's shard is durable; capture first what was not staged."""
        staged = _staged(planner)
        pending = staged.pending if staged is not None else self._capture(planner)
        if pending.step != self._step:
            raise UsageError(f"step {pending.step} was staged, and this TierWriter is for step {self._step}")
        pending.wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: a version is complete when every shard is."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a step."""
        return os.fspath(checkpoint_id).isdecimal()

    def _capture(self, planner: SavePlanner) -> Pending:
        if self._step is None:
            raise UsageError("TierWriter: no step: TierWriter(ck, step=…), or a whole number as checkpoint_id")
        return stage(self._checkpointer, self._step, _state_of(planner))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "TierWriter cannot be sent to another process, the agent is one already: use AsyncCheckpointerType.THREAD"
        )


def _step_of(given: object) -> int:
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return int(given)
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if isinstance(text, str) and text.isdecimal():
        return int(text)
    raise UsageError(f"step: expected a whole number, 0 or more, found {given!r}")


def _staged(planner: SavePlanner) -> StagedState | None:
    state = getattr(planner, "state_dict", None)
    if isinstance(state, Mapping) and len(state) == 1:  # a planner of the user's may have renamed it
        only = next(iter(state.values()))
        return only if isinstance(only, StagedState) else None
    return None


def _state_of(planner: SavePlanner) -> dict[str, Any]:
    """The nested state that a planner was given; planners that alter what they give out are refused."""
    kind = type(planner)
    if not isinstance(planner, DefaultSavePlanner) or any(
        getattr(kind, name) is not getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "lookup_object", "transform_object", "create_local_plan")
    ):
        raise UsageError(
            f"planner: {kind.__module__}.{kind.__qualname__} decides what is written (expected DefaultSavePlanner, or "
            "one that only renames): convert the state before it is saved"
        )
    state: dict[str, Any] = planner.state_dict
    if planner.flatten_state_dict:
        state = unflatten_state_dict(state, planner.mappings)
        _number_parameters(state)
    return state


def _number_parameters(state: Any) -> None:
    """DCP makes text of every key; an optimizer's parameters are numbers, and `Checkpointer.restore` needs them so."""
    if not isinstance(state, dict):
        return
    for value in state.values():
        _number_parameters(value)
    if isinstance(state.get("param_groups"), list):
        numbered = state.setdefault("state", {})  # DCP has no name for an empty dict
        if isinstance(numbered, dict) and all(str(key).isdecimal() for key in numbered):
            state["state"] = {int(key): value for key, value in numbered.items()}
