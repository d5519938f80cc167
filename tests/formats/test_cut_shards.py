"""To go into tests/formats/test_version_folder.py once safetensors.patch is in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

import evergrad as eg
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.records import Check
from version_folders import commit, files, two_ranks

pytestmark = pytest.mark.usefixtures("shm")


def cut(version: Path) -> None:
    """Leave tensor `a` of rank 1 to rank 0, as a shared tier does with what all ranks have alike."""
    shard, record = version / "rank-00001.safetensors", version / "rank-00001.json"
    data = shard.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    del header["a"]
    header["__metadata__"]["evergrad.elsewhere"] = json.dumps({"tensors": {"a": ["float32", [5000]]}, "aliases": {}})
    text = json.dumps(header).encode().ljust(4088)
    shard.write_bytes(new := len(text).to_bytes(8, "little") + text)
    held = Manifest.read(version / "rank-00000.json").digests["a"]
    manifest = replace(
        Manifest.read(record),
        size=len(new),
        data_start=len(new),
        header=xxhash.xxh3_128_hexdigest(new),
        digests={},
        elsewhere={"a": (0, held)},
    )
    record.write_bytes(manifest.to_bytes())
    commit(version)


def test_a_tensor_that_another_rank_holds_is_listed_once(tmp_path: Path) -> None:
    version = two_ranks(tmp_path)
    cut(version)
    with eg.open_checkpoint(version) as ck:
        assert set(ck.tensors) == {"rank-00000/a"}
        assert ck.others == {"rank-00001/a": "a tensor that another rank's shard holds"}
    found = eg.verify(version)
    assert found["rank-00000/a"].checksum is Check.OK
    assert set(found.container.values()) == {Check.OK}
    before = files(version)
    log = eg.inject(version, eg.SetValue(77.0), count=1, in_place=True)
    held, cut_off = (Manifest.read(version / f"rank-0000{rank}.json") for rank in (0, 1))
    assert cut_off.elsewhere["a"] == (0, held.digests["a"])
    assert set(eg.verify(version).container.values()) == {Check.OK}
    eg.undo(log)
    assert files(version) == before
