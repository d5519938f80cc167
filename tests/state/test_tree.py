"""A nested state goes into named tensors and JSON, and comes back the same."""

from __future__ import annotations

import json
import math
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.dtypes import DType
from evergrad.errors import StateError
from evergrad.records import Role
from evergrad.state import Skeleton, flatten, unflatten
from states import keys, same, states


class Colour(str, Enum):  # noqa: UP042 - people still write it so
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Epoch(int):
    pass


def _freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def through_json(state: Any) -> Any:
    """As if every tensor had been written to a file on its own and read again."""
    flat = flatten(state)
    skeleton = Skeleton.loads(flat.skeleton.dumps())
    return unflatten({path: tensor.clone() for path, tensor in flat.tensors.items()}, skeleton)


@settings(max_examples=200, deadline=None)
@given(states)
def test_any_state_comes_back_the_same(state: Any) -> None:
    assert same(through_json(state), state)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(keys, st.just(torch.ones(1)), max_size=6))
def test_every_tensor_has_a_path_of_its_own(state: Any) -> None:
    assert len(flatten(state).tensors) == len(state)


@pytest.mark.parametrize("dtype", list(DType))
def test_every_dense_dtype_is_kept(dtype: DType) -> None:
    bits = torch.arange(dtype.itemsize * 6, dtype=torch.uint8)
    tensor = (bits % 2).view(torch.bool) if dtype is DType.BOOL else bits.view(dtype.torch)
    assert same(through_json({"x": tensor, "scalar": tensor[0]}), {"x": tensor, "scalar": tensor[0]})


def test_the_skeleton_is_json_without_extensions() -> None:
    text = flatten({"a": math.nan, "b": math.inf, 3: -0.0, "big": 2**100}).skeleton.dumps()
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def test_key_types_are_kept_and_their_paths_do_not_collide() -> None:
    state = {1: torch.ones(1), "1": torch.ones(2), b"1": torch.ones(3), "a/b": torch.ones(4), "a": {"b": torch.ones(5)}}
    flat = flatten(state)
    assert set(flat.tensors) == {"1%int", "1", "1%bytes", "a%2Fb", "a/b"}
    assert same(through_json(state), state)


def test_tied_tensors_and_views_share_again() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"w": base, "tied": base, "row": base[1], "t": base.t(), "bits": base.view(torch.int32)}
    back = through_json(state)
    assert same(back, state)
    assert back["t"].stride() == (1, 4)
    back["w"][1, 2] = -1
    assert back["tied"][1, 2] == back["row"][2] == back["t"][2, 1] == -1
    assert back["bits"][1, 2] == torch.tensor([-1.0]).view(torch.int32)[0]


def test_overlapping_and_expanded_tensors_share_again() -> None:
    line = torch.arange(10.0)
    state = {
        "left": line[:6],
        "right": line[4:],
        "wide": torch.full((1, 1), 3.0).expand(5, 2),
        "windows": line.unfold(0, 4, 1),
    }
    back = through_json(state)
    assert same(back, state)
    assert back["wide"].stride() == (0, 0)
    back["left"][5] = 99
    assert back["right"][1] == 99


def test_a_slice_of_a_huge_storage_is_kept_as_the_slice() -> None:
    flat = flatten({"x": torch.zeros(1_000_000)[10:20]})
    assert not flat.skeleton.sharing.views
    flat = flatten({"x": (huge := torch.zeros(1_000_000))[10:20], "y": huge[15:30]})
    assert flat.skeleton.sharing.sizes[0] < 200


def test_tensors_are_not_copied_and_the_same_ones_come_back_in_the_same_process() -> None:
    base = torch.zeros(4, 4)
    flat = flatten({"a": base, "b": base[1:]})
    back = unflatten(flat.tensors, flat.skeleton)
    assert back["a"].data_ptr() == base.data_ptr()
    assert back["b"].data_ptr() == base[1:].data_ptr()


