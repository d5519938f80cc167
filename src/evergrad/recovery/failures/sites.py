"""The places of a step at which failures can be scheduled, and what happens there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from evergrad.recovery.crew import Crew
from evergrad.recovery.failures.acts import Live, LiveActs
from evergrad.recovery.failures.reaching import send
from evergrad.recovery.failures.schedule import Failures
from evergrad.recovery.failures.triggers import Trigger
from evergrad.recovery.failures.words import At, Phase
from evergrad.recovery.launched import Launched
from evergrad.recovery.membership import Keys


class Sites:
    """This rank's sites; without a schedule none of them costs anything."""

    def __init__(self, failures: Failures, crew: Crew, nodes: Sequence[str], tell: Callable[..., None]) -> None:
        self._nodes = nodes
        self._trigger: Trigger | None = None
        self._acts: LiveActs | None = None
        if failures and isinstance(crew, Launched):

            def claim(key: str, text: str) -> str:
                return crew.client.claim(key, text)  # whichever connection it has by then

            self._crew = crew
            self._acts = LiveActs(tell, find=lambda ranks: _find(crew, ranks), send=lambda *how: _send(crew, *how))
            self._trigger = Trigger(failures, claim=claim, acts=self._acts)

    def expose(self, live: Live, flipped: Callable[[str], None]) -> None:
        """The state that soft errors hit: path → tensor, the tensors themselves, asked for when one is due.

        `flipped` is called with a sentence after each.
        """
        if self._acts is not None:
            self._acts.live, self._acts.flipped = live, flipped

    def is_armed(self, step: int) -> bool:
        """Whether anything might happen now, in this step; cheap enough to be asked at every site."""
        if self._trigger is None or self._acts is None:
            return False
        return self._acts.pace is not None or self._trigger.is_armed(step, self._crew.plan.generation)

    def reach(self, phase: Phase, step: int, crew: Crew, bucket: int | None = None, at: At | None = None) -> None:
        """This rank is at a site; it may not come back from there."""
        assert self._trigger is not None
        assert self._acts is not None
        assert isinstance(crew, Launched)
        generation = crew.plan.generation
        if self._trigger.is_armed(step, generation):
            nodes = [self._node_of(crew, uid) for uid in crew.plan.members]
            self._trigger.reach(
                phase,
                step=step,
                generation=generation,
                rank=crew.rank,
                members=crew.plan.members,
                nodes=nodes,
                bucket=bucket,
                at=at,
            )
        if self._acts.pace is not None and phase is Phase.DATA:
            self._acts.pace.lap(generation)
            if self._acts.pace.is_over:
                self._acts.pace = None

    def watch(self, module: nn.Module, site: Callable[[Phase], None], is_in_step: Callable[[], bool]) -> None:
        """Reach the sites of a forward pass, and the one before a backward pass that reduces gradients.

        A pass without gradients, and one outside of a step, is an evaluation.
        """
        if self._trigger is None:
            return
        syncs: Any = module

        def trains() -> bool:
            return module.training and torch.is_grad_enabled() and is_in_step()

        module.register_forward_pre_hook(lambda *_: site(Phase.FORWARD) if trains() else None)
        module.register_forward_hook(
            lambda *_: site(Phase.BACKWARD) if trains() and syncs.require_backward_grad_sync else None
        )

    def _node_of(self, crew: Launched, uid: int) -> str:
        if uid < len(self._nodes):
            return self._nodes[uid]
        node: str = json.loads(crew.client.get(Keys.joined(uid)))["node"]  # it was started later than this process
        return node


def _find(crew: Launched, ranks: Sequence[int]) -> list[tuple[int, int | None]]:
    """Whose process each of these ranks is."""
    uids = [crew.plan.members[rank] for rank in ranks]
    about = {uid: json.loads(crew.client.get(Keys.joined(uid))) for uid in uids}
    is_spread, node = os.environ.get("EVERGRAD_SPREAD") == "1", os.environ.get("EVERGRAD_NODE")
    return [(uid, None if is_spread and about[uid]["node"] != node else about[uid]["pid"]) for uid in uids]


def _send(crew: Launched, number: int, uids: Sequence[int], whole_node: bool) -> None:
    send(crew.client, number, uids, env=os.environ, whole_node=whole_node)
