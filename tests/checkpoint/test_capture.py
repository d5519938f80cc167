"""What is captured by a plan is what the state holds now, or the plan says that it no longer fits."""

from __future__ import annotations

import gc
import math
import mmap
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import evergrad as eg
from evergrad.checkpoint.capture.capture import ArenaWriter, CapturePlan
from evergrad.checkpoint.shard_layout import ParsedHeader, parse_header
from evergrad.dtypes import DType
from evergrad.errors import StateError
from evergrad.records import Role
from evergrad.state import unflatten
from states import every_dtype, keys, same, scalars, some_bits, states, training_state

RECORD: dict[str, Any] = {"step": 7, "attempt": 1, "rank": 0, "world_size": 1, "meta": {}}


def captured(plan: CapturePlan, state: object) -> bytes | None:
    """The shard of a state by a plan; None if the plan does not fit."""
    gathered = plan.gather(state)
    header = None if gathered is None else plan.header(gathered, RECORD)
    if gathered is None or header is None:
        return None
    assert len(header) == plan.layout.data_start
    buffer = mmap.mmap(-1, plan.layout.size)
    ArenaWriter(plan, buffer).copy(gathered)
    buffer[: len(header)] = header
    return buffer[:]


def fresh(state: object) -> bytes:
    data = captured(CapturePlan.of(state), state)
    assert data is not None, "a new plan does not fit the state it was made for"
    return data


def load(data: bytes) -> Any:
    """The state again, by way of a file and the reader of any safetensors file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-00000.safetensors"
        path.write_bytes(data)
        with safetensors.safe_open(path, "pt") as file:
            assert set(file.keys()) == {entry.path for entry in parse_header(data).layout.entries}
        with eg.open_checkpoint(path) as ck:
            return unflatten({name: ck.read(name) for name in ck.tensors}, ck.skeleton)


def content(data: bytes) -> tuple[Any, ...]:
    """What a shard says, whatever room its header has."""
    parsed: ParsedHeader = parse_header(data)
    start = parsed.layout.data_start
    entries = [(*entry[:3], entry.offset - start, entry.nbytes) for entry in parsed.layout.entries]
    return parsed.skeleton.dumps(), parsed.layout.aliases, entries, data[start:]


def fits(before: object, after: object) -> bool:
    """Whether the plan of one state still fits another; if so, what it captures must be exactly that."""
    data = captured(CapturePlan.of(before), after)
    if data is not None:
        assert content(data) == content(fresh(after))
    return data is not None


class Thing:
    """Anything with a state_dict."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


def adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()


def line(count: int = 6) -> torch.Tensor:
    return torch.arange(float(count))


def two_tensor() -> torch.Tensor:
    """A tensor that is made of two, as a DTensor is made of a local one and a mesh."""
    return TwoTensor(line(), line())


def freed() -> torch.Tensor:
    tensor = line()
    tensor.untyped_storage().resize_(0)
    return tensor


@settings(max_examples=100, deadline=None)
@given(states)
def test_any_state_comes_back_the_same(state: Any) -> None:
    assert same(load(fresh(state)), state)


def test_every_dtype_comes_back_to_the_bit() -> None:
    state = every_dtype()
    assert same(load(fresh(state)), state)
    many = {f"{dtype}.{n}": some_bits(dtype, 8, n) for dtype in DType for n in range(9)}
    assert same(load(fresh(many)), many)


def test_a_training_state_comes_back_with_its_sharing() -> None:
    state = training_state()
    back = load(fresh(state))
    assert same(back, state)
    assert back["model"]["0.weight"].data_ptr() == back["model"]["2.weight"].data_ptr()
    assert back["transposed"].stride() == (1, 6)


def test_one_plan_serves_a_whole_training() -> None:
    model, optimizer = adam()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "losses": [1.0]}
    plan = CapturePlan.of(state, RECORD)
    for epoch in range(4):
        train(model, optimizer)
        scheduler.step()
        state["epoch"] = epoch
        state["losses"].append(1 / 3 - epoch)  # type: ignore[attr-defined]
        data = captured(plan, state)
        assert data is not None
        assert content(data) == content(fresh(state))
        back = load(data)
        assert back["epoch"] == epoch
        assert back["optimizer"]["param_groups"][0]["lr"] == 0.1 * 0.5 ** (epoch + 1)
        assert same(back["model"], model.state_dict())
        assert same(back["losses"], state["losses"])


