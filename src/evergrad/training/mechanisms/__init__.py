"""How a training is spread over processes: session.py is the contract, then one file a mechanism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evergrad.wording import checked_choice

if TYPE_CHECKING:
    from evergrad.training.mechanisms.session import Session
    from evergrad.training.settings import Training
    from evergrad.training.workloads.workload import Workload

__all__ = ["MECHANISMS", "make_session"]

MECHANISMS = ("single", "ddp")


def make_session(training: Training, workload: Workload) -> Session:
    """This rank's part of a training, freshly initialised."""
    checked_choice("mechanism", training.mechanism, MECHANISMS)
    if training.mechanism == "ddp":
        from evergrad.training.mechanisms.ddp import DdpSession

        return DdpSession(training, workload)
    from evergrad.training.mechanisms.single import SingleSession

    return SingleSession(training, workload)
