"""Replay: the same elements and the same bits again, in the same file, in other values, in another framework's file."""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from kinds import snapshot
from readers import by_h5py, by_zip_and_h5py

import evergrad as eg
from evergrad.dtypes import DType
from evergrad.errors import EvergradError, UnknownTensor, UsageError
from evergrad.formats import Match
from evergrad.injection import Draws, Fault
from evergrad.testing import raw_bytes

FAULTS = [
    eg.BitFlip(bits="mantissa", burst=2),
    eg.BitMask("1011"),
    eg.StuckAt(1, bits=range(2, 12)),
    eg.StuckAt(0, bits="mantissa"),
    eg.Scale(-3.0),
    eg.SetValue(7.5),
]
# Keras' layout of the model that tests/data/keras_torch.* holds: which axis of PyTorch's comes where.
TWINS = {
    "conv.weight": ("layers/conv2d/vars/0", (2, 3, 1, 0)),
    "conv.bias": ("layers/conv2d/vars/1", (0,)),
    "norm.weight": ("layers/batch_normalization/vars/0", (0,)),
    "norm.bias": ("layers/batch_normalization/vars/1", (0,)),
    "norm.running_mean": ("layers/batch_normalization/vars/2", (0,)),
    "norm.running_var": ("layers/batch_normalization/vars/3", (0,)),
    "head.weight": ("layers/dense/vars/0", (1, 0)),
    "head.bias": ("layers/dense/vars/1", (0,)),
}


def saved(path: Path, seed: int, names: tuple[str, ...] = ("a.weight", "b.weight")) -> Path:
    torch.manual_seed(seed)
    torch.save({names[0]: torch.randn(12, 5), names[1]: torch.randn(40)}, path)
    return path


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power failure leaves is not at stake here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return saved(tmp_path / "model.pt", 0)


@pytest.fixture
def log(path: Path) -> eg.InjectionLog:
    return eg.inject(path, eg.BitFlip(), count=9, seed=3, out=path.with_name("bad.pt"))


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int32).numpy().view(np.uint32)


def flipped(before: Path, after: Path) -> dict[str, np.ndarray]:
    """Which bits of which elements differ, as torch reads the two files."""
    one, other = torch.load(before), torch.load(after)
    return {name: bits(one[name]) ^ bits(other[name]) for name in one if one[name].dtype == torch.float32}


def happened(fault: Fault, old: np.ndarray, aim: np.ndarray) -> np.ndarray:
    """What the fault does to float32 numbers, worked out here."""
    values = old.view(np.float32)
    if isinstance(fault, eg.StuckAt):
        return old | aim if fault.value else old & ~aim
    if isinstance(fault, eg.Scale):
        return (values * np.float32(fault.factor)).view(np.uint32)
    if isinstance(fault, eg.SetValue):
        return np.full_like(values, fault.value).view(np.uint32)
    return old ^ aim


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("sampling", ["element", "tensor"])
def test_on_other_values_the_same_bits_of_the_same_elements_are_aimed_at(
    fault: Fault, sampling: str, path: Path, tmp_path: Path
) -> None:
    log = eg.inject(path, fault, count=60, sampling=sampling, seed=5, out=tmp_path / "bad.pt")
    other = saved(tmp_path / "other.pt", 1)
    again = eg.replay(log, other, out=tmp_path / "again.pt")
    sites = [(hit.where, hit.bits) for hit in log.faults()]
    assert [(hit.where, hit.bits) for hit in again.faults()] == sites
    expected = {name: bits(tensor).copy() for name, tensor in torch.load(other).items()}
    for hit in again.faults():  # one after the other: an element may be hit twice
        place = expected[hit.tensor][hit.position]
        assert hit.old == place
        expected[hit.tensor][hit.position] = happened(fault, np.array([place]), np.array([hit.aim], np.uint32))[0]
        assert hit.new == expected[hit.tensor][hit.position]
    found = torch.load(tmp_path / "again.pt")
    for name, wanted in expected.items():
        np.testing.assert_array_equal(bits(found[name]), wanted)


@dataclass(frozen=True)
class SwapHalves(Fault):
    """A fault of a user's own, on two neighbours at a time."""

    elements: int = 2

    def fits(self, dtype: DType) -> bool:
        return dtype.itemsize == 4

    def draw(self, dtype: DType, count: int, draws: Draws) -> np.ndarray:
        return np.full(count, 0xFFFFFFFF, dtype.bits)

    def alter(self, old: np.ndarray, aim: np.ndarray, dtype: DType) -> np.ndarray:
        return old << np.uint32(16) | old >> np.uint32(16)


