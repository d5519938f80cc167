"""The places of a step at which failures can be scheduled, and what happens there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from evergrad.recovery.crew import Crew, Launched
from evergrad.recovery.failures import At, Failures, Phase
from evergrad.recovery.membership import Keys
from evergrad.recovery.triggers import Trigger

__all__ = ["Sites"]


class Sites:
    """This rank's sites; without a schedule none of them costs anything."""

    def __init__(self, failures: Failures, crew: Crew, nodes: Sequence[str], tell: Callable[..., None]) -> None:
        self._nodes, self._tell = nodes, tell
        self._trigger: Trigger | None = None
        if failures and isinstance(crew, Launched):

            def claim(key: str, text: str) -> str:
                return crew.client.claim(key, text)  # whichever connection it has by then

            self._trigger = Trigger(failures, claim=claim, kill=lambda ranks: self._kill(crew, ranks))

    def is_armed(self, step: int) -> bool:
        """Whether anything might happen in this step."""
        return self._trigger is not None and self._trigger.is_armed(step)

    def reach(self, phase: Phase, step: int, crew: Crew, bucket: int | None, at: At | None) -> None:
        """This rank is at a site; it may not come back from there."""
        assert self._trigger is not None
        assert isinstance(crew, Launched)
        nodes = [self._node_of(crew, uid) for uid in crew.plan.members]
        self._trigger.reach(
            phase,
            step=step,
            generation=crew.plan.generation,
            rank=crew.rank,
            members=crew.plan.members,
            nodes=nodes,
            bucket=bucket,
            at=at,
        )

    def watch(self, module: nn.Module, site: Callable[[Phase], None]) -> None:
        """Reach the sites of a forward pass, and the one before a backward pass that reduces gradients."""
        if self._trigger is None:
            return
        syncs: Any = module
        module.register_forward_pre_hook(lambda *_: site(Phase.FORWARD) if module.training else None)
        module.register_forward_hook(
            lambda *_: site(Phase.BACKWARD) if module.training and syncs.require_backward_grad_sync else None
        )

    def _node_of(self, crew: Launched, uid: int) -> str:
        if uid < len(self._nodes):
            return self._nodes[uid]
        node: str = json.loads(crew.client.get(Keys.joined(uid)))["node"]  # it was started later than this process
        return node

    def _kill(self, crew: Launched, ranks: Sequence[int]) -> None:
        """End these ranks together, by SIGKILL, this one last."""
        uids = [crew.plan.members[rank] for rank in ranks]
        pids = [json.loads(crew.client.get(Keys.joined(uid)))["pid"] for uid in uids]
        self._tell("killing", ranks=list(ranks), uids=uids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
