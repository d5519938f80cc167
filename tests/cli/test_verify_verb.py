"""`evergrad verify`, as a person at a terminal meets it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import safetensors.torch
import torch

import evergrad as eg
from programs import run_python


def evergrad(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return run_python("-m", "evergrad", *arguments, cwd=cwd)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A sound checkpoint with checksums, one without, and one with a flipped top exponent bit."""
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    weight[0, 0] = -0.75
    torch.save({"model": {"4.weight": weight, "4.bias": torch.zeros(8)}, "epoch": 1}, tmp_path / "a.pt")
    safetensors.torch.save_file({"4.weight": weight}, tmp_path / "a.safetensors")
    torch.save({"model": {"4.weight": weight, "4.bias": torch.zeros(8)}, "epoch": 1}, tmp_path / "flipped.pt")
    with eg.open_checkpoint(tmp_path / "flipped.pt") as ck:
        ck.xor("model/4.weight", [0], [1 << 30])
    return tmp_path


def test_a_sound_file_is_said_to_be_so_in_a_line(files: Path) -> None:
    done = evergrad("verify", files / "a.pt")
    assert (done.returncode, done.stdout) == (0, "ok: torch-zip, 0 of 2 tensors wrong\n"), done.stderr


def test_an_outlier_is_shown_with_its_place_and_exits_1(files: Path) -> None:
    done = evergrad("verify", files / "flipped.pt")
    assert done.returncode == 1
    assert "model/4.weight[0,0] = -2.55e+38: 2^126 beyond all others (up to 2^2)" in done.stdout
    assert "4.bias" not in done.stdout
    assert done.stdout.endswith("failed: torch-zip, 1 of 2 tensors wrong\n")
    assert "model/4.bias" in evergrad("verify", files / "flipped.pt", "--all").stdout
    assert evergrad("verify", files / "flipped.pt", "--where", "model/4.bias").returncode == 0


def test_no_checksum_is_unknown_which_only_strict_minds(files: Path) -> None:
    done = evergrad("verify", files / "a.safetensors")
    assert (done.returncode, done.stdout) == (
        0,
        "unknown: safetensors, 0 of 1 tensors wrong, no checksums in this format\n",
    )
    assert evergrad("verify", files / "a.safetensors", "--strict").returncode == 1
    assert evergrad("verify", files / "a.pt", "--strict").returncode == 0


def test_where_there_is_nothing_to_check_it_is_not_called_ok(data: Path) -> None:
    done = evergrad("verify", data / "orbax")
    assert done.returncode == 1
    assert "not verified: default/params/dense/kernel (a jax.Array" in done.stdout
    assert done.stdout.endswith("unknown: orbax, 0 of 0 tensors wrong, 6 more not verified\n")


@pytest.mark.parametrize("state", [{}, {"epoch": 3}, 3], ids=str)
def test_a_torch_file_without_tensors_has_nothing_to_verify(state: object, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "a.pt")
    for options, code in (((), 0), (("--strict",), 1)):
        done = evergrad("verify", tmp_path / "a.pt", *options)
        assert done.returncode == code
        assert done.stdout.startswith("nothing to verify: torch-zip, no tensors (")
        assert done.stdout.endswith(" other parts with a checksum that holds)\n")
    assert eg.verify(tmp_path / "a.pt").verdict == "unknown"
    data = (tmp_path / "a.pt").read_bytes()
    assert data.count(b"little") == 1, "the content of a part that is no tensor"
    (tmp_path / "a.pt").write_bytes(data.replace(b"little", b"mittle"))
    done = evergrad("verify", tmp_path / "a.pt")
    assert (done.returncode, done.stdout.splitlines()[-1].split(":")[0]) == (1, "failed")


def test_json_has_the_documented_form(files: Path) -> None:
    done = evergrad("verify", files / "flipped.pt", "--json", "--where", "model/4.weight")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert (report["format"], report["verdict"]) == ("torch-zip", "failed")
    assert report["container"]["flipped/data.pkl"] == "ok"
    worst = report["tensors"][0].pop("worst")
    assert worst["index"] == [0, 0]
    assert worst["value"] == pytest.approx(-2.55e38, rel=1e-2)
    assert report["tensors"] == [
        {
            "name": "model/4.weight",
            "verdict": "failed",
            "checksum": "ok",
            "values": "failed",
            "nonfinite": 0,
            "outliers": 1,
            "reason": "[0,0] = -2.55e+38: 2^126 beyond all others (up to 2^2)",
        }
    ]


def test_nan_is_valid_json(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "nan.pt")
    report = json.loads(evergrad("verify", tmp_path / "nan.pt", "--json").stdout)
    assert report["tensors"][0]["worst"] == {"index": [1], "value": "nan"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "missing.pt"], "no such file or folder"),
        (["verify"], "Missing argument"),
        (["verify", "a.pt", "--where", "model/4.wieght"], "Did you mean 'model/4.weight'"),
        (["verify", "text.pt"], "no checkpoint recognised"),
        (["verify", "short.pt"], "no zip directory"),
        (["verify", "a.pt", "b.pt"], "unexpected extra argument"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_on_stderr_and_exit_2(arguments: list[str], words: str, files: Path) -> None:
    (files / "text.pt").write_text("hello")
    (files / "short.pt").write_bytes((files / "a.pt").read_bytes()[:500])
    done = evergrad(*arguments, cwd=files)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr
