"""Everything of a state that is no tensor, as text for the header; written anew only where it changed."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import torch

from evergrad.checkpoint.layout import escaped
from evergrad.errors import StateError
from evergrad.state import outline
from evergrad.state.tree import MAX_DEPTH

# Of these, equal values of the same type have the same text, and none can change in place.
_SETTLED = {int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_KEYS = {str, int, bool, bytes, type(None)}


class Values:
    """The texts of a template's holes as they were last seen."""

    def __init__(self, count: int) -> None:
        self._seen: list[object] = [None] * count
        self._texts: list[bytes] = [b""] * count

    def texts(self, slots: Sequence[int], values: Sequence[Any]) -> list[bytes] | None:
        """Today's values as escaped JSON, each in its slot; None if one now holds a tensor or cannot be stored."""
        for slot, value in zip(slots, values, strict=True):
            kind = type(value)
            seen = (kind, value) if kind in _SETTLED else _trace(value)
            if seen is None or seen != self._seen[slot]:
                text = _text(value)
                if text is None:
                    return None
                self._texts[slot], self._seen[slot] = text, seen
        return list(self._texts)


def _text(value: object) -> bytes | None:
    try:
        walked = outline(value, lambda thing: isinstance(thing, torch.Tensor))
    except StateError:  # the full walk will say so, and at which path
        return None
    if walked.leaves:
        return None
    return escaped(json.dumps(walked.root, separators=(",", ":"), allow_nan=False))


def _trace(value: object) -> list[object] | None:
    """What the text of a value depends on, to be compared with the trace of another day; None if nobody can tell.

    Level by level, as a template reads. Only things that cannot change in place are kept, never a container.
    """
    trace: list[object] = []
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        kinds = [*map(type, level)]
        trace.append(kinds)
        below: list[Any] = []
        different = dict.fromkeys(kinds)
        for kind in different:
            group: list[Any] = level if len(different) == 1 else [thing for thing in level if type(thing) is kind]
            if kind in _SETTLED:
                trace.append(group)
            elif kind is float:  # 0.0 equals -0.0; a NaN equals nothing and is written again
                trace += (group, [*map(math.copysign, repeat(1.0), group)])
            elif kind is list or kind is tuple:
                trace.append([*map(len, group)])
                below.extend(chain.from_iterable(group))
            elif kind is dict or (kind is OrderedDict and not any(map(vars, group))):  # nor torch's metadata
                keys = [*chain.from_iterable(group)]
                key_kinds = [*map(type, keys)]
                if not {*key_kinds} <= _KEYS:
                    return None
                trace += ([*map(len, group)], keys, key_kinds)
                below.extend(chain.from_iterable(thing.values() for thing in group))
            else:
                return None
        if not below:
            return trace
        level = below
    return None
