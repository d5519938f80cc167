"""A version of the checkpointer is a checkpoint like any other: listed, read, compared, converted, verified."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import evergrad as eg
from evergrad.checkpoint.restore.shards import Shard
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.cli import main
from evergrad.errors import EvergradError, UnsupportedContent
from evergrad.formats.version_records import record_bytes
from evergrad.records import Check
from evergrad.testing import FormatContract
from version_folders import commit, copy_of, files, flip, saved, state, two_ranks

pytestmark = pytest.mark.usefixtures("shm")


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """One rank, one version."""
    return saved(tmp_path, 3)[0]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two ranks, committed."""
    return two_ranks(tmp_path)


class TestVersion(FormatContract):
    format = "evergrad version"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        (folder / "job").mkdir()
        (version,) = saved(folder / "job", 3)
        commit(version)
        return version, eg.flatten(state(3.0)).tensors

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        found = safetensors.torch.load_file(path / "rank-00000.safetensors")
        return found | {"model/tied": found["model/fc.weight"]}


class TestVersionOfTwoRanks(FormatContract):
    format = "evergrad version"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        (folder / "job").mkdir()
        return two_ranks(folder / "job"), {f"rank-0000{n}/a": torch.full((5000,), float(n)) for n in (0, 1)}

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        return {f"rank-0000{n}/a": safetensors.torch.load_file(path / f"rank-0000{n}.safetensors")["a"] for n in (0, 1)}


def test_one_rank_is_named_as_in_its_shard_and_gives_the_state_back(version: Path) -> None:
    with eg.open_checkpoint(version) as ck:
        assert ck.format == "evergrad version"
        assert set(ck.tensors) == {"model/fc.weight", "model/tied", "model/none", "model/half", "wave"}
        found = ck.state()
    assert found["epoch"] == 3
    assert found["model"]["tied"].data_ptr() == found["model"]["fc.weight"].data_ptr()


def test_several_ranks_are_named_behind_the_rank(pair: Path) -> None:
    with eg.open_checkpoint(pair) as ck:
        assert set(ck.tensors) == {"rank-00000/a", "rank-00001/a"}
        assert ck.state()["rank-00001"]["step"] == 7


def test_a_version_that_lost_a_rank_keeps_its_names(pair: Path) -> None:
    (pair / "rank-00000.safetensors").unlink()
    with eg.open_checkpoint(pair) as ck:
        assert set(ck.tensors) == {"rank-00001/a"}
        assert list(ck.others) == ["rank-00000.safetensors"]


def test_a_sound_version_is_ok_in_every_part(version: Path, pair: Path) -> None:
    one, two = eg.verify(version), eg.verify(pair)
    assert (one.verdict, two.verdict) == (Check.OK, Check.OK)
    assert set(one.container) == {"rank-00000.safetensors/header", "rank-00000.json"}
    assert {"rank-00001.safetensors/header", "rank-00001.json", "COMMIT.json"} < set(two.container)


