"""Two checkpoints differ where they differ, and say how much."""

from __future__ import annotations

import math
import struct
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.dtypes import DType
from evergrad.errors import UnknownTensor
from states import every_dtype, training_state


def saved(folder: Path, name: str, state: object) -> Path:
    torch.save(state, folder / name)
    return folder / name


def test_the_same_state_is_equal_across_formats(tmp_path: Path) -> None:
    a = saved(tmp_path, "a.pt", training_state())
    torch.save(training_state(), b := tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    c = eg.convert(a, tmp_path / "c.safetensors")
    for left, right in [(a, b), (b, c), (c, a)]:
        comparison = eg.compare(left, right)
        assert comparison.equal
        assert all(row.status == "equal" for row in comparison.tensors)


def test_changes_are_counted_and_measured(tmp_path: Path) -> None:
    before = torch.zeros(10)
    after = before.clone()
    after[2], after[3], after[4], after[5] = 1.5, -3, math.nan, math.inf
    row = eg.compare(saved(tmp_path, "a.pt", {"x": before}), saved(tmp_path, "b.pt", {"x": after}))["x"]
    assert (row.status, row.changed, row.max_abs, row.nonfinite_a, row.nonfinite_b) == ("changed", 4, 3.0, 0, 2)


def test_equal_means_bit_for_bit(tmp_path: Path) -> None:
    nan = torch.tensor([math.nan, 0.0])
    a, b = saved(tmp_path, "a.pt", {"x": nan}), saved(tmp_path, "b.pt", {"x": nan.clone()})
    assert eg.compare(a, b).equal
    with eg.open_checkpoint(b) as ck:
        ck.xor("x", [0, 1], [1, 1 << 31])  # another NaN, and −0
    row = eg.compare(a, b)["x"]
    assert (row.status, row.changed, row.max_abs, row.nonfinite_a) == ("changed", 2, 0.0, 1)


@pytest.mark.parametrize("dtype", list(DType))
def test_one_flipped_bit_is_found_in_every_dtype(dtype: DType, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in every_dtype().items() if name.startswith(f"{dtype}.")}
    a, b = saved(tmp_path, "a.pt", state), saved(tmp_path, "b.pt", state)
    with eg.open_checkpoint(b) as ck:
        ck.xor(f"{dtype}.matrix", [7], np.ones((1, 2) if dtype.parts == 2 else 1, dtype.bits))
    comparison = eg.compare(a, b)
    assert [row.name for row in comparison.different] == [f"{dtype}.matrix"]
    assert comparison.different[0].changed == 1


@pytest.mark.parametrize(
    ("dtype", "a", "b", "expected"),
    [
        (torch.int64, -(2**63), 2**63 - 1, float(2**64 - 1)),
        (torch.uint8, 0, 255, 255.0),
        (torch.bool, False, True, 1.0),
        (torch.bfloat16, 1.0, 1.5, 0.5),
        (torch.float8_e4m3fn, 1.0, -2.0, 3.0),
        (torch.complex64, 0, 3 + 4j, 5.0),
        (torch.float64, 1e308, -1e308, math.inf),
    ],
)
def test_the_largest_difference_is_exact(
    dtype: torch.dtype, a: complex, b: complex, expected: float, tmp_path: Path
) -> None:
    left = saved(tmp_path, "a.pt", {"x": torch.tensor([a, a], dtype=dtype)})
    right = saved(tmp_path, "b.pt", {"x": torch.tensor([a, b], dtype=dtype)})
    assert eg.compare(left, right)["x"].max_abs == expected


def test_missing_tensors_shapes_and_dtypes_are_told_apart(tmp_path: Path) -> None:
    a = saved(tmp_path, "a.pt", {"gone": torch.ones(1), "s": torch.ones(2, 3), "d": torch.ones(2), "i": torch.ones(2)})
    b = saved(
        tmp_path,
        "b.pt",
        {
            "new": torch.ones(1),
            "s": torch.ones(3, 2),
            "d": torch.ones(2).bfloat16(),
            "i": torch.ones(2, dtype=torch.complex64),
        },
    )
    comparison = eg.compare(a, b)
    assert {row.name: row.status for row in comparison.tensors} == {
        "gone": "only in a", "s": "shape", "d": "dtype", "i": "dtype", "new": "only in b",
    }  # fmt: skip
    assert comparison["s"].detail == "2×3 / 3×2"
    assert (comparison["d"].detail, comparison["d"].changed) == ("float32 / bfloat16", 0)


def test_prefixes_of_wrappers_are_ignored(tmp_path: Path) -> None:
    layer = torch.ones(2)
    a = saved(tmp_path, "a.pt", {"model": {"fc.weight": layer, "fc.bias": layer}})
    b = saved(tmp_path, "b.pt", {"model": {"_orig_mod.module.fc.weight": layer, "module.fc.bias": layer}})
    comparison = eg.compare(a, b)
    assert comparison.equal
    assert comparison["model/fc.weight"].other_name == "model/_orig_mod.module.fc.weight"


def test_a_selection_limits_the_comparison(tmp_path: Path) -> None:
    a = saved(tmp_path, "a.pt", {"x": torch.ones(2), "y": torch.ones(2)})
    b = saved(tmp_path, "b.pt", {"x": torch.ones(2), "y": torch.zeros(2), "z": torch.ones(2)})
    assert eg.compare(a, b, where="x").equal
    with pytest.raises(UnknownTensor):
        eg.compare(a, b, where="nope")


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    a = saved(tmp_path, "a.pt", training_state())
    seen: list[tuple[int, int]] = []
    eg.compare(a, a, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0


def test_values_besides_tensors_count_where_both_files_hold_some(tmp_path: Path) -> None:
    a = saved(tmp_path, "a.pt", {"x": torch.ones(2), "lr": 0.1, "array": np.ones(3)})
    b = saved(tmp_path, "b.pt", {"x": torch.ones(2), "lr": 0.9, "array": np.zeros(3)})
    comparison = eg.compare(a, b)
    assert not comparison.equal
    assert [tensor.name for tensor in comparison.different] == ["array"], "an array is a tensor, not a value"
    assert comparison.values == ("lr: 0.1 / 0.9",)
    beside = eg.compare(a, eg.convert(a, tmp_path / "a.npz", tensors_only=True))
    assert beside.equal, "an npz has no place for values"
    assert beside.note == "1 value besides tensors only in a: the other format holds none"
    assert eg.compare(a, saved(tmp_path, "c.pt", {"x": torch.ones(2), "array": np.ones(3)})).values == ("lr: 0.1 / –",)


def test_integers_of_different_types_are_compared_exactly(tmp_path: Path) -> None:
    a = saved(tmp_path, "a.pt", {"x": torch.tensor([2**53 + 1])})
    b = saved(tmp_path, "b.pt", {"x": torch.tensor([2**53], dtype=torch.uint64)})
    assert eg.compare(a, b)["x"].changed == 1


def test_objects_are_compared_by_class_and_by_everything_that_the_pickle_says_of_them(tmp_path: Path) -> None:
    first = saved(tmp_path, "a.pt", {"x": torch.ones(2), "when": timedelta(days=2)})
    again = saved(tmp_path, "b.pt", {"x": torch.ones(2), "when": timedelta(days=2)})
    other = saved(tmp_path, "c.pt", {"x": torch.ones(2), "when": timedelta(days=3)})
    assert eg.compare(first, again).verdict == "equal"
    assert eg.compare(first, other).verdict == "different"
    plain = eg.convert(first, tmp_path / "a.safetensors", tensors_only=True)
    beside = eg.compare(first, plain)
    assert (beside.verdict, beside.uncompared) == ("unknown", {"when": "datetime.timedelta"})


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0.0, -0.0),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        ([0.0, (1.0, {"x": 0.0})], [0.0, (1.0, {"x": -0.0})]),
        (1, 1.0),
        (1, True),
        (0.0, False),
        (np.float64(0.0), np.float64(-0.0)),
        (struct.unpack("<d", bytes(6) + b"\xf8\x7f")[0], struct.unpack("<d", b"\1" + bytes(5) + b"\xf8\x7f")[0]),
    ],
)
def test_plain_values_are_compared_by_type_and_to_the_bit(a: object, b: object, tmp_path: Path) -> None:
    for name, value in (("a.pt", a), ("again.pt", a), ("b.pt", b)):
        torch.save({"w": torch.ones(2), "value": value}, tmp_path / name)
    assert eg.compare(tmp_path / "a.pt", tmp_path / "again.pt").verdict == "equal"
    comparison = eg.compare(tmp_path / "a.pt", tmp_path / "b.pt")
    assert comparison.verdict == "different"
    assert len(comparison.values) == 1
    eg.convert(tmp_path / "b.pt", tmp_path / "b.safetensors")
    assert eg.compare(tmp_path / "b.pt", tmp_path / "b.safetensors").verdict == "equal"
    assert eg.compare(tmp_path / "a.pt", tmp_path / "b.safetensors").verdict == "different"