def test_modules_and_optimizers_are_asked_for_their_state_and_roles() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.ones(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    flat = flatten({"net": model, "opt": optimizer})
    roles = flat.skeleton.roles
    assert roles["net/0.weight"] is Role.MODEL
    assert roles["net/mask"] is Role.BUFFER
    assert roles["opt/state/0/exp_avg"] is Role.OPTIMIZER
    model.load_state_dict(through_json({"net": model})["net"])
    optimizer.load_state_dict(through_json({"opt": optimizer})["opt"])


def test_the_state_dicts_metadata_is_kept() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert through_json(state)._metadata == state._metadata


def test_simple_tuples_are_keys_and_subclasses_of_numbers_are_numbers() -> None:
    state = {(0, "a"): torch.ones(1), "b": bytearray(b"x"), "plain": Epoch(7)}
    back = through_json(state)
    assert back[0, "a"].tolist() == [1]
    assert type(back["b"]) is bytearray
    assert back["plain"] == 7


def test_odd_numpy_arrays_are_kept() -> None:
    base = np.arange(6.0)
    fields = np.zeros(3, [("a", "i1"), ("b", "f4")])
    state = {"reversed": base[::-1], "field": fields["b"], "frozen": np.broadcast_to(np.float32(1), (2, 2))}
    back = through_json(state)
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array)


def test_both_names_of_a_tied_buffer_are_buffers() -> None:
    model = torch.nn.Module()
    model.register_buffer("a", torch.ones(2))
    model.register_buffer("b", model.a)
    assert set(flatten({"m": model}).skeleton.roles.values()) == {Role.BUFFER}


def test_numpy_values_and_torch_values_are_kept() -> None:
    state = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "big-endian": np.arange(3, dtype=">f8"),
        "text": np.array(["a", "bc"]),
        "scalar": np.float32(0.1),
        "random": np.random.RandomState(3).get_state(),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "set": {1, "a"},
    }
    assert same(through_json(state), state)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised"),
        (lambda: torch.zeros(2, dtype=torch.float4_e2m1fn_x2), "float4_e2m1fn_x2"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (object, "builtins.object"),
        (lambda: {(1, (2,)): 3}, "key of type tuple"),
        (lambda: Colour.RED, "test_tree.Colour"),
        (lambda: Level.LOW, "test_tree.Level"),
        (lambda: torch.nn.LazyLinear(2), "no shape yet"),
        (lambda: torch.nn.Linear, "builtins.type"),
        (lambda: np.ma.masked_array([1.0], [True]), "masked array"),
        (_freed, "freed"),
        (lambda: len, "builtin_function"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*", "ignore:torch.ao.quantization:DeprecationWarning")
def test_what_cannot_be_stored_is_refused_by_name_and_place(value: Any, word: str) -> None:
    with pytest.raises(StateError, match=word) as caught:
        flatten({"model": [value()]})
    assert str(caught.value).startswith("model/0")
    assert "\n" not in str(caught.value)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(StateError, match="containing itself"):
        flatten(state)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema_version": 99, "root": null}',
        '{"schema_version": 1}',
        '{"schema_version": 1, "root": {"nonsense": 1}}',
        '{"schema_version": 1, "root": {"tensor": "missing"}}',
        '{"schema_version": 1, "root": {"dict": [["a"]]}}',
        '{"schema_version": 1, "root": {"list": 3}}',
        '{"schema_version": 1, "root": {"array": ["O", [1], ""]}}',
        '{"schema_version": 1, "root": {"torch.dtype": "load"}}',
        '{"schema_version": 1, "root": {"object": "os.system", "parts": []}}',
        '{"schema_version": 1, "root": null, "sharing": {"sizes": [4], "views": {"x": [0, 0]}}}',
        '{"schema_version": 1, "root": {"tensor": "x"}, "sharing": {"sizes": [4], "views": {"x": [0, 0, [100]]}}}',
        '{"schema_version": 1, "root": {"tensor": "x"}, "sharing": {"sizes": [4], "views": {"x": [7, 0, [1]]}}}',
        '{"schema_version": 1, "root": ' + '{"list": [' * 5000 + "]}" * 5000 + "}",
    ],
    ids=lambda text: text[:60],
)
def test_a_damaged_skeleton_is_refused(text: str) -> None:
    with pytest.raises(StateError) as caught:
        unflatten({"x": torch.zeros(2, 2)[:, 0]}, Skeleton.loads(text))
    assert "\n" not in str(caught.value)
