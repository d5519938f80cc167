"""Tied weights and views lie in the same bytes: each is hit once, under one name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.formats import AddressedCheckpoint
from states import training_state

SAME_BYTES = "the same bytes under another name"


def tied() -> dict[str, Any]:
    layer = torch.nn.Linear(6, 6)
    twin = torch.nn.Linear(6, 6)
    twin.weight = layer.weight
    return {"a": layer.state_dict(), "b": twin.state_dict()}


def grid() -> torch.Tensor:
    return torch.arange(1.0, 61).reshape(6, 10)


def interleaved_columns() -> dict[str, torch.Tensor]:
    base = grid()
    return {"even": base[:, ::2], "odd": base[:, 1::2]}


def overlapping_columns() -> dict[str, torch.Tensor]:
    base = grid()
    return {"left": base[:, :6], "right": base[:, 4:], "row": base[2], "scattered": base[::3, ::4]}


def within_the_gaps() -> dict[str, torch.Tensor]:
    base = grid()
    return {"columns": base[:, ::2], "cell": base[2, 3:4], "block": base[3:5, 5:6], "taken": base[1, 4:5]}


def overlapping_rows() -> dict[str, torch.Tensor]:
    base = grid()
    return {"upper": base[:4], "lower": base[3:], "both": base[2:5]}


def expanded() -> dict[str, torch.Tensor]:
    base = torch.arange(1.0, 7)
    return {"rows": base.expand(5, 6), "alone": torch.ones(1).expand(9), "apart": torch.ones(4)}


def expanded_with_its_base() -> dict[str, torch.Tensor]:
    base = torch.arange(1.0, 7)
    return {"rows": base[1:4].expand(5, 3), "base": base, "one": base[5].expand(20)}


def other_orders() -> dict[str, torch.Tensor]:
    image = torch.arange(1.0, 121).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    matrix = grid()
    return {"image": image, "turned": matrix.t(), "row": matrix[4], "diagonal": matrix.diagonal()}


def complex_views() -> dict[str, torch.Tensor]:
    wave = torch.complex(torch.arange(1.0, 25), torch.arange(25.0, 49))
    return {"third": wave[::3], "half": wave[1::2], "end": wave[20:], "few": wave[3:9]}


def unfolded() -> dict[str, torch.Tensor]:
    """Windows over the same numbers, no step of which is 0."""
    return {"x": torch.arange(8.0).unfold(0, 4, 1)}


def expanded_over_a_gap() -> dict[str, torch.Tensor]:
    """A view that repeats itself and reaches as far as if it did not, and what lies in its gap."""
    base = torch.zeros(2, 4)
    return {"v": base[0, ::3].expand(2, 2), "w": base[0, 1:3]}


STATES = [
    training_state,
    unfolded,
    expanded_over_a_gap,
    tied,
    interleaved_columns,
    overlapping_columns,
    within_the_gaps,
    overlapping_rows,
    expanded,
    expanded_with_its_base,
    other_orders,
    complex_views,
]


def tensors(state: object) -> Iterator[torch.Tensor]:
    """Every tensor of a state, complex ones as their parts."""
    if isinstance(state, torch.Tensor):
        yield torch.view_as_real(state) if state.is_complex() else state
    elif isinstance(state, (dict, list, tuple)):
        for child in state.values() if isinstance(state, dict) else state:
            yield from tensors(child)


def addresses(tensor: torch.Tensor) -> set[int]:
    """Where in memory the numbers of a tensor are."""
    steps = [torch.arange(size) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    where = torch.zeros((), dtype=torch.int64)
    for step in steps:
        where = where[..., None] + step
    return set((tensor.data_ptr() + where.reshape(-1) * tensor.itemsize).tolist())


def stored(state: object) -> int:
    """How many numbers a state holds, whatever they are called."""
    return len(set().union(*(addresses(tensor) for tensor in tensors(state))))


def flipped(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.unsignedinteger]]:
    """The bits of a tensor with every sign turned."""
    bits = np.ascontiguousarray(tensor.numpy()).view(f"u{tensor.itemsize}")
    return bits ^ bits.dtype.type(1 << (8 * tensor.itemsize - 1))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("make", STATES)
def test_with_all_of_it_hit_every_stored_number_is_hit_once(
    make: Callable[[], object], zipped: bool, tmp_path: Path
) -> None:
    torch.save(make(), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    log = eg.inject(tmp_path / "a.pt", eg.BitFlip(0), fraction=1.0, out=tmp_path / "b.pt")
    before, after = torch.load(tmp_path / "a.pt"), torch.load(tmp_path / "b.pt")
    assert log.injected == stored(before) == len({(hit.tensor, hit.number) for hit in log.faults()})
    for old, new in zip(tensors(before), tensors(after), strict=True):
        assert np.array_equal(flipped(old), np.ascontiguousarray(new.numpy()).view(f"u{new.itemsize}"))


@pytest.mark.parametrize("make", STATES)
def test_what_was_hit_once_is_undone_to_the_byte(make: Callable[[], object], tmp_path: Path) -> None:
    torch.save(make(), tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    log = eg.inject(tmp_path / "a.pt", eg.BitFlip(), fraction=1.0, seed=1, in_place=True)
    assert (tmp_path / "a.pt").read_bytes() != before
    with eg.open_checkpoint(tmp_path / "a.pt") as ck:
        for column in log.columns:
            found = ck.read_bits(column.tensor).reshape(-1)
            assert np.array_equal(found[column.numbers], column.new)  # nothing came after what the log says
    eg.undo(log)
    assert (tmp_path / "a.pt").read_bytes() == before


def test_of_tied_weights_one_name_is_told_and_the_other_left_out(tmp_path: Path) -> None:
    torch.save(tied(), tmp_path / "a.pt")
    log = eg.inject(tmp_path / "a.pt", eg.BitFlip(), fraction=1.0, dry_run=True)
    assert {column.tensor for column in log.columns} == {"a/weight", "a/bias", "b/bias"}
    assert log.left_out == {SAME_BYTES: ("b/weight",)}
    assert log.injected == 36 + 6 + 6


def test_tied_weights_are_no_likelier_to_be_hit_than_others(tmp_path: Path) -> None:
    weight = torch.zeros(1_000)
    names = {f"tied{n}": weight for n in range(9)}
    torch.save({**names, "free": torch.zeros(1_000)}, tmp_path / "a.pt")
    for sampling in ("element", "tensor"):
        log = eg.inject(tmp_path / "a.pt", eg.BitFlip(), count=1_000, sampling=sampling, dry_run=True)
        hits = {column.tensor: len(column) for column in log.columns}
        assert set(hits) == {"tied0", "free"}
        assert abs(hits["free"] - 500) < 80


def test_a_view_that_is_selected_alone_is_hit_under_its_own_name(tmp_path: Path) -> None:
    base = torch.zeros(4, 6)
    torch.save({"base": base, "column": base[:, 1]}, tmp_path / "a.pt")
    log = eg.inject(tmp_path / "a.pt", eg.SetValue(1.0), fraction=1.0, where="column", out=tmp_path / "b.pt")
    expected = torch.zeros(4, 6)
    expected[:, 1] = 1
    assert {hit.tensor for hit in log.faults()} == {"column"}
    assert log.left_out == {}
    assert torch.equal(torch.load(tmp_path / "b.pt")["base"], expected)


def test_in_views_that_overlap_in_part_each_number_has_one_name(tmp_path: Path) -> None:
    torch.save(overlapping_rows(), tmp_path / "a.pt")
    log = eg.inject(tmp_path / "a.pt", eg.BitFlip(), fraction=1.0, dry_run=True)
    numbers = {column.tensor: column.numbers.tolist() for column in log.columns}
    assert numbers == {"upper": list(range(40)), "lower": list(range(10, 30))}
    assert log.left_out == {SAME_BYTES: ("both",)}


def test_a_run_stays_in_a_tensor_of_its_own(tmp_path: Path) -> None:
    torch.save(overlapping_rows(), tmp_path / "a.pt")
    log = eg.inject(tmp_path / "a.pt", eg.BitFlip(0, elements=4), fraction=1.0, dry_run=True)
    assert {column.tensor for column in log.columns} == {"upper"}
    assert log.left_out == {SAME_BYTES: ("lower", "both")}
    assert log.injected == 37


def test_an_expanded_tensor_costs_what_its_bytes_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    addresses_of = AddressedCheckpoint.addresses

    def counting(ck: AddressedCheckpoint, name: str, start: int = 0, stop: int | None = None) -> Any:
        found = addresses_of(ck, name, start, stop)
        looked_at.append(0 if found is None else len(found))
        return found

    monkeypatch.setattr(AddressedCheckpoint, "addresses", counting)
    row = torch.arange(6.0)
    torch.save({"rows": row.expand(1 << 16, 6), "columns": row[2:4, None].expand(2, 1 << 16)}, tmp_path / "a.pt")
    log = eg.inject(tmp_path / "a.pt", eg.BitFlip(0), fraction=1.0, dry_run=True)
    assert {column.tensor: column.numbers.tolist() for column in log.columns} == {"rows": [0, 1, 2, 3, 4, 5]}
    assert log.left_out == {SAME_BYTES: ("columns",)}
    assert sum(looked_at) < 100


def test_a_file_that_stores_an_expanded_tensor_in_full_is_hit_everywhere(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3.0).expand(4, 3), "one": torch.ones(1).expand(2, 2)}, tmp_path / "a.pt")
    eg.convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    log = eg.inject(tmp_path / "a.safetensors", eg.BitFlip(0), fraction=1.0, dry_run=True)
    assert {column.tensor: len(column) for column in log.columns} == {"w": 12, "one": 4}