def test_roles_are_kept_with_the_plan() -> None:
    model, optimizer = adam()
    train(model, optimizer)
    roles = parse_header(fresh({"m": model, "o": optimizer})).skeleton.roles
    assert roles["m/1.running_mean"] is Role.BUFFER
    assert roles["o/state/0/exp_avg"] is Role.OPTIMIZER


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1, 2), (1, True), (1, 1.0), (True, 1.0), (0.0, -0.0), (-0.0, 0.0), (math.nan, 1.0), (math.nan, -math.nan),
        (1.0, math.inf), (None, 0), ("a", "b"), ("1", 1), (b"a", bytearray(b"a")), (1, 2**70), (1 + 0j, 1 - 0j),
        (np.float32(1), np.float64(1)), (np.int64(1), 1), (np.array(["a"]), np.array(["b"])), (torch.Size([2]), (2,)),
        (torch.float32, torch.float16), (torch.Size([2]), torch.Size([3])), ([1, 2], [1, 2, 3]), ([1], (1,)),
        ({1}, {2}), (OrderedDict(a=1), OrderedDict(a=2)), (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        ({"a": 1}, {"a": True}), ({1: 0}, {True: 0}), ({0.0: 0}, {-0.0: 0}), ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({(1,): 0}, {(True,): 0}), ({"a": 1}, OrderedDict(a=1)), ([0.0], [-0.0]), ({1}, frozenset({1})), ([], 3),
        (list(range(100)), list(range(101))), ({"lr": 1, "x": [*range(99)]}, {"lr": 2, "x": [*range(99)]}),
        ({"lr": 0.0, "x": [*range(99)]}, {"lr": -0.0, "x": [*range(99)]}), (Thing({"a": 1}), Thing({"a": 2})),
        (Thing([1]), [1]), ([[0.0, 1]] * 99, [[-0.0, 1]] * 99),
    ],
)  # fmt: skip
def test_a_value_of_any_kind_is_written_as_it_is_today(before: Any, after: Any) -> None:
    tensor = line()
    fits({"x": tensor, "v": before}, {"x": tensor, "v": after})
    fits({"x": tensor, "v": after}, {"x": tensor, "v": before})
    assert fits({"x": tensor, "v": before}, {"x": tensor, "v": before})


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, True), (0.0, -0.0), ([1], [1, 2]), (None, {"a": [1.5]})])
def test_a_changed_value_needs_no_new_plan(before: Any, after: Any) -> None:
    assert fits({"x": line(), "v": before}, {"x": line(), "v": after})


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.__setitem__(0, 2),
        lambda value: value.append(3),
    ],
)
@pytest.mark.parametrize("value", [[1], bytearray(b"1"), [1, [2.0]]], ids=repr)
def test_a_value_that_is_changed_in_place_is_noticed(value: Any, change: Callable[[Any], None]) -> None:
    value = type(value)(value)
    state = {"x": line(), "v": value}
    plan = CapturePlan.of(state)
    assert captured(plan, state) is not None
    change(value)
    data = captured(plan, state)
    assert data is not None
    assert same(load(data), state)


def test_a_value_that_outgrows_the_header_needs_a_new_plan() -> None:
    assert not fits({"x": line(), "v": ""}, {"x": line(), "v": "long" * 5000})


@pytest.mark.parametrize(
    "after",
    [
        {"a": line()},
        {"a": line(), "b": line(), "c": line()},
        {"b": line(), "a": line()},
        {"a": line(), "b": line().reshape(2, 3)},
        {"a": line(), "b": line().double()},
        {"a": line(), "b": line().int()},
        {"a": line(), "b": 3},
        {"a": line(), "b": [line()]},
        {"a": line(), "b": line(12)[::2]},
        {"a": line(), "b": torch.zeros(1).expand(6)},
        OrderedDict(a=line(), b=line()),
        [line(), line()],
        {"a": line(), "b": line().numpy()},
        Thing({"a": line(), "b": line()}),
        {"a": (both := line()), "b": both},
        {"a": (both := line(8))[:6], "b": both[2:]},
        {"a": (both := line(12))[:6], "b": both[6:]},
        {"a": line(12)[6:], "b": torch.zeros(())},
    ],
)
def test_another_form_needs_another_plan(after: Any) -> None:
    assert not fits({"a": line(), "b": line()}, after)


