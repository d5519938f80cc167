"""`Compress`: an element of the list of tiers that packs what goes to the slow tier behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from evergrad.checkpoint.tiers.contract import Tier
from evergrad.checkpoint.tiers.frames import require_zstandard
from evergrad.errors import UsageError
from evergrad.wording import meant

_LEVELS = range(1, 20)


@dataclass(frozen=True, slots=True)
class Compress:
    """Pack shards, exactly, before they go to the slow tier that follows.

    >>> Compress("zstd", level=3).to_json()
    {'codec': 'zstd', 'level': 3}
    """

    codec: str = "zstd"
    level: int = 1

    def __post_init__(self) -> None:
        if self.codec != "zstd":
            hint = meant(str(self.codec), ["zstd"])
            raise UsageError(f"Compress({self.codec!r}): unknown codec.{hint} There is 'zstd'.")
        if type(self.level) is not int or self.level not in _LEVELS:
            raise UsageError(f"Compress(level={self.level!r}): expected 1 to {_LEVELS[-1]}")
        require_zstandard()

    def to_json(self) -> dict[str, Any]:
        """The settings, as the tier behind it keeps them."""
        return {"codec": self.codec, "level": self.level}

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> Compress:
        """The settings that `to_json` gave."""
        try:
            return cls(**settings)
        except TypeError as error:
            raise UsageError(f"compress={dict(settings)!r}: {error}") from None


def join_compression(tiers: Sequence[Tier | Compress]) -> list[Tier]:
    """The tiers alone, each `Compress` folded into the slow tier that follows it."""
    joined: list[Tier] = []
    waiting: Compress | None = None
    for each in tiers:
        if isinstance(each, Compress):
            if waiting is not None:
                raise _misplaced("another Compress")
            waiting = each
            continue
        if waiting is not None:
            if not getattr(each, "slow", False) or not _can_pack(each):
                raise _misplaced(type(each).__name__)
            each = replace(each, compress=waiting.to_json())  # type: ignore[type-var]
            waiting = None
        joined.append(each)
    if waiting is not None:
        raise _misplaced("nothing")
    return joined


def _can_pack(tier: object) -> bool:
    return is_dataclass(tier) and any(field.name == "compress" for field in fields(tier))


def _misplaced(found: str) -> UsageError:
    return UsageError(
        "tiers: Compress goes before a slow tier, such as Persistent: zstd is slower than a local disk "
        f"(found {found} behind it)"
    )
