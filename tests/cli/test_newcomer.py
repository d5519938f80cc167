"""Somebody who knows nothing of it: every verb without input and with wrong input gives one clear line, and code 2.

In this process, as a subprocess does it: `main` with a real stdout. What the verbs do with right input is elsewhere.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
import typer.main

from evergrad.cli import app, main
from evergrad.cli.output import labelled_line


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a newcomer points at by mistake."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "empty.pt").touch()
    (folder / "garbage.pt").write_bytes(bytes(range(1, 255)) * 20)
    (folder / "settings.json").write_text('{"a": 1}\n')
    (folder / "broken.toml").write_text("not = [toml\n")
    (folder / "train.py").write_text("print('hi')\n")
    (folder / "folder").mkdir()
    (folder / "run").mkdir()
    (folder / "run" / "job.json").write_text('{"id": "run-00000000", "schema_version": 1}\n')
    data = Path(__file__).parent.parent / "data"
    (folder / "a.ckpt").write_bytes((data / "lightning.ckpt").read_bytes())
    return folder


@pytest.fixture
def mistake(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str | list[str]], str]:
    """Give a command that is wrong; its one line on stderr."""
    monkeypatch.chdir(place)

    def give(words: str | list[str]) -> str:
        code = main(words.split() if isinstance(words, str) else words)
        found = capsys.readouterr()
        assert code == 2, (words, found)
        assert found.out == "", (words, found)
        assert found.err.startswith("evergrad: "), (words, found)
        assert found.err.count("\n") == 1, (words, found)
        assert "Traceback" not in found.err, (words, found)
        return found.err.removeprefix("evergrad: ").rstrip("\n")

    return give


def _verbs() -> list[str]:
    found = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        found += [f"{name} {verb}" for verb in command.commands] if hasattr(command, "commands") else [name]
    return found


def _needed(verb: str) -> int:
    command = typer.main.get_command(app)
    for word in verb.split():
        command = command.commands[word]  # type: ignore[attr-defined]
    return sum(parameter.required for parameter in command.params)


def test_a_verb_without_its_arguments_names_the_first_and_where_help_is(mistake: Callable[[str], str]) -> None:
    verbs = [verb for verb in _verbs() if _needed(verb)]
    assert len(verbs) > 20
    for verb in verbs:
        said = mistake(verb)
        assert re.fullmatch(rf"Missing argument '[A-Z_-]+'\. See 'evergrad {verb} --help'\.", said), f"{verb}: {said}"


def test_every_verb_refuses_an_unknown_option(mistake: Callable[[str], str]) -> None:
    for verb in _verbs():
        expected = f"No such option: --nosuchoption. See 'evergrad {verb} --help'."
        assert mistake(f"{verb} --nosuchoption") == expected, verb


def test_every_verb_has_help_with_an_example_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in _verbs():
        assert main([*verb.split(), "--help"]) == 0, verb
        said = " ".join(capsys.readouterr().out.split())
        assert "Example" in said, verb
        assert "Exit codes: 0" in said, verb


# Verbs that take a file or a folder, with the place of it; and what nobody could take for one.
READ = {
    "inspect": "{}",
    "verify": "{}",
    "diff": "{} a.ckpt",
    "diff second": "a.ckpt {}",
    "convert": "{} x.npz",
    "inject": "{} --count 1 --out x.pt",
    "undo": "{}",
    "replay": "{} a.ckpt --out x.pt",
    "checkpoints ls": "{}",
    "checkpoints show": "{} 10",
    "checkpoints verify": "{}",
    "checkpoints pin": "{} 10",
    "checkpoints rm": "{} 10 --yes",
    "checkpoints export": "{} latest x.pt",
    "checkpoints lineage": "{}",
    "checkpoints report": "{}",
    "timeline": "{}",
    "study report": "{}",
    "study show": "{}",
    "study run": "{} --out x",
    "study status": "{}",
    "study table": "{}",
    "study export": "{}",
    "study replay": "{} 3f2a",
    "agent": "{}",
}


@pytest.mark.parametrize("wrong", ["nothing-here", "folder", "empty.pt", "garbage.pt"])
def test_what_is_no_checkpoint_no_log_no_plan_and_no_run_is_told(wrong: str, mistake: Callable[[str], str]) -> None:
    for verb, arguments in READ.items():
        if (verb, wrong) == ("agent", "folder"):  # a folder that exists may become a run folder
            continue
        words = f"{verb.removesuffix(' second')} {arguments.format(wrong)}"
        said = mistake(words)
        assert said.startswith(wrong), f"{words}: {said}"


MISTAKES = {
    "inspct a.ckpt": "No such command 'inspct'. Did you mean 'inspect', 'inject'? See 'evergrad --help'.",
    "study lst": "No such command 'lst'. Did you mean 'list'? See 'evergrad study --help'.",
    "inspect a.ckpt more": "unexpected extra argument",
    "inspect run": "It is a job's run folder: evergrad checkpoints ls run",
    "inspect a.ckpt --where role:wrong": "Roles are model, optimizer, buffer, other",
    "convert a.ckpt b.xyz": "Or name it: to=…, or --to.",
    "convert a.ckpt b.safetensors --to nope": "expected safetensors, torch-zip, npz, npy, hdf5",
    "inject a.ckpt --count one": "--count: expected a whole number, found 'one'. See 'evergrad inject --help'.",
    "inject a.ckpt --fraction=x": "--fraction: expected a number, found 'x'.",
    "inject a.ckpt --count -1 --out x.pt": "count -1: expected a whole number from 0 on",
    "inject a.ckpt --count 1 --fraction 0.5 --out x.pt": "choose one",
    "inject a.ckpt --count 1 --out x.pt --in-place": "choose one",
    "inject a.ckpt --count 1 --bits 8-1 --out x.pt": "bits '8-1': expected a number from 0",
    "inject a.ckpt --count 1": "--out FILE",
    "undo a.ckpt": "evergrad inject writes one: OUT.faults.jsonl.",
    "run -n two train.py": "-n/--ranks: expected a whole number, found 'two'",
    "run -ntwo train.py": "found 'two'",
    "run -n 0 train.py": "-n: expected the number of ranks, 1 or more, found 0",
    "run nothing.py": "nothing.py: no such script",
    "run --strategy nope train.py": "--strategy: expected one of rollback, forward, restart",
    "run --out a.ckpt train.py": "a.ckpt: no folder for the run: file exists",
    "agent run --linger -1": "--linger: expected 0 or more, found '-1'",
    "study show bitflip": "Did you mean 'bitflip-nev'?",
    "study show bitflip-nev --scale huge": "scale: expected tiny, small, gpu or paper, found 'huge'",
    "study show broken.toml": "A plan is TOML",
    "study run bitflip-nev": "--out: expected --out DIR",
    "study run bitflip-nev --out x --executor cloud": "--executor: expected local, dask or slurm",
    "study run bitflip-nev --out x --workers 0": "--workers: expected 1 or more, found '0'",
    "study run bitflip-nev --out x --partition a": "partition: goes with executor slurm",
    "study run bitflip-nev --out x --device gpu": "device: expected cpu, cuda or cuda:1, found 'gpu'",
    "study table folder --layout nope": "--layout: expected summary, paper",
    "study table folder --format nope": "--format: expected rich, csv, markdown or latex",
    "checkpoints ls folder": "is no run folder",
    "doctor --folder nothing-here": "there is no such folder",
    "doctor --folder a.ckpt": "is no folder",
}


def test_a_mistake_says_what_was_expected_and_what_to_do(mistake: Callable[[str], str]) -> None:
    for words, expected in MISTAKES.items():
        assert expected in mistake(words), words


@pytest.mark.parametrize("group", ["", "study", "checkpoints"])
def test_a_group_alone_shows_its_verbs(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(group.split()) == 2
    found = capsys.readouterr()
    assert "Usage: evergrad" in found.out + found.err
    assert "Commands" in found.out + found.err


def _that_raises(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("evergrad.formats.open_checkpoint", raise_it)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(errno.EACCES, "Permission denied", "/somewhere"), 2, "/somewhere: permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "no space left on device"),
        (MemoryError(), 2, "out of memory"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_machine_refuses_is_one_line_too(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _that_raises(error, monkeypatch)
    assert main(["inspect", "x"]) == code
    assert capsys.readouterr().err.splitlines()[-1] == f"evergrad: {line}"


def test_a_reader_that_has_enough_is_no_finding(place: Path) -> None:
    # Real processes: a pipe whose reader has gone, and no stdout at all.
    command = f"'{sys.executable}' -m evergrad"
    gone = f"{{ {command} inspect a.ckpt; echo $? >&2; }} | true; {command} inspect a.ckpt >&-; echo $? >&2"
    done = subprocess.run(["bash", "-c", gone], cwd=place, capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["0", "0"]


def test_a_long_line_is_folded_at_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    text = "a flip may hit any bit of any model parameter, each alike"
    assert labelled_line("differs  ", text) == f"differs  {text}"
    monkeypatch.setattr("evergrad.cli.output.console", lambda: Console(width=40))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = labelled_line("differs  ", text, indent=9).splitlines()
    assert max(map(len, lines)) <= 40
    assert all(line.startswith(" " * 9) for line in lines[1:])
    assert os.linesep.join(lines).split() == ["differs", *text.split()]