def test_a_bit_that_flips_at_rest_is_found_in_its_tensor(version: Path) -> None:
    with eg.open_checkpoint(version) as ck:
        place = ck.tensors["model/half"].nbytes
    flip(version / "rank-00000.safetensors", -place // 2)  # half precision comes last
    found = eg.verify(version)
    assert [row.name for row in found.wrong] == ["model/half"]
    assert found["model/half"].checksum is Check.FAILED
    assert set(found.container.values()) == {Check.OK}
    alone = eg.verify(version / "rank-00000.safetensors")
    assert (alone.format, [row.name for row in alone.wrong]) == ("safetensors", ["model/half"])


@pytest.mark.parametrize(
    ("name", "offset", "part"),
    [
        ("rank-00001.safetensors", 35, "rank-00001.safetensors/header"),
        ("rank-00001.json", 0, "rank-00001.json"),
        ("rank-00001.json", 60, "rank-00001.json"),
        ("rank-00001.json", -20, "rank-00001.json"),
        ("COMMIT.json", 12, "COMMIT.json"),
        ("COMMIT.json", 100, "COMMIT.json"),
    ],
)
def test_a_bit_that_flips_beside_the_tensors_is_found_in_its_part(
    name: str, offset: int, part: str, pair: Path
) -> None:
    flip(pair / name, offset)
    found = eg.verify(pair)
    assert {what for what, check in found.container.items() if check is Check.FAILED} == {part}
    assert not found.wrong


def test_a_shard_that_cannot_be_read_does_not_hide_the_others(pair: Path, tmp_path: Path) -> None:
    flip(pair / "rank-00001.safetensors", 8)
    found = eg.verify(pair)
    assert found.container["rank-00001.safetensors/header"] is Check.FAILED
    assert found["rank-00000/a"].checksum is Check.OK
    with pytest.raises(EvergradError, match=r"rank-00001\.safetensors.*header is not JSON"):
        eg.convert(pair, tmp_path / "all.pt")


def test_digests_that_cannot_be_believed_say_nothing_about_a_tensor(pair: Path) -> None:
    flip(pair / "rank-00001.json", -20)
    found = eg.verify(pair)
    assert found["rank-00000/a"].checksum is Check.OK
    assert found["rank-00001/a"].checksum is Check.UNKNOWN


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize(
    "gone", [["rank-00001.safetensors"], ["rank-00001.json"], ["rank-00001.safetensors", "rank-00001.json"]]
)
def test_what_is_missing_has_failed(gone: list[str], committed: bool, tmp_path: Path) -> None:
    pair = two_ranks(tmp_path, committed=committed)
    for name in gone:
        (pair / name).unlink()
    found = eg.verify(pair)
    assert {what for what, check in found.container.items() if check is Check.FAILED} == {
        f"{n} (missing)" for n in gone
    }
    with pytest.raises(EvergradError, match="missing"):
        eg.convert(pair, tmp_path / "all.pt")


def test_a_shard_of_another_version_is_not_taken_for_one_of_this(pair: Path) -> None:
    manifest = Manifest.read(pair / "rank-00001.json")
    (pair / "rank-00001.json").write_bytes(replace(manifest, job="job-2").to_bytes())
    commit(pair)
    found = eg.verify(pair)
    assert {what for what, check in found.container.items() if check is Check.FAILED} == {"rank-00001.json"}


def test_a_manifest_that_was_replaced_after_the_commit_is_found(pair: Path) -> None:
    manifest = Manifest.read(pair / "rank-00001.json")
    (pair / "rank-00001.json").write_bytes(replace(manifest, meta={"note": 1}).to_bytes())
    assert eg.verify(pair).container["rank-00001.json"] is Check.FAILED
    assert eg.verify(pair / "rank-00001.safetensors").container["COMMIT.json"] is Check.FAILED


def test_a_tensor_that_another_rank_holds_has_to_agree(pair: Path) -> None:
    manifest = Manifest.read(pair / "rank-00001.json")
    for digest, check in ((Manifest.read(pair / "rank-00000.json").digests["a"], Check.OK), ("0" * 32, Check.FAILED)):
        (pair / "rank-00001.json").write_bytes(replace(manifest, elsewhere={"a": (0, digest)}).to_bytes())
        commit(pair)
        assert eg.verify(pair).container["rank-00001.json"] is check


@pytest.mark.parametrize("head", ["28b52ffd", "5e2a4d18"])
def test_a_packed_shard_is_refused_with_the_next_step(head: str, pair: Path) -> None:
    packed = pair / "rank-00001.safetensors.zst"
    packed.write_bytes(bytes.fromhex(head) + bytes(100))
    (pair / "rank-00001.safetensors").unlink()
    for path in (pair, packed):
        with pytest.raises(UnsupportedContent, match=r"packed with zstd.*evergrad checkpoints export"):
            eg.open_checkpoint(path)


def test_altering_by_hand_keeps_every_digest_true(pair: Path) -> None:
    before = files(pair)
    with eg.open_checkpoint(pair) as ck:
        for _ in range(3):  # one after the other: the digests follow once, in the end
            ck.xor("rank-00001/a", [5], [1 << 30])
        assert ck.checksum("rank-00001/a") is Check.OK
    after = files(pair)
    assert {name for name in before if before[name] != after[name]} == {
        "rank-00001.safetensors",
        "rank-00001.json",
        "COMMIT.json",
    }
    assert {name: len(data) for name, data in before.items()} == {name: len(data) for name, data in after.items()}
    assert eg.verify(pair).container["COMMIT.json"] is Check.OK
    with Shard(copy_of(pair, 1), "job-1") as shard:
        assert shard.verify() == []
    with eg.open_checkpoint(pair) as ck:
        ck.xor("rank-00001/a", [5], [1 << 30])
    assert files(pair) == before


def test_a_digest_that_was_wrong_before_stays_wrong(pair: Path) -> None:
    flip(pair / "rank-00001.safetensors", -1)
    before = files(pair)
    with eg.open_checkpoint(pair) as ck:
        ck.xor("rank-00001/a", [5], [1 << 3])
    after = files(pair)
    assert {name for name in before if before[name] != after[name]} == {"rank-00001.safetensors"}
    assert eg.verify(pair)["rank-00001/a"].checksum is Check.FAILED


def test_a_link_to_a_manifest_keeps_what_it_was(version: Path, tmp_path: Path) -> None:
    (tmp_path / "kept.json").hardlink_to(version / "rank-00000.json")
    before = (tmp_path / "kept.json").read_bytes()
    with eg.open_checkpoint(version) as ck:
        ck.xor("wave", [0], [[1 << 20, 0]])
    assert (tmp_path / "kept.json").read_bytes() == before != (version / "rank-00000.json").read_bytes()


def test_two_versions_are_compared_and_converted_like_any_files(tmp_path: Path) -> None:
    (old, new) = saved(tmp_path, 3, 4)
    found = eg.compare(old, new)
    assert {row.name for row in found.different} == {"model/fc.weight", "model/tied", "model/half", "wave"}
    eg.convert(new, tmp_path / "new.pt")
    assert torch.load(tmp_path / "new.pt", weights_only=True)["epoch"] == 4
    assert not eg.compare(new, tmp_path / "new.pt").different


def test_a_version_that_was_moved_and_renamed_is_still_one(version: Path, tmp_path: Path) -> None:
    shutil.copytree(version, tmp_path / "best")
    assert eg.verify(tmp_path / "best").verdict is Check.OK


def test_other_peoples_files_of_such_a_name_stay_what_they_are(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(8)}, tmp_path / "rank-00000.safetensors")
    (tmp_path / "rank-00000.json").write_text('{"mine": true}')
    with eg.open_checkpoint(tmp_path) as ck:
        assert ck.format == "safetensors"
    assert eg.verify(tmp_path / "rank-00000.safetensors").verdict is Check.UNKNOWN


