"""What a file calls its tensors reaches a terminal: nothing of it may be obeyed there, or stop the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from programs import run_python

# Clears the screen, sets the window's title, fakes a line of output, writes right to left, and is no Unicode.
NAMES = ["a\x1b[2Jb", "t\x1b]0;owned\x07", "x\nok: nothing wrong", "r\u202el", "s\ud800", "c\x9b31m", "µ→"]


def evergrad(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return run_python("-m", "evergrad", *arguments, env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment})


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two checkpoints with hostile names, that differ in every tensor and in a value, and hold an infinity."""
    for file, value in (("a.pt", 1.0), ("b.pt", float("inf"))):
        state: dict[str, object] = {name: torch.full((9,), value) for name in NAMES}
        state["nested\x1b[1m"] = {name: torch.full((9,), value) for name in NAMES}
        state["lr\x1b[5m"] = value
        state["other\x1b[7m"] = Stranger()
        torch.save(state, tmp_path / file)
    return tmp_path


class Stranger:
    """Of a class that the command does not know."""


COMMANDS = [
    ["inspect", "a.pt"],
    ["inspect", "a.pt", "--tree"],
    ["verify", "b.pt"],
    ["verify", "b.pt", "--all"],
    ["diff", "a.pt", "b.pt"],
    ["diff", "a.pt", "a.pt", "--all"],
    ["convert", "a.pt", "x.npz", "--dry-run"],
    ["convert", "a.pt", "x.npz"],
    ["inspect", "a.pt", "--where", "no\x1b[2Jname"],
    ["inspect", "a.pt", "--no\x1b[2Jsuch"],
    ["no\x1b[2Jverb"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command).replace("\x1b", "ESC"))
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_nothing_unprintable_reaches_the_terminal(command: list[str], encoding: str, files: Path) -> None:
    arguments = [files / word if word.endswith((".pt", ".npz")) else word for word in command]
    done = evergrad(*arguments, PYTHONIOENCODING=encoding)
    assert done.returncode in (0, 1, 2), done.stderr
    for line in [*done.stdout.split("\n"), *done.stderr.split("\n")]:
        assert line.isprintable() or not line, repr(line)
    assert "Traceback" not in done.stderr
    assert "\nok: nothing wrong" not in done.stdout
    if encoding == "ascii":
        assert (done.stdout + done.stderr).isascii()


@pytest.mark.parametrize("verb", [[], ["inspect"], ["demo"]])
def test_help_needs_no_unicode(verb: list[str]) -> None:
    done = evergrad(*verb, "--help", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_json_is_ascii_and_keeps_the_names(files: Path) -> None:
    done = evergrad("inspect", files / "a.pt", "--json", PYTHONIOENCODING="ascii")
    assert done.stdout.isascii()
    names = {row["name"] for row in json.loads(done.stdout)["tensors"]}
    assert {"a\x1b[2Jb", "µ→"} <= names


@pytest.mark.parametrize("flags", [[], ["--tree"], ["--json"]])
def test_a_name_that_is_no_unicode_is_shown_and_stops_nothing(flags: list[str], tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"weights-\xff\x1b[2J.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "plain.pt")
    (tmp_path / "plain.pt").rename(path)
    done = evergrad("inspect", path, *flags)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    missing = evergrad("inspect", str(path) + "x", *flags)
    assert missing.returncode == 2
    assert "\x1b" not in missing.stderr
    assert missing.stderr.count("\n") == 1


def test_printable_leaves_text_alone_and_spells_out_the_rest() -> None:
    from evergrad.cli.output import printable

    assert printable("model/0.weight [2×3] µ") == "model/0.weight [2×3] µ"
    assert [printable(name) for name in NAMES] == [
        r"a\x1b[2Jb",
        r"t\x1b]0;owned\x07",
        r"x\nok: nothing wrong",
        r"r\u202el",
        r"s\ud800",
        r"c\x9b31m",
        "µ→",
    ]


def test_a_bug_of_ours_exits_3_with_its_traceback(tmp_path: Path) -> None:
    code = (
        "import sys, evergrad.formats as formats\n"
        "def broken(*_, **__): raise ZeroDivisionError('a \\x1b[2J bug')\n"
        "formats.open_checkpoint = formats.compare = broken\n"
        "from evergrad.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    for arguments in (["inspect", "a.pt"], ["diff", "a.pt", "b.pt"]):
        done = run_python("-c", code, *arguments, cwd=tmp_path)
        assert done.returncode == 3
        assert "Traceback (most recent call last):" in done.stderr
        assert r"ZeroDivisionError: a \x1b[2J bug" in done.stderr
        assert done.stderr.endswith("\nevergrad: internal error, please report\n")
        assert done.stdout == ""


def test_a_full_disk_under_the_output_is_one_line(files: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "evergrad", "inspect", files / "a.pt"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stderr == "evergrad: the output cannot be written: no space left on device\n"
