"""DeepSpeed's folders: every rank's file, read where DeepSpeed is not installed."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import evergrad as eg
from evergrad.errors import DamagedFile, FileAccessError, FormatError, UnknownFormat, UnsupportedContent
from evergrad.records import Check, Role
from evergrad.testing import FormatContract, raw_bytes
from folder_fuzz import FUZZ
from refusals import refusal_of_file

DATA = Path(__file__).parent.parent / "data"
MODEL = "mp_rank_00_model_states.pt"


class TestDeepSpeed(FormatContract):
    """ZeRO-2 over two ranks, by DeepSpeed 0.19.8."""

    format = "deepspeed"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        shutil.copytree(DATA / "deepspeed", path := folder / "run")
        with eg.open_checkpoint(path) as ck:
            return path, {name: ck.read(name) for name in ck.tensors}


class TestDeepSpeedModel(FormatContract):
    """Files of the same names whose contents torch can load without DeepSpeed."""

    format = "deepspeed"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        (step := folder / "run" / "global_step10").mkdir(parents=True)
        (folder / "run" / "latest").write_text("global_step10")
        torch.save({"module": {"fc.weight": torch.randn(4, 5)}}, step / MODEL)
        for rank in range(2):
            torch.save({"fp32": [torch.randn(9)]}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        return folder / "run", self.load(folder / "run")

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        step = path / "global_step10"
        tensors = {f"{MODEL}/module/fc.weight": torch.load(step / MODEL)["module"]["fc.weight"]}
        for rank in range(2):
            name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            tensors[f"{name}/fp32/0"] = torch.load(step / name)["fp32"][0]
        return tensors


def test_every_tensor_is_as_deepspeed_itself_read_it(data: Path) -> None:
    expected = json.loads((data / "deepspeed.expected.json").read_text())
    with eg.open_checkpoint(data / "deepspeed") as ck:
        assert sorted(ck.tensors) == sorted(row["name"] for row in expected)
        for row in expected:
            info = ck.tensors[row["name"]]
            assert [list(info.shape), info.dtype.value] == [row["shape"], row["dtype"]], row["name"]
            assert hashlib.sha256(raw_bytes(ck.read(row["name"]))).hexdigest() == row["sha256"], row["name"]


def test_it_is_read_where_deepspeed_is_not_installed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with eg.open_checkpoint(data / "deepspeed" / "global_step2") as ck:
        assert "deepspeed.runtime.zero.config.ZeroStageEnum" in ck.others.values()
        assert ck.tensors[f"{MODEL}/module/0.weight"].role is Role.MODEL
        assert ck.tensors[f"{MODEL}/module/0.weight"].dtype == "bfloat16"
        optimizer = [name for name in ck.tensors if "optim_states" in name and name.endswith("exp_avg")]
        assert {ck.tensors[name].role for name in optimizer} == {Role.OPTIMIZER}
        assert {ck.checksum(name) for name in ck.tensors} == {Check.OK}


def test_the_folder_and_its_parent_list_the_same_names(data: Path) -> None:
    with eg.open_checkpoint(data / "deepspeed") as above, eg.open_checkpoint(data / "deepspeed" / "global_step2") as ck:
        assert list(above.tensors) == list(ck.tensors)
        assert above.path == ck.path


@pytest.mark.parametrize(
    ("latest", "kind", "word"),
    [
        (b"../elsewhere", DamagedFile, "points elsewhere"),
        (b"/etc", DamagedFile, "points elsewhere"),
        (b"..", DamagedFile, "points elsewhere"),
        (b"a\0b", DamagedFile, "points elsewhere"),
        (b"", DamagedFile, "points elsewhere"),
        (b"\xff\xfe" * 5000, FileAccessError, "cannot"),
        (b"x" * 5000, FileAccessError, "cannot"),
        (b"global_step3", FileAccessError, "not there"),
        (b"empty", FileAccessError, "holds no"),
    ],
    ids=lambda value: repr(value[:16]) if isinstance(value, bytes) else None,
)
def test_a_latest_that_points_elsewhere_is_refused(
    latest: bytes, kind: type[FormatError], word: str, tmp_path: Path
) -> None:
    shutil.copytree(DATA / "deepspeed", path := tmp_path / "run")
    (path / "empty").mkdir()
    shutil.copytree(DATA / "deepspeed" / "global_step2", tmp_path / "elsewhere")
    (path / "latest").write_bytes(latest)
    (line,) = refusal_of_file(path, kind)
    assert word in line


def test_a_damaged_file_is_named_and_foreign_ones_are_listed(tmp_path: Path) -> None:
    shutil.copytree(DATA / "deepspeed", path := tmp_path / "run")
    model = path / "global_step2" / MODEL
    whole = model.read_bytes()
    model.write_bytes(whole[:-30])
    (line,) = refusal_of_file(path, DamagedFile)
    assert MODEL in line
    model.write_bytes(b"something else")
    with eg.open_checkpoint(path) as ck:
        assert ck.others[MODEL] == "a file of no known format"


def test_other_folders_with_a_latest_are_not_taken(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("v3")
    (tmp_path / "v3").mkdir()
    (line,) = refusal_of_file(tmp_path, UnknownFormat)
    assert "no checkpoint recognised" in line


def test_more_files_than_can_be_open_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evergrad.formats.deepspeed.MAX_FILES", 2)
    (line,) = refusal_of_file(DATA / "deepspeed", UnsupportedContent)
    assert "3 files" in line


def test_mutated_folders_give_only_our_errors(tmp_path: Path, limited: Callable[..., str]) -> None:
    said = limited(FUZZ, DATA / "deepspeed", tmp_path, 150, 20261, memory=3 << 29, seconds=100)
    assert 0 < int(said) < 150
