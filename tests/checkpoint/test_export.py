"""A version as one plain file: what any reader of the format gets is what was saved, to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
import safetensors.torch
import torch
import xxhash
from s3_server import s3_server
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

import evergrad as eg
from evergrad.checkpoint.catalogue.catalogue import Catalogue
from evergrad.checkpoint.catalogue.export import Exported, export_version, gather_whole
from evergrad.checkpoint.catalogue.verify import check_version
from evergrad.checkpoint.restore.shards import Shard
from evergrad.checkpoint.shard_layout import cut, parse_header
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tiers import Copy, Local, Persistent
from evergrad.checkpoint.version import Version
from evergrad.errors import DamagedFile, EvergradError, RestoreError, UnknownTensor, UsageError
from evergrad.formats.version_records import shard_name

VERSION = Version(7, 1)


def place(whole: Sequence[int], offset: Sequence[int], piece: Sequence[int]) -> dict[str, list[int]]:
    return {"shape": list(whole), "offset": list(offset), "piece": list(piece)}


class Ranks:
    """A version of several ranks, each saved by a job of its own and brought together in one run folder."""

    def __init__(self, folder: Path, states: Sequence[dict[str, Any]], placements: Sequence[dict[str, Any]]) -> None:
        self.run = folder / "run"
        for rank, state in enumerate(states):
            with eg.Checkpointer(folder / f"job{rank}", tiers=[eg.Local()], agent=False) as ck:
                ck.save(VERSION.step, state).wait()
        shutil.move(folder / "job0", self.run)
        job = Catalogue(self.run).location.job
        shutil.rmtree(self.run / "catalogue", ignore_errors=True)
        self.folder = next((self.run / "local").glob(f"*/*/{VERSION.name}"))
        for rank in range(len(states)):
            source = self.folder if rank == 0 else next((folder / f"job{rank}").glob(f"local/*/*/{VERSION.name}"))
            manifest = Manifest.read(source / f"{shard_name(0)}.json")
            data = (source / f"{shard_name(0)}.safetensors").read_bytes()
            self.write(replace(manifest, job=job, rank=rank, world_size=len(states), placements=placements[rank]), data)

    def write(self, manifest: Manifest, data: bytes) -> None:
        stem = shard_name(manifest.rank)
        (self.folder / f"{stem}.safetensors").write_bytes(data)
        (self.folder / f"{stem}.json").write_bytes(manifest.to_bytes())

    def leave_out(self, rank: int, paths: Sequence[str], holder: int) -> None:
        """Make a shard like those of a shared tier: what another rank holds is not stored again."""
        stem = shard_name(rank)
        manifest = Manifest.read(self.folder / f"{stem}.json")
        data = (self.folder / f"{stem}.safetensors").read_bytes()
        header, kept = cut(data, parse_header(data), paths)
        data = header + b"".join(data[entry.offset : entry.offset + entry.nbytes] for entry in kept)
        self.write(
            replace(
                manifest,
                size=len(data),
                data_start=len(header),
                header=xxhash.xxh3_128_hexdigest(header),
                digests={entry.path: manifest.digests[entry.path] for entry in kept},
                elsewhere={path: (holder, manifest.digests[path]) for path in paths},
            ),
            data,
        )

    def export(self, out: Path, **settings: Any) -> Exported:
        return export(self.run, out, **settings)


def export(run: Path | str, out: Path | str, version: str = "latest", **settings: Any) -> Exported:
    catalogue = Catalogue(run)
    seen = catalogue.survey()
    return export_version(catalogue.resolve(version, catalogue.entries(seen)), seen, out, **settings)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    )


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def single(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A job of one rank, and the state that it saved: odd types, tied and strided tensors, values."""
    model, optimizer = trained()
    tied = torch.arange(6, dtype=torch.float32)
    odd = {
        "bf16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "fp8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j]),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.0),
        "strided": torch.arange(6).reshape(2, 3).t(),
    }
    state = {"model": model, "optimizer": optimizer, "odd": odd, "tied": [tied, tied], "epoch": 3, "name": "r50"}
    with eg.Checkpointer(tmp_path / "run", tiers=[eg.Local()], agent=False) as ck:
        ck.save(7, state).wait()
    return tmp_path / "run", {**state, "model": model.state_dict(), "optimizer": optimizer.state_dict()}