def test_of_a_users_own_fault_the_bits_that_flipped_are_flipped(path: Path, tmp_path: Path) -> None:
    log = eg.inject(path, SwapHalves(), count=5, out=tmp_path / "bad.pt")
    eg.replay(log.path, path, out=tmp_path / "same.pt")
    assert (tmp_path / "same.pt").read_bytes() == (tmp_path / "bad.pt").read_bytes()
    other = saved(tmp_path / "other.pt", 1)
    eg.replay(log.path, other, out=tmp_path / "again.pt")
    first, second = flipped(path, tmp_path / "bad.pt"), flipped(other, tmp_path / "again.pt")
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_names_may_be_mapped(log: eg.InjectionLog, path: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other.pt", 1, ("x.W", "y.W"))
    again = eg.replay(log, other, rename={"a.weight": "x.W", "b.weight": "y.W"}, out=tmp_path / "again.pt")
    assert {hit.tensor for hit in again.faults()} == {"x.W", "y.W"}
    ours, theirs = flipped(path, Path(log.out)), flipped(other, tmp_path / "again.pt")
    np.testing.assert_array_equal(theirs["x.W"], ours["a.weight"])
    np.testing.assert_array_equal(theirs["y.W"], ours["b.weight"])


def test_a_map_may_say_the_order_of_the_axes(log: eg.InjectionLog, path: Path, tmp_path: Path) -> None:
    torch.save({"kernel": torch.randn(5, 12), "b.weight": torch.randn(40)}, other := tmp_path / "other.pt")
    rename = {"a.weight": Match("a.weight", "kernel", (1, 0))}
    eg.replay(log, other, rename=rename, out=tmp_path / "again.pt")
    ours, theirs = flipped(path, Path(log.out)), flipped(other, tmp_path / "again.pt")
    np.testing.assert_array_equal(theirs["kernel"], ours["a.weight"].T)
    np.testing.assert_array_equal(theirs["b.weight"], ours["b.weight"])


@pytest.mark.parametrize("axes", [(0, 0), (0,), (0, 5), (0, 1, 2)])
def test_axes_that_cannot_be_are_refused(axes: tuple[int, ...], tmp_path: Path) -> None:
    torch.save({"w": torch.randn(6, 6)}, path := tmp_path / "square.pt")
    log = eg.inject(path, eg.BitFlip(), count=9, out=tmp_path / "bad.pt")
    with pytest.raises(UsageError):
        eg.replay(log, path, rename={"w": Match("w", "w", axes)}, out=tmp_path / "again.pt")
    assert not (tmp_path / "again.pt").exists()


def torch_twin(path: Path, prefix: str = "") -> Path:
    """The PyTorch model of the same architecture, as its state dict orders it."""
    torch.manual_seed(2)
    layers = OrderedDict(conv=torch.nn.Conv2d(1, 3, 3), norm=torch.nn.BatchNorm2d(3), head=torch.nn.Linear(48, 4))
    state = torch.nn.Sequential(layers).state_dict()
    torch.save({"model": {f"{prefix}{name}": tensor for name, tensor in state.items()}}, path)
    return path


@pytest.mark.parametrize("keras", ["keras_torch.weights.h5", "keras_torch.keras"])
def test_faults_in_a_pytorch_model_happen_in_the_same_weights_of_its_keras_twin(
    keras: str, data: Path, tmp_path: Path
) -> None:
    pt = torch_twin(tmp_path / "model.pt")
    log = eg.inject(pt, eg.BitFlip(), count=90, sampling="tensor", dtypes=["float32"], seed=4, out=tmp_path / "bad.pt")
    assert {hit.tensor for hit in log.faults()} == {f"model/{name}" for name in TWINS}
    again = eg.replay(log, data / keras, rename="auto", out=tmp_path / keras)
    read = by_h5py if keras.endswith("h5") else by_zip_and_h5py
    before, after = read(data / keras), read(tmp_path / keras)
    ours, theirs = (torch.load(file)["model"] for file in (pt, tmp_path / "bad.pt"))
    for name, (twin, axes) in TWINS.items():
        wanted = (bits(ours[name]) ^ bits(theirs[name])).transpose(axes)
        np.testing.assert_array_equal(bits(before[twin]) ^ bits(after[twin]), wanted, name)
        assert wanted.any(), name
    untouched = set(before) - {twin for twin, _ in TWINS.values()}
    assert all(torch.equal(before[name], after[name]) for name in untouched)
    for hit, moved in zip(log.faults(), again.faults(), strict=True):
        twin, axes = TWINS[hit.tensor.removeprefix("model/")]
        assert (moved.tensor, moved.bits) == (twin, hit.bits)
        assert moved.position == tuple(hit.position[axis] for axis in axes)


def test_and_back_from_keras_to_pytorch(data: Path, tmp_path: Path) -> None:
    pt = torch_twin(tmp_path / "model.pt")
    where = [twin for twin, _ in TWINS.values()]
    log = eg.inject(data / "keras_torch.keras", eg.BitFlip(), count=60, where=where, seed=1, out=tmp_path / "bad.keras")
    eg.replay(log, pt, rename="auto", out=tmp_path / "bad.pt")
    before, after = by_zip_and_h5py(data / "keras_torch.keras"), by_zip_and_h5py(tmp_path / "bad.keras")
    ours, theirs = (torch.load(file)["model"] for file in (pt, tmp_path / "bad.pt"))
    for name, (twin, axes) in TWINS.items():
        wanted = bits(before[twin]) ^ bits(after[twin])
        np.testing.assert_array_equal((bits(ours[name]) ^ bits(theirs[name])).transpose(axes), wanted, name)


def test_wrappers_of_names_are_looked_through(data: Path, tmp_path: Path) -> None:
    pt, ddp = torch_twin(tmp_path / "model.pt"), torch_twin(tmp_path / "ddp.pt", "module.")
    log = eg.inject(pt, eg.BitFlip(), count=40, dtypes=["float32"], out=tmp_path / "bad.pt")
    again = eg.replay(log, ddp, rename="auto", out=tmp_path / "bad-ddp.pt")
    assert [hit.where.replace("module.", "") for hit in again.faults()] == [hit.where for hit in log.faults()]
    ours, theirs = (torch.load(tmp_path / name)["model"] for name in ("bad.pt", "bad-ddp.pt"))
    assert all(raw_bytes(theirs[f"module.{name}"]) == raw_bytes(ours[name]) for name in ours)


def test_a_tensor_that_is_not_there_is_named_with_those_most_like_it(log: eg.InjectionLog, tmp_path: Path) -> None:
    other = saved(tmp_path / "other.pt", 1, ("module.a.weight", "module.b.weight"))
    with pytest.raises(UnknownTensor, match=r"unknown tensor 'a\.weight'\. Did you mean 'module\.a\.weight'") as caught:
        eg.replay(log, other, out=tmp_path / "again.pt")
    assert "rename" in str(caught.value), "what to do about it"
    assert "auto" in str(caught.value)
    with pytest.raises(
        UnknownTensor, match=r"rename: unknown tensor of the log 'a\.wieght'\. Did you mean 'a\.weight'"
    ):
        eg.replay(log, other, rename={"a.wieght": "module.a.weight"}, out=tmp_path / "again.pt")
    with pytest.raises(UsageError, match="expected 'auto' or a mapping"):
        eg.replay(log, other, rename="Auto", out=tmp_path / "again.pt")
    assert sorted(os.listdir(tmp_path)) == ["bad.pt", "bad.pt.faults.jsonl", "model.pt", "other.pt"]


@pytest.mark.parametrize(
    ("a", "told"),
    [
        (torch.zeros(5, 12), r"a\.weight has shape \(5, 12\) \(expected \(12, 5\)\)"),
        (torch.zeros(60), r"a\.weight has shape \(60,\)"),
        (torch.zeros(12, 5, dtype=torch.float64), r"a\.weight is float64 \(the log has float32\)"),
        (torch.zeros(12, 5, dtype=torch.int32), r"a\.weight is int32"),
    ],
)
def test_other_shapes_and_types_are_refused(a: torch.Tensor, told: str, log: eg.InjectionLog, tmp_path: Path) -> None:
    torch.save({"a.weight": a, "b.weight": torch.zeros(40)}, other := tmp_path / "other.pt")
    before = snapshot(tmp_path, logs=True)
    for where in ({"in_place": True}, {"out": tmp_path / "again.pt"}):
        with pytest.raises(UsageError, match=told) as caught:
            eg.replay(log, other, **where)
        assert "\n" not in str(caught.value)
    assert snapshot(tmp_path, logs=True) == before


def test_matching_needs_the_file_that_was_injected(log: eg.InjectionLog, path: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other.pt", 1, ("module.a.weight", "module.b.weight"))
    (away := tmp_path / "away").mkdir()
    path.rename(away / "model.pt")
    eg.replay(log, other, rename="auto", out=tmp_path / "by-the-result.pt")
    Path(log.out).unlink()
    with pytest.raises(UsageError, match=r"model\.pt: is not there.*source") as caught:
        eg.replay(log, other, rename="auto", out=tmp_path / "again.pt")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "again.pt").exists()
    eg.replay(log, other, rename="auto", source=away / "model.pt", out=tmp_path / "again.pt")
    assert (tmp_path / "again.pt").read_bytes() == (tmp_path / "by-the-result.pt").read_bytes()


@pytest.mark.parametrize("rename", [None, {"b": "a"}], ids=["tied", "two names for one"])
def test_where_two_tensors_are_one_the_log_says_what_happened_and_undoes_it(
    rename: dict[str, str] | None, tmp_path: Path
) -> None:
    w = torch.randn(20)
    torch.save({"a": w, "b": w.clone()}, apart := tmp_path / "apart.pt")
    torch.save({"a": w, "b": w if rename is None else w.clone()}, tied := tmp_path / "tied.pt")
    before = tied.read_bytes()
    log = eg.inject(apart, eg.SetValue(7.0), fraction=1.0, out=tmp_path / "bad.pt")
    try:
        again = eg.replay(log, tied, rename=rename, in_place=True)
    except EvergradError:  # that may be refused
        assert tied.read_bytes() == before
        return
    assert torch.equal(torch.load(tied)["a"], torch.full((20,), 7.0))
    eg.undo(again)
    assert tied.read_bytes() == before


def test_a_replay_has_a_log_of_its_own_that_undoes_it(log: eg.InjectionLog, tmp_path: Path) -> None:
    other = saved(tmp_path / "other.pt", 1)
    before = other.read_bytes()
    again = eg.replay(log, other, in_place=True)
    assert again.path == tmp_path / "other.pt.faults.jsonl"
    assert (again.file, again.out, again.in_place) == (str(other), str(other), True)
    assert again.settings["replay_of"] == log.digest != again.digest
    kept = eg.replay(again.path, other, in_place=True, log_to=tmp_path / "own.jsonl")
    assert other.read_bytes() == before, "the same flips twice"
    for done in (kept, again):
        assert eg.undo(done.path).found_state == "injected"
    assert other.read_bytes() == before


def test_a_dry_run_tells_what_would_happen(log: eg.InjectionLog, tmp_path: Path) -> None:
    other = saved(tmp_path / "other.pt", 1)
    before = snapshot(tmp_path, logs=True)
    told = eg.replay(log, other, dry_run=True)
    assert snapshot(tmp_path, logs=True) == before
    done = eg.replay(log, other, out=tmp_path / "again.pt")
    assert [str(hit) for hit in told.faults()] == [str(hit) for hit in done.faults()]


def test_checksums_are_left_stale_where_they_were(path: Path, tmp_path: Path) -> None:
    log = eg.inject(path, eg.BitFlip(), count=3, out=tmp_path / "bad.pt", stale_checksum=True)
    eg.replay(log, path, out=tmp_path / "same.pt")
    assert (tmp_path / "same.pt").read_bytes() == (tmp_path / "bad.pt").read_bytes()
    eg.replay(log, path, out=tmp_path / "sound.pt", stale_checksum=False)
    assert torch.load(tmp_path / "sound.pt").keys() == torch.load(path).keys()
    assert eg.verify(tmp_path / "sound.pt").verdict != "failed" == eg.verify(tmp_path / "same.pt").verdict


def test_a_folder_is_replayed_into_its_twin(data: Path, tmp_path: Path) -> None:
    log = eg.inject(data / "sharded", eg.BitFlip(), count=30, out=tmp_path / "bad")
    shutil.copytree(data / "sharded", tmp_path / "twin")
    eg.replay(log, tmp_path / "twin", in_place=True)
    assert snapshot(tmp_path / "twin") == snapshot(tmp_path / "bad")
