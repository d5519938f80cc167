"""The examples that are one process: they print what they promise. The DDP loops are run by the tests of recovery."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from programs import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name: str, folder: Path) -> list[str]:
    done = run_python(EXAMPLES / name, folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_fault_by_hand_changes_the_training_and_is_undone_to_the_last_bit(tmp_path: Path) -> None:
    golden, fault, found, trained, undone, again = printed("inject_resume.py", tmp_path)
    assert re.fullmatch(r"golden run: accuracy (9\d|100)%", golden)
    assert re.match(r"model/2.weight\[\d+,\d+\] bit 1 \(exponent msb\): ", fault)
    assert found.startswith("verify: failed, [")
    assert trained.endswith("4 of 4 tensors differ from the golden run's")
    assert undone == "undone: the same file as before"
    assert again == "trained on from that: the golden run, to the last bit"


def test_a_keras_file_is_hit_matched_and_mended_without_keras(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    listed, kernel, fault, found, matched, replayed, undone = printed("keras_file.py", tmp_path)
    assert listed == "keras: 22 tensors"
    assert kernel == "the convolution's kernel: (3, 3, 1, 4)"
    assert fault.startswith("layers/conv2d/vars/0[")
    assert found == "verify: failed"
    assert matched == "0.weight is layers/conv2d/vars/0 with axes (2, 3, 1, 0)"
    assert replayed.startswith("0.weight of the twin")
    assert undone == "undone: the same bytes as before"


def test_every_example_has_its_line_and_its_command() -> None:
    table = (EXAMPLES / "README.md").read_text()
    names = [path.name for path in EXAMPLES.glob("*.py")] + ["command_study/"]
    assert len(names) >= 6
    for name in names:
        assert f"]({name}" in table
        assert f"examples/{name}" in table
    for path in EXAMPLES.glob("*.py"):
        assert f"examples/{path.name}" in path.read_text().split('"""')[1], "the docstring says the command"


def test_the_readme_of_the_study_shows_commands_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    from evergrad.cli import main

    plan = EXAMPLES / "command_study" / "study.toml"
    shown = (plan.parent / "README.md").read_text()
    for verb in ("study show", "study run", "study table"):
        assert f"evergrad {verb} " in shown
    assert main(["study", "show", str(plan)]) == 0
    assert "flips-in-my-training" in capsys.readouterr().out
