"""A job as the reduction of gradients sees it, without one: for tests that need no processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from evergrad.recovery.gradients import BucketLayout
from evergrad.recovery.process_group import Group

AnyGroup = TypeVar("AnyGroup", bound=Group)


class Around(Generic[AnyGroup]):
    """`evergrad.recovery.gradients.ReductionContext` over some group."""

    def __init__(self, group: AnyGroup, share: float, *, shares_buffers: bool) -> None:
        self.now, self.share, self._shares_buffers = group, share, shares_buffers
        self.count = 0
        self.layout: BucketLayout | None = None
        self.sites: list[tuple[int, str]] = []
        self.at_end: Callable[[], None] = lambda: None

    def group(self) -> AnyGroup:
        return self.now

    def weight(self) -> float:
        return self.share

    def passes(self) -> int:
        return self.count

    def root(self) -> int:
        return 0

    def misuse(self) -> str:
        return ""

    def shares_buffers(self) -> bool:
        return self._shares_buffers

    def reach_site(self, bucket: int, at: str) -> None:
        self.sites.append((bucket, at))

    def backward_ended(self) -> None:
        self.at_end()
