"""Digests of models: every bit, name, shape and order counts; and nothing is recorded unless it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from evergrad.recovery.fingerprints import RECORD_WEIGHTS, digest, record_weights


def test_every_bit_name_shape_dtype_and_order_counts() -> None:
    base = torch.arange(6, dtype=torch.float32)
    flipped = base.clone()
    flipped.view(torch.int32)[3] ^= 1
    variants = [
        [("a", base)],
        [("a", flipped)],
        [("b", base)],
        [("a", base.reshape(2, 3))],
        [("a", base.view(torch.int32))],
        [("a", base), ("b", base[:0])],
        [("b", base[:0]), ("a", base)],
    ]
    assert len({digest(one) for one in variants}) == len(variants)


def test_how_a_tensor_lies_in_memory_does_not_count() -> None:
    grid = torch.randn(3, 4, dtype=torch.bfloat16)
    assert digest([("a", grid.t())]) == digest([("a", grid.t().contiguous())])
    assert digest([("a", torch.tensor(1.5))]) == digest([("a", torch.tensor([1.5])[0])])


def test_buffers_are_in_the_state_and_not_in_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []

    def tell(event: str, **fields: Any) -> None:
        assert event == "weight_digests"
        told.append(fields)

    model = nn.BatchNorm1d(2)
    monkeypatch.delenv(RECORD_WEIGHTS, raising=False)
    record_weights(model, tell, rank=0)
    assert told == []
    monkeypatch.setenv(RECORD_WEIGHTS, "1")
    record_weights(None, tell, rank=0)
    assert told == []
    record_weights(model, tell, rank=0)
    model(torch.randn(4, 2))
    record_weights(model, tell, rank=0)
    assert told[0]["weights"] == told[1]["weights"]
    assert told[0]["state"] != told[1]["state"]
    assert told[0]["rank"] == 0
