"""A job of several ranks that save a small state: each rank's state and checkpointer, and the end of its agent."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import torch
from torch import distributed

import evergrad as eg
from ranks import Rank


def rank_tiers(me: Rank, kinds: str) -> list[Any]:
    """The tiers of a job that is run with several, by their names."""
    made = {
        "memory": eg.Memory(),
        "local": eg.Local(me.folder / "disk"),
        "persistent": eg.Persistent(str(me.folder / "shared")),
    }
    return [made[kind] for kind in kinds.split("+")]


def rank_checkpointer(me: Rank, **settings: Any) -> eg.Checkpointer:
    tiers = settings.pop("tiers", [eg.Memory(), eg.Local(me.folder / "disk")])
    return eg.Checkpointer(me.folder / "run", tiers=tiers, **settings)


def rank_state(me: Rank, value: float) -> dict[str, Any]:
    return {"a": torch.full((100,), value * 100 + me.rank), "rank": me.rank, "step": int(value)}


def holds_rank_state(me: Rank, state: dict[str, Any], value: float) -> bool:
    same = bool((state["a"] == value * 100 + me.rank).all())
    return same and (state["rank"], state["step"]) == (me.rank, value)


def stop_agent(ck: eg.Checkpointer) -> int:
    """Stop the node's agent once it is done with the first arena; all ranks return when every agent is stopped."""
    while not ck._tracker.is_free(0, ck._state_capture._arenas[0].ticket.generation):
        time.sleep(0.01)
    distributed.barrier()
    agent = getattr(ck._client, "pid", None)
    assert isinstance(agent, int)
    os.kill(agent, signal.SIGSTOP)
    distributed.barrier()
    return agent


def die_with(agent: int) -> None:
    """Kill the stopped agent and this process, once all ranks are here."""
    distributed.barrier()
    with suppress(ProcessLookupError):  # another rank of the node was first
        os.kill(agent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
