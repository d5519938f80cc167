"""Folders that torch.distributed.checkpoint wrote, restored into a live state; nothing of them is run."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import evergrad as eg
from evergrad.checkpoint.restore.dcp_folder import restore_dcp
from evergrad.errors import DamagedFile, FormatError, StateError

pytestmark = [
    pytest.mark.usefixtures("shm"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Training:
    """A module, its optimizer and a schedule, after a step."""

    def __init__(self, seed: int, steps: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[2].parameters(), "lr": 0.5}]
        self.optimizer = torch.optim.Adam(groups, lr=0.25 / seed)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        for _ in range(steps):
            self.model(torch.randn(5, 4)).sum().backward()
            self.optimizer.step()
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "step": 0}

    def is_like(self, other: Training) -> bool:
        return (
            all(map(torch.equal, self.model.state_dict().values(), other.model.state_dict().values()))
            and same(self.optimizer.state_dict(), other.optimizer.state_dict())
            and self.schedule.last_epoch == other.schedule.last_epoch
        )


@pytest.fixture
def saved() -> Training:
    return Training(1, steps=2)


@pytest.fixture
def folder(saved: Training, tmp_path: Path) -> Path:
    state = {**saved.state(), "step": 9}
    dcp.save(state, checkpoint_id=tmp_path / "folder")
    return tmp_path / "folder"


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh optimizer", "used optimizer"])
def test_a_folder_is_restored_whole(folder: Path, saved: Training, steps: int) -> None:
    live = Training(2, steps)
    state = live.state()
    assert restore_dcp(folder, state) == ()
    assert live.is_like(saved)
    assert state["step"] == 9


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_parameters_that_are_called_by_name_are_found(saved: Training, tmp_path: Path, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(saved.model, saved.optimizer, options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "folder")
    live = Training(2)
    assert restore_dcp(tmp_path / "folder", {"model": live.model, "optimizer": live.optimizer}) == ()
    assert all(map(torch.equal, live.model.state_dict().values(), saved.model.state_dict().values()))
    assert same(live.optimizer.state_dict()["state"], saved.optimizer.state_dict()["state"])
    groups = zip(live.optimizer.param_groups, saved.optimizer.param_groups, strict=True)
    assert all(ours["lr"] == theirs["lr"] for ours, theirs in groups)


@pytest.mark.parametrize("name", ["dcp", "dcp_sharded"])
def test_every_tensor_is_what_dcp_itself_reads(data: Path, name: str) -> None:
    with eg.open_checkpoint(data / name) as source:
        shapes = {key: (info.shape, info.dtype.torch) for key, info in source.tensors.items()}
    ours, theirs = ({key: torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in shapes.items()} for _ in range(2))
    dcp.load(theirs, checkpoint_id=data / name)
    skipped = restore_dcp(data / name, ours, where="**")
    assert skipped == ()
    for key in shapes:
        assert torch.equal(ours[key].view(-1).view(torch.uint8), theirs[key].view(-1).view(torch.uint8)), key


def test_a_checkpointer_begins_from_a_folder(folder: Path, saved: Training, tmp_path: Path) -> None:
    live = Training(2)
    with eg.Checkpointer(tmp_path / "run", agent=False) as ck:
        ck.restore(live.state(), source=folder)
        assert live.is_like(saved)
        assert ck.save(10, live.state()).wait(timeout=60).step == 10


def test_nested_lists_values_and_numbers_for_keys_come_back(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        return {
            "list": [torch.full((2,), value), {"n": value}],
            "values": [value, 2],
            "pair": (value, torch.full((2,), value)),
            "numbers": {0: torch.tensor(value), 1: torch.tensor(-value)},
            "a.b": {"c.d": torch.tensor(value)},
            "nothing": {},
        }

    dcp.save(state(5.0), checkpoint_id=tmp_path / "folder")
    live = state(0.0)
    assert restore_dcp(tmp_path / "folder", live) == ()
    assert repr(live) == repr(state(5.0))


def test_what_does_not_fit_is_named_before_anything_is_touched(folder: Path) -> None:
    live = Training(2)
    before = repr(live.model.state_dict())
    wrong = {**live.state(), "model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 7))}
    with pytest.raises(StateError, match=r"model/2\.weight: expected float32 \(7, 3\), found float32 \(2, 3\)"):
        restore_dcp(folder, wrong)
    with pytest.raises(StateError, match=r"extra: not in the checkpoint"):
        restore_dcp(folder, {**live.state(), "extra": torch.ones(1)})
    with pytest.raises(StateError, match=r"optimizer: in the checkpoint .* and not in the state given"):
        restore_dcp(folder, {"model": live.model})
    assert repr(live.model.state_dict()) == before


def test_what_does_not_fit_is_left_out_and_listed_if_that_is_wanted(folder: Path, saved: Training) -> None:
    live = Training(2)
    extra = torch.ones(1)
    skipped = restore_dcp(folder, {"model": live.model, "extra": extra}, strict=False)
    assert [line.partition(":")[0] for line in skipped] == ["extra", "optimizer", "schedule"]
    assert torch.equal(live.model[0].weight, saved.model[0].weight)
    assert extra == 1


def test_some_tensors_can_be_chosen(folder: Path, saved: Training) -> None:
    live = Training(2)
    bias = live.model[0].bias.detach().clone()
    assert restore_dcp(folder, {"model": live.model}, where="model/*.weight") == ()
    assert torch.equal(live.model[0].weight, saved.model[0].weight)
    assert torch.equal(live.model[0].bias, bias)


def test_a_flipped_bit_is_found_before_anything_is_touched(folder: Path, saved: Training) -> None:
    weight = saved.model[2].weight.detach().numpy().tobytes()
    (file,) = folder.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(weight)] ^= 1
    file.write_bytes(content)
    live = Training(2)
    before = repr(live.model.state_dict())
    with pytest.raises(DamagedFile, match=r"model\.2\.weight: the checksum does not hold"):
        restore_dcp(folder, live.state())
    assert repr(live.model.state_dict()) == before


class Bomb:
    """What a pickle can do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_hostile_metadata_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    live = Training(2)
    before = repr(live.model.state_dict())
    with pytest.raises(FormatError):
        restore_dcp(folder, live.state())
    assert not (tmp_path / "ran").exists()
    assert repr(live.model.state_dict()) == before


def test_a_value_that_would_have_to_be_run_is_refused_by_name(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(2), "bad": Bomb(tmp_path / "ran")}, checkpoint_id=tmp_path / "folder")
    shutil.rmtree(tmp_path / "ran", ignore_errors=True)
    live = {"x": torch.zeros(2), "bad": 0}
    with pytest.raises(StateError, match=r"bad: in the checkpoint it is a posix\.mkdir, which cannot be rebuilt"):
        restore_dcp(tmp_path / "folder", live)
    assert not live["x"].any()
    assert restore_dcp(tmp_path / "folder", live, strict=False)[0].startswith("bad: ")
    assert live["x"].all()
    assert not (tmp_path / "ran").exists()
