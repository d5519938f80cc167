"""Two checkpoints differ where they differ, and say how much."""

from __future__ import annotations

import json
import math
import struct
import warnings
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.dtypes import DType
from evergrad.errors import UnknownTensor
from evergrad.records import Role
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


def quantised(scale: float) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: torch.Tensor = torch._make_per_tensor_quantized_tensor(torch.ones(3, dtype=torch.int8), scale, 0)
    return made


def sparse(size: int) -> torch.Tensor:
    with torch.sparse.check_sparse_tensor_invariants(True):  # torch 2.11 warns where nobody has chosen
        return torch.sparse_coo_tensor([[0]], [1.0], (size,))


def optimizer(step: int) -> dict[str, object]:
    return {"state": {0: {"step": step, "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1}]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("a", "b", "where", "line"),
    [
        (quantised(0.1), quantised(0.2), "odd", "odd/quantizer/0: 0.1 / 0.2"),
        (quantised(0.1), quantised(0.2), "odd/int_repr", "odd/quantizer/0: 0.1 / 0.2"),
        (quantised(0.1), quantised(0.2), "**", "odd/quantizer/0: 0.1 / 0.2"),
        (quantised(0.1), quantised(0.2), "re:^o", "odd/quantizer/0: 0.1 / 0.2"),
        (quantised(0.1), quantised(0.2), "role:model", "odd/quantizer/0: 0.1 / 0.2"),
        (sparse(4), sparse(5), "odd", 'odd/size: {"torch.Size": [4]} / {"torch.Size": [5]}'),
        (sparse(4), sparse(5), "odd/values", 'odd/size: {"torch.Size": [4]} / {"torch.Size": [5]}'),
        (timedelta(1), timedelta(2), "odd", "odd/()/0: 1 / 2"),
        (3, 4, "odd", "odd: 3 / 4"),
        (3, 4, ["w", "odd"], "odd: 3 / 4"),
        ({"x": [3]}, {"x": [4]}, "odd", "odd/x/0: 3 / 4"),
        ({"x": [3]}, {"x": (3,)}, "odd/x", "odd/x: a list / a tuple"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_selection_compares_values_as_well(
    a: object, b: object, where: str | list[str], line: str, tmp_path: Path
) -> None:
    left = saved(tmp_path, "a.pt", {"w": torch.ones(2), "odd": a, "rest": 1})
    right = saved(tmp_path, "b.pt", {"w": torch.ones(2), "odd": b, "rest": 2})
    comparison = eg.compare(left, right, where=where)
    assert comparison.verdict == "different"
    assert comparison.values == ((line,) if where != "**" else (line, "rest: 1 / 2"))
    assert not comparison.different
    assert eg.compare(left, right, where="w").equal
    assert eg.compare(left, left, where=where).equal


def test_a_selection_by_path_or_role_takes_the_plain_values_of_an_optimizer(tmp_path: Path) -> None:
    a = saved(tmp_path, "a.pt", {"model": {"w": torch.ones(2)}, "optimizer": optimizer(5), "epoch": 1})
    b = saved(tmp_path, "b.pt", {"model": {"w": torch.ones(2)}, "optimizer": optimizer(6), "epoch": 2})
    for where in ("optimizer/**", "optimizer", "role:optimizer", Role.OPTIMIZER, "re:step"):
        comparison = eg.compare(a, b, where=where)
        assert comparison.values == ("optimizer/state/0/step: 5 / 6",), where
    assert eg.compare(a, b, where="role:model").equal
    assert eg.compare(a, b, where="role:other").values == ("epoch: 1 / 2",)
    only = eg.compare(a, b, where="epoch")
    assert (only.tensors, only.verdict) == ((), "different")
    assert eg.compare(a, a, where="epoch").verdict == "equal", "a value alone can be compared"


def test_a_selection_finds_what_only_the_second_file_has(tmp_path: Path) -> None:
    a = saved(tmp_path, "a.pt", {"x": torch.ones(2)})
    b = saved(tmp_path, "b.pt", {"x": torch.ones(2), "more": {"y": torch.ones(2), "z": 3}})
    comparison = eg.compare(a, b, where="more")
    assert [(row.name, row.status) for row in comparison.tensors] == [("more/y", "only in b")]
    assert comparison.values == ("more/z: – / 3",)
    assert eg.compare(a, b, where="x").equal


@pytest.mark.parametrize("swapped", [False, True])
def test_values_that_the_other_format_has_no_place_for_are_named_and_unknown(swapped: bool, tmp_path: Path) -> None:
    state = {"x": torch.ones(2), "y": torch.ones(2), "lr": 0.1, "epoch": 3, "empty": {}}
    a = saved(tmp_path, "a.pt", state)
    b = eg.convert(a, tmp_path / "a.npz", tensors_only=True)
    comparison = eg.compare(*((b, a) if swapped else (a, b)))
    assert comparison.verdict == "unknown"
    assert comparison.uncompared == {
        "lr": "a plain value: 0.1", "epoch": "a plain value: 3", "empty": "an empty dict",
    }  # fmt: skip
    assert comparison.note == (
        f"3 values besides tensors in {'b' if swapped else 'a'}, and none in the other file to compare with. "
        "To compare tensors alone: tensors_only=True, or --tensors-only."
    )
    tensors = eg.compare(*((b, a) if swapped else (a, b)), tensors_only=True)
    assert (tensors.verdict, tensors.uncompared, tensors.note) == ("equal", {}, "")
    assert tensors.left_out == comparison.uncompared
    assert eg.compare(a, b, where="x").equal
    assert eg.compare(a, b, where="lr").uncompared == {"lr": "a plain value: 0.1"}


def test_tensors_only_leaves_out_values_and_not_the_scale_of_a_quantised_tensor(tmp_path: Path) -> None:
    one = {"q": quantised(0.1), "lr": 0.1, "when": timedelta(1), "l": [1]}
    two = {"q": quantised(0.2), "lr": 0.2, "when": timedelta(2), "l": (2,)}
    a, b = saved(tmp_path, "a.pt", one), saved(tmp_path, "b.pt", two)
    comparison = eg.compare(a, b, tensors_only=True)
    assert comparison.values == ("q/quantizer/0: 0.1 / 0.2",)
    assert set(comparison.left_out) == {"lr", "when", "l/0"}
    assert eg.compare(a, a, tensors_only=True).verdict == "equal"
    c = saved(tmp_path, "c.pt", {**two, "q": quantised(0.1)})
    assert eg.compare(a, c, tensors_only=True).verdict == "equal"


@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        ({1: 2}, {"1": 2}, 'x/1: the key 1 / the key "1"'),
        ({1: torch.ones(1)}, {"1": torch.ones(1)}, 'x/1: the key 1 / the key "1"'),
        ({None: 1}, {"None": 1}, 'x/None: the key null / the key "None"'),
        ({True: 1}, {1: 1}, "x/True: 1 / –"),
        ((1, 2), [1, 2], "x: a tuple / a list"),
        ([(1, 2)], ([1, 2],), "x/0: a tuple / a list"),
        ((torch.ones(1),), [torch.ones(1)], "x: a tuple / a list"),
        ((0,), {0: 0}, "x: a tuple / a dict"),
        ({}, [], "x: an empty dict / an empty list"),
        ({}, 0, "x: an empty dict / 0"),
        ({1, 2}, frozenset({1, 2}), "x: a set / a frozenset"),
        (timedelta, "datetime.timedelta", 'x: datetime.timedelta / "datetime.timedelta"'),
        (torch.strided, "torch.strided", 'x: torch.layout / "torch.strided"'),
        (torch.float32, "float32", 'x: {"torch.dtype": "float32"} / "float32"'),
    ],
    ids=lambda value: str(value)[:24],
)
def test_values_of_another_kind_differ(a: object, b: object, line: str, tmp_path: Path) -> None:
    left = saved(tmp_path, "a.pt", {"w": torch.ones(2), "x": a})
    right = saved(tmp_path, "b.pt", {"w": torch.ones(2), "x": b})
    comparison = eg.compare(left, right)
    assert comparison.verdict == "different"
    assert line in comparison.values
    more = {"x/True: 1 / –": ["x/1: – / 1"], "x/0: a tuple / a list": ["x: a list / a tuple"]}
    assert [told for told in comparison.values if told != line] == more.get(line, [])
    assert eg.compare(right, left).verdict == "different"
    assert eg.compare(left, left).verdict == "equal"


def test_an_empty_container_that_is_missing_differs(tmp_path: Path) -> None:
    a = saved(tmp_path, "a.pt", {"w": torch.ones(2), "x": {}})
    b = saved(tmp_path, "b.pt", {"w": torch.ones(2)})
    assert eg.compare(a, b).values == ("x: an empty dict / –",)
    for suffix in ("safetensors", "h5"):
        assert eg.compare(a, eg.convert(a, tmp_path / f"a.{suffix}")).equal


def test_what_is_outside_of_the_comparison_by_design(tmp_path: Path) -> None:
    """docs/formats.md states all of it."""
    w = torch.ones(2)
    a = saved(tmp_path, "a.pt", {"a": w, "b": w, "x": {"i": 1, "j": 2}, "n": np.ones(2)})
    b = saved(
        tmp_path,
        "b.pt",
        OrderedDict(
            n=torch.ones(2, dtype=torch.float64),
            x={"j": 2, "i": 1},
            b=torch.nn.Parameter(torch.ones(2)),
            a=torch.ones(2, requires_grad=True),
        ),
    )
    assert eg.compare(a, b).verdict == "equal"
    tensors = saved(tmp_path, "c.pt", {"l": [w, w]})
    assert eg.compare(tensors, eg.convert(tensors, tmp_path / "c.npz", tensors_only=True)).equal


def test_nothing_is_called_equal_where_nothing_was_compared(tmp_path: Path) -> None:
    empty = saved(tmp_path, "a.pt", {})
    assert eg.compare(empty, empty).verdict == "unknown"
    number = saved(tmp_path, "b.pt", 3)
    assert eg.compare(number, number).verdict == "equal"
    assert eg.compare(number, number, tensors_only=True).verdict == "unknown"
    assert eg.compare(number, saved(tmp_path, "c.pt", 4)).verdict == "different"


def test_values_in_a_shard_are_compared_and_kept(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        name = saved(tmp_path / folder, "pytorch_model-00001-of-00001.bin", {"w": torch.ones(2), "v": value}).name
        index = {"metadata": {}, "weight_map": {"w": name}}
        (tmp_path / folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    comparison = eg.compare(tmp_path / "a", tmp_path / "b")
    assert comparison.verdict == "different"
    assert comparison.values == ("v: 1 / 2",)
    assert eg.compare(tmp_path / "a", tmp_path / "a").equal
    assert eg.compare(tmp_path / "a", eg.convert(tmp_path / "a", tmp_path / "c.safetensors")).equal
