"""What a checkpoint of the whole job is called: a step and an attempt."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_NAME = re.compile(r"v(\d{10,19})-(\d{2,9})")


@dataclass(frozen=True, slots=True)
class Version:
    """One checkpoint of the whole job.

    After a restart the same step may be saved again: the attempt tells the two apart, so that they never mix. A
    later attempt is newer whatever its step, because it is what the job went on with.

    >>> Version(120, 2).name, Version.parse("v0000000120-02") == Version(120, 2)
    ('v0000000120-02', True)
    >>> max(Version(500, 1), Version(120, 2), key=Version.age).name
    'v0000000120-02'
    """

    step: int
    attempt: int

    @property
    def name(self) -> str:
        """The name of its folder in every tier."""
        return f"v{self.step:010d}-{self.attempt:02d}"

    def age(self) -> tuple[int, int]:
        """Sorts versions from the oldest to the newest."""
        return self.attempt, self.step

    @classmethod
    def parse(cls, name: str) -> Version | None:
        """The version that a folder's name stands for, or None."""
        found = _NAME.fullmatch(name)
        return cls(int(found[1]), int(found[2])) if found else None

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.attempt})"


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """What is known of a version: where all of it is, when it was saved, how large it is, what was noted with it."""

    version: Version
    tiers: tuple[str, ...]
    """The tiers in which every rank's shard is complete."""
    time: str
    world_size: int
    size_bytes: int
    """Of this rank's shard."""
    meta: dict[str, Any] = field(default_factory=dict)
    unverified: bool = False
    """True if of some rank no copy has the digests of its capture: they were taken again after a restart."""

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self.version.step

    @property
    def attempt(self) -> int:
        """The attempt that saved it."""
        return self.version.attempt
