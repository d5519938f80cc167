"""Bits as numbers, for comparing and judging; needs torch only for fp8."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.formats.contract import Bits

__all__ = ["finite", "values"]


def values(bits: Bits, dtype: DType) -> npt.NDArray[Any]:
    """The elements as a NumPy array that holds each of them exactly; complex ones as rows of two parts.

    bfloat16 becomes float32, fp8 and complex32 become float32 and float16 parts.
    """
    kind = dtype.layout.kind
    if dtype is DType.BFLOAT16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype.value.startswith("float8"):
        return _fp8_table(dtype)[bits]
    if kind == "bool":
        return bits
    letter = {"float": "f", "complex": "f", "int": "i", "uint": "u"}[kind]
    return np.ascontiguousarray(bits).view(f"{letter}{dtype.layout.part_bytes}")


def finite(numbers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which elements are neither NaN nor infinite; a complex one needs both parts."""
    if numbers.dtype.kind != "f":
        return np.ones(len(numbers), bool)
    found: npt.NDArray[np.bool_] = np.isfinite(numbers)
    return np.logical_and(found[:, 0], found[:, 1]) if found.ndim == 2 else found


@lru_cache
def _fp8_table(dtype: DType) -> npt.NDArray[np.float32]:
    import torch

    return torch.arange(256, dtype=torch.uint8).view(dtype.torch).to(torch.float32).numpy()
