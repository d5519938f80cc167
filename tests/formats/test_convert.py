"""Conversion keeps everything, or refuses and says what would be lost."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings

import evergrad as eg
from evergrad.errors import ConversionLoss, DamagedFile, LimitExceeded, UsageError
from evergrad.formats import left_out
from programs import run_python
from states import every_dtype, same, states, training_state


def saved(folder: Path, state: object, name: str = "a.pt") -> Path:
    torch.save(state, folder / name)
    return folder / name


def test_a_whole_training_state_survives_the_way_through_safetensors(tmp_path: Path) -> None:
    state = training_state()
    there = eg.convert(saved(tmp_path, state), tmp_path / "b.safetensors")
    back = eg.convert(there, tmp_path / "c.pt")
    assert eg.compare(tmp_path / "a.pt", back).equal
    loaded: dict[str, Any] = torch.load(back)
    assert loaded["epoch"] == 3
    assert np.isnan(loaded["best"])
    assert loaded["history"] == [(1, 0.5), (2, 0.25)]
    assert loaded["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert list(loaded["optimizer"]["state"]) == [0, 1, 2, 3, 4], "integer keys stay integers"
    assert loaded["model"]["0.weight"].data_ptr() == loaded["model"]["2.weight"].data_ptr(), "tied weights stay tied"
    assert loaded["transposed"].data_ptr() == loaded["base"].data_ptr()
    assert loaded["transposed"].stride() == (1, 6)
    assert loaded["model"]._metadata == state["model"]._metadata
    torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)).load_state_dict(
        loaded["model"]
    )


def test_every_dtype_survives_the_way_through_safetensors(tmp_path: Path) -> None:
    there = eg.convert(saved(tmp_path, every_dtype()), tmp_path / "b.safetensors")
    assert eg.compare(tmp_path / "a.pt", there).equal
    back = eg.convert(there, tmp_path / "c.pt")
    assert eg.compare(tmp_path / "a.pt", back).equal
    assert len(safetensors.torch.load_file(there)) == len(every_dtype()), (
        "its own library reads what it cannot name as bytes"
    )


def test_a_flat_state_dict_becomes_the_file_that_the_library_would_write(tmp_path: Path) -> None:
    state = {"fc.weight": torch.randn(3, 4), "fc.bias": torch.randn(3)}
    there = eg.convert(saved(tmp_path, state), tmp_path / "b.safetensors")
    with safetensors.safe_open(there, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in state.items())


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    there = eg.convert(saved(tmp_path, {"in": weight, "out": weight}), tmp_path / "b.safetensors")
    assert there.stat().st_size < 41_000
    with eg.open_checkpoint(there) as ck:
        assert ck.tensors["in"].shares == ("out",)
        ck.xor("out", [0], [1 << 31])
        assert ck.read("in")[0, 0] == -weight[0, 0]


def test_npz_takes_what_it_can_hold_and_refuses_the_rest(tmp_path: Path) -> None:
    plain = {"model": {"fc.weight": torch.randn(3, 4), "n": torch.tensor(7)}}
    there = eg.convert(saved(tmp_path, plain), tmp_path / "b.npz")
    assert eg.compare(tmp_path / "a.pt", there).equal
    with np.load(there) as arrays:
        np.testing.assert_array_equal(arrays["model/fc.weight"], plain["model"]["fc.weight"].numpy())
    assert eg.compare(eg.convert(there, tmp_path / "c.pt"), tmp_path / "a.pt").equal
    with pytest.raises(
        ConversionLoss, match=r"would lose optimizer/param_groups/0/lr \(a plain value: 0.001\)"
    ) as caught:
        eg.convert(saved(tmp_path, training_state(), "t.pt"), tmp_path / "t.npz")
    assert "optimizer/param_groups/0/betas (a tuple)" in caught.value.losses
    assert "optimizer/state (a dict with keys that are no texts)" in caught.value.losses
    assert "views or share memory" in " ".join(caught.value.losses)
    with pytest.raises(ConversionLoss, match="NumPy has no bfloat16"):
        eg.convert(saved(tmp_path, {"x": torch.ones(2).bfloat16()}, "h.pt"), tmp_path / "h.npz", tensors_only=True)
    assert not (tmp_path / "t.npz").exists()
    assert not (tmp_path / "h.npz").exists()
    assert eg.convert(tmp_path / "t.pt", tmp_path / "t.npz", tensors_only=True).exists()
    assert eg.compare(tmp_path / "t.pt", tmp_path / "t.npz", tensors_only=True).equal


def test_npy_holds_one_array_and_no_name(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    eg.convert(tmp_path / "a.npy", tmp_path / "b.npz")
    assert torch.load(eg.convert(tmp_path / "a.npy", tmp_path / "a.pt")).tolist() == [[0, 1, 2], [3, 4, 5]]
    eg.convert(saved(tmp_path, {"x": torch.ones(2)}), tmp_path / "c.npy", tensors_only=True)
    assert np.load(tmp_path / "c.npy").tolist() == [1, 1]
    with pytest.raises(ConversionLoss, match="npy holds one array"):
        eg.convert(
            saved(tmp_path, {"x": torch.ones(2), "y": torch.ones(2)}, "two.pt"), tmp_path / "d.npy", tensors_only=True
        )


def test_objects_of_unknown_classes_are_named_as_the_loss(tmp_path: Path, data: Path) -> None:
    with pytest.raises(ConversionLoss, match=r"config \(acme_training\.config\.Config\)") as caught:
        eg.convert(data / "user_class.pt", tmp_path / "b.safetensors")
    assert len(caught.value.losses) == 2
    eg.convert(data / "user_class.pt", tmp_path / "b.safetensors", tensors_only=True)
    comparison = eg.compare(data / "user_class.pt", tmp_path / "b.safetensors")
    assert not comparison.different
    assert comparison.verdict == "unknown"
    assert set(comparison.uncompared) == {"config", "extra"}


def test_notes_of_a_safetensors_file_are_kept_or_named_as_the_loss(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors", {"format": "pt", "licence": "MIT"})
    eg.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with eg.open_checkpoint(tmp_path / "b.safetensors") as ck:
        assert ck.metadata == {"format": "pt", "licence": "MIT"}
    with pytest.raises(ConversionLoss, match="metadata 'licence'"):
        eg.convert(tmp_path / "a.safetensors", tmp_path / "c.pt")


def test_folders_become_one_file(tmp_path: Path, data: Path) -> None:
    index = data / "sharded" / "model.safetensors.index.json"
    one = eg.convert(index, tmp_path / "one.safetensors")
    assert eg.compare(data / "sharded", one).equal
    with pytest.raises(ConversionLoss, match=r"config\.json \(a file without tensors\); generation_config\.json"):
        eg.convert(data / "sharded", tmp_path / "two.safetensors")
    shutil.copytree(data / "trainer" / "checkpoint-4", folder := tmp_path / "checkpoint-4")
    with pytest.raises(ConversionLoss, match=r"config\.json \(a file without tensors\)|training_args"):
        eg.convert(folder, tmp_path / "state.pt")
    for path in [*folder.glob("*.json"), folder / "training_args.bin"]:
        if path.name != "trainer_state.json":
            path.unlink()
    (folder / "trainer_state.json").unlink()
    state = eg.convert(folder, tmp_path / "state.pt")
    assert eg.compare(folder, state).equal
    loaded = torch.load(state, weights_only=False)
    assert loaded["optimizer.pt"]["param_groups"][0]["lr"] >= 0


def test_nothing_is_overwritten_unless_asked_and_no_half_file_stays(tmp_path: Path) -> None:
    source = saved(tmp_path, {"x": torch.ones(2)})
    (tmp_path / "b.npz").write_bytes(b"precious")
    with pytest.raises(UsageError, match="exists already"):
        eg.convert(source, tmp_path / "b.npz")
    assert (tmp_path / "b.npz").read_bytes() == b"precious"
    eg.convert(source, tmp_path / "b.npz", overwrite=True)
    with pytest.raises(UsageError, match="it is the source"):
        eg.convert(source, source, overwrite=True)
    with pytest.raises(UsageError, match="no folder"):
        eg.convert(source, tmp_path / "nowhere" / "b.npz")
    with pytest.raises(UsageError, match=r"no format is written with the ending '\.h6'"):
        eg.convert(source, tmp_path / "b.h6")
    with pytest.raises(UsageError, match="Did you mean 'safetensors'"):
        eg.convert(source, tmp_path / "b.bin", to="safetensor")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.npz"]


def test_names_that_look_escaped_lose_no_tensor(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x%": torch.ones(1), "x%25": torch.zeros(1)}, tmp_path / "a.safetensors")
    with eg.open_checkpoint(tmp_path / "a.safetensors") as ck:
        assert set(ck.tensors) == {"x%", "x%25"}
        assert len(ck.state()) == 2
    assert len(torch.load(eg.convert(tmp_path / "a.safetensors", tmp_path / "a.pt"))) == 2


def test_tensors_only_keeps_the_names(tmp_path: Path, data: Path) -> None:
    one = eg.convert(data / "lightning.ckpt", tmp_path / "a.pt", tensors_only=True)
    with eg.open_checkpoint(data / "lightning.ckpt") as a, eg.open_checkpoint(one) as b:
        assert set(a.tensors) == set(b.tensors)


def test_a_skeleton_that_contradicts_the_header_is_refused(tmp_path: Path) -> None:
    path = eg.convert(saved(tmp_path, {"alpha": torch.ones(2), "epoch": 3}), tmp_path / "b.safetensors")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"alpha":{"dtype"', b'"alpho":{"dtype"'))
    with pytest.raises(eg.EvergradError, match="disagree on 'alpha'"):
        eg.open_checkpoint(path)


def test_odd_keys_and_values_survive(tmp_path: Path) -> None:
    state = {(0, "a"): torch.ones(1), "raw": bytearray(b"x"), "dtype": torch.bfloat16, np.int64(3): 1}
    with eg.open_checkpoint(eg.convert(saved(tmp_path, state), tmp_path / "b.safetensors")) as ck:
        back = ck.state()
    assert list(back) == list(state)
    assert type(back["raw"]) is bytearray
    assert back["dtype"] is torch.bfloat16


def test_attributes_of_an_ordered_dict_are_named_as_the_loss(tmp_path: Path) -> None:
    state = OrderedDict(x=torch.ones(1))
    state.note = "important"
    with pytest.raises(ConversionLoss, match="OrderedDict with attributes"):
        eg.convert(saved(tmp_path, state), tmp_path / "b.safetensors")


def test_a_header_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    source = saved(tmp_path, {"x": torch.ones(1), "big": np.zeros(80_000_000, "S1")})
    with pytest.raises(ConversionLoss, match="a header of"):
        eg.convert(source, tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize("name", ["a\0b", "x" * 70_000, "\ud800"])
def test_names_that_a_zip_cannot_hold_are_refused(name: str, tmp_path: Path) -> None:
    source = saved(tmp_path, {"ok": torch.ones(1)})
    with eg.open_checkpoint(source) as ck:
        info = ck.tensors["ok"]
        ck.tensors = {name: info}
        with pytest.raises(ConversionLoss, match="cannot hold"):
            eg.convert(ck, tmp_path / "b.npz", tensors_only=True)


def test_a_shard_of_the_source_is_not_written_over(tmp_path: Path, data: Path) -> None:
    shutil.copytree(data / "sharded", folder := tmp_path / "gpt")
    shard = next(folder.glob("*.safetensors"))
    before = shard.read_bytes()
    with pytest.raises(UsageError, match="it is the source"):
        eg.convert(folder, shard, overwrite=True)
    assert shard.read_bytes() == before


def test_a_folder_of_several_files_lists_each_behind_its_name(tmp_path: Path) -> None:
    for name in ("model.pt", "ema.pt"):
        saved(tmp_path, {"w": torch.ones(2)}, name)
    (tmp_path / "config.json").write_text("{}")
    with eg.open_checkpoint(tmp_path) as ck:
        assert ck.format == "folder"
        assert set(ck.tensors) == {"ema.pt/w", "model.pt/w"}
        assert ck.unkept == {"config.json": "a file without tensors"}


def test_the_same_state_gives_the_same_file(tmp_path: Path) -> None:
    saved(tmp_path, training_state())
    eg.convert(tmp_path / "a.pt", tmp_path / "b.pt")
    eg.convert(tmp_path / "a.pt", tmp_path / "c.pt")
    assert (tmp_path / "b.pt").read_bytes() == (tmp_path / "c.pt").read_bytes()


def test_a_disk_that_fills_up_leaves_the_old_file_and_nothing_else(tmp_path: Path, limited: Callable[..., str]) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(1_000_000))
    (tmp_path / "b.safetensors").write_bytes(b"precious")
    said = limited(
        """
        import evergrad as eg
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        try:
            eg.convert(sys.argv[1], sys.argv[2], overwrite=True)
        except eg.EvergradError as error:
            print(error)
        """,
        tmp_path / "a.npz",
        tmp_path / "b.safetensors",
    )
    assert "cannot be written: file too large" in said
    assert (tmp_path / "b.safetensors").read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.safetensors"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states)
def test_any_state_survives_torch_and_safetensors_files(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    folder = tmp_path_factory.mktemp("any")
    source = saved(folder, state)
    with eg.open_checkpoint(source) as ck:
        assert same(ck.state(), state)
    there = eg.convert(source, folder / "b.safetensors")
    with eg.open_checkpoint(there) as ck:
        assert same(ck.state(), state)


def with_values() -> dict[str, Any]:
    return {
        "w": torch.ones(3),
        "epoch": 3,
        "names": np.array(["a", "bb"]),
        "best": np.float64(2.0),
        "raw": b"xy",
        "seen": {7},
        "big": np.arange(3, dtype=">f4"),
    }


def test_values_that_are_left_out_with_tensors_only_are_named_and_counted(tmp_path: Path) -> None:
    saved(tmp_path, with_values())
    done = run_python("-m", "evergrad", "convert", "a.pt", "b.npz", "--tensors-only", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "left out: names (a text array with 2 elements)",
        "left out: big (an array of >f4 with 3 elements)",
        "left out: epoch (a plain value: 3)",
        "left out: best (a NumPy value of float64)",
        "left out: raw (a value of type bytes)",
        "left out: seen/0 (a plain value: 7)",
        "b.npz: 1 tensor, 12 B; 6 values left out",
    ]
    done = run_python("-m", "evergrad", "convert", "a.pt", "b.safetensors", "--tensors-only", "--json", cwd=tmp_path)
    assert set(json.loads(done.stdout)["left_out"]) == {"names", "big", "epoch", "best", "raw", "seen/0"}


def test_notes_of_the_container_are_named_where_the_target_has_no_place_for_them(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors", {"format": "pt", "licence": "MIT"})
    with eg.open_checkpoint(tmp_path / "a.safetensors") as ck:
        assert left_out(ck, "b.npz") == {"metadata 'licence'": "a note of the container"}
        assert left_out(ck, "b.safetensors") == {}


def test_inspect_names_arrays_that_are_no_tensors(tmp_path: Path) -> None:
    saved(tmp_path, with_values())
    done = run_python("-m", "evergrad", "inspect", "a.pt", cwd=tmp_path)
    assert "not listed as a tensor: names (a text array with 2 elements)" in done.stdout
    assert "not listed as a tensor: big (an array of >f4 with 3 elements)" in done.stdout
    found = json.loads(run_python("-m", "evergrad", "inspect", "a.pt", "--json", cwd=tmp_path).stdout)
    assert list(found["arrays"]) == ["names", "big"]


@pytest.mark.parametrize("node", [{"dict": 5}, {"dict": [5]}, {"list": "ab"}, {"object": 3, "parts": []}])
def test_a_skeleton_that_cannot_be_is_named_with_its_file(node: object, tmp_path: Path) -> None:
    root = {"dict": [["x", {"tensor": "x"}], ["y", node]]}
    notes = {"evergrad.skeleton": json.dumps({"schema_version": 1, "root": root})}
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors", notes)
    with pytest.raises(DamagedFile, match=r"a\.safetensors: notes in the metadata are damaged"):
        eg.open_checkpoint(tmp_path / "a.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex32], ids=str)
def test_tensors_that_npz_has_no_type_for_are_left_out_by_name_if_asked(dtype: torch.dtype, tmp_path: Path) -> None:
    saved(tmp_path, {"w": torch.ones(2), "x": torch.ones(2).to(dtype)})
    why = f"NumPy has no {str(dtype).removeprefix('torch.')}"

    def convert(*options: str) -> tuple[int, str, str]:
        done = run_python("-m", "evergrad", "convert", "a.pt", "b.npz", *options, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    code, _, said = convert()
    assert code == 2
    assert "--tensors-only --skip-unread. Or write .safetensors, .h5 or .pt" in said
    code, _, said = convert("--tensors-only")
    assert code == 2
    assert f"1 tensor that cannot be converted: x ({why}). Leave them out: skip_unread=True, or --skip-unread." in said
    assert not (tmp_path / "b.npz").exists()
    assert convert("--tensors-only", "--skip-unread", "--dry-run")[0] == 1
    code, told, said = convert("--tensors-only", "--skip-unread")
    assert (code, told.splitlines(), said) == (
        1,
        [f"left out: x ({why})", "b.npz: 1 tensor, 8 B; 1 tensor left out"],
        "",
    )
    with np.load(tmp_path / "b.npz") as arrays:
        assert {name: arrays[name].tolist() for name in arrays} == {"w": [1, 1]}
    only = saved(tmp_path, {"x": torch.ones(2).to(dtype)}, "only.pt")
    with pytest.raises(ConversionLoss, match=r"no tensor would be left: x .*Or write .safetensors"):
        eg.convert(only, tmp_path / "only.npz", tensors_only=True, skip_unread=True)


def test_the_hint_for_tensors_without_values_is_one_that_helps(tmp_path: Path) -> None:
    saved(tmp_path, {"w": torch.ones(2), "x": torch.empty(3, device="meta")})
    with pytest.raises(ConversionLoss, match="--tensors-only --skip-unread"):
        eg.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    eg.convert(tmp_path / "a.pt", tmp_path / "b.safetensors", tensors_only=True, skip_unread=True)


@pytest.mark.parametrize("options", [["--skip-unread"], ["--skip-unread", "--dry-run"]], ids=" ".join)
def test_skip_unread_without_tensors_only_is_refused(options: list[str], tmp_path: Path) -> None:
    saved(tmp_path, {"w": torch.ones(2)})
    done = run_python("-m", "evergrad", "convert", "a.pt", "b.npz", *options, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "evergrad: --skip-unread needs --tensors-only\n")
    with pytest.raises(UsageError, match="skip_unread=True needs tensors_only=True"):
        eg.convert(tmp_path / "a.pt", tmp_path / "b.npz", skip_unread=True)


@pytest.mark.parametrize("target", ["b.safetensors", "b.h5", "b.npz", "b.pt"])
def test_views_that_would_become_far_larger_are_refused(target: str, tmp_path: Path) -> None:
    source = saved(tmp_path, {f"w{i}": torch.zeros(1).expand(2**24) for i in range(5)})
    for options in ({}, {"tensors_only": True}):
        with pytest.raises(LimitExceeded, match="views of 335,544,320 bytes over 20 bytes"):
            eg.convert(source, tmp_path / target, **options)
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]


def test_tied_tensors_that_are_stored_once_are_no_views_that_become_larger(tmp_path: Path) -> None:
    weight = torch.zeros(2**20)
    source = saved(tmp_path, {f"w{i}": weight for i in range(70)})
    assert eg.convert(source, tmp_path / "b.safetensors").stat().st_size < 5_000_000
    with pytest.raises(LimitExceeded, match="views of"):
        eg.convert(source, tmp_path / "c.safetensors", tensors_only=True)
