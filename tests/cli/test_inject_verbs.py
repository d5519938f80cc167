"""`inject`, `undo` and `replay` as a person at a terminal meets them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from evergrad.cli import main
from programs import run_python


def evergrad(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return run_python("-m", "evergrad", *arguments, cwd=cwd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one checkpoint, `model.pt`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "model.pt")
    return tmp_path


INJECT = ("inject", "model.pt", "--bits", "exponent", "--count", "10", "--where", "model/**", "--seed", "7")


def test_injecting_tells_the_first_faults_in_words_and_where_everything_is(folder: Path) -> None:
    done = evergrad(*INJECT, "--fault", "bitflip", "--out", "bad.pt", "--log", "faults.jsonl", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert all(
        re.fullmatch(r"model/\S+\[[\d,]+\] bit [1-8] \(exponent( msb)?\): \S+ → \S+", line) for line in lines[:10]
    )
    assert "10 attempted, 10 injected, 10 changed, 0 non-finite; drawn by element, seed 7" in lines
    assert "left out, 'exponent' means floats, not int64: 1 tensor (model/1.num_batches_tracked)" in lines
    assert lines[-1] == "bad.pt: to undo it, evergrad undo faults.jsonl"
    assert (folder / "faults.jsonl").exists()


def test_json_is_the_documented_summary(folder: Path) -> None:
    done = evergrad("inject", "model.pt", "--count", "3", "--out", "bad.pt", "--json", cwd=folder)
    assert json.loads(done.stdout) == {
        "attempts": 3,
        "injected": 3,
        "changed": 3,
        "nonfinite": 0,
        "log": "bad.pt.faults.jsonl",
        "out": "bad.pt",
    }


def test_undo_brings_the_file_back_and_says_so_once(folder: Path) -> None:
    before = (folder / "model.pt").read_bytes()
    assert evergrad(*INJECT, "--in-place", cwd=folder).returncode == 0
    assert (folder / "model.pt").read_bytes() != before
    done = evergrad("undo", "model.pt.faults.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "10 elements restored, byte for byte as before" in done.stdout
    assert (folder / "model.pt").read_bytes() == before
    again = json.loads(evergrad("undo", "model.pt.faults.jsonl", "model.pt", "--json", cwd=folder).stdout)
    assert (again["was"], again["restored"]) == ("clean", 0)


def test_replay_gives_the_same_bytes(folder: Path) -> None:
    evergrad(*INJECT, "--out", "bad.pt", cwd=folder)
    done = evergrad("replay", "bad.pt.faults.jsonl", "model.pt", "--out", "again.pt", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "again.pt").read_bytes() == (folder / "bad.pt").read_bytes()


def test_replay_takes_names_and_axes_from_a_file(folder: Path) -> None:
    np.savez(folder / "other.npz", kernel=np.ones((3, 3, 3, 8), np.float32), shift=np.ones(8, np.float32))
    evergrad(
        *("inject", "model.pt", "--count", "5", "--where", "model/0.weight", "--where", "model/0.bias"),
        *("--sampling", "tensor", "--bits", "0", "--out", "bad.pt"),
        cwd=folder,
    )
    (folder / "map.toml").write_text(
        "'model/0.weight' = { to = 'kernel', axes = [2, 3, 1, 0] }\n\"model/0.bias\" = 'shift'\n"
    )
    done = evergrad(
        "replay", "bad.pt.faults.jsonl", "other.npz", "--rename", "map.toml", "--out", "bad.npz", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    clean, bad = (torch.load(folder / name)["model"]["0.weight"] for name in ("model.pt", "bad.pt"))
    flipped = (clean.sign() != bad.sign()).permute(2, 3, 1, 0).numpy()
    with np.load(folder / "bad.npz") as there:
        np.testing.assert_array_equal(there["kernel"] < 0, flipped)
    assert flipped.any()


def test_a_dry_run_says_what_would_happen_and_leaves_nothing(folder: Path) -> None:
    before = sorted(folder.iterdir()), (folder / "model.pt").read_bytes()
    done = evergrad(*INJECT, "--dry-run", cwd=folder)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "dry run: nothing was changed"
    told = json.loads(evergrad(*INJECT, "--dry-run", "--json", cwd=folder).stdout)
    assert (told["injected"], told["log"], told["out"]) == (10, None, None)
    assert (sorted(folder.iterdir()), (folder / "model.pt").read_bytes()) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fault", "scale", "--factor", "4500", "--count", "2"], "all bits: "),
        (["--fault", "bitmask", "--mask", "1101", "--count", "2"], " bits "),
        (["--fault", "stuckat", "--value", "1", "--bits", "sign", "--count", "2"], "bit 0 (sign): "),
        (["--fault", "setvalue", "--value", "nan", "--count", "2", "--where", "model/0.weight"], "→ nan"),
        (["--bits", "1-3", "--burst", "2", "--fraction", "0.01", "--where", "model/0.*"], " bits "),
        (["--rate", "1e12", "--hours", "2", "--where", "model/0.*"], "drawn by element"),
        (["--probability", "0.5"], "attempted"),
        (["--count", "4", "--elements", "3", "--stride", "2"], "and 2 more"),
        (["--count", "4", "--finite-only", "--sampling", "tensor"], "drawn by tensor first, then element"),
        (["--count", "4", "--stale-checksum", "--digest", "full"], "4 changed"),
    ],
)
def test_every_fault_and_amount_has_its_options(folder: Path, options: list[str], said: str) -> None:
    done = evergrad("inject", "model.pt", "--out", "bad.pt", *options, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--count", "1"], "where to? Write a copy"),
        (["--out", "bad.pt"], "how many faults?"),
        (["--count", "1", "--out", "bad.pt", "--in-place"], "choose one"),
        (["--count", "1", "--fraction", "0.1", "--out", "bad.pt"], "two ways to say how many"),
        (["--count", "1", "--out", "no/bad.pt"], "there is no folder 'no'"),
        (["--count", "1", "--out", "model.pt"], "is the source"),
        (["--count", "9999", "--out", "bad.pt"], "9,999 faults in 257 elements"),
        (["--count", "1", "--where", "model/0.wieght", "--out", "bad.pt"], "Did you mean 'model/0.weight'"),
        (["--count", "1", "--bits", "32", "--where", "model/0.*", "--out", "bad.pt"], "fits no tensor"),
        (["--count", "1", "--bits", "exponnet", "--out", "bad.pt"], "bits 'exponnet': expected"),
        (["--count", "1", "--fault", "bitflop", "--out", "bad.pt"], "Did you mean 'bitflip'?"),
        (["--count", "1", "--fault", "scale", "--out", "bad.pt"], "scale needs --factor"),
        (["--count", "1", "--factor", "2", "--out", "bad.pt"], "--factor is not for bitflip"),
        (["--count", "1", "--sampling", "row", "--out", "bad.pt"], "expected element or tensor"),
        (["--count", "1", "--digest", "md5", "--out", "bad.pt"], "expected blocks or full"),
        (["--count", "1", "--hours", "5", "--out", "bad.pt"], "hours are hours at a rate"),
        (
            ["--count", "1", "--bits", "exponent", "--burst", "9", "--out", "bad.pt"],
            "no burst of 9 bits lies in the exp",
        ),
        (["--count", "1", "--seed", "-1", "--out", "bad.pt"], "seed -1"),
        (["--count", "1", "--out", "bad.pt", "--log", "model.pt"], "exists already, and a log is never written over"),
        (["--config", "model.pt", "--out", "bad.pt"], "model.pt"),
    ],
)
def test_wrong_input_is_one_line_and_changes_nothing(folder: Path, arguments: list[str], said: str) -> None:
    before = sorted(folder.iterdir()), (folder / "model.pt").read_bytes()
    done = evergrad("inject", "model.pt", *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert (sorted(folder.iterdir()), (folder / "model.pt").read_bytes()) == before


def test_undo_and_replay_refuse_what_is_no_log_or_another_file(folder: Path) -> None:
    evergrad(*INJECT, "--out", "bad.pt", cwd=folder)
    torch.save({"model": {"0.weight": torch.ones(3)}}, folder / "other.pt")
    for arguments, said in (
        (["undo", "model.pt"], "is no injection log"),
        (["undo", "gone.jsonl"], "no such file"),
        (["undo", "bad.pt.faults.jsonl", "other.pt"], "it is not the file that the log is of"),
        (["replay", "bad.pt.faults.jsonl", "other.pt", "--out", "x.pt"], "other.pt"),
        (["replay", "bad.pt.faults.jsonl", "model.pt", "--rename", "none.toml", "--out", "x.pt"], "none.toml"),
    ):
        done = evergrad(*arguments, cwd=folder)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert said in done.stderr
    assert not (folder / "x.pt").exists()


def test_published_settings_do_what_they_say(folder: Path) -> None:
    (folder / "settings.toml").write_text(
        'hdf5_file = "model.pt"\ninjection_probability = 1.0\ninjection_type = "count"\ninjection_attempts = 6\n'
        'float_precision = 32\ncorruption_mode = "bit_range"\nfirst_bit = 0\nlast_bit = 0\nallow_NaN_values = true\n'
        'use_random_locations = false\nlocations_to_corrupt = ["model/0.weight"]\n'
    )
    done = evergrad("inject", "--config", "settings.toml", "--out", "bad.pt", "--seed", "3", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "6 attempted, 6 injected" in done.stdout
    assert "drawn by tensor first, then element, seed 3" in done.stdout
    assert all("bit 0 (sign)" in line for line in done.stdout.splitlines()[:6])
    (folder / "other.pt").write_bytes((folder / "model.pt").read_bytes())
    options = ("--config", "settings.toml", "--out", "bad2.pt", "--count", "2", "--bits", "1", "--sampling", "element")
    wrong = evergrad("inject", "--config", "settings.toml", "--out", "bad3.pt", "--factor", "2", cwd=folder)
    assert "--factor is not for bitflip" in wrong.stderr
    more = evergrad("inject", "other.pt", *options, cwd=folder)
    assert (more.returncode, more.stderr) == (0, "")
    assert "2 attempted, 2 injected, 2 changed, 0 non-finite; drawn by element" in more.stdout


def test_a_map_of_names_that_is_no_text_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"x": torch.ones(4, 4)}, tmp_path / "a.pt")
    assert main(["inject", str(tmp_path / "a.pt"), "--out", str(tmp_path / "b.pt"), "--count", "1", "--seed", "1"]) == 0
    log = tmp_path / "b.pt.faults.jsonl"
    (tmp_path / "names.toml").write_bytes(b'x = "\xff"')
    capsys.readouterr()
    assert (
        main(["replay", str(log), str(tmp_path / "a.pt"), "--rename", str(tmp_path / "names.toml"), "--dry-run"]) == 2
    )
    err = capsys.readouterr().err
    assert "names.toml: is no TOML: expected UTF-8 text, found the byte 0xff at offset 5" in err


def test_a_hint_to_match_by_layer_has_the_spelling_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"x": torch.ones(4, 2)}, tmp_path / "a.pt")
    torch.save({"x": torch.ones(2, 4)}, tmp_path / "turned.pt")
    assert main(["inject", str(tmp_path / "a.pt"), "--out", str(tmp_path / "b.pt"), "--count", "1", "--seed", "1"]) == 0
    log = tmp_path / "b.pt.faults.jsonl"
    capsys.readouterr()
    assert main(["replay", str(log), str(tmp_path / "turned.pt"), "--dry-run"]) == 2
    assert "say so: --rename auto (rename='auto'), or axes in the map" in capsys.readouterr().err
    (tmp_path / "a.pt").unlink()
    (tmp_path / "b.pt").unlink()
    assert main(["replay", str(log), str(tmp_path / "turned.pt"), "--rename", "auto", "--dry-run"]) == 2
    assert "matching by --rename auto (rename='auto') needs" in capsys.readouterr().err
