"""Versions as the checkpointer leaves them, of one rank and of two, with and without `COMMIT.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import xxhash

import evergrad as eg
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tiers import Copy, Site
from evergrad.checkpoint.version import Version
from evergrad.testing.tier_contract import capture_shard

Files = dict[str, bytes]


def state(value: float) -> dict[str, Any]:
    """A small state with a tied tensor, an empty one and values besides."""
    weight = torch.linspace(-1, 1, 600).reshape(20, 30) + value
    model = {"fc.weight": weight, "tied": weight, "none": torch.empty(0, 3), "half": torch.full((9,), value).half()}
    return {"model": model, "wave": torch.full((5,), value, dtype=torch.complex64), "epoch": int(value)}


def checkpointer(folder: Path) -> eg.Checkpointer:
    """One rank that keeps its versions in `folder/disk`."""
    return eg.Checkpointer(folder / "run", tiers=[eg.Local(folder / "disk", keep=9)], agent=False)


def saved(folder: Path, *steps: int) -> list[Path]:
    """The folders of versions of one rank, one a step, oldest first."""
    with checkpointer(folder) as ck:
        for step in steps:
            ck.save(step, state(float(step))).wait(timeout=60)
    return sorted(shard.parent for shard in (folder / "disk").rglob("rank-00000.safetensors"))


def restored(folder: Path) -> tuple[int | None, dict[str, Any]]:
    """What a job that starts now goes on with."""
    live = state(0.0)
    with checkpointer(folder) as ck:
        return ck.restore(live), live


def two_ranks(folder: Path, *, committed: bool = True) -> Path:
    """A version of two ranks, each with one tensor `a` that is full of the rank's number."""
    site = Site("job-1", "n0", folder / "arenas", folder / "run")
    site.arenas.mkdir()
    store = eg.Local(folder / "disk").store(site)
    store.check()
    for rank in (0, 1):
        with capture_shard(site, Version(7, 1), rank) as work:
            store.put(work)
    version = folder / "disk" / "job-1" / "n0" / "v0000000007-01"
    if committed:
        commit(version)
    return version


def commit(version: Path) -> None:
    """Write `COMMIT.json`, as a shared tier has it."""
    manifests = [(path, Manifest.read(path)) for path in sorted(version.glob("rank-*.json"))]
    first = manifests[0][1]
    shards = [
        {
            "rank": manifest.rank,
            "name": f"{path.stem}.safetensors",
            "size": manifest.size,
            "stored": manifest.size,
            "manifest": xxhash.xxh3_128_hexdigest(path.read_bytes()),
        }
        for path, manifest in manifests
    ]
    body = {
        "schema_version": 1,
        "job": first.job,
        "step": first.version.step,
        "attempt": first.version.attempt,
        "world_size": first.world_size,
        "time": first.time,
        "parent": None,
        "meta": {"note": 'a "check": of {nothing}, [at all]'},
        "encoding": "",
        "shards": shards,
    }
    text = json.dumps(body).encode()[1:] + b"\n"
    check = xxhash.xxh3_128_hexdigest(text).encode()
    (version / "COMMIT.json").write_bytes(b'{"check": "' + check + b'", ' + text)


def copy_of(version: Path, rank: int) -> Copy:
    """A shard as a restore sees it."""
    stem = version / f"rank-{rank:05d}"
    return Copy("local", Version(7, 1), rank, stem.with_suffix(".safetensors"), stem.with_suffix(".json"))


def files(version: Path) -> Files:
    """Every file of a version, byte for byte."""
    return {path.name: path.read_bytes() for path in sorted(version.iterdir())}


def flip(path: Path, offset: int, bit: int = 1) -> None:
    """One bit flips at rest; from the end if the offset is negative."""
    data = bytearray(path.read_bytes())
    data[offset] ^= bit
    path.write_bytes(data)
