"""The journal: whatever happens to it, what is sound in it stays, and what is not is said."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evergrad.errors import StudyError
from evergrad.study.folder import JournalEntry, TrialJournal, read_journal
from evergrad.study.trials import Observation, Series, Trial, TrialEnd

MakeTrial = Callable[..., Trial]


@pytest.fixture
def entries(first_trial: MakeTrial) -> list[JournalEntry]:
    """Five trials; one with everything that JSON does not have."""
    odd = Observation(
        end=TrialEnd.ABANDONED,
        metrics=(0.1, float("nan")),
        losses=Series(1, (1.5, float("inf"))),
        nonfinite_at=2,
        nonfinite_in="loss",
    )
    seen = [Observation(end=TrialEnd.FINISHED, metrics=(0.1 * number,)) for number in range(4)]
    return [JournalEntry(first_trial(repetition=number), one) for number, one in enumerate([*seen, odd])]


def write(path: Path, entries: list[JournalEntry]) -> None:
    """All of them, one after the other."""
    with TrialJournal(path) as journal:
        for entry in entries:
            journal.append([entry])


def test_what_is_written_is_read_back(tmp_path: Path, entries: list[JournalEntry]) -> None:
    write(tmp_path / "j", entries)
    kept = read_journal(tmp_path / "j")
    assert not kept.damaged
    assert [entry.trial for entry in kept.entries.values()] == [entry.trial for entry in entries]
    for entry in entries:
        assert kept.entries[entry.trial.id].observation.to_json() == entry.observation.to_json()


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_a_torn_last_line_is_said_and_the_next_one_is_whole(
    tmp_path: Path, entries: list[JournalEntry], cut: int
) -> None:
    path = tmp_path / "j"
    write(path, entries[:3])
    path.write_bytes(path.read_bytes()[:-cut])
    kept = read_journal(path)
    # Without its line end alone, the last line is sound all the same.
    assert len(kept.entries) == (3 if cut == 1 else 2)
    write(path, entries[3:])
    kept = read_journal(path)
    assert len(kept.entries) == (5 if cut == 1 else 4)
    if cut > 1:
        assert len(kept.damaged) == 1
        assert kept.damaged[0].startswith("j line 3: ")
        assert kept.damaged[0].endswith("its trial runs again")


def test_every_altered_byte_of_a_line_is_noticed_and_costs_that_line_alone(
    tmp_path: Path, entries: list[JournalEntry]
) -> None:
    path = tmp_path / "j"
    write(path, entries[:3])
    lines = path.read_bytes().splitlines(keepends=True)
    for place in range(0, len(lines[1]) - 1, 7):
        altered = bytearray(lines[1])
        altered[place] ^= 1
        path.write_bytes(lines[0] + bytes(altered) + lines[2])
        kept = read_journal(path)
        assert entries[0].trial.id in kept.entries
        assert entries[2].trial.id in kept.entries
        if entries[1].trial.id in kept.entries:  # an alteration that JSON does not see: a space, say
            assert kept.entries[entries[1].trial.id].observation == entries[1].observation
        else:
            assert len(kept.damaged) == 1 or bytes(altered).count(b"\n") > 1


def test_a_lost_trial_is_replaced_by_a_later_one_and_never_the_other_way(
    tmp_path: Path, entries: list[JournalEntry]
) -> None:
    path, known = tmp_path / "j", entries[0]
    lost = JournalEntry(known.trial, Observation(end=TrialEnd.LOST, reason="worker 1 ended with SIGKILL"))
    write(path, [lost, known, lost])
    assert read_journal(path).entries[known.trial.id].observation.end is TrialEnd.FINISHED
    assert not lost.known


@pytest.fixture
def little_room() -> Iterator[Callable[[int], None]]:
    """Let no file of this process grow beyond so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_said_and_leaves_no_half_line(
    tmp_path: Path, entries: list[JournalEntry], little_room: Callable[[int], None]
) -> None:
    path = tmp_path / "j"
    write(path, entries[:2])
    whole = path.read_bytes()
    little_room(len(whole) + 100)
    with pytest.raises(StudyError, match=r"1 results could not be written: .* What was written before is sound"):
        write(path, entries[2:])
    little_room(resource.RLIM_INFINITY)
    assert path.read_bytes() == whole
    write(path, entries[2:])
    assert len(read_journal(path).entries) == 5


def test_a_journal_of_another_kind_of_lines_loses_nothing(tmp_path: Path, entries: list[JournalEntry]) -> None:
    path = tmp_path / "j"
    path.write_text(json.dumps({"hello": 1}) + "\n[1, 2]\nnot json\n\n")
    write(path, entries)
    kept = read_journal(path)
    assert len(kept.damaged) == 3
    assert len(kept.entries) == 5