@pytest.mark.parametrize("text", ["null", "[]", '{"shards": 3}', '{"world_size": 1e9, "shards": [[]]}', "[" * 5000])
def test_records_that_make_no_sense_are_damage_and_no_crash(text: str, pair: Path) -> None:
    import xxhash

    body = (text[1:] if text.startswith("{") else f'"x": {text}}}').encode() + b"\n"
    for name in ("COMMIT.json", "rank-00000.json"):
        (pair / name).write_bytes(b'{"check": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'", ' + body)
    found = eg.verify(pair)
    assert found.verdict is Check.FAILED
    with eg.open_checkpoint(pair) as ck:
        ck.xor("rank-00000/a", [0], [1])
        ck.xor("rank-00001/a", [0], [1])


def test_the_verbs_take_a_version(version: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(version), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == "evergrad version"
    assert main(["verify", str(version), "--strict"]) == 0
    assert main(["diff", str(version), str(version)]) == 0
    flip(version / "rank-00000.safetensors", -1)
    capsys.readouterr()
    assert main(["verify", str(version)]) == 1
    assert "model/half" in capsys.readouterr().out


def test_digests_that_are_not_those_of_the_capture_are_unknown_and_never_ok(
    version: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(version), "--strict"]) == 0
    path = version / "rank-00000.json"
    body = {name: value for name, value in json.loads(path.read_bytes()).items() if name != "check"}
    path.write_bytes(record_bytes(body | {"unverified": True}))
    assert Manifest.read(path).unverified
    for place in (version, version / "rank-00000.safetensors"):
        found = eg.verify(place)
        assert found.verdict is Check.UNKNOWN
        assert set(found.doubts) == {"rank-00000.safetensors"}
        assert found["model/fc.weight"].checksum is Check.UNKNOWN
        capsys.readouterr()
        assert main(["verify", str(place)]) == 1
        first, last = capsys.readouterr().out.splitlines()
        assert first.startswith("unverified: rank-00000.safetensors (digests were taken after a restart, with none")
        assert last.startswith("unknown: ")
        assert last.endswith(", 0 of 5 tensors wrong, 4 without a digest from the time of the capture")
        assert main(["verify", str(place), "--strict"]) == 1
    shard = version / "rank-00000.safetensors"
    flip(shard, shard.stat().st_size - 3)
    assert eg.verify(version).verdict is Check.FAILED