def test_a_value_that_becomes_a_tensor_needs_another_plan() -> None:
    assert not fits({"a": 1, "b": [1, 2]}, {"a": 1, "b": [1, line()]})
    assert not fits({"a": 1}, {"a": np.arange(3)})


def test_a_slice_elsewhere_in_another_storage_is_as_good() -> None:
    assert fits({"a": line()}, {"a": line(20)[7:13]})


def test_a_parameter_is_as_good_as_a_tensor() -> None:
    assert fits({"a": line()}, {"a": nn.Parameter(line())})
    assert fits({"a": nn.Parameter(line())}, {"a": line()})


def test_a_pair_that_is_untied_is_noticed() -> None:
    one, two = line(), line() + 1
    state = {"a": one, "b": one}
    plan = CapturePlan.of(state)
    assert len(plan.layout.entries) == 1
    assert captured(plan, state) is not None
    assert captured(plan, {"a": one, "b": two}) is None
    assert captured(plan, {"a": two, "b": two}) is not None


def test_a_pair_that_changes_partners_is_noticed() -> None:
    one, two = line(), line() + 1
    assert not fits({"a": one, "b": one, "c": two}, {"a": one, "b": two, "c": one})
    assert not fits({"a": one, "b": one, "c": two}, {"a": one, "b": two, "c": two})


def test_tied_modules_that_are_untied_are_noticed() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    plan = CapturePlan.of({"m": model})
    assert plan.layout.aliases == {"m/1.weight": "m/0.weight"}
    assert captured(plan, {"m": model}) is not None
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    assert captured(plan, {"m": model}) is None


def test_tensors_that_are_tied_later_are_noticed_even_if_they_were_captured_before() -> None:
    state = {"a": line(), "b": line()}
    plan = CapturePlan.of(state)
    assert captured(plan, state) is not None
    assert captured(plan, {"a": line(), "b": line()}) is not None
    assert captured(plan, {"a": state["a"], "b": state["a"]}) is None


@pytest.mark.parametrize(
    "after",
    [
        lambda base: {"base": base, "row": base[0]},
        lambda base: {"base": base, "row": base[:, 1][:3].clone()},
        lambda base: {"base": base.clone(), "row": base[1]},
        lambda base: {"base": base.t().contiguous().t(), "row": base[1]},
    ],
)
def test_a_view_that_moves_or_parts_is_noticed(after: Any) -> None:
    base = torch.arange(9.0).reshape(3, 3)
    assert fits({"base": base, "row": base[1]}, {"base": base, "row": base[1]})
    assert not fits({"base": base, "row": base[1]}, after(base))


def test_other_strides_where_strides_are_recorded_are_noticed() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert not fits(
        {"x": x.to(memory_format=torch.channels_last)}, {"x": x.transpose(0, 1).contiguous().transpose(0, 1)}
    )
    assert not fits({"x": x.to(memory_format=torch.channels_last)}, {"x": x})
    assert fits({"x": x.to(memory_format=torch.channels_last)}, {"x": (x + 1).to(memory_format=torch.channels_last)})


def test_sources_that_do_not_lie_as_the_file_does_are_copied_right() -> None:
    x = torch.randn(2, 3, 4, 5)
    z = torch.randn(3, dtype=torch.complex64)
    state = {
        "channels_last": x.to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 4).t(),
        "expanded": torch.randn(1, 4).expand(3, 4),
        "step": line(12)[::3],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "conj": z.conj(),
        "imag": z.conj().imag,
        "negated": torch._neg_view(line()),
        "grad": nn.Parameter(line()),
        "graph": nn.Parameter(line()) * 2,
    }
    back = load(fresh(state))
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name


