"""Shards that hold something else than their index says: all of it is listed, compared, verified and converted."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import evergrad as eg
from evergrad.errors import ConversionLoss, DamagedFile
from evergrad.records import Check
from programs import run_python

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

ONES = torch.ones(3)
NAN = torch.full((3,), float("nan"))


def quantised(x: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.tensor([x, 1.0]), 0.1, 0, torch.qint8)


def sharded(folder: Path, shards: dict[str, dict[str, Any]], weight_map: dict[str, str]) -> Path:
    folder.mkdir()
    for file, state in shards.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (save_file if file.endswith(".safetensors") else torch.save)(state, folder / file)
    kind = "model.safetensors" if next(iter(shards)).endswith(".safetensors") else "pytorch_model.bin"
    (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("file", ["m.safetensors", "m.bin"])
def test_tensors_that_the_index_does_not_name_are_tensors_like_others(file: str, tmp_path: Path) -> None:
    a, b = (
        sharded(tmp_path / name, {file: {"w": ONES, "hidden": value}}, {"w": file})
        for name, value in (("a", torch.zeros(3)), ("b", NAN))
    )
    with eg.open_checkpoint(a) as ck:
        assert list(ck.tensors) == ["w", "hidden"]
        assert list(ck.unindexed) == ["hidden"]
        assert not ck.others
    assert [tensor.name for tensor in eg.compare(a, b).different] == ["hidden"]
    assert eg.compare(a, a).equal
    assert eg.verify(b)["hidden"].values is Check.FAILED
    one = eg.convert(b, tmp_path / "one.pt")
    assert eg.compare(b, one).equal
    assert "hidden" in torch.load(one)
    done = run_python("-m", "evergrad", "inspect", a)
    assert "not in the index: hidden" in done.stdout
    done = run_python("-m", "evergrad", "inspect", a, "--json")
    assert json.loads(done.stdout)["unindexed"] == ["hidden"]
    done = run_python("-m", "evergrad", "verify", b)
    assert (done.returncode, done.stdout.splitlines()[-1].partition(":")[0]) == (1, "failed")


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_second_tensor_of_a_name_is_named_behind_its_file(suffix: str, tmp_path: Path) -> None:
    one, two = f"1.{suffix}", f"2.{suffix}"
    index = {"x": one, "w": two}
    a, again, b = (
        sharded(tmp_path / name, {one: {"x": 2 * ONES, "w": value}, two: {"w": ONES}}, index)
        for name, value in (("a", 3 * ONES), ("again", 3 * ONES), ("b", NAN))
    )
    told = {f"{one}/w": "not the w of the index: another tensor of that name"}
    with eg.open_checkpoint(a) as ck:
        assert list(ck.tensors) == ["x", "w"]
        assert ck.others == told
        assert ck.read("w").tolist() == [1, 1, 1]
        assert not ck.unindexed
    assert eg.compare(a, again).equal
    assert eg.compare(a, b).verdict == "different"
    assert eg.verify(a).unverified == told
    assert run_python("-m", "evergrad", "verify", a).returncode == 1
    with pytest.raises(ConversionLoss, match=f"1.{suffix}/w"):
        eg.convert(a, tmp_path / "x.pt")
    with pytest.raises(ConversionLoss, match=f"1.{suffix}/w"):
        eg.convert(a, tmp_path / "x.pt", tensors_only=True)
    eg.convert(a, tmp_path / "x.pt", tensors_only=True, skip_unread=True)


@pytest.mark.parametrize(
    ("what", "made"),
    [
        (
            "a quantised tensor (qint8)",
            lambda x: torch.quantize_per_tensor(torch.tensor([x, 1.0]), 0.1, 0, torch.qint8),
        ),
        ("a sparse tensor (COO)", lambda x: torch.tensor([[x, 0.0], [0.0, 1.0]]).to_sparse()),
    ],
)
def test_tensors_of_other_kinds_in_shards_are_listed_by_their_parts(
    what: str, made: Callable[[float], Any], tmp_path: Path
) -> None:
    a, again, b = (
        sharded(
            tmp_path / name, {"1.bin": {"w": ONES}, "2.bin": {"q": made(x), "v": ONES}}, {"w": "1.bin", "q": "2.bin"}
        )
        for name, x in (("a", 2.0), ("again", 2.0), ("b", 1.0))
    )
    torch.save({"w": ONES, "q": made(2.0), "v": ONES}, tmp_path / "one.pt")
    with eg.open_checkpoint(a) as ck, eg.open_checkpoint(tmp_path / "one.pt") as one:
        assert ck.others == {"q": what}
        assert not ck.unread
        assert set(ck.tensors) == set(one.tensors)
        assert list(ck.unindexed) == ["v"]
    assert eg.compare(a, again).equal
    assert eg.compare(a, b).verdict == "different"
    assert eg.compare(a, tmp_path / "one.pt").equal
    assert eg.verify(a).verdict is Check.OK
    with pytest.raises(ConversionLoss, match="q "):
        eg.convert(a, tmp_path / "x.pt", tensors_only=True)


def test_a_scale_in_a_shard_is_compared(tmp_path: Path) -> None:
    one = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    two = torch._make_per_tensor_quantized_tensor(one.int_repr(), 0.2, 0)
    a, b = (sharded(tmp_path / name, {"m.bin": {"q": q}}, {"q": "m.bin"}) for name, q in (("a", one), ("b", two)))
    assert eg.compare(a, b).values == ("q/quantizer/0: 0.1 / 0.2",)


def test_an_object_that_two_shards_hold_is_that_of_the_index(tmp_path: Path) -> None:
    shards = {"1.bin": {"w": ONES, "q": quantised(2.0)}, "2.bin": {"q": quantised(3.0)}}
    path = sharded(tmp_path / "a", shards, {"w": "1.bin", "q": "2.bin"})
    with eg.open_checkpoint(path) as ck:
        assert ck.read("q/int_repr").tolist() == [30, 10]
        assert set(ck.others) == {"q", "1.bin/q", "1.bin/q/int_repr"}
    assert eg.verify(path).verdict is Check.UNKNOWN


def test_values_of_shards_are_one_state(tmp_path: Path) -> None:
    shards = {"1.bin": {"w": ONES, "meta": {"a": 1}}, "2.bin": {"v": ONES, "meta": {"b": [ONES]}, "lr": 0.1}}
    path = sharded(tmp_path / "a", shards, {"w": "1.bin", "v": "2.bin"})
    one = eg.convert(path, tmp_path / "one.pt")
    loaded = torch.load(one)
    assert (loaded["meta"]["a"], loaded["lr"]) == (1, 0.1)
    assert loaded["meta"]["b"][0].tolist() == [1, 1, 1]
    assert eg.compare(path, one).equal


def test_what_has_no_place_beside_another_shard_is_named(tmp_path: Path) -> None:
    shards = {"1.bin": {"w": ONES, "x": 1, "n": ONES}, "2.bin": {"x": 2, "n": {"deep": ONES, "y": 3}}}
    path = sharded(tmp_path / "a", shards, {"w": "1.bin", "n": "1.bin", "x": "1.bin"})
    index = path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "1.bin", "n": "2.bin"}}))
    with pytest.raises(DamagedFile, match=r"names tensor 'n' in '2\.bin', which does not hold it"):
        eg.open_checkpoint(path)
    index.write_text(json.dumps({"weight_map": {"w": "1.bin", "n": "1.bin", "x": "1.bin", "y": "2.bin"}}))
    torch.save({"x": 2, "n": {"deep": ONES}, "y": 3}, path / "2.bin")
    with eg.open_checkpoint(path) as ck:
        assert set(ck.tensors) == {"w", "n"}
        assert ck.others == {
            "2.bin/n/deep": "not the n/deep of the index: another tensor of that name",
            "2.bin/x": "not the x of the index: a plain value: 2",
        }
    assert eg.compare(path, path).verdict == "unknown"
