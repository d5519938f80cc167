"""Tab: what a shell offers, asked as the shell asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evergrad.cli import main
from evergrad.cli.output import complete_studies, complete_words

BIN = Path(sys.executable).parent


def offered(script: Path, *words: str) -> list[str]:
    """What bash would offer for the last word: its own function, called as bash calls it."""
    listed = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {script}; COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; "
        'complete -p evergrad >&2; _evergrad_completion evergrad; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "-o default" in done.stderr  # where nothing is offered, bash offers files
    return done.stdout.split()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `evergrad --show-completion` prints it in bash."""
    code = f"'{sys.executable}' -m evergrad --show-completion; true"  # "true": else bash becomes the command
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    path = tmp_path_factory.mktemp("bash") / "evergrad.sh"
    path.write_text(done.stdout)
    return path


@pytest.mark.skipif(not (BIN / "evergrad").exists(), reason="not installed as a command")
def test_bash_offers_verbs_and_studies(script: Path) -> None:
    assert offered(script, "evergrad", "ins") == ["inspect"]
    assert offered(script, "evergrad", "study", "run", "bit") == ["bit-mask", "bit-position", "bitflip-nev"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_get_a_script_of_their_own(shell: str, tmp_path: Path) -> None:
    from typer._completion_shared import get_completion_script

    made = get_completion_script(prog_name="evergrad", complete_var="_EVERGRAD_COMPLETE", shell=shell)
    assert f"_EVERGRAD_COMPLETE=complete_{shell}" in made
    if shutil.which(shell):
        (tmp_path / "script").write_text(made)
        subprocess.run([shell, "--no-execute", str(tmp_path / "script")], check=True)


def test_another_shell_is_told_where_it_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shellingham

    monkeypatch.setattr(shellingham, "detect_shell", lambda: ("dash", "/bin/dash"))
    assert main(["--show-completion"]) == 2
    told = "--show-completion: expected to be started by bash, zsh or fish, found dash. Start one of them."
    assert capsys.readouterr().err == f"evergrad: {told}\n"


def test_every_study_of_the_gallery_is_offered() -> None:
    from evergrad.study.plan_files import gallery

    assert complete_studies("") == gallery()
    assert complete_words("a", "ab", "b")("a") == ["a", "ab"]


def test_what_is_offered_is_what_is_taken() -> None:
    from evergrad.injection.faults import FAULTS, FIELDS

    assert set(_choices("inject", "fault")) == set(FAULTS)
    assert set(_choices("inject", "bits")) == set(FIELDS)
    assert _choices("run", "strategy") == ["rollback", "forward", "restart"]
    assert _choices("convert", "to") == ["torch-zip", "safetensors", "hdf5", "npz", "npy"]


def _choices(verb: str, name: str) -> list[str]:
    import typer.main

    from evergrad.cli import app

    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    parameter = next(parameter for parameter in command.params if parameter.name == name)
    return [item.value for item in parameter.shell_complete(command.make_context(verb, [], resilient_parsing=True), "")]