def test_conjugated_and_negated_views_are_followed() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    assert fits({"z": z.clone()}, {"z": z.conj()})
    assert fits({"z": z.conj()}, {"z": z.clone()})
    assert fits({"z": z, "c": z.conj()}, {"z": z, "c": z.conj()})
    assert fits({"x": line(3)}, {"x": z.conj().imag})
    assert not fits({"x": z.imag}, {"x": z.conj().imag})


@pytest.mark.parametrize("small", [8, 40_000])
def test_many_alike_tensors_are_each_copied_to_their_own_place(small: int) -> None:
    state = {f"{n}": torch.full((small,), float(n)) for n in range(20)} | {f"s{n}": torch.tensor(n) for n in range(20)}
    plan = CapturePlan.of(state)
    state = {name: nn.Parameter(tensor + 1, requires_grad=tensor.is_floating_point()) for name, tensor in state.items()}
    data = captured(plan, state)
    assert data is not None
    assert all(torch.equal(tensor, state[name]) for name, tensor in load(data).items())


def test_large_tensors_are_copied_whole_however_many_threads_share_them() -> None:
    large = torch.arange(9_000_001, dtype=torch.int32)
    wave = torch.randn(20_000, dtype=torch.complex64)
    state = {
        "large": large,
        "alike": large + 1,
        "conj": wave.conj(),
        "negated": torch._neg_view(wave),
        "bytes": large.view(torch.uint8)[:99_999],
    }
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            data = fresh({name: tensor.clone() if name == "bytes" else tensor for name, tensor in state.items()})
        finally:
            torch.set_num_threads(before)
        back = load(data)
        assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_numpy_arrays_are_taken_as_they_lie_or_as_copies() -> None:
    base = np.arange(12.0)
    before = {"a": base.copy(), "r": base[::-1], "t": base.reshape(3, 4).T, "f": np.broadcast_to(np.float32(1), (2, 2))}
    after = {"a": base + 1, "r": (base * 2)[::-1], "t": (base * 3).reshape(3, 4).T, "f": before["f"]}
    assert fits(before, after)
    back = load(fresh(after))
    for name, array in after.items():
        np.testing.assert_array_equal(back[name], array)
    assert not fits({"a": base}, {"a": base.astype(">f8")})
    assert not fits({"a": base.astype(">f8")}, {"a": base})
    assert fits({"a": base.astype(">f8")}, {"a": (base + 1).astype(">f8")})


def test_the_metadata_of_a_state_dict_is_followed() -> None:
    def state(version: int | None) -> OrderedDict[str, torch.Tensor]:
        out = OrderedDict(w=line())
        if version is not None:
            out._metadata = OrderedDict({"": {"version": version}})  # type: ignore[attr-defined]
        return out

    assert fits({"m": state(1)}, {"m": state(2)})
    assert not fits({"m": state(1)}, {"m": state(None)})
    assert not fits({"m": state(None)}, {"m": state(1)})
    assert load(fresh({"m": state(2)}))["m"]._metadata[""]["version"] == 2


def test_objects_with_a_state_are_asked_each_time_wherever_they_are() -> None:
    thing = Thing({"inner": Thing([line(), 1])})
    state = {"things": [thing, {"deep": (thing,)}]}
    plan = CapturePlan.of(state)
    thing.state = {"inner": Thing([line() + 1, 2])}
    data = captured(plan, state)
    assert data is not None
    assert load(data)["things"][0]["inner"][1] == 2
    assert torch.equal(load(data)["things"][1]["deep"][0]["inner"][0], line() + 1)


def test_an_object_that_gives_something_else_each_time_is_refused() -> None:
    class Restless(Thing):
        def state_dict(self) -> Any:
            self.state.append(line())
            return list(self.state)

    with pytest.raises(StateError, match="something else each time"):
        CapturePlan.of({"x": Restless([line()])})


