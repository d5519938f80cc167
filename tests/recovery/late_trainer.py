"""`trainer.py`, in which one rank takes part in a point and never hears that it was passed.

EVERGRAD_TEST_LATE=uid@step/kind: the rank's part of the confirmation reaches the others, but before it has their answer
the generation is broken. That can happen to any rank whose peer dies in the very moment; here it is made to.
EVERGRAD_TEST_DIES=uid@step/kind: this one is killed right after it has passed that point.
"""

from __future__ import annotations

import os
import runpy
import signal
import time
from pathlib import Path
from typing import Any

from evergrad.recovery.membership import PointKind
from evergrad.recovery.process_group import GroupBroken
from evergrad.recovery.step_barrier import StepBarrier

pass_point, passed = StepBarrier.pass_point, StepBarrier.mark_passed
happened: list[bool] = []


def is_here(name: str, engine: StepBarrier, point: PointKind) -> bool:
    """Whether this is the rank and the point that a variable names, for the first time."""
    uid, _, rest = os.environ.get(name, "").partition("@")
    place = f"{engine.position.step}/{point}"
    return not happened and uid == os.environ["EVERGRAD_UID"] and rest == place


def pass_or_not(engine: StepBarrier, point: PointKind, num_batches: int = 0) -> bool:
    if is_here("EVERGRAD_TEST_DIES", engine, point):
        pass_point(engine, point, num_batches)
        os.kill(os.getpid(), signal.SIGKILL)
    if not is_here("EVERGRAD_TEST_LATE", engine, point):
        return pass_point(engine, point, num_batches)
    happened.append(True)
    StepBarrier.mark_passed = lambda *_: None  # type: ignore[method-assign]
    try:
        pass_point(engine, point, num_batches)
    finally:
        StepBarrier.mark_passed = passed  # type: ignore[method-assign]
    crew: Any = engine.worker
    while crew._why_broken() is None:
        time.sleep(0.001)
    raise GroupBroken("the answer came too late")


StepBarrier.pass_point = pass_or_not  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).with_name("trainer.py")), run_name="__main__")
