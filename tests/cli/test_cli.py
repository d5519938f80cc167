"""The command line, as a person at a terminal meets it: real processes, real files, wrong input too."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

import evergrad as eg
from evergrad.errors import UsageError
from programs import run_python

VERBS = [
    *("demo", "inspect", "verify", "diff", "convert", "inject", "undo", "replay"),
    *("checkpoints", "run", "timeline", "doctor", "agent"),
]


def evergrad(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return run_python("-m", "evergrad", *arguments, cwd=cwd)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two checkpoints that differ in one element."""
    state = {"model": {"fc.weight": torch.ones(2, 3), "fc.bias": torch.zeros(2)}, "epoch": 3}
    torch.save(state, tmp_path / "a.pt")
    state["model"]["fc.bias"][1] = 0.5
    torch.save(state, tmp_path / "b.pt")
    return tmp_path


def test_inspect_lists_the_tensors(files: Path) -> None:
    done = evergrad("inspect", files / "a.pt")
    assert done.returncode == 0, done.stderr
    assert ["model/fc.weight", "2×3", "float32", "model", "24", "B"] in [
        line.split() for line in done.stdout.splitlines()
    ]
    assert "torch-zip: 2 tensors, 32 B" in done.stdout


def test_inspect_json_has_the_documented_form(files: Path) -> None:
    done = evergrad("inspect", files / "a.pt", "--json")
    assert json.loads(done.stdout) == {
        "format": "torch-zip",
        "tensors": [
            {"name": "model/fc.weight", "shape": [2, 3], "dtype": "float32", "role": "model", "nbytes": 24},
            {"name": "model/fc.bias", "shape": [2], "dtype": "float32", "role": "model", "nbytes": 8},
        ],
        "total_bytes": 32,
    }


def test_inspect_shows_a_tree_and_selects(files: Path) -> None:
    done = evergrad("inspect", files / "a.pt", "--tree", "--where", "model/*.bias")
    assert "└── fc.bias  2 float32 8 B" in done.stdout
    assert "fc.weight" not in done.stdout
    assert "1 of 2 tensors" in done.stdout


def test_inspect_tells_what_shares_bytes_and_what_is_left_alone(tmp_path: Path, data: Path) -> None:
    weight = torch.ones(2)
    torch.save({"in": weight, "out": weight}, tmp_path / "tied.pt")
    assert "shares bytes with" in evergrad("inspect", tmp_path / "tied.pt").stdout
    rows = json.loads(evergrad("inspect", tmp_path / "tied.pt", "--json").stdout)["tensors"]
    assert rows[0]["shares"] == ["out"]
    assert "left alone: config (acme_training.config.Config)" in evergrad("inspect", data / "user_class.pt").stdout


def test_diff_exits_1_when_something_differs_and_0_when_nothing_does(files: Path) -> None:
    done = evergrad("diff", files / "a.pt", files / "b.pt")
    assert done.returncode == 1
    assert ["model/fc.bias", "changed", "1", "of", "2", "0.5"] in [line.split() for line in done.stdout.splitlines()]
    assert "different: 1 of 2 tensors" in done.stdout
    same = evergrad("diff", files / "a.pt", files / "a.pt")
    assert (same.returncode, same.stdout) == (0, "equal: all 2 tensors and 1 value, bit for bit\n")


