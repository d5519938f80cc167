"""Every small file of a job is damaged in many ways: nothing raises a traceback, and intact versions are restored."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import evergrad as eg
from evergrad.checkpoint import Version
from evergrad.checkpoint.agent.inventory import CompletionLog
from evergrad.checkpoint.catalogue.catalogue import Catalogue
from evergrad.checkpoint.catalogue.pins import Pins
from evergrad.checkpoint.run_folder import arenas_root, read_identity, remove_orphans
from evergrad.cli import main
from evergrad.errors import AgentError, CheckpointError, EvergradError, TierError
from programs import run_python
from unprivileged import Unprivileged

SECONDS = 100.0
STEPS = (1, 2, 3)
FILES = {
    "job": "run/job.json",
    "attempt": "run/attempts/00001.json",
    "completion": "run/complete/*.jsonl",
    "committed": "run/complete/*.committed",
    "history": "run/catalogue/*.jsonl",
    "pin": "run/catalogue/pins/*",
    "tag": "run/catalogue/tags/*.json",
    "local manifest": "disk/*/*/v0000000003-01/rank-00000.json",
    "owner": "shared/JOB.json",
    "commit": "shared/v0000000003-01/COMMIT.json",
    "persistent manifest": "shared/v0000000003-01/rank-00000.json",
    "arena's run folder": "shm/*/*/run",
    "ticket": "shm/*/*/*/rank-00000.*.ticket",
    "arena's manifest": "shm/*/*/*/rank-00000.*.json",
}
MORE_FILES = {
    "own journal": "run/complete/n0.rank-00000.jsonl",
    "verdicts": "run/catalogue/verify-*.jsonl",
    "local shard": "disk/*/*/v0000000003-01/rank-00000.safetensors",
    "persistent shard": "shared/v0000000003-01/rank-00000.safetensors",
    "arena": "shm/*/*/*/rank-00000.*.safetensors",
    "arena's work": "shm/*/*/*/rank-00000.*.work",
    "agent's lock": "shm/*/*/*/agent.lock",
    "agent's log": "run/agents/*.log",
}
"""Files that no test above damages, and that are opened as well."""
USES_ALL = """
import sys
from pathlib import Path
from test_small_files import use_all
use_all(Path(sys.argv[1]), sys.argv[2], agent=sys.argv[3] == "agent")
"""


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((300,), float(step)), "step": step}


def tiers(folder: Path, kinds: str) -> list[Any]:
    made = {
        "memory": eg.Memory(),
        "local": eg.Local(folder / "disk", keep=3),
        "persistent": eg.Persistent(str(folder / "shared"), keep=3, patience_s=1.0),
    }
    return [made[kind] for kind in kinds.split("+")]


def checkpointer(folder: Path, kinds: str, *, agent: bool = False) -> eg.Checkpointer:
    return eg.Checkpointer(folder / "run", tiers=tiers(folder, kinds), agent=agent, linger_s=0.1)


def use_all(folder: Path, kinds: str, *, agent: bool) -> None:
    """Restore, list and save a job, and ask the command line for it; prints what was found."""
    run = str(folder / "run")
    for verb in (["ls", run], ["show", run, "3"], ["lineage", run], ["verify", run], ["pin", run, "3"]):
        assert main(["checkpoints", *verb]) in (0, 1, 2), verb
    with checkpointer(folder, kinds, agent=agent) as ck:
        live = state(0)
        step = ck.restore(live)
        assert bool((live["w"] == step).all())
        print("listed", [record.step for record in ck.versions()])
        for later in (4, 5, 6):
            ck.save(later, state(later)).wait(kinds.rpartition("+")[2], timeout=SECONDS)
        assert ck.restore(live) == 6
    print("restored", step)


class Job:
    """A job with three versions in three tiers, which can be put back as it was."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._kept = folder / "job", folder / "kept"
        with checkpointer(self.folder, "memory+local+persistent") as ck:
            for step in STEPS:
                ck.save(step, state(step)).wait("persistent", timeout=SECONDS)
        pins = Pins(self.folder / "run")
        pins.pin(Version(1, 1))
        pins.tag(Version(2, 1), "best")
        Catalogue(self.folder / "run").note_verified(Version(1, 1), "local", ok=True)
        shutil.copytree(self.folder, self._kept)

    def put_back(self) -> None:
        for entry in self.folder.iterdir():
            shutil.rmtree(entry)
            shutil.copytree(self._kept / entry.name, entry)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    (tmp_path / "job" / "shm").mkdir(parents=True)
    monkeypatch.setenv("EVERGRAD_SHM", str(tmp_path / "job" / "shm"))
    return Job(tmp_path)


