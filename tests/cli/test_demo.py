"""The demo, a chapter at a time and as a whole: what it shows is so, and what it leaves is harmless."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from programs import run_python

LIMIT_S = 280.0
"""Far more than it takes, for machines that have much else to do."""

FILES = {"model.pt", "flipped.pt", "flipped.pt.faults.jsonl", "model.safetensors"}
CHECKPOINTS = {"lineage.svg", "version.faults.jsonl", "run", "first", "second", "third", "bucket"}
JOBS = {"job", "job-fewer", "job-spare", "job-trouble"}
STUDY = {"study", "study-ranks"}

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def demo(*arguments: object) -> str:
    """What it prints, in a process of its own."""
    done = run_python("-m", "evergrad", "demo", *arguments, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kept(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def found(pattern: str, shown: str) -> tuple[float, ...]:
    """The numbers in a sentence, which is said once."""
    (sentence,) = re.finditer(pattern, " ".join(shown.split()))
    return tuple(map(float, sentence.groups()))


def check_files(facts: dict[str, Any]) -> None:
    assert facts["accuracy"] > 0.9
    assert facts["accuracy_after_flip"] < 0.7
    assert facts["verify"] == "failed"
    assert facts["undone"] is True
    worst = {field: results[1] for field, results in facts["accuracy_by_field"].items()}
    assert worst["exponent-msb"] < 0.9 < worst["mantissa"]
    assert facts["conversion_exact"] is True
    assert facts["trap_ran"] is False


def check_checkpoints(facts: dict[str, Any]) -> None:
    assert facts["killed"] is True
    assert facts["restored_step"] == 40
    assert facts["losses_identical"] is True
    assert facts["preempted_exit_code"] == 75
    assert facts["moved_losses_identical"] is True
    assert facts["lineage_picture"] is True
    # A flipped bit with its digest is restored, one without is passed over for the version before.
    assert facts["following_step"] == facts["preempted_step"] > facts["stale_step"] > 0
    assert float(facts["following_loss"]) > 10 > facts["clean_loss"]
    assert "model/4.weight: not what was captured" in facts["stale_reason"]


def check_recovery(facts: dict[str, Any]) -> None:
    assert facts["spare_exact"] is True
    assert facts["corruptions_healed"] == 1
    assert facts["trouble_exact"] is True
    assert facts["rank_lost_seconds"] > 0


def check_study(facts: dict[str, Any]) -> None:
    assert facts["study_trials"] == 24
    assert facts["ranks_known"] == facts["ranks_trials"] == 40
    few, more, many = (facts["study_nev"][flips] for flips in ("1", "10", "100"))
    assert few <= more <= many <= 8
    assert few < many
    assert facts["study_replayed"] is True


def see_files(shown: str) -> None:
    verified = shown.split("$ evergrad verify flipped.pt\n")[1]
    assert re.search(r"model/4\.weight\[\d+,\d+\] = ", verified)
    assert "failed: torch-zip, 1 of 24 tensors wrong" in verified
    assert "flipped.pt is model.pt again: yes" in shown
    assert "command executed: no" in shown


def see_checkpoints(shown: str) -> None:
    assert "trainer killed by SIGKILL: yes" in shown
    assert "restored step 40, every digest verified" in shown
    assert "losses are those of a run that was never killed, to the last bit: yes" in shown
    assert "left with exit code 75" in shown
    assert re.search(r"v\d{10}-01 .* memory, local, persistent ", shown)
    assert "losses are those of a run that was never interrupted, to the last bit: yes" in shown
    # A flipped bit with its digest is restored, one without is passed over for the version before.
    moved = found(r"which knows nothing but \S+, restored step (\d+) from there", shown)
    taken = found(r"restore takes it, without a word: step (\d+), loss (\S+) instead of (\S+)", shown)
    passed = found(r"and takes the version before: step (\d+), loss (\S+)", shown)
    assert taken[0] == moved[0] > passed[0] > 0
    assert taken[1] > 10 > taken[2]
    assert "model/4.weight: not what was captured" in shown


def see_recovery(shown: str) -> None:
    assert "rank 1 died (SIGKILL): generation 1 goes on with 3 ranks (rollback)" in shown
    assert "with the spare the very weights of the undisturbed run: yes" in shown
    assert all(found(r"next applied step: (\d+) ms on 3 ranks, (\d+) ms with a spare", shown))
    assert re.search(r"rank 1 died \(SIGKILL\)\s+13 .* redo, spare 4\n", shown)
    assert "job-spare/timeline.html: the same as a page, with pictures" in shown
    assert re.search(r"what the flip changed \(model/4\.weight on rank 2\) was found and healed", shown)
    assert shown.count("The very weights of the undisturbed run: yes") == 1


def see_study(shown: str) -> None:
    table = shown.partition("How many met")[2].partition("15. One of")[0]
    rates = {flips: found(rf"(?<!\S){flips} (\S+) \[(\S+), (\S+)\]", table) for flips in (1, 10, 100)}
    for rate, low, high in rates.values():
        assert 0 <= low <= rate <= high <= 100
    assert rates[1][0] <= rates[10][0] <= rates[100][0] > rates[1][0]
    assert "study/report.html: the same as a page" in shown
    replayed = shown.split("$ evergrad study replay study ")[1]
    assert re.search(r"model/\S+\[\S+\] bit \d+ ", replayed)
    assert "the same bits as in the study: yes" in replayed


def test_files_are_flipped_found_undone_and_converted_and_no_live_trap_is_left(tmp_path: Path) -> None:
    see_files(demo("files", "--keep", tmp_path / "new" / "kept"))
    assert kept(tmp_path / "new" / "kept") == FILES
    (tmp_path / "empty").mkdir()
    check_files(json.loads(demo("files", "--json", "--keep", tmp_path / "empty")))


def test_trainers_are_killed_and_preempted_and_training_goes_on(tmp_path: Path) -> None:
    see_checkpoints(demo("checkpoints", "--keep", tmp_path / "kept"))
    assert kept(tmp_path / "kept") == CHECKPOINTS


def test_ranks_are_lost_and_training_goes_on(tmp_path: Path) -> None:
    shown = demo("recovery", "--keep", tmp_path / "kept")
    see_recovery(shown)
    page = tmp_path / "kept" / "job-spare" / "timeline.html"
    assert shown.splitlines()[-1] == f"To look at, in a browser: {page}"
    assert page.is_file()
    assert kept(tmp_path / "kept") == JOBS


def test_a_study_counts_what_flips_do_and_one_of_its_trials_is_the_same_again(tmp_path: Path) -> None:
    see_study(demo("study", "--keep", tmp_path / "kept"))
    assert kept(tmp_path / "kept") == STUDY


@pytest.mark.slow  # the chapters, one after the other, are all of it
def test_all_chapters_are_told_in_their_order_if_none_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "evergrad", "demo", "--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    see_files(done.stdout)
    see_checkpoints(done.stdout)
    see_recovery(done.stdout)
    see_study(done.stdout)
    assert re.findall(r"(?m)^(\d+)\. ", done.stdout) == [str(part) for part in range(1, 17)]
    assert kept(tmp_path / "kept") == FILES | CHECKPOINTS | JOBS | STUDY
    facts = json.loads(demo("--json"))
    check_files(facts)
    check_checkpoints(facts)
    check_recovery(facts)
    check_study(facts)


def test_a_chapter_that_there_is_not_is_one_line_that_names_those_there_are() -> None:
    done = run_python("-m", "evergrad", "demo", "files", "recvery")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "expected files, checkpoints" in done.stderr
    assert "found 'recvery'. Did you mean 'recovery'?" in done.stderr


def test_the_demo_keeps_only_in_a_new_or_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.pt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place, words in [("full", "is not empty"), ("file", "is no folder"), ("file/below", "cannot be made")]:
        done = run_python("-m", "evergrad", "demo", "--keep", tmp_path / place)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert words in done.stderr
    assert (tmp_path / "full" / "model.pt").read_text() == "mine"
