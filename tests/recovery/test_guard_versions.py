"""Versions that a guard vouches for: noted, shown, kept, and found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import evergrad as eg
from evergrad.checkpoint.catalogue.catalogue import Catalogue
from evergrad.checkpoint.catalogue.history import CatalogueJournal
from evergrad.checkpoint.catalogue.pins import Pins
from evergrad.checkpoint.version import Version
from evergrad.cli import main


def state(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((4,), float(step))}


@pytest.fixture
def ck(tmp_path: Path, shm: Path) -> eg.Checkpointer:
    return eg.Checkpointer(tmp_path / "run", eg.Local(tmp_path / "disk", keep=2), agent=False)


def save(ck: eg.Checkpointer, *steps: int, guarded: tuple[int, ...] = ()) -> None:
    for step in steps:
        pending = ck.save(step, state(step))
        pending.wait()
        if step in guarded:
            ck.note_guarded(pending.version)


def test_the_newest_version_that_a_guard_vouches_for_is_found_and_restored(ck: eg.Checkpointer) -> None:
    with ck:
        assert ck.newest_guarded() is None
        save(ck, 10, 20, 30, guarded=(20,))
        assert ck.newest_guarded() == Version(20, 1)
        found = state(0)
        assert ck.restore(found, version=ck.newest_guarded()) == 20
        assert found["weight"].tolist() == [20.0] * 4
        save(ck, 25)
        assert ck.newest_guarded() == Version(20, 1), "of the next attempt none is vouched for yet"


def test_retention_spares_the_newest_guarded_version_and_the_one_before(ck: eg.Checkpointer, tmp_path: Path) -> None:
    with ck:
        save(ck, *range(1, 20), guarded=(3, 6, 9))
        kept = sorted(record.version.step for record in ck.versions())
        assert kept == [6, 9, 18, 19]
        assert ck.newest_guarded() == Version(9, 1)
    assert Pins(tmp_path / "run").tags() == {"guarded": Version(9, 1), "guarded-before": Version(6, 1)}


def test_a_version_that_was_never_finished_does_not_cost_the_one_before(ck: eg.Checkpointer) -> None:
    with ck:
        save(ck, *range(1, 5), guarded=(2,))
        ck.note_guarded(Version(5, 1))  # noted when its save began, which then came to nothing
        save(ck, *range(6, 12))
        assert ck.newest_guarded() == Version(2, 1)


def test_the_guards_word_and_the_files_digests_are_two_things(ck: eg.Checkpointer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ck:
        save(ck, 1, 2, guarded=(2,))
    found = Catalogue(run)
    guarded = {entry.version.step: (entry.guarded, entry.verified) for entry in found.entries()}
    assert guarded == {1: (False, "unknown"), 2: (True, "unknown")}
    found.note_verified(Version(1, 1), "local", ok=True)
    found.note_guarded(Version(1, 1))
    guarded = {entry.version.step: (entry.guarded, entry.verified) for entry in Catalogue(run).entries()}
    assert guarded == {1: (True, "ok"), 2: (True, "unknown")}


def test_the_list_shows_it(ck: eg.Checkpointer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ck:
        save(ck, 1, 2, guarded=(2,))
    run = str(tmp_path / "run")
    assert main(["checkpoints", "ls", run, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["versions"]
    assert {row["step"]: row["guarded"] for row in rows} == {1: False, 2: True}
    assert main(["checkpoints", "ls", run]) == 0
    assert "guard" in capsys.readouterr().out.splitlines()[0]
    assert main(["checkpoints", "show", run, "2"]) == 0
    assert "guarded" in capsys.readouterr().out


def test_a_line_that_is_not_understood_is_passed_over(tmp_path: Path) -> None:
    journal = CatalogueJournal(tmp_path)
    journal.note_guarded(Version(4, 1))
    with (tmp_path / "catalogue" / "guard.jsonl").open("a") as file:
        file.write('{"schema_version": 1, "guarded": "nonsense", "time": ""}\n{"schema_version": 1, "guarded": 7}\n')
    assert list(journal.read().guarded) == [Version(4, 1)]
