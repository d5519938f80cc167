"""Loading a verified shard in place: what is touched, what is refused, and what follows the checkpoint."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from sources import MemorySource, SharedSource, bytes_of, load, network, refusal
from torch import nn

from evergrad.checkpoint.restore.load_state import prepare
from evergrad.errors import StateError, UnknownTensor, UsageError
from evergrad.state import flatten, unflatten
from evergrad.testing import raw_bytes
from states import every_dtype, same, states, training_state


@given(states)
def test_a_state_of_the_same_form_gets_every_value(state: Any) -> None:
    flat = flatten({"state": state})
    live = unflatten({path: torch.zeros_like(tensor) for path, tensor in flat.tensors.items()}, flat.skeleton)
    load(live, MemorySource({"state": state}))
    assert same(live["state"], state)


def test_tensors_in_containers_are_filled_and_values_replaced() -> None:
    Point = namedtuple("Point", "x y")

    def state(fill: float, number: int, names: list[str], best: float | None) -> dict[str, Any]:
        return {
            "t": torch.full((2,), fill),
            "list": [torch.full((1,), fill), number],
            "pair": (torch.full((1,), fill), number),
            "point": Point(number, torch.full((1,), fill)),
            "epoch": number,
            "array": np.full(3, fill),
            "names": np.array(names),
            "best": best,
        }

    live, then = state(0, 0, ["a"], None), state(1, 3, ["b"], 0.5)
    objects = {key: live[key] for key in ("t", "list", "array", "names")} | {"in pair": live["pair"][0]}
    load(live, MemorySource(then))
    assert same({**live, "point": tuple(live["point"])}, {**then, "point": tuple(then["point"])})
    assert all(live[key] is objects[key] for key in ("t", "list", "array", "names"))
    assert live["pair"][0] is objects["in pair"]
    assert isinstance(live["point"], Point)


def test_an_unchanged_tuple_stays_the_same_object() -> None:
    live = {"pair": (torch.zeros(1), 1)}
    pair = live["pair"]
    load(live, MemorySource({"pair": (torch.ones(1), 1)}))
    assert live["pair"] is pair
    root = (torch.zeros(1), 1)
    load(root, MemorySource((torch.ones(1), 1)))
    assert float(root[0]) == 1


def test_values_of_an_immutable_state_are_refused() -> None:
    found = refusal((torch.zeros(1), 1), MemorySource((torch.ones(1), 2)))
    assert re.search("the state is a tuple, whose values cannot be replaced", found.text)
    assert found.is_clean, found
    live = {"fixed": MappingProxyType({"t": torch.zeros(1), "n": 1})}
    found = refusal(live, MemorySource({"fixed": {"t": torch.ones(1), "n": 2}}))
    assert re.search("fixed/n: a value in a mappingproxy cannot be replaced", found.text)
    assert found.is_clean, found


def test_values_follow_the_checkpoint_as_a_rollback_needs_it() -> None:
    history, metrics = [1, 2, 3], defaultdict(list, {1: [0.5], 2: [0.25]})
    live = {"model": nn.Linear(1, 1), "history": history, "metrics": metrics, "best": None}
    saved = MemorySource({"model": nn.Linear(1, 1), "history": [1], "metrics": {1: [0.5]}, "best": {"loss": 0.5}})
    load(live, saved)
    assert live["history"] is history
    assert history == [1]
    assert live["metrics"] is metrics
    assert metrics == {1: [0.5]}
    assert live["best"] == {"loss": 0.5}
    history.append(2)
    prepare(live, saved).apply()
    assert history == [1], "the values are made anew each time"


def test_a_value_that_only_the_checkpoint_has_is_added() -> None:
    live: dict[str, Any] = {"model": nn.Linear(1, 1)}
    load(live, MemorySource({"model": nn.Linear(1, 1), "epoch": 3}))
    assert live["epoch"] == 3


def test_a_value_that_only_the_live_state_has_is_refused() -> None:
    live, saved = {"model": nn.Linear(1, 1), "epoch": 0}, MemorySource({"model": nn.Linear(1, 1)})
    found = refusal(live, saved)
    assert re.search("^epoch: not in the checkpoint", found.text)
    assert found.is_clean, found
    assert load(live, saved, strict=False) == ("epoch: not in the checkpoint",)
    assert live["epoch"] == 0


def test_the_type_of_a_value_comes_back_too() -> None:
    live = {"t": torch.zeros(1), "a": 1, "b": 0.0, "c": 1, "d": [1], "e": float("nan")}
    then = {"t": torch.zeros(1), "a": True, "b": -0.0, "c": 1.0, "d": (1,), "e": float("inf")}
    load(live, MemorySource(then))
    assert same(live, then)


def test_ordered_dicts_and_nested_objects_are_found_anywhere() -> None:
    live = OrderedDict(deep=[{"nets": (nn.Linear(2, 2), nn.Linear(2, 2))}], n=1)
    then = OrderedDict(deep=[{"nets": (nn.Linear(2, 2), nn.Linear(2, 2))}], n=2)
    load(live, MemorySource(then))
    assert bytes_of(live) == bytes_of(then)
    assert live["n"] == 2


def test_a_whole_training_state_in_plain_containers_comes_back() -> None:
    for source in (MemorySource, SharedSource):
        live, then = training_state(), training_state()
        with torch.no_grad():
            for tensor in flatten(then).tensors.values():
                tensor += 1
        then["epoch"] = 9
        load(live, source(then))
        assert bytes_of(live) == bytes_of(then)
        assert live["row"].data_ptr() == live["base"][2].data_ptr()


def test_every_dtype_is_filled_to_the_bit() -> None:
    then = every_dtype()
    live = {name: torch.zeros_like(tensor) for name, tensor in then.items()}
    load(live, MemorySource(then))
    assert all(raw_bytes(live[name]) == raw_bytes(then[name]) for name in then)


@pytest.mark.parametrize("size", [3, 300])
def test_strided_targets_are_filled_as_they_lie(size: int) -> None:
    base = torch.zeros(2, 3, size, size)
    live = {
        "channels last": torch.zeros(2, 3, size, size).contiguous(memory_format=torch.channels_last),
        "transposed": torch.zeros(3, size).t(),
        "slice": base[:, 1],
        "leaf": torch.zeros(size, requires_grad=True),
        "conjugated": torch.zeros(size, dtype=torch.complex64).conj(),
        "part": nn.Parameter(torch.zeros(size * size))[1:],
    }
    strides = {name: tensor.stride() for name, tensor in live.items()}
    then = {name: torch.randn(tensor.shape, dtype=tensor.dtype) for name, tensor in live.items()}
    load(live, MemorySource(then))
    assert all(raw_bytes(live[name].resolve_conj()) == raw_bytes(then[name]) for name in then)
    assert {name: tensor.stride() for name, tensor in live.items()} == strides
    assert not base[:, 0].any()
    assert not base[:, 2].any()


def test_large_tensors_are_copied_in_pieces_and_all_of_them() -> None:
    then = {"large": torch.randn((20 << 20) + 3), "odd": torch.randn(12_345), "view": torch.randn(300, 300)[:, 1:]}
    live = {name: torch.zeros(tensor.shape) for name, tensor in then.items()}
    load(live, MemorySource(then))
    assert all(torch.equal(live[name], then[name]) for name in then)


def test_expanded_tensors_are_filled_if_the_checkpoint_agrees() -> None:
    live = {"t": torch.zeros(2, 1, 3).expand(2, 4, 3)}
    load(live, MemorySource({"t": torch.arange(6.0).reshape(2, 1, 3).expand(2, 4, 3)}))
    assert live["t"][:, 3].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert live["t"].stride() == (3, 0, 1)
    found = refusal(live, MemorySource({"t": torch.randn(2, 4, 3)}))
    assert re.search("^t: is expanded, and the checkpoint has different values", found.text)
    assert found.is_clean, found


def test_targets_without_memory_are_refused() -> None:
    live = {"model": nn.Linear(2, 2, device="meta")}
    with pytest.raises(StateError, match=r"^model/weight: is on the meta device.*to_empty.* \(and 1 more\)"):
        prepare(live, MemorySource({"model": nn.Linear(2, 2)}))
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    for target, reason in (
        (nn.UninitializedParameter(), "has no shape yet"),
        (torch.zeros(3).to_sparse(), "nested, sparse or quantised"),
        (freed, "its storage was freed"),
    ):
        with pytest.raises(StateError, match=rf"^t: .*{reason}"):
            prepare({"t": target}, MemorySource({"t": torch.zeros(3)}))


def test_a_read_only_array_is_refused() -> None:
    live = {"a": np.zeros(3)}
    live["a"].flags.writeable = False
    found = refusal(live, MemorySource({"a": np.ones(3)}))
    assert re.search("^a: the NumPy array is read-only", found.text)
    assert found.is_clean, found


def test_arrays_that_lie_oddly_are_filled() -> None:
    memory = np.zeros((4, 6))
    live = {"a": memory[::-1, ::2], "b": np.zeros(3, ">f8"), "c": np.zeros((), np.int64)}
    then = {"a": np.random.default_rng(0).random((4, 3)), "b": np.arange(3.0).astype(">f8"), "c": np.array(7)}
    load(live, MemorySource(then))
    assert all(np.array_equal(live[name], then[name]) for name in then)
    assert not memory[:, 1::2].any()


def _mixed(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    tensors = [torch.rand(1), torch.rand(1)]
    return {"model": network(seed), "t": torch.rand(2, 2), "array": np.full(3, seed), "list": tensors, "epoch": seed}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda s: s.update(modle=s.pop("model")),
            r"^modle: not in the checkpoint. Did you mean 'model'\? \(and 1 more\)",
        ),
        (
            lambda s: s.pop("model"),
            r"^model: in the checkpoint \(11 tensors\), and not in the state given\. strict=False",
        ),
        (
            lambda s: s.update(t=torch.zeros(3)),
            r"^t: expected float32 \(3,\), found float32 \(2, 2\) in the checkpoint",
        ),
        (lambda s: s.update(t=s["t"].double()), r"^t: expected float64 \(2, 2\), found float32 \(2, 2\)"),
        (lambda s: s.update(t=3), "^t: expected a value, found a tensor in the checkpoint"),
        (lambda s: s.update(t=None), "^t: expected a value, found a tensor in the checkpoint"),
        (lambda s: s.update(t=s["t"].numpy()), "^t: expected a NumPy array, found a tensor"),
        (lambda s: s.update(t={"x": torch.zeros(2)}), "^t: expected a dict, found a tensor in the checkpoint"),
        (lambda s: s.update(array=torch.zeros(3)), "^array: expected a tensor, found a NumPy array"),
        (lambda s: s.update(array=np.zeros(4, int)), r"^array: expected int64 \(4,\), found int64 \(3,\)"),
        (lambda s: s.update(epoch=torch.zeros(1)), "^epoch: expected a tensor, found the value 3 in the checkpoint"),
        (lambda s: s["list"].pop(), "^list/1: in the checkpoint, and not in the state given"),
        (lambda s: s["list"].append(torch.zeros(1)), "^list/2: not in the checkpoint"),
        (lambda s: s.update(list={"0": torch.zeros(1)}), "^list: expected a dict, found a list in the checkpoint"),
        (lambda s: s["model"].register_buffer("extra", torch.zeros(1)), "^model/extra: not in the checkpoint"),
        (lambda s: s["model"].add_module("1", nn.Identity()), r"^model/1.weight: in the checkpoint, .* \(and 4 more\)"),
        (lambda s: s.update(model=nn.Linear(2, 2)), "^model/weight: not in the checkpoint"),
    ],
)
def test_whatever_does_not_fit_is_named_before_anything_is_touched(
    change: Callable[[dict[str, Any]], Any], match: str
) -> None:
    live, then = _mixed(0), _mixed(3)
    saved = MemorySource(then)
    change(live)
    found = refusal(live, saved)
    assert re.search(match, found.text)
    assert found.is_clean, found
    assert load(live, saved, strict=False)
    changed = match.lstrip("^").split(":")[0].split("/")[0]
    for name in then.keys() - {changed, "model"}:
        assert bytes_of(live[name]) == bytes_of(then[name]), name


def test_what_fits_is_loaded_and_the_rest_is_listed() -> None:
    then = {"model": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5)), "epoch": 3}
    live = {"model": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4)), "epoch": 0, "new": torch.zeros(1)}
    head = bytes_of(live["model"][1])
    skipped = load(live, MemorySource(then), strict=False)
    assert skipped == (
        "model/1.weight: expected float32 (4, 3), found float32 (5, 3) in the checkpoint",
        "model/1.bias: expected float32 (4,), found float32 (5,) in the checkpoint",
        "new: not in the checkpoint",
    )
    assert torch.equal(live["model"][0].weight, then["model"][0].weight)
    assert bytes_of(live["model"][1]) == head
    assert live["epoch"] == 3


def test_a_state_that_contains_itself_is_refused() -> None:
    live: dict[str, Any] = {"t": torch.zeros(1), "loop": []}
    live["loop"].append(live["loop"])
    with pytest.raises(StateError, match="contains itself"):
        prepare(live, MemorySource({"t": torch.zeros(1), "loop": [[]]}))


def test_a_selected_tensor_that_is_not_in_the_checkpoint_is_missed() -> None:
    saved = MemorySource({"model": nn.Linear(2, 2, bias=False), "other": torch.zeros(1)})
    found = refusal({"model": nn.Linear(2, 2)}, saved, where="model/**")
    assert re.search("^model/bias: not in the checkpoint", found.text)
    assert found.is_clean, found
    load({"model": nn.Linear(2, 2)}, saved, where="model/weight")


def test_a_pattern_that_selects_nothing_is_refused() -> None:
    saved, live = MemorySource({"model": nn.Linear(2, 2)}), {"model": nn.Linear(2, 2)}
    with pytest.raises(UnknownTensor, match="model/wieght"):
        prepare(live, saved, where="model/wieght")
    with pytest.raises(UsageError):
        prepare(live, saved, where=[])


def test_no_second_copy_of_the_state_is_made() -> None:
    code = """
import re, sys, threading, torch
sys.path.insert(0, "tests/checkpoint")
from sources import MemorySource
from evergrad.checkpoint.restore.load_state import prepare

def anonymous():
    return int(re.search(r"^Anonymous: +(\\d+) kB", open("/proc/self/smaps_rollup").read(), re.M)[1]) / 1024

live = {f"layer{i}": torch.ones(1 << 18) for i in range(200)}
source = MemorySource({name: torch.zeros(1 << 18) for name in live})
prepare({"layer0": live["layer0"]}, source, where="layer0").apply()  # threads are started, pools allocated
before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
for _ in range(5):
    prepare(live, source).apply()
done.set()
watcher.join()
assert not live["layer199"].any()
print(peak - before)
"""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 40, f"{done.stdout.strip()} MB more, for a state of 200 MB"