def equal(a: Any, b: Any) -> bool:
    left, right = eg.flatten(a), eg.flatten(b)
    tensors = left.tensors.keys() == right.tensors.keys() and all(
        same(left.tensors[path], right.tensors[path]) for path in left.tensors
    )
    return tensors and left.skeleton.values() == right.skeleton.values()


@pytest.mark.parametrize("ending", ["pt", "safetensors", "h5"])
def test_a_file_holds_the_state_as_it_was_saved(
    single: tuple[Path, dict[str, Any]], tmp_path: Path, ending: str
) -> None:
    run, state = single
    out = tmp_path / f"out.{ending}"
    done = export(run, out)
    assert done.tensors == len(eg.flatten(state).tensors)
    with eg.open_checkpoint(out) as ck:
        found = ck.state()
    assert equal(found, state)
    assert found["tied"][0].data_ptr() == found["tied"][1].data_ptr()
    assert found["odd"]["strided"].stride() == state["odd"]["strided"].stride()


def test_the_libraries_themselves_read_what_was_written(single: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, state = single
    weight = state["model"]["0.weight"]
    export(run, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert same(loaded["model"]["0.weight"], weight)
    assert same(loaded["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    assert loaded["epoch"] == 3
    export(run, tmp_path / "a.safetensors", where="model/**")
    flat = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert sorted(flat) == ["model/0.bias", "model/0.weight", "model/1.bias", "model/1.weight"]
    assert same(flat["model/0.weight"], weight)
    export(run, tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert torch.equal(torch.from_numpy(file["model/0/weight"][()]), weight)


def test_a_folder_becomes_a_dcp_checkpoint(single: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, state = single
    done = export(run, tmp_path / "dcp", where=["model", "optimizer"])
    assert done.format == "dcp"
    live = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        load_dcp(live, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(same(live["model"][name], state["model"][name]) for name in live["model"])
    with eg.open_checkpoint(tmp_path / "dcp") as ck:
        assert ck.format == "dcp"
        assert same(ck.read("optimizer.state.0.exp_avg"), state["optimizer"]["state"][0]["exp_avg"])


def test_where_takes_whole_containers_with_their_values_and_of_others_only_tensors(
    single: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run, state = single
    export(run, tmp_path / "some.pt", where=["optimizer", "model/0.*"])
    found = torch.load(tmp_path / "some.pt", weights_only=True)
    assert set(found) == {"model", "optimizer"}
    assert set(found["model"]) == {"0.weight", "0.bias"}
    assert equal(found["optimizer"], state["optimizer"])
    with pytest.raises(UnknownTensor, match="Did you mean"):
        export(run, tmp_path / "none.pt", where="model/0.wieght")
    assert not (tmp_path / "none.pt").exists()


def test_pieces_of_all_ranks_become_one_tensor(tmp_path: Path) -> None:
    whole = torch.arange(35, dtype=torch.float32).reshape(5, 7)
    states = [{"w": whole[begin:end].clone(), "rng": torch.full((2,), float(rank))} for rank, (begin, end) in
              enumerate([(0, 2), (2, 4), (4, 5), (5, 5)])]  # fmt: skip
    placements = [
        {"sharded": {"w": place([5, 7], [begin, 0], [size, 7])}} for begin, size in ((0, 2), (2, 2), (4, 1), (5, 0))
    ]
    ranks = Ranks(tmp_path, states, placements)
    ranks.export(tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert same(found["w"], whole)
    assert found["rng"].tolist() == [0, 0]
    ranks.export(tmp_path / "third.pt", rank=2)
    assert torch.load(tmp_path / "third.pt", weights_only=True)["rng"].tolist() == [2, 2]


def test_a_grid_of_pieces_with_copies_becomes_one_tensor(tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    corners = [(0, 0), (0, 3), (2, 0), (2, 3)] * 2  # the second four hold the same pieces
    states = [{"w": whole[y : y + 2, x : x + 3].clone()} for y, x in corners]
    placements = [{"sharded": {"w": place([4, 6], [y, x], [2, 3])}} for y, x in corners]
    Ranks(tmp_path, states, placements).export(tmp_path / "whole.safetensors")
    assert same(safetensors.torch.load_file(tmp_path / "whole.safetensors")["w"], whole)


def test_sharded_tensors_that_were_tied_are_tied_again(tmp_path: Path) -> None:
    whole = torch.arange(8.0)
    states = []
    for begin in (0, 4):
        piece = whole[begin : begin + 4].clone()
        states.append({"in": piece, "out": piece, "other": piece.clone()})
    placements = [{"sharded": {name: place([8], [begin], [4]) for name in ("in", "out", "other")}} for begin in (0, 4)]
    Ranks(tmp_path, states, placements).export(tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert all(same(found[name], whole) for name in found)
    assert found["in"].data_ptr() == found["out"].data_ptr() != found["other"].data_ptr()


def test_what_another_rank_holds_is_taken_from_there(tmp_path: Path) -> None:
    shared, twin = torch.arange(5.0), torch.arange(9.0)
    states = [{"shared": shared, "a": twin, "b": twin, "own": torch.full((3,), float(rank))} for rank in (0, 1)]
    ranks = Ranks(tmp_path, states, [{"replicated": ["shared", "a", "b"]}] * 2)
    ranks.leave_out(1, ["shared", "a"], holder=0)
    ranks.export(tmp_path / "second.pt", rank=1)
    found = torch.load(tmp_path / "second.pt", weights_only=True)
    assert same(found["shared"], shared)
    assert same(found["a"], twin)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert found["own"].tolist() == [1, 1, 1]
    # The holder saved something else: then it is not this rank's tensor.
    manifest = Manifest.read(ranks.folder / "rank-00001.json")
    wrong = {**manifest.elsewhere, "shared": (0, "0" * 32)}
    (ranks.folder / "rank-00001.json").write_bytes(replace(manifest, elsewhere=wrong).to_bytes())
    with pytest.raises(DamagedFile, match="shared: not what rank 1 saved"):
        ranks.export(tmp_path / "wrong.pt", rank=1)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [((0, 5), "7 of 8 elements"), ((0, 0), "different values"), ((0, 2), "overlap"), ((1, 4), "overlap")],
)
def test_pieces_that_do_not_make_up_the_whole_are_refused(tmp_path: Path, offsets: tuple[int, int], words: str) -> None:
    sizes = (4, 4) if offsets in ((0, 2), (0, 0)) else (4, 3)
    states = [{"w": torch.full((size,), float(rank))} for rank, size in enumerate(sizes)]
    placements = [{"sharded": {"w": place([8], [offset], [size])}} for offset, size in zip(offsets, sizes, strict=True)]
    with pytest.raises(DamagedFile, match=words):
        Ranks(tmp_path, states, placements).export(tmp_path / "whole.pt")
    assert not (tmp_path / "whole.pt").exists()


def test_a_piece_that_is_not_what_its_placement_says_is_refused(tmp_path: Path) -> None:
    states = [{"w": torch.zeros(4)}, {"w": torch.zeros(3)}]
    placements = [{"sharded": {"w": place([8], [begin], [4])}} for begin in (0, 4)]
    with pytest.raises(DamagedFile, match=r"w: not a piece of the same tensor.*expected \[4\] of \[8\], found \[3\]"):
        Ranks(tmp_path, states, placements).export(tmp_path / "whole.pt")


def test_a_shard_that_is_missing_or_damaged_stops_the_export_before_anything_is_written(tmp_path: Path) -> None:
    states = [{"w": torch.full((4,), float(rank))} for rank in (0, 1)]
    placements = [{"sharded": {"w": place([8], [begin], [4])}} for begin in (0, 4)]
    ranks = Ranks(tmp_path, states, placements)
    shard = ranks.folder / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(RestoreError, match="no intact shard of rank 1: tier local: w: not what was captured"):
        ranks.export(tmp_path / "whole.pt")
    (ranks.folder / "rank-00001.json").unlink()
    with pytest.raises(RestoreError, match="no intact shard of rank 1: none can be seen from here"):
        ranks.export(tmp_path / "whole.pt", version="7")
    assert not (tmp_path / "whole.pt").exists()


def test_an_intact_copy_in_another_tier_is_used(tmp_path: Path) -> None:
    with eg.Checkpointer(tmp_path / "run", agent=False) as ck:  # memory and disk
        ck.save(7, {"w": torch.arange(4.0)}).wait()
        shard = next((tmp_path / "run").glob("local/*/*/v*/*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-4] + b"rot!")
        export(tmp_path / "run", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["w"].tolist() == [0, 1, 2, 3]


def test_gathering_gives_memory_of_its_own(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, [{"w": torch.arange(4.0)}], [{}])
    copy = Copy("local", VERSION, 0, ranks.folder / "rank-00000.safetensors", ranks.folder / "rank-00000.json")
    with Shard(copy, Catalogue(ranks.run).location.job) as shard:
        assert shard.verify() == []
        flat = gather_whole({0: shard})
    copy.shard.write_bytes(b"\0" * copy.shard.stat().st_size)
    flat.tensors["w"] += 1
    assert flat.tensors["w"].tolist() == [1, 2, 3, 4]
    with pytest.raises(RestoreError, match="no shard of rank 3"):
        gather_whole({0: shard}, rank=3)


def test_a_persistent_tier_is_exported_from_by_its_url_alone(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/shared"
    with eg.Checkpointer(tmp_path / "run", tiers=[eg.Local(), Persistent(url)], agent=False) as ck:
        ck.save(7, {"w": torch.arange(4.0)}, meta={"loss": 0.5}).wait(tier="persistent")
    shutil.rmtree(tmp_path / "run")
    for where in (url, str(tmp_path / "shared")):
        (entry,) = Catalogue(where).entries()
        assert (entry.tiers, entry.meta, entry.state) == (("persistent",), {"loss": 0.5}, "restorable")
        export(where, tmp_path / "out.pt", overwrite=True)
        assert torch.load(tmp_path / "out.pt", weights_only=True)["w"].tolist() == [0, 1, 2, 3]
        with pytest.raises(UsageError, match="run folder"):
            _ = Catalogue(where).pins


def test_a_version_in_s3_is_checked_and_exported_by_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as server:
        options = server.options
        url = "s3://bucket/r50"
        tiers = [eg.Local(), Persistent(url, options=options)]
        with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
            ck.save(7, {"w": torch.arange(4.0)}).wait(tier="persistent")
        monkeypatch.setenv("AWS_ENDPOINT_URL", options["client_kwargs"]["endpoint_url"])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
        catalogue = Catalogue(url)
        seen = catalogue.survey()
        (entry,) = catalogue.entries(seen)
        assert [(each.tier, each.verdict) for each in check_version(entry, seen)] == [("persistent", "ok")]
        export(url, tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["w"].tolist() == [0, 1, 2, 3]


def test_shards_on_the_disks_of_several_nodes_are_one_version(tmp_path: Path) -> None:
    states = [{"w": torch.full((4,), float(rank))} for rank in (0, 1)]
    placements = [{"sharded": {"w": place([8], [begin], [4])}} for begin in (0, 4)]
    ranks = Ranks(tmp_path, states, placements)
    other = ranks.folder.parent.parent / "n1" / VERSION.name
    other.mkdir(parents=True)
    for path in ranks.folder.glob("rank-00001.*"):
        path.rename(other / path.name)
    (entry,) = Catalogue(ranks.run).entries()
    assert (entry.state, entry.tiers) == ("restorable", ("local",))
    ranks.export(tmp_path / "whole.pt")
    assert torch.load(tmp_path / "whole.pt", weights_only=True)["w"].tolist() == [0] * 4 + [1] * 4
    shutil.rmtree(other)
    (entry,) = Catalogue(ranks.run).entries()
    assert (entry.state, entry.tiers) == ("partial", ())


def test_what_is_in_the_way_is_said_before_anything_is_read(
    single: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run, _ = single
    (tmp_path / "there.pt").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    for out, settings, words in [
        ("there.pt", {}, "exists already"),
        ("full", {}, "exists already"),
        ("full", {"overwrite": True}, "is no DCP checkpoint"),
        ("full", {"overwrite": True, "format": "pt"}, "is a folder"),
        ("no/where.pt", {}, "there is no folder"),
        ("a.xyz", {}, "no format is written with the ending '.xyz'"),
        ("a.pt", {"format": "onnx"}, "unknown format 'onnx'"),
        ("a.pt", {"rank": 1}, "there is no rank 1: 1 saved it"),
    ]:
        with pytest.raises(EvergradError, match=words):
            export(run, tmp_path / out, **settings)
    assert (tmp_path / "there.pt").read_text() == "mine"
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    export(run, tmp_path / "empty", where="model")
    export(run, tmp_path / "empty", where="odd", overwrite=True)
    with eg.open_checkpoint(tmp_path / "empty") as ck:
        assert {name.split(".")[0] for name in ck.tensors} == {"odd"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_run_folders_own_tier_needs_no_record(single: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, _ = single
    for path in run.glob("attempts/*.json"):
        path.write_text(json.dumps({"attempt": "nonsense", "tiers": [None, 3, {}]}))
    assert Local() in Catalogue(run).location.tiers
    export(run, tmp_path / "a.pt")
