"""States to test with: real ones, ones of every dtype, and any that Hypothesis can think of."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from evergrad.dtypes import DType
from evergrad.testing import raw_bytes

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.complex_numbers()
    | st.text()
    | st.binary()
)
keys = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False) | st.binary(max_size=4)
)
tensors = st.builds(
    lambda dtype, shape: torch.zeros(shape, dtype=torch.uint8).to(dtype.torch),
    st.sampled_from([d for d in DType if d not in (DType.COMPLEX32, DType.FLOAT8_E8M0FNU)]),
    st.lists(st.integers(0, 3), max_size=3),
)
states = st.recursive(
    scalars | tensors,
    lambda children: (
        st.lists(children, max_size=4)
        | st.tuples(children, children)
        | st.dictionaries(keys, children, max_size=4)
        | st.dictionaries(keys, children, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw_bytes(a) == raw_bytes(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True) if len(a) == len(b) else [((0, 0), (1, 1))]
        return all(same(k, key) and same(v, w) for (k, v), (key, w) in pairs)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


def some_bits(dtype: DType, count: int, seed: int = 0) -> torch.Tensor:
    """Elements with random bits, NaNs and all."""
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, np.uint8))
    return (raw % 2).view(torch.bool) if dtype is DType.BOOL else raw.view(dtype.torch)


def every_dtype() -> dict[str, torch.Tensor]:
    """A matrix, a scalar and an empty tensor of every dense dtype."""
    tensors: dict[str, torch.Tensor] = {}
    for seed, dtype in enumerate(DType):
        tensors[f"{dtype}.matrix"] = some_bits(dtype, 12, seed).reshape(3, 4)
        tensors[f"{dtype}.scalar"] = some_bits(dtype, 1, seed)[0].clone()
        tensors[f"{dtype}.empty"] = torch.zeros(0, 3).to(dtype.torch)
    return tensors


def training_state() -> dict[str, object]:
    """A model with a buffer, tied weights and a view, its optimizer, and plain values."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "base": base,
        "row": base[2],
        "column": base[:, 1],
        "transposed": base.t(),
        "epoch": 3,
        "best": float("nan"),
        "history": [(1, 0.5), (2, 0.25)],
    }