@pytest.mark.parametrize(
    "bad",
    [
        lambda: torch.arange(6.0).to_sparse(),
        lambda: torch.zeros(6, device="meta"),
        lambda: torch.arange(6.0).to_mkldnn(),
        nn.parameter.UninitializedParameter,
        lambda: torch.nested.nested_tensor([line()]),
        two_tensor,
        freed,
        object,
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_stored_is_refused_on_every_call(bad: Callable[[], Any]) -> None:
    plan = CapturePlan.of({"x": line(), "v": 1})
    assert plan.gather({"x": bad(), "v": 1}) is None
    assert plan.gather({"x": line(), "v": bad()}) is None
    for state in ({"x": bad(), "v": 1}, {"x": line(), "v": bad()}):
        with pytest.raises(StateError, match=r"^[xv]:"):
            CapturePlan.of(state)


def test_a_state_that_contains_itself_later_is_refused() -> None:
    state: dict[str, Any] = {"x": line(), "v": [1]}
    plan = CapturePlan.of(state)
    state["v"].append(state["v"])
    assert plan.gather(state) is None


def test_an_empty_state_is_a_shard_too() -> None:
    for state in ({}, [], None, 3, line(), {"a": {}}):
        assert same(load(fresh(state)), state)


def test_sets_of_tensors_are_followed() -> None:
    state = {"s": {torch.tensor(1.0), torch.tensor(2.0)}}
    assert fits(state, {"s": {torch.tensor(3.0), torch.tensor(0.5)}})


def test_the_buffer_is_let_go_with_the_target() -> None:
    state = {f"{n}": line() for n in range(9)}
    plan = CapturePlan.of(state)
    buffer = mmap.mmap(-1, plan.layout.size)
    target = ArenaWriter(plan, buffer)
    gathered = plan.gather(state)
    assert gathered is not None
    target.copy(gathered)
    del target
    gc.collect()
    buffer.close()


def test_a_plan_keeps_no_tensor_alive() -> None:
    state = {"x": line(), "y": [line()]}
    plan = CapturePlan.of(state)
    assert captured(plan, state) is not None
    alive = weakref.ref(state["x"])
    state.clear()
    gc.collect()
    assert alive() is None


def leaves(pool: list[torch.Tensor]) -> st.SearchStrategy[Any]:
    """Values, tensors of their own, and tensors that lie in the memory of others."""
    base, other = pool
    own = st.builds(
        lambda dtype, shape, seed: some_bits(dtype, 4, seed)[: math.prod(shape)].reshape(shape),
        st.sampled_from([*DType]),
        st.lists(st.integers(0, 2), max_size=2),
        st.integers(0, 3),
    )
    shared = [base, base[1], base.t(), base[:, 1], base[0, 0].expand(2), base.clone(), other, other.real, other.imag,
              other.conj(), other.clone(), other.numpy(), nn.Parameter(other), torch._neg_view(other)]  # fmt: skip
    return scalars | own | st.sampled_from(shared)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    table = st.dictionaries(keys, inner, max_size=3)
    return (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | table
        | table.map(OrderedDict)
        | table.map(Thing)
        | st.lists(inner, max_size=2).map(Thing)
    )


def mutated(draw: Callable[[Any], Any], value: Any, leaf: st.SearchStrategy[Any]) -> Any:
    """A state like this one, but for a few things."""
    if draw(st.integers(0, 7)) == 0:
        return draw(leaf)
    if isinstance(value, Thing):
        return Thing(mutated(draw, value.state, leaf))
    if isinstance(value, dict):
        out = type(value)((key, mutated(draw, inner, leaf)) for key, inner in value.items())
        if out and draw(st.integers(0, 7)) == 0:
            key = draw(st.sampled_from([*out]))
            inner = out.pop(key)
            if draw(st.booleans()):
                out[draw(st.sampled_from([key, "new", 1, True]))] = inner
        return out
    if isinstance(value, (list, tuple)):
        return type(value)(mutated(draw, inner, leaf) for inner in value)
    return value


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_changed_state_is_captured_as_a_new_plan_would_or_not_at_all(data: st.DataObject) -> None:
    pool = [torch.arange(4.0).reshape(2, 2), torch.arange(3.0) * (1 + 2j)]
    leaf = leaves(pool)
    before = data.draw(st.recursive(leaf, containers, max_leaves=10))
    after = mutated(data.draw, before, leaf)
    plan = CapturePlan.of(before)
    assert captured(plan, before) is not None
    for state in (after, before):
        found = captured(plan, state)
        if found is not None:
            assert content(found) == content(fresh(state))