def damages(data: bytes, seed: str) -> Iterator[tuple[str, bytes]]:
    """The same bytes with a bit flipped, cut, emptied, and replaced by random ones."""
    chance = random.Random(seed)
    size = len(data)
    for position in sorted(chance.sample(range(size), min(size, 14))):
        bit = chance.randrange(8)
        yield (
            f"bit {bit} of byte {position}",
            data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :],
        )
    for position in sorted(chance.sample(range(size), min(size, 3))):
        yield f"high bit of byte {position}", data[:position] + bytes([data[position] ^ 0x80]) + data[position + 1 :]
    for length in sorted({0, 1, size // 3, size - 2}):
        yield f"cut to {length} bytes", data[:length]
    begin = chance.randrange(max(1, size - 8))
    yield "eight random bytes in it", data[:begin] + chance.randbytes(8) + data[begin + 8 :]
    yield "random bytes", chance.randbytes(size)
    yield "zeros", bytes(size)
    yield "another JSON", b'{"id": 1e999, "version": [], "rank": 1e999, "schema_version": 1, "tiers": [{"kind": []}]}\n'


def each_damage(job: Job, kind: str) -> Iterator[str]:
    """Damage the files of a kind in every way in turn; the job is put back after each."""
    paths = sorted(path for path in job.folder.glob(FILES[kind]) if path.is_file())
    assert paths, f"there is no {kind}"
    for path in paths:
        for what, data in damages(path.read_bytes(), f"{kind} {path.name.split('.')[0]}"):
            path.write_bytes(data)
            yield f"{path.relative_to(job.folder)}: {what}"
            job.put_back()


def restored(folder: Path, kinds: str) -> tuple[int | None, list[int]]:
    """The step that is restored, with its values, and the versions that are listed."""
    with checkpointer(folder, kinds) as ck:
        live = state(0)
        step = ck.restore(live)
        assert step is None or (bool((live["w"] == step).all()) and live["step"] == step)
        return step, [record.step for record in ck.versions()]


@pytest.mark.parametrize("kind", FILES)
def test_restore_finds_the_newest_version_whatever_small_file_is_damaged(job: Job, kind: str) -> None:
    for what in each_damage(job, kind):
        step, listed = restored(job.folder, "memory+local+persistent")
        assert (step, listed) == (3, [3, 2, 1]), what


@pytest.mark.parametrize("kind", [kind for kind, path in FILES.items() if not path.startswith(("disk", "shm"))])
def test_restore_from_the_persistent_tier_alone_survives_the_same(job: Job, kind: str) -> None:
    shutil.rmtree(job.folder / "shm")
    (job.folder / "shm").mkdir()
    shutil.rmtree(job._kept / "shm")
    (job._kept / "shm").mkdir()
    newest = 2 if kind == "persistent manifest" else 3  # there it is the only copy
    for what in each_damage(job, kind):
        assert restored(job.folder, "persistent") == (newest, [3, 2, 1]), what


@pytest.mark.parametrize("kind", FILES)
def test_the_catalogue_is_listed_whatever_small_file_is_damaged(
    job: Job, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(job.folder / "run")
    for what in each_damage(job, kind):
        assert main(["checkpoints", "ls", run, "--json"]) == 0, what
        told = json.loads(capsys.readouterr().out)
        steps = {row["step"]: row for row in told["versions"]}
        assert set(steps) >= {1, 2, 3}, what
        assert all(steps[step]["state"] == "restorable" for step in STEPS), what
        for verb in (["show", run, "3"], ["lineage", run], ["verify", run, "1"], ["pin", run, "3"]):
            assert main(["checkpoints", *verb]) in (0, 1), f"{what}: {verb}: {capsys.readouterr().err}"
        err = capsys.readouterr().err
        assert "Traceback" not in err, what


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("job", "job.json"),
        ("attempt", "attempts/00001.json"),
        ("history", ".jsonl"),
        ("tag", "tags/best.json"),
        ("commit", "COMMIT.json"),
        ("owner", "JOB.json"),
    ],
)
def test_what_is_passed_over_is_said_in_one_line(
    job: Job, kind: str, said: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (path, *_) = sorted(path for path in job.folder.glob(FILES[kind]) if path.is_file())
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    with caplog.at_level(logging.WARNING), checkpointer(job.folder, "memory+local+persistent") as ck:
        assert ck.restore(state(0)) == 3
        ck.save(4, state(4)).wait("persistent", timeout=SECONDS)
    job.put_back()
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    main(["checkpoints", "ls", str(job.folder / "run")])
    lines = [record.getMessage() for record in caplog.records] + capsys.readouterr().err.splitlines()
    assert any(said in line for line in lines), lines
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize("kinds", ["local+persistent", "persistent"])
@pytest.mark.parametrize("kind", ["owner", "commit", "persistent manifest"])
def test_links_that_lead_to_each_other_are_said_at_once(
    kind: str, kinds: str, job: Job, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the place of a record of the persistent tier they hide nothing, and nothing is tried again for them."""
    path, run = job.folder / FILES[kind], str(job.folder / "run")
    path.unlink()
    path.symlink_to(path.name)
    shutil.rmtree(job.folder / "shm")
    (job.folder / "shm").mkdir()
    with caplog.at_level(logging.WARNING), checkpointer(job.folder, kinds) as ck:
        # Without another tier a version whose own record cannot be read is passed over for the one before.
        assert ck.restore(state(0)) == (3 if "local" in kinds or kind == "owner" else 2)
        ck.save(4, state(4)).wait("persistent", timeout=SECONDS)
    assert (job.folder / "shared" / "v0000000003-01" / "rank-00000.safetensors").exists()
    assert main(["checkpoints", "ls", run]) == 0
    said = [record.getMessage() for record in caplog.records] + capsys.readouterr().err.splitlines()
    if kind != "persistent manifest" or "local" not in kinds:  # else nobody has to read it
        assert any(str(path) in line for line in said), said
    assert not any("trying again" in line or "tried" in line for line in said), said


def by_a_folder(job: Job, kind: str) -> Path:
    """Put a folder in the place of a file: of the record of an older version, if each has one."""
    pattern = FILES[kind].replace("v0000000003", "v0000000002") if kind == "commit" else FILES[kind]
    (path, *_) = sorted(path for path in job.folder.glob(pattern) if path.is_file())
    path.unlink()
    path.mkdir()
    (path / "something").write_bytes(b"x")
    return path


@pytest.mark.parametrize("kind", FILES)
def test_a_folder_in_the_place_of_a_small_file_hides_no_intact_version(
    job: Job, kind: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = by_a_folder(job, kind), str(job.folder / "run")
    with caplog.at_level(logging.WARNING):
        assert restored(job.folder, "memory+local+persistent") == (3, [3, 2, 1])
    told = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    if kind in ("job", "commit", "committed", "arena's run folder"):
        assert len(told) == 1, told
    for verb in (["ls", run, "--json"], ["show", run, "3"], ["lineage", run], ["verify", run, "1"], ["pin", run, "3"]):
        assert main(["checkpoints", *verb]) in (0, 1), f"{verb}: {capsys.readouterr().err}"
    said = capsys.readouterr().err.splitlines() + [record.getMessage() for record in caplog.records]
    if kind in ("attempt", "tag", "history", "completion"):
        assert any(path.name in line for line in said), said
    assert not any(record.exc_info for record in caplog.records)
    assert not any("Traceback" in line for line in said)


def test_of_the_persistent_tier_alone_a_version_whose_record_is_a_folder_is_left_out(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    path = by_a_folder(job, "commit")
    with caplog.at_level(logging.WARNING), checkpointer(job.folder, "persistent") as ck:
        assert ck.restore(state(0)) == 3
        assert [record.step for record in ck.versions()] == [3, 1]
        for step in (4, 5, 6):
            ck.save(step, state(step)).wait(timeout=SECONDS)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "COMMIT.json", "rank-00000.json", "rank-00000.safetensors",
    ], "for a person to look at"  # fmt: skip
    assert {record.getMessage() for record in caplog.records if path.name in record.getMessage()} == {
        f"{path}: cannot be read: is a directory: step 2 (attempt 1) is left out"
    }


def test_while_a_tag_is_a_folder_nothing_is_retired(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    path = by_a_folder(job, "tag")
    with checkpointer(job.folder, "local") as ck, caplog.at_level(logging.WARNING):
        assert ck.restore(state(0)) == 3
        for step in (4, 5, 6, 7):
            ck.save(step, state(step)).wait(timeout=SECONDS)
        assert 2 in [record.step for record in ck.versions()]
    assert any(f"{path}: cannot be read: is a directory" in record.getMessage() for record in caplog.records)
    with pytest.raises(EvergradError, match=r"best\.json: cannot be removed: is a directory"):
        Pins(job.folder / "run").untag("best")


def test_records_that_this_user_may_not_read_are_left_out_or_told_by_others(
    unprivileged: Unprivileged, caplog: pytest.LogCaptureFixture
) -> None:
    run = unprivileged.folder / "run"
    with eg.Checkpointer(run, tiers=[eg.Local()], agent=False) as ck:
        ck.save(1, state(1)).wait(timeout=SECONDS)
    Pins(run).tag(Version(1, 1), "best")
    identity = json.loads((run / "job.json").read_bytes())["id"]
    closed = [run / "catalogue", run / "job.json"]
    for path in closed:
        path.chmod(0)
    with unprivileged, caplog.at_level(logging.WARNING):
        assert [entry.version.step for entry in Catalogue(run).entries()] == [1]
        assert Pins(run).tags() == {}
        with pytest.raises(EvergradError, match="permission denied"):
            Pins(run).pinned()
    lines = [record.getMessage() for record in caplog.records]
    assert (
        f"{run / 'job.json'}: cannot be read (permission denied): by the other records this is job {identity}" in lines
    )
    assert any(line.startswith(f"{run / 'catalogue'}: cannot be read: permission denied") for line in lines)
    shutil.rmtree(run / "attempts")
    shutil.rmtree(run / "local")
    with (
        unprivileged,
        pytest.raises(CheckpointError, match=r"permission denied\. Let this user read it\.$"),
    ):
        read_identity(run)
    for path in closed:
        path.chmod(0o755)


@pytest.mark.parametrize("damage", ["halved", "zeroed", "a folder"])
def test_lost_news_of_another_node_is_said_when_a_version_is_asked_for_by_name(
    job: Job, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = job.folder / "run" / "complete" / "n9.jsonl"
    CompletionLog(job.folder / "run", "n9").note(Version(3, 1), "local", 0, 1)
    data = path.read_bytes()
    if damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "halved" else bytes(len(data)))
    with caplog.at_level(logging.WARNING), checkpointer(job.folder, "memory+local") as ck:
        assert ck.restore(state(0), version="3") == 3
        told = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    count = len(data) // 2 if damage == "halved" else len(data)
    wanted = "cannot be read: is a directory: left out"
    if damage != "a folder":
        wanted = f"ends within a line, after {count} bytes of it: that line is left out"
    assert set(told) == {f"{path}: {wanted}"}


def test_a_line_that_is_being_written_is_not_called_lost(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    run = job.folder / "run"
    CompletionLog(run, "n9").note(Version(9, 1), "local", 0, 1)
    path = run / "complete" / "n9.jsonl"
    data = path.read_bytes()
    reader = CompletionLog(run, "n8")
    path.write_bytes(data[:20])
    reader.refresh()
    with path.open("ab") as file:
        file.write(data[20:])
    reader.refresh()
    assert reader.is_complete(Version(9, 1), "local")
    assert not [record for record in caplog.records if str(path) in record.getMessage()]
    with path.open("ab") as file:
        file.write(data[:20])
    for _ in range(3):
        reader.refresh()
    assert len([record for record in caplog.records if str(path) in record.getMessage()]) == 1


def test_damaged_news_of_other_nodes_is_left_out_in_one_line(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    (journal,) = job.folder.glob(FILES["completion"])
    (committed,) = job.folder.glob(FILES["committed"])
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0].replace(b"rank", b"\xffank") + b"".join(lines[1:]))
    committed.write_bytes(b"\xff\xfe")
    reader = CompletionLog(job.folder / "run", None)
    reader.refresh()
    assert reader.last_committed() is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{journal}: 1 damaged line is left out",
        f"{committed}: names no version: left out",
    ]


def test_a_damaged_identity_is_written_again(job: Job) -> None:
    path = job.folder / "run" / "job.json"
    before = json.loads(path.read_bytes())
    path.write_bytes(path.read_bytes().replace(before["id"].encode(), before["id"][:-1].encode() + b"!"))
    with checkpointer(job.folder, "memory") as ck:
        assert ck.restore(state(0)) == 3
    assert json.loads(path.read_bytes())["id"] == before["id"]


@pytest.mark.parametrize("target", ["elsewhere.json", "no folder/job.json"])
def test_an_identity_that_is_a_link_to_nothing_is_told_by_other_records(job: Job, target: str) -> None:
    path = job.folder / "run" / "job.json"
    before = read_identity(job.folder / "run")
    path.unlink()
    path.symlink_to(job.folder / target)
    assert remove_orphans() == []
    with checkpointer(job.folder, "memory") as ck:
        assert ck.restore(state(0)) == 3
    assert read_identity(job.folder / "run") == before


@pytest.mark.parametrize("agent", [True, False])
def test_a_link_to_nothing_that_no_record_replaces_is_refused_in_one_line(tmp_path: Path, agent: bool) -> None:
    path = tmp_path / "run" / "job.json"
    path.parent.mkdir()
    path.symlink_to("elsewhere")
    line = "expected a file, found a symbolic link to elsewhere, which is missing. Remove the link, or choose another"
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: is no record of a job: {line} run folder.")):
        checkpointer(tmp_path, "local", agent=agent)
    assert path.is_symlink()


def test_one_flipped_bit_of_the_identity_is_noticed_and_no_arena_is_removed(job: Job) -> None:
    path = job.folder / "run" / "job.json"
    data = path.read_bytes()
    identity = json.loads(data)["id"].encode()
    at = data.index(identity) + len(identity) - 1
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert remove_orphans() == []
    assert list(arenas_root().glob("*/*/*.ticket"))
    assert restored(job.folder, "memory")[0] == 3


def test_a_damaged_note_of_the_run_folder_removes_no_arena(job: Job) -> None:
    for what in each_damage(job, "arena's run folder"):
        assert remove_orphans() == [], what
        assert list(arenas_root().glob("*/*/*.ticket")), what


def test_a_rank_count_that_flipped_in_a_journal_commits_nothing(job: Job, tmp_path: Path) -> None:
    run = tmp_path / "other"
    (run / "complete").mkdir(parents=True)
    CompletionLog(run, "a").note(Version(9, 1), "local", 0, 5)
    (path,) = run.glob("complete/*.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"world_size": 5', b'"world_size": 1'))  # one bit
    reader = CompletionLog(run, None)
    reader.refresh()
    assert not reader.is_complete(Version(9, 1), "local")


def test_retention_stops_while_a_tag_is_damaged_and_nothing_is_lost(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    path = job.folder / "run" / "catalogue" / "tags" / "best.json"
    path.write_bytes(path.read_bytes().replace(b"v0000000002-01", b"v0000000003-01"))  # one bit
    with checkpointer(job.folder, "local") as ck, caplog.at_level(logging.WARNING):
        assert ck.restore(state(0)) == 3
        for step in (4, 5, 6, 7):
            ck.save(step, state(step)).wait(timeout=SECONDS)
        assert 2 in [record.step for record in ck.versions()]
    assert any("best.json" in record.getMessage() for record in caplog.records)
    assert main(["checkpoints", "pin", str(job.folder / "run"), "2", "--tag", "best"]) == 0
    assert Pins(job.folder / "run").tags() == {"best": Version(2, 1)}


def test_a_damaged_tag_is_said_once_until_that_changes(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    path = job.folder / "run" / "catalogue" / "tags" / "best.json"
    sound = path.read_bytes()
    expected = []

    def use(ck: eg.Checkpointer, begin: int) -> None:
        for step in (begin, begin + 1):
            ck.save(step, state(step)).wait(timeout=SECONDS)
        assert ck.restore(state(0)) == begin + 1

    def damage(data: bytes, why: str) -> None:
        path.write_bytes(data)
        expected.append(
            f"nothing is retired, because what is pinned is not known: {path}: is no tag: {why}. Tag the version again."
        )

    damage(b"", "it is empty")
    with caplog.at_level(logging.WARNING), checkpointer(job.folder, "memory+local") as ck:
        use(ck, 4)
        damage(b"{", "it is not JSON")
        use(ck, 6)
    with caplog.at_level(logging.WARNING), checkpointer(job.folder, "memory+local") as ck:
        assert ck.restore(state(0)) == 7
        use(ck, 8)
        damage(b"{}", "it names no version")
        use(ck, 10)
        path.write_bytes(sound)
        use(ck, 12)
        damage(b"{}", "it names no version")
        use(ck, 14)
    assert [line for line in caplog.messages if line.startswith("nothing is retired")] == expected


def test_a_damaged_tag_can_be_taken_away(job: Job) -> None:
    path = job.folder / "run" / "catalogue" / "tags" / "best.json"
    path.write_bytes(b"{")
    Pins(job.folder / "run").untag("best")
    assert not path.exists()


def test_an_identity_that_nothing_tells_is_refused_in_one_line(job: Job) -> None:
    run = job.folder / "run"
    (run / "job.json").write_bytes(b"\xff\xfe")
    for record in (run / "attempts").iterdir():
        record.write_bytes(b"\xff\xfe")
    for folder in ("disk", "shm"):
        shutil.rmtree(job.folder / folder)
    (job.folder / "shm").mkdir()
    with pytest.raises(CheckpointError, match=r"job\.json: is no record of a job") as found:
        checkpointer(job.folder, "local")
    assert "\n" not in str(found.value)
    assert main(["checkpoints", "ls", str(run)]) == 2


def test_a_place_of_another_job_stays_refused_when_its_record_is_damaged(job: Job) -> None:
    (job.folder / "shared" / "JOB.json").write_bytes(b"\xff")
    with (
        eg.Checkpointer(job.folder / "other", tiers=tiers(job.folder, "persistent"), agent=False) as ck,
        pytest.raises(TierError, match="belongs to job run-"),
    ):
        ck.save(1, state(1)).wait(timeout=SECONDS)


@pytest.mark.parametrize("agent", ["agent", "no agent"])
@pytest.mark.parametrize("kind", {**FILES, **MORE_FILES})
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(job: Job, kind: str, agent: str) -> None:
    pattern = {**FILES, **MORE_FILES}[kind]
    paths = sorted(path for path in job.folder.glob(pattern) if path.is_file())
    if not paths:  # not made yet, or only while somebody uses it
        (folder,) = job.folder.glob(pattern.rpartition("/")[0] + "/")
        paths = [folder / pattern.rpartition("/")[2].replace("*", job_node(job))]
    for path in paths:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *filter(None, sys.path)])}
    done = run_python("-c", USES_ALL, job.folder, "memory+local+persistent", agent, env=env, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "listed [3, 2, 1]" in done.stdout
    assert "restored 3" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("found", ["a link to itself", "a folder"])
@pytest.mark.parametrize("name", ["start.lock", "agent.lock", "agent.sock"])
def test_a_lock_or_socket_that_cannot_be_opened_is_an_error_that_says_to_remove_it(
    job: Job, name: str, found: str
) -> None:
    path = next(job.folder.glob("shm/*/*/*/")) / name
    path.unlink(missing_ok=True)
    if found == "a folder":
        path.mkdir()
    else:
        path.symlink_to(path.name)
    is_folder = found == "a folder"
    if name == "agent.sock" and not is_folder:  # a link is replaced
        with checkpointer(job.folder, "memory+local", agent=True) as ck:
            assert ck.restore(state(0)) == 3
        return
    why = "is a directory" if is_folder else "too many levels of symbolic links"
    advice = r"\. Remove it\.$" if is_folder else rf"\. It is a symbolic link to {name}: remove it\.$"
    with pytest.raises(AgentError, match=rf"{path}: .*{why}{advice}") as caught:
        checkpointer(job.folder, "memory+local", agent=True)
    assert "\n" not in str(caught.value)
    if is_folder:
        path.rmdir()
    else:
        path.unlink()
    with checkpointer(job.folder, "memory+local", agent=True) as ck:
        assert ck.restore(state(0)) == 3


def test_a_note_of_the_run_folder_that_is_a_link_to_itself_is_written_again(job: Job) -> None:
    (path,) = job.folder.glob("shm/*/*/run")
    before = path.read_bytes()
    path.unlink()
    path.symlink_to(path.name)
    with checkpointer(job.folder, "memory+local") as ck:
        assert ck.restore(state(0)) == 3
    assert path.read_bytes() == before


@pytest.mark.parametrize("found", ["a link to itself", "a link to nothing", "a folder"])
@pytest.mark.parametrize("name", ["ticket", "safetensors"])
def test_a_file_of_an_arena_that_cannot_be_opened_is_an_error_that_says_to_remove_it(
    tmp_path: Path, shm: Path, name: str, found: str
) -> None:
    with checkpointer(tmp_path, "memory+local") as ck:
        ck.save(1, state(1)).wait(timeout=SECONDS)
    (path,) = shm.glob(f"*/*/*/rank-00000.0.{name}")
    path.unlink()
    targets = {"a link to itself": path.name, "a link to nothing": "no folder/file"}
    if found == "a folder":
        path.mkdir()
    else:
        path.symlink_to(targets[found])
    with checkpointer(tmp_path, "memory+local") as ck:
        if name == "safetensors" and found != "a folder":  # a link is replaced
            ck.save(2, state(2)).wait(timeout=SECONDS)
            return
        advice = "Remove it." if found == "a folder" else f"It is a symbolic link to {targets[found]}: remove it."
        with pytest.raises(TierError, match=re.escape(advice)) as caught:
            for step in (2, 3):  # the arenas are used in turns
                ck.save(step, state(step)).wait(timeout=SECONDS)
        assert str(caught.value).startswith(f"{path}: no arena: ")
        if found == "a folder":
            path.rmdir()
        else:
            path.unlink()
        for step in (4, 5):
            ck.save(step, state(step)).wait(timeout=SECONDS)
        assert ck.restore(state(0)) == 5


def job_node(job: Job) -> str:
    """The folder of this node."""
    (folder,) = job.folder.glob("shm/*/*/*/")
    return folder.name


def test_no_file_of_a_job_is_opened_in_a_way_that_waits_for_a_pipe() -> None:
    opens = re.compile(r"\.read_(?:bytes|text)\(|(?<![.\w])open\(|\.open\(")
    never_waits = re.compile(
        r"/proc/|os\.devnull|O_RDWR|O_PATH|O_DIRECTORY|RunFolder\.open\(|def open\(|Dcp\(\)\.open\(|fs\.open\("
    )
    package = Path(eg.__file__).parent / "checkpoint"
    lines = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if opens.search(line) and not never_waits.search(line)
    ]
    assert lines == []


def without_record(job: Job, *, damage: str, alone: bool = True) -> Path:
    """Damage or remove the record that the newest version is committed by; `alone` leaves no other tier."""
    if alone:
        for folder in ("disk", "shm"):
            shutil.rmtree(job.folder / folder)
        (job.folder / "shm").mkdir()
    (path,) = job.folder.glob(FILES["commit"])
    data = path.read_bytes()
    path.unlink()
    if damage == "a bit":
        path.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    elif damage == "a pipe":
        os.mkfifo(path)
    return path


@pytest.mark.parametrize("alone", [True, False])
def test_all_who_look_say_that_the_record_of_a_version_is_damaged(
    job: Job, alone: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path, run = without_record(job, damage="a bit", alone=alone), str(job.folder / "run")
    kinds = "persistent" if alone else "memory+local+persistent"
    with checkpointer(job.folder, kinds) as ck:
        assert [record.step for record in ck.versions()] == ([2, 1] if alone else [3, 2, 1])
    said = [record.getMessage() for record in caplog.records if path.name in record.getMessage()]
    wrong = f"file://{path}: the record is not as it was written"
    assert said == [f"{wrong}: step 3 (attempt 1) is not committed without it"]
    assert main(["checkpoints", "ls", run, "--json"]) == 0
    newest = json.loads(capsys.readouterr().out)["versions"][0]
    assert (newest["step"], newest["state"]) == (3, "uncommitted" if alone else "restorable")
    assert newest["damaged"] == wrong
    assert main(["checkpoints", "show", run, "3"]) == 0
    assert f"damaged   {wrong}" in capsys.readouterr().out
    assert main(["checkpoints", "verify", run, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["versions"][0]
    assert found["verdict"] == "failed"
    assert [copy["why"] for copy in found["copies"] if copy["verdict"] == "failed"] == [wrong]
    assert main(["checkpoints", "verify", run]) == 1
    assert "1 of 3 versions wrong" in capsys.readouterr().out
    code = main(["checkpoints", "export", run, "3", str(job.folder / "out.safetensors")])
    told = capsys.readouterr().err
    assert (code, wrong in told) == ((2, True) if alone else (0, False))
    assert main(["checkpoints", "lineage", run]) == 0
    assert ("step 3 · uncommitted" in capsys.readouterr().out) == alone
    assert main(["checkpoints", "pin", run, "3", "--tag", "last"]) == 0
    assert main(["checkpoints", "ls", f"file://{job.folder / 'shared'}", "--json"]) == 0
    assert [row["state"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])["versions"]] == [
        "uncommitted", "restorable", "restorable",
    ]  # fmt: skip
    with checkpointer(job.folder, kinds) as ck:
        assert ck.restore(state(0), version="last") == 3
    assert main(["checkpoints", "verify", run]) == 0


@pytest.mark.parametrize("damage", ["a bit", "gone"])
def test_removing_a_version_without_a_sound_record_leaves_nothing_to_be_committed_again(
    job: Job, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = without_record(job, damage=damage), str(job.folder / "run")
    assert main(["checkpoints", "rm", run, "3", "--yes"]) == 2
    assert "is the newest version that can be restored" in capsys.readouterr().err
    assert main(["checkpoints", "rm", run, "3", "--yes", "--force"]) == 0
    assert not path.parent.exists()
    with checkpointer(job.folder, "persistent") as ck:
        assert ck.restore(state(0)) == 2


def test_what_removing_a_version_leaves_is_said(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    path, run = without_record(job, damage="a pipe", alone=False), str(job.folder / "run")
    assert main(["checkpoints", "rm", run, "3", "--yes", "--force"]) == 0
    out = capsys.readouterr().out
    assert f"stays: {path}: cannot be read: expected a file, found a named pipe" in out
    assert "removed, except for what stays" in out
    assert main(["checkpoints", "rm", run, "3", "--yes", "--force"]) == 2
    assert "found a named pipe. Remove that by hand." in capsys.readouterr().err