def test_diff_json_tells_each_tensor(files: Path) -> None:
    done = evergrad("diff", files / "a.pt", files / "b.pt", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["equal"] is False
    changed = {row["name"]: (row["status"], row["changed"], row["max_abs"]) for row in report["tensors"]}
    assert changed == {"model/fc.weight": ("equal", 0, 0.0), "model/fc.bias": ("changed", 1, 0.5)}


def test_convert_writes_and_the_two_are_equal(files: Path) -> None:
    done = evergrad("convert", files / "a.pt", files / "a.safetensors")
    assert done.returncode == 0, done.stderr
    assert evergrad("diff", files / "a.pt", files / "a.safetensors").returncode == 0
    report = json.loads(evergrad("convert", files / "a.pt", files / "a.safetensors", "--overwrite", "--json").stdout)
    assert report == {"out": str(files / "a.safetensors"), "tensors": 2, "total_bytes": 32}


def test_convert_refuses_a_loss_and_dry_run_lists_it(files: Path) -> None:
    done = evergrad("convert", files / "a.pt", files / "a.npz")
    assert done.returncode == 2
    assert "would lose epoch (a plain value: 3). Keep only the tensors" in done.stderr
    dry = evergrad("convert", files / "a.pt", files / "a.npz", "--dry-run", "--json")
    assert json.loads(dry.stdout)["losses"]
    assert dry.returncode == 1
    assert evergrad("convert", files / "a.pt", files / "a.npz", "--dry-run").returncode == 1
    exact = evergrad("convert", files / "a.pt", files / "a.safetensors", "--dry-run")
    assert (exact.returncode, exact.stdout) == (0, "nothing would be lost\n")
    assert not (files / "a.safetensors").exists()
    assert not (files / "a.npz").exists()
    assert evergrad("convert", files / "a.pt", files / "a.npz", "--tensors-only").returncode == 0


def test_diff_tells_values_besides_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    from evergrad.cli.files import _print_diff as _print
    from evergrad.records import Comparison, TensorDiff

    values = tuple(f"optimizer/param_groups/{i}/lr: 0.1 / 0.9" for i in range(23))
    rows = (TensorDiff("w", "equal", numel=2), TensorDiff("b", "changed", numel=2, changed=1, max_abs=0.5))
    _print(Comparison("a", "b", "torch-zip", "torch-zip", rows, values=values), show_all=False)
    said = capsys.readouterr().out
    assert "\nvalues:\n  optimizer/param_groups/0/lr: 0.1 / 0.9\n" in said
    assert "param_groups/19/" in said
    assert "param_groups/20/" not in said
    assert said.endswith("  and 3 more\n\ndifferent: 1 of 2 tensors, 23 values\n")
    _print(Comparison("a", "b", "torch-zip", "torch-zip", rows[:1], values=values[:1]), show_all=False)
    assert capsys.readouterr().out.endswith("different: 0 of 1 tensors, 1 value\n")


def test_diff_of_real_files_shows_a_learning_rate_that_changed(files: Path) -> None:
    torch.save({"w": torch.ones(2), "lr": 0.1}, files / "slow.pt")
    torch.save({"w": torch.ones(2), "lr": 0.9}, files / "fast.pt")
    done = evergrad("diff", files / "slow.pt", files / "fast.pt")
    assert (done.returncode, done.stdout) == (1, "values:\n  lr: 0.1 / 0.9\n\ndifferent: 0 of 1 tensors, 1 value\n")


def test_diff_of_files_without_tensors_compares_values_and_of_empty_ones_is_unknown(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    torch.save({"epoch": 4}, tmp_path / "b.pt")
    torch.save({}, tmp_path / "empty.pt")
    same = evergrad("diff", tmp_path / "a.pt", tmp_path / "a.pt")
    assert (same.returncode, same.stdout) == (0, "equal: all 1 value, bit for bit\n")
    other = evergrad("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert (other.returncode, other.stdout.splitlines()[1]) == (1, "  epoch: 3 / 4")
    none = evergrad("diff", tmp_path / "empty.pt", tmp_path / "empty.pt")
    assert (none.returncode, none.stdout) == (1, "nothing to compare: no tensors and no values\n")


def test_diff_says_that_values_were_not_compared_and_how_to_leave_them_out(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "b": torch.ones(2), "lr": 0.1, "epoch": 3}, tmp_path / "a.pt")
    assert evergrad("convert", tmp_path / "a.pt", tmp_path / "a.npz", "--tensors-only").returncode == 0
    done = evergrad("diff", tmp_path / "a.pt", tmp_path / "a.npz")
    assert (done.returncode, done.stdout.splitlines()) == (
        1,
        [
            "2 values besides tensors in a, and none in the other file to compare with. "
            "To compare tensors alone: tensors_only=True, or --tensors-only.",
            "not compared: lr (a plain value: 0.1)",
            "not compared: epoch (a plain value: 3)",
            "unknown: 2 tensors are equal, 2 more could not be compared",
        ],
    )
    done = evergrad("diff", tmp_path / "a.pt", tmp_path / "a.npz", "--tensors-only")
    told = "equal: all 2 tensors, bit for bit; 2 values besides tensors were not compared\n"
    assert (done.returncode, done.stdout) == (0, told)
    report = json.loads(evergrad("diff", tmp_path / "a.pt", tmp_path / "a.npz", "--tensors-only", "--json").stdout)
    assert report["left_out"] == {"lr": "a plain value: 0.1", "epoch": "a plain value: 3"}
    done = evergrad("diff", tmp_path / "a.pt", tmp_path / "a.pt")
    assert done.stdout == "equal: all 2 tensors and 2 values, bit for bit\n"
    done = evergrad("diff", tmp_path / "a.npz", tmp_path / "a.npz")
    assert done.stdout == "equal: all 2 tensors, bit for bit\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_json_an_example_and_its_exit_codes_in_its_help(verb: str) -> None:
    text = evergrad(verb, "--help").stdout
    assert "--json" in text
    assert f"evergrad {verb}" in text.split("Example", 1)[1]
    assert "Exit codes: 0" in text


def test_help_tells_every_exit_code_and_every_format() -> None:
    text = " ".join(evergrad("--help").stdout.split())
    for words in (
        "1 found something (diff",
        "doctor, verify: something is wrong",
        "convert: something was left out, or would be",
        "could not judge all of it (diff, verify)",
        "3 internal error",
    ):
        assert words in text
    text = evergrad("inspect", "--help").stdout
    formats = "Lightning safetensors sharded Trainer DeepSpeed DCP HDF5 Keras Chainer .keras TensorFlow npz npy Orbax"
    assert [name for name in formats.split() if name not in text] == []


def test_help_names_the_verbs_in_the_order_of_the_workflow() -> None:
    text = evergrad("--help").stdout
    places = [text.index(f"│ {verb} ") for verb in VERBS]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "missing.pt"], "no such file or folder"),
        (["inspect", "aa.pt"], "Did you mean 'a.pt'?"),
        (["inspect"], "Missing argument"),
        (["inspect", "a.pt", "--nonsense"], "No such option"),
        (["inspect", "a.pt", "--where", "model/fc.wieght"], "Did you mean 'model/fc.weight'"),
        (["inspect", "text.pt"], "no checkpoint recognised"),
        (["inspect", "short.pt"], "no zip directory"),
        (["inspect", "."], "short.pt: no zip directory"),
        (["diff", "a.pt"], "Missing argument"),
        (["diff", "a.pt", "text.pt"], "no checkpoint recognised"),
        (["convert", "a.pt", "b.pt"], "exists already"),
        (["convert", "a.pt", "x.h6"], "no format is written with the ending"),
        (["convert", "a.pt", "x.pt", "--to", "hdf6"], "unknown target format"),
        (["nonsense"], "No such command"),
        (["--nonsense"], "No such option"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_on_stderr_and_exit_2(arguments: list[str], words: str, files: Path) -> None:
    (files / "text.pt").write_text("hello")
    (files / "short.pt").write_bytes((files / "a.pt").read_bytes()[:500])
    before = {path.name: path.read_bytes() for path in files.iterdir()}
    done = evergrad(*arguments, cwd=files)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("evergrad: ")
    assert words in done.stderr
    assert {path.name: path.read_bytes() for path in files.iterdir()} == before


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    done = evergrad("inspect", tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no checkpoint recognised" in done.stderr


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    torch.save({f"t{i}": torch.ones(1) for i in range(2500)}, tmp_path / "many.pt")
    command = f"{sys.executable} -m evergrad inspect {tmp_path / 'many.pt'} | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout.startswith("tensor")


def test_the_version_is_the_packages() -> None:
    import evergrad as eg

    assert evergrad("--version").stdout == f"evergrad {eg.__version__}\n"


def many(path: Path, count: int, axes: int = 2) -> Path:
    """A safetensors file of many small tensors, written without any library."""
    header = {
        f"model.layers.{n // 6}.block{n % 6}.weight": {
            "dtype": "F32",
            "shape": [2] * axes,
            "data_offsets": [n * 4 * 2**axes, (n + 1) * 4 * 2**axes],
        }
        for n in range(count)
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(count * 4 * 2**axes))
    return path


def test_a_listing_of_many_tensors_is_written_row_by_row(tmp_path: Path) -> None:
    path = many(tmp_path / "many.safetensors", 20_000)
    done = evergrad("inspect", path)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["tensor", "shape", "dtype", "role", "size"]
    assert [line.split()[0] for line in lines[1:-2]] == list(open_names(path))
    assert lines[-2:] == ["", "safetensors: 20000 tensors, 320.0 kB"]
    assert len({line.index("float32") for line in lines[1:-2]}) == 1, "the columns are aligned"


def test_a_terminal_gets_the_first_rows_and_how_to_see_the_rest(tmp_path: Path) -> None:
    path = many(tmp_path / "many.safetensors", 3_000)
    table = on_a_terminal("inspect", str(path))
    assert "model.layers.166.block3.weight" in table
    assert "model.layers.166.block4.weight" not in table
    assert "… and 2,000 more: select some with --where, or see all of them: add | less" in table
    assert "safetensors: 3000 tensors" in table
    tree = on_a_terminal("inspect", str(path), "--tree")
    assert "… and 2,001 more" in tree
    few = on_a_terminal("inspect", str(path), "--where", "model.layers.3.*")
    assert "more:" not in few
    assert "6 of 3000 tensors" in few


def test_the_layout_takes_little_memory_beside_the_listing(tmp_path: Path) -> None:
    path = many(tmp_path / "many.safetensors", 20_000)
    code = (
        "import re, sys\n"
        "from evergrad.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
    )
    peaks = []
    for flags in (["--json"], [], ["--tree"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "inspect", path, *flags], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stderr))
    assert max(peaks) < peaks[0] + 20_000, peaks


def test_one_long_name_does_not_widen_every_row(tmp_path: Path) -> None:
    torch.save({"x" * 3000: torch.ones(1), **{f"t{n}": torch.ones(1) for n in range(50)}}, tmp_path / "long.pt")
    done = evergrad("inspect", tmp_path / "long.pt")
    assert len(done.stdout) < 20_000


def test_the_json_rows_are_those_of_the_records(tmp_path: Path) -> None:
    from evergrad.formats import open_checkpoint

    tied = torch.ones(2, 3)
    state = {"µ\x1b": torch.ones(()), 'quo"te\\': torch.zeros(0, 3), "a": {"b": tied, "c": tied}, "half": tied.half()}
    torch.save(state, tmp_path / "state.pt")
    rows = json.loads(evergrad("inspect", tmp_path / "state.pt", "--json").stdout)["tensors"]
    with open_checkpoint(tmp_path / "state.pt") as ck:
        assert rows == [info.to_json() for info in ck.tensors.values()]


def test_the_tree_shows_every_nesting(tmp_path: Path) -> None:
    state = {"a": {"x": torch.ones(1), "y": {"z": torch.ones(2)}}, "b": torch.ones(3), "c": {"d": torch.ones(())}}
    torch.save(state, tmp_path / "state.pt")
    done = evergrad("inspect", "state.pt", "--tree", cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "state.pt",
        "├── a",
        "│   ├── x  1 float32 4 B",
        "│   └── y",
        "│       └── z  2 float32 8 B",
        "├── b  3 float32 12 B",
        "└── c",
        "    └── d  scalar float32 4 B",
        "",
        "torch-zip: 4 tensors, 28 B",
    ]


def open_names(path: Path) -> list[str]:
    from evergrad.formats import open_checkpoint

    with open_checkpoint(path) as ck:
        return list(ck.tensors)


def on_a_terminal(*arguments: str) -> str:
    """What the command shows on a terminal of 200 columns."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (50, 200))
    process = subprocess.Popen(
        [sys.executable, "-m", "evergrad", *arguments], stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True
    )
    os.close(theirs)
    shown = b""
    try:
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux says so at the end
                break
            if not piece:
                break
            shown += piece
    finally:
        os.close(ours)
        assert process.wait() == 0
    return shown.decode()


@pytest.mark.parametrize(
    "verb",
    [
        ["inspect", ""],
        ["verify", ""],
        ["diff", "", "a.pt"],
        ["diff", "a.pt", ""],
        ["convert", "", "b.npz"],
        ["convert", "a.pt", ""],
        ["inject", "", "--count", "1", "--in-place"],
        ["undo", ""],
        ["undo", "log.jsonl", ""],
        ["replay", "", "a.pt", "--in-place"],
        ["replay", "log.jsonl", "", "--in-place"],
        ["timeline", ""],
        ["study", "status", ""],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_current_folder(verb: list[str], files: Path) -> None:
    (files / "b.pt").unlink()
    before = (files / "a.pt").read_bytes()
    done = evergrad(*verb, cwd=files)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("evergrad: an empty path names no file or folder")
    assert (files / "a.pt").read_bytes() == before
    assert os.listdir(files) == ["a.pt"]


def test_an_empty_path_opens_nothing() -> None:
    with pytest.raises(UsageError, match="an empty path names no file"):
        eg.open_checkpoint("")
