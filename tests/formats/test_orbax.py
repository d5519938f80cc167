"""Orbax's folders are listed; what is compressed is refused with a clear word, and stays as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import evergrad as eg
from evergrad.errors import FormatError, UnsupportedContent
from evergrad.formats import orbax
from evergrad.records import Check, Role
from folder_fuzz import LISTING
from programs import run_python

DATA = Path(__file__).parent.parent / "data"


def test_zarr_arrays_are_listed_with_name_shape_and_dtype(data: Path) -> None:
    with eg.open_checkpoint(data / "orbax_zarr") as ck:
        assert ck.format == "orbax"
        assert {name: (info.shape, info.dtype.value) for name, info in ck.tensors.items()} == {
            "counts": ((5,), "int64"),
            "opt/0": ((2, 2), "float32"),
            "opt/1": ((), "int32"),
            "params/dense/bias": ((4,), "bfloat16"),
            "params/dense/kernel": ((3, 4), "float32"),
            "step": ((), "int64"),
        }
        assert ck.others == {"note": "a string"}
        assert ck.tensors["params/dense/kernel"].role is Role.MODEL


def test_reading_and_altering_is_refused_with_the_reason(data: Path) -> None:
    with eg.open_checkpoint(data / "orbax_zarr") as ck:
        for action in (lambda: ck.read("step"), lambda: ck.xor("step", [0], [1]), lambda: ck.read_bits("counts", 1, 2)):
            with pytest.raises(UnsupportedContent, match=r"not read or altered: .* are compressed \(zstd\)"):
                action()
        assert ck.checksum("step") is Check.UNKNOWN
        assert not ck.container_checks()


@pytest.mark.parametrize(("path", "prefix"), [("orbax", "default/"), ("orbax/3", "default/"), ("orbax/3/default", "")])
def test_arrays_in_an_ocdbt_database_are_named_with_their_shapes(path: str, prefix: str, data: Path) -> None:
    with eg.open_checkpoint(data / path) as ck:
        assert ck.format == "orbax"
        assert not ck.tensors, "their types are told only inside the database"
        assert len(ck.others) == 6
        kernel = ck.others[f"{prefix}params/dense/kernel"]
        assert kernel == "a jax.Array of shape (3, 4) in a compressed OCDBT database, which alone tells its type"


def test_shapes_are_also_found_where_older_versions_keep_them(tmp_path: Path) -> None:
    shutil.copytree(DATA / "orbax" / "3" / "default", path := tmp_path / "item")
    metadata = json.loads((path / "_METADATA").read_text())
    for leaf in metadata["tree_metadata"].values():
        leaf["value_metadata"].pop("write_shape", None)
    (path / "_METADATA").write_text(json.dumps(metadata))
    with eg.open_checkpoint(path) as ck:
        assert "of shape (3, 4)" in ck.others["params/dense/kernel"]
        assert "of shape ()" in ck.others["opt/1"]


def test_without_metadata_the_folders_of_arrays_are_listed(tmp_path: Path) -> None:
    shutil.copytree(DATA / "orbax_zarr", path := tmp_path / "zarr")
    for marker in ("_METADATA", "_CHECKPOINT_METADATA"):
        (path / marker).unlink()
    with eg.open_checkpoint(path) as ck:
        assert "params.dense.kernel" in ck.tensors
    shutil.copytree(DATA / "orbax" / "3" / "default", path := tmp_path / "ocdbt")
    (path / "_METADATA").unlink()
    with eg.open_checkpoint(path) as ck:
        assert ck.others == {"manifest.ocdbt": "an OCDBT database without Orbax's metadata"}


def test_a_folder_of_several_steps_says_which_there_are(tmp_path: Path) -> None:
    for step in ("3", "4"):
        shutil.copytree(DATA / "orbax" / "3", tmp_path / step)
    with pytest.raises(UnsupportedContent, match="several steps: '3', '4'"):
        eg.open_checkpoint(tmp_path)


def tree(*keys: object) -> str:
    return json.dumps({"tree_metadata": {"x": {"key_metadata": [{"key": key} for key in keys], "value_metadata": {}}}})


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("_METADATA", "{", "not JSON"),
        ("_METADATA", "[" * 100_000, "not JSON"),
        ("_METADATA", "[]", "not a JSON object"),
        ("_METADATA", "{}", "no tree_metadata"),
        ("_METADATA", '{"tree_metadata": {"a": 3}}', "leaf without keys"),
        ("_METADATA", tree(), "leaf without keys"),
        ("_METADATA", tree([1]), "no name"),
        ("_METADATA", '{"tree_metadata": {"a": {"key_metadata": [{}]}}}', "leaf without keys"),
        (
            "_METADATA",
            '{"tree_metadata": {"a": {"key_metadata": [{"key": "k"}]}, "b": {"key_metadata": [{"key": "k"}]}}}',
            "twice",
        ),
        ("_METADATA", " " * 2000, "metadata (expected at most 1024 bytes)"),
        ("step/.zarray", "{}", "no shape"),
        ("step/.zarray", '{"shape": [-1], "dtype": "<f4"}', "no shape"),
        ("step/.zarray", '{"shape": [99999999999999999999], "dtype": "<f4"}', "no shape"),
        ("step/.zarray", '{"shape": [1.5], "dtype": "<f4"}', "no shape"),
        ("step/.zarray", '{"shape": [1], "dtype": [["a", "<f4"]]}', "no shape"),
        ("step/.zarray", "nothing", "not JSON"),
    ],
)
def test_bad_metadata_is_refused_in_one_line(
    file: str, content: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DATA / "orbax_zarr", path := tmp_path / "zarr")
    (path / file).write_text(content)
    if "1024" in word:
        monkeypatch.setattr(orbax, "MAX_JSON_BYTES", 1024)
    with pytest.raises(FormatError) as caught:
        eg.open_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("key", ["../outside", "..", "a\0b", "x" * 5000, "", 3])
def test_keys_lead_nowhere_outside_the_folder(key: object, tmp_path: Path) -> None:
    shutil.copytree(DATA / "orbax_zarr", path := tmp_path / "zarr")
    shutil.copytree(path / "step", tmp_path / "outside")
    (path / "_METADATA").write_text(tree(key))
    with eg.open_checkpoint(path) as ck:
        assert not ck.tensors
        assert len(ck.others) == 1


@pytest.mark.parametrize("code", ["<f3", "|O", "<U7", "<c99", "<M8[s]", "float4"])
def test_types_that_are_not_served_are_listed_and_left_alone(code: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "orbax_zarr", path := tmp_path / "zarr")
    (path / "step" / ".zarray").write_text(json.dumps({"shape": [2], "dtype": code}))
    with eg.open_checkpoint(path) as ck:
        assert ck.others["step"] == f"an array of {code}"


def test_huge_shapes_cost_nothing(tmp_path: Path) -> None:
    shutil.copytree(DATA / "orbax_zarr", path := tmp_path / "zarr")
    (path / "step" / ".zarray").write_text(json.dumps({"shape": [1 << 61] * 3, "dtype": "<f4", "compressor": None}))
    with eg.open_checkpoint(path) as ck, pytest.raises(UnsupportedContent, match="not served yet"):
        ck.read("step")


@pytest.mark.parametrize("source", ["orbax", "orbax_zarr"])
def test_mutated_folders_give_only_our_errors(source: str, tmp_path: Path, limited: Callable[..., str]) -> None:
    said = limited(LISTING, DATA / source, tmp_path, 150, 20261, memory=3 << 29, seconds=100)
    assert 0 < int(said) < 150, "either every mutation was refused, or none"


def test_zarr_arrays_are_neither_verified_nor_compared_and_are_named(data: Path, tmp_path: Path) -> None:
    path = data / "orbax_zarr"
    names = ["counts", "opt/0", "opt/1", "params/dense/bias", "params/dense/kernel", "step"]
    why = "its zarr chunks are compressed (zstd)"
    report = eg.verify(path)
    assert report.verdict is Check.UNKNOWN
    assert report.unverified == {**dict.fromkeys(names, why), "note": "a string"}
    comparison = eg.compare(path, path)
    assert (comparison.verdict, comparison.uncompared) == ("unknown", report.unverified)
    for verb, line in (
        (["verify", path], f"not verified: counts ({why})"),
        (["diff", path, path], f"not compared: counts ({why})"),
    ):
        done = run_python("-m", "evergrad", *verb)
        assert done.returncode == 1, done.stderr
        assert line in done.stdout.splitlines()
    assert eg.verify(path, where="params").unverified == dict.fromkeys(names[3:5], why)
    shutil.copytree(path, other := tmp_path / "other")
    header = json.loads((other / "counts" / ".zarray").read_text())
    (other / "counts" / ".zarray").write_text(json.dumps({**header, "shape": [6]}))
    changed = eg.compare(path, other)
    assert (changed.verdict, [row.name for row in changed.different]) == ("different", ["counts"])
    torch.save(
        {"counts": torch.zeros(5, dtype=torch.int64), "opt": {"0": torch.zeros(2, 2).double()}}, tmp_path / "a.pt"
    )
    mixed = eg.compare(tmp_path / "a.pt", path, where=["counts", "opt/0"])
    assert [(row.name, row.status) for row in mixed.tensors] == [("opt/0", "dtype")]
    assert mixed.uncompared == {"counts": why}
