"""The catalogue: history that outlives versions, pins, tags, and what came from what."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import evergrad as eg
from evergrad.checkpoint.catalogue.catalogue import Catalogue, CatalogueEntry, plan_removal
from evergrad.checkpoint.catalogue.history import CatalogueJournal
from evergrad.checkpoint.catalogue.lineage import Lineage, LineageNode, draw, draw_svg, trace_lineage
from evergrad.checkpoint.catalogue.pins import Pins
from evergrad.checkpoint.catalogue.verify import check_version
from evergrad.checkpoint.run_folder import RunFolder
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tiers import Local
from evergrad.checkpoint.version import Version
from evergrad.errors import FileAccessError, UsageError
from evergrad.formats.version_records import record_bytes


def state(value: float) -> dict[str, Any]:
    return {"a": torch.full((50,), float(value)), "epoch": int(value)}


def train(run: Path, steps: list[int], *, restore: bool = False, keep: int = 2, **settings: Any) -> None:
    """One attempt of a job, in this process."""
    settings = {"tiers": [eg.Local(run.parent / "disk", keep=keep)], **settings}
    with eg.Checkpointer(run, agent=False, **settings) as ck:
        if restore:
            assert ck.restore(state(0)) is not None
        for step in steps:
            ck.save(step, state(step), meta={"loss": step / 10}).wait()


def describe(run: Path, attempt: int, **members: Any) -> None:
    """Add to the record of an attempt."""
    path = run / "attempts" / f"{attempt:05d}.json"
    record = {name: value for name, value in json.loads(path.read_text()).items() if name != "check"}
    path.write_bytes(record_bytes(record | members))


def catalogue(run: Path) -> Catalogue:
    return Catalogue(run, [Local(run.parent / "disk")])


def states(run: Path) -> dict[int, str]:
    return {entry.version.step: entry.state for entry in catalogue(run).entries()}


def manifest(step: int, attempt: int = 1, rank: int = 0, world_size: int = 1, **members: Any) -> Manifest:
    made = Manifest(
        "job-1", Version(step, attempt), rank, world_size, 4096, 64, "2026-01-01T00:00:00Z", "", {"a": "00"}, "n0"
    )
    return replace(made, **members)


def test_a_version_stays_in_the_history_when_it_is_retired(tmp_path: Path) -> None:
    train(tmp_path / "run", [1, 2, 3, 4])
    assert states(tmp_path / "run") == {4: "restorable", 3: "restorable", 2: "retired", 1: "retired"}
    newest, *_, oldest = catalogue(tmp_path / "run").entries()
    assert (newest.tiers, newest.world_size, dict(newest.meta)) == (("local",), 1, {"loss": 0.4})
    assert newest.size_bytes == oldest.size_bytes > 0
    assert (oldest.tiers, oldest.retired, oldest.parent) == ((), True, None)
    assert newest.parent == "v0000000003-01"
    assert newest.digest != oldest.digest


def test_without_any_history_what_lies_in_the_tiers_is_listed(tmp_path: Path) -> None:
    with eg.Checkpointer(tmp_path / "run", agent=False) as ck:  # memory, and the run folder's own disk
        ck.save(1, state(1)).wait()
        ck.save(2, state(2), meta={"note": "x"}).wait()
    for path in (tmp_path / "run").glob("catalogue/*.jsonl"):
        path.unlink()
    found = Catalogue(tmp_path / "run").entries()
    assert [(entry.version.step, entry.state) for entry in found] == [(2, "restorable"), (1, "restorable")]
    assert found[0].tiers == ("memory", "local")
    assert found[0].meta == {"note": "x"}
    assert found[0].size_bytes == next((tmp_path / "run").glob("local/*/*/v*02*/*.safetensors")).stat().st_size


def test_equal_states_have_equal_digests_whatever_the_step(tmp_path: Path) -> None:
    with eg.Checkpointer(tmp_path / "run", tiers=[eg.Local(tmp_path / "disk", keep=5)], agent=False) as ck:
        for step, value in ((1, 7), (2, 7), (3, 8)):
            ck.save(step, state(value)).wait()
    digests = {entry.version.step: entry.digest for entry in catalogue(tmp_path / "run").entries()}
    assert digests[1] == digests[2] != digests[3]


def test_looking_makes_nothing_and_changes_nothing(tmp_path: Path, shm: Path) -> None:
    train(tmp_path / "run", [1, 2, 3])
    before = sorted((str(path), path.stat().st_mtime_ns) for top in (tmp_path, shm) for path in top.rglob("*"))
    catalogue(tmp_path / "run").entries()
    trace_lineage(catalogue(tmp_path / "run"))
    after = sorted((str(path), path.stat().st_mtime_ns) for top in (tmp_path, shm) for path in top.rglob("*"))
    assert after == before


def test_the_tiers_that_an_attempt_has_on_record_are_looked_at(tmp_path: Path) -> None:
    train(tmp_path / "run", [1])
    describe(tmp_path / "run", 1, tiers=[eg.Local(tmp_path / "disk").to_json(), {"kind": "tape", "reel": 3}])
    plain = Catalogue(tmp_path / "run")
    assert [entry.tiers for entry in plain.entries()] == [("local",)]
    assert "tape" in plain.survey().unseen[0]


def test_a_version_that_may_lie_in_a_tier_that_cannot_be_seen_is_not_called_retired(tmp_path: Path) -> None:
    train(tmp_path / "run", [1, 2, 3])
    describe(tmp_path / "run", 1, tiers=[{"kind": "tape"}, eg.Local(tmp_path / "disk").to_json()])
    assert states(tmp_path / "run") == {3: "restorable", 2: "restorable", 1: "unknown"}


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    train(tmp_path / "run", [1, 2, 3])
    (path,) = (tmp_path / "run" / "catalogue").glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    assert states(tmp_path / "run")[1] == "retired"
    CatalogueJournal(tmp_path / "run").note_shard(manifest(9), path.stem)
    assert states(tmp_path / "run")[9] == "retired"
    garbage = [b"", b"null", b"[1]", b'{"schema_version": 1}', b"\xff\xfe", b'{"schema_version": 9, "version": "v"}']
    garbage += [json.dumps({"schema_version": 1, "version": "v0000000077-01", "rank": 5, "world_size": 2}).encode()]
    with path.open("ab") as out:
        out.write(b"\n".join(garbage) + b"\n")
    assert sorted(states(tmp_path / "run")) == [1, 2, 3, 9]


def _note_many(run: Path, writer: str) -> None:
    for step in itertools.count():
        CatalogueJournal(run).note_shard(manifest(step), writer)


def test_a_writer_that_is_killed_loses_at_most_the_line_that_it_was_writing(tmp_path: Path) -> None:
    RunFolder.open(tmp_path / "run")
    child = multiprocessing.get_context("fork").Process(target=_note_many, args=(tmp_path / "run", "n0"))
    child.start()
    try:
        while len(CatalogueJournal(tmp_path / "run").read().shards) < 20:
            assert child.is_alive()
    finally:
        child.kill()
        child.join()
    steps = sorted(version.step for version in CatalogueJournal(tmp_path / "run").read().shards)
    assert steps == list(range(len(steps)))
    CatalogueJournal(tmp_path / "run").note_shard(manifest(10**9), "n0")
    assert Version(10**9, 1) in CatalogueJournal(tmp_path / "run").read().shards


def test_many_writers_make_one_version(tmp_path: Path) -> None:
    RunFolder.open(tmp_path / "run")
    for rank in range(3):
        CatalogueJournal(tmp_path / "run").note_shard(manifest(5, rank=rank, world_size=3, node=f"n{rank}"), f"n{rank}")
    CatalogueJournal(tmp_path / "run").note_shard(manifest(6, rank=1, world_size=3), "n1")
    found = {entry.version.step: entry for entry in Catalogue(tmp_path / "run").entries()}
    assert (found[5].state, found[5].size_bytes, found[5].nodes) == ("retired", 3 * 4096, {0: "n0", 1: "n1", 2: "n2"})
    assert (found[6].state, found[6].digest) == ("torn", "")


def test_a_full_disk_costs_history_and_not_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RunFolder.open(tmp_path / "run")
    (tmp_path / "run" / "catalogue").write_text("no folder can be made here")
    CatalogueJournal(tmp_path / "run").note_shard(manifest(1), "n0")
    assert "not noted in the history" in caplog.text


def test_a_verdict_is_remembered_and_the_last_one_counts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, [1])
    found = catalogue(run)
    assert found.entries()[0].verified == "unknown"
    found.note_verified(Version(1, 1), "local", ok=False, why="rank 0: a bit")
    assert found.entries()[0].verified == "failed"
    found.note_verified(Version(1, 1), "local", ok=True)
    assert found.entries()[0].verified == "ok"
    assert found.entries()[0].verified_at
    found.note_verified(Version(1, 1), "memory", ok=False)  # of a copy that is not there any more
    assert found.entries()[0].verified == "ok"


def test_checking_finds_the_flipped_bit_and_only_that(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, [1, 2])
    shard = next((tmp_path / "disk").rglob("v0000000002-01/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 4
    shard.write_bytes(data)
    found = catalogue(run)
    seen = found.survey()
    verdicts = {entry.version.step: check_version(entry, seen) for entry in found.entries(seen)}
    assert [each.verdict for each in verdicts[1]] == ["ok"]
    assert [(each.verdict, each.why) for each in verdicts[2]] == [("failed", "a: not what was captured")]


def test_a_lost_shard_is_failed_and_one_on_a_node_out_of_sight_unknown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, [1], node="n0")
    found = catalogue(run)
    seen = found.survey()
    (entry,) = found.entries(seen)
    half = replace(entry, world_size=2, nodes={0: "n0", 1: "n0"})
    assert [each.verdict for each in check_version(half, seen)] == ["ok", "failed"]
    away = replace(half, nodes={0: "n0", 1: "n1"})
    assert [each.verdict for each in check_version(away, seen)] == ["ok", "unknown"]


def test_pins_and_tags_keep_and_name_versions(tmp_path: Path) -> None:
    pins = Pins(tmp_path)
    assert (pins.pinned(), pins.tags()) == (set(), {})
    pins.pin(Version(1, 1))
    pins.pin(Version(1, 1))
    pins.tag(Version(2, 1), "best")
    pins.tag(Version(2, 1), "paper")
    assert pins.pinned() == {Version(1, 1), Version(2, 1)}
    pins.tag(Version(3, 1), "best")  # goes over
    assert pins.tags() == {"best": Version(3, 1), "paper": Version(2, 1)}
    pins.unpin(Version(2, 1))
    pins.unpin(Version(9, 9))
    assert pins.pinned() == {Version(1, 1), Version(3, 1)}
    pins.untag("best")
    with pytest.raises(UsageError, match="no tag 'best'"):
        pins.untag("best")


@pytest.mark.parametrize("name", ["", "120", "latest", "v0000000120-02", "a/b", "..", "-x", "a" * 65, "é", "a\n"])
def test_a_tag_that_could_be_taken_for_something_else_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="expected letters"):
        Pins(tmp_path).tag(Version(1, 1), name)
    assert list(tmp_path.iterdir()) == []


def test_a_rotten_tag_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Pins(tmp_path).tag(Version(1, 1), "good")
    (tmp_path / "catalogue" / "tags" / "bad.json").write_text("{")
    assert Pins(tmp_path).tags() == {"good": Version(1, 1)}
    assert "is no tag" in caplog.text
    with pytest.raises(FileAccessError, match=r"bad\.json: is no tag"):  # so that nothing is retired that it may mean
        Pins(tmp_path).pinned()


def _pin_many(run: Path, first: int) -> None:
    for step in range(first, first + 10):
        Pins(run).pin(Version(step, 1))
        Pins(run).tag(Version(step, 1), "moving")


def test_several_processes_may_pin_at_the_same_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_pin_many, args=(tmp_path, first)) for first in (0, 100, 200)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert len(Pins(tmp_path).pinned()) == 30
    assert Pins(tmp_path).tags()["moving"].step % 100 == 9


def test_a_version_is_found_by_step_name_tag_and_latest(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, [10, 20], keep=9)
    train(run, [15, 20], keep=9, restore=True)
    Pins(run).tag(Version(10, 1), "best")
    found = catalogue(run)
    for text, version in {
        "20": Version(20, 2),
        "v0000000020-01": Version(20, 1),
        "best": Version(10, 1),
        "latest": Version(20, 2),
    }.items():
        assert found.resolve(text).version == version
    for text, words in {
        "19": "The nearest are v0000000020-02, v0000000020-01, v0000000015-02",
        "bset": "Did you mean 'best'",
        "v0000000020-09": "The nearest are v0000000020",
        "∞": "Name a step, a version, a tag or 'latest'",
    }.items():
        with pytest.raises(UsageError, match=f"no version '{text}'.*{words}"):
            found.resolve(text)


def test_what_is_pinned_or_newest_is_not_removed_by_hand(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, [1, 2, 3], keep=9)
    found = catalogue(run)
    Pins(run).tag(Version(1, 1), "best")
    seen = found.survey()
    newest, middle, pinned = found.entries(seen)
    entries = [newest, middle, pinned]
    with pytest.raises(UsageError, match=r"is pinned \(tag best\): unpin it first"):
        plan_removal(pinned, entries, seen, tier=None, force=True)
    with pytest.raises(UsageError, match=r"newest version that can be restored.*--force"):
        plan_removal(newest, entries, seen, tier=None, force=False)
    with pytest.raises(UsageError, match="nothing of it is in tier memory"):
        plan_removal(middle, entries, seen, tier="memory", force=False)
    plan_removal(middle, entries, seen, tier="local", force=False).run()
    assert states(run) == {3: "restorable", 2: "retired", 1: "restorable"}
    with eg.Checkpointer(run, tiers=[eg.Local(tmp_path / "disk")], agent=False) as ck:
        assert ck.restore(state(0)) == 3


def test_what_a_running_trainer_holds_in_memory_stays(tmp_path: Path) -> None:
    with eg.Checkpointer(tmp_path / "run", agent=False) as ck:
        ck.save(1, state(1)).wait()
        ck.save(2, state(2)).wait()
        found = Catalogue(tmp_path / "run")
        seen = found.survey()
        newest, *_ = entries = found.entries(seen)
        removal = plan_removal(newest, entries, seen, tier=None, force=True)
        assert [each.copy.tier for each in removal.going] == ["local"]
        assert [each.copy.tier for each in removal.held] == ["memory"]
        removal.run()
        assert found.entries()[0].tiers == ("memory",)


def test_where_there_is_no_job_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for where, words in (("none", "no such run folder"), ("file", "is no folder"), (".", "no job.json")):
        with pytest.raises(FileAccessError, match=words):
            Catalogue(tmp_path / where).entries()


def edges(lineage: Lineage) -> set[tuple[str, str]]:
    return {(child.version.name, parent.version.name) for child, parent in lineage.edges()}


def test_the_lineage_follows_attempts_and_restarts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, [10, 20, 30])
    train(run, [40], restore=True)
    with eg.Checkpointer(run, tiers=[eg.Local(tmp_path / "disk")], agent=False) as ck:
        ck.restore(state(0), version=30)
        ck.save(35, state(35)).wait()
    traced = trace_lineage(catalogue(run))
    assert edges(traced) == {
        ("v0000000020-01", "v0000000010-01"),
        ("v0000000030-01", "v0000000020-01"),
        ("v0000000040-02", "v0000000030-01"),
        ("v0000000035-03", "v0000000030-01"),
    }
    looks = {node.version.step: node.appearance for node in traced.nodes}
    assert looks == {10: "gone", 20: "gone", 30: "gone", 40: "restorable", 35: "restorable"}
    assert [(drawing, node.version.step if node else None) for drawing, node in draw(traced)] == [
        ("●", 35), ("│ ●", 40), ("├─╯", None), ("○", 30), ("○", 20), ("○", 10),
    ]  # fmt: skip


def test_the_lineage_goes_on_in_the_other_job_that_a_run_began_from(tmp_path: Path) -> None:
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    train(base, [10, 20, 30], keep=9)
    describe(base, 1, tiers=[eg.Local(tmp_path / "disk").to_json()])
    train(tuned, [1, 2])
    other = Catalogue(base).location.job
    describe(tuned, 1, parent=f"{other}/v0000000020-01", source=str(base))
    traced = trace_lineage(catalogue(tuned))
    assert [(node.job == other, node.version.step) for node in traced.nodes] == [
        (False, 2), (False, 1), (True, 20), (True, 10),
    ]  # fmt: skip
    assert ("v0000000001-01", "v0000000020-01") in edges(traced)
    assert traced.notes == ()
    describe(tuned, 1, source=str(tmp_path / "gone"))
    stub = trace_lineage(catalogue(tuned))
    assert [node.appearance for node in stub.nodes] == ["restorable", "restorable", "unknown"]
    assert "no such run folder" in stub.notes[0]
    describe(tuned, 1, source=str(tuned))
    assert "is job tuned-" in trace_lineage(catalogue(tuned)).notes[0]


def test_two_attempts_may_begin_from_two_versions_of_one_job(tmp_path: Path) -> None:
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    train(base, [10, 20, 30], keep=9)
    describe(base, 1, tiers=[eg.Local(tmp_path / "disk").to_json()])
    other = Catalogue(base).location.job
    for attempt, step in ((1, 10), (2, 30)):
        train(tuned, [1, 2])
        describe(tuned, attempt, parent=f"{other}/v{step:010d}-01", source=str(base))
    traced = trace_lineage(catalogue(tuned))
    assert all(node.entry is not None for node in traced.nodes)
    assert len(traced.nodes) == 7


def test_records_that_lead_in_a_circle_are_cut(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, [10])
    train(run, [20])
    describe(run, 1, parent="v0000000020-02")
    describe(run, 2, parent="v0000000010-01")
    traced = trace_lineage(catalogue(run))
    assert len(traced.nodes) == 2
    assert len(edges(traced)) == 1
    assert len(list(draw(traced))) == 2


def made_up(job: str, version: Version, parent: str | None, **members: Any) -> CatalogueEntry:
    settings = {"state": "restorable", "tiers": ("local",), "time": "2026-01-01T00:00:00Z", "world_size": 1}
    return CatalogueEntry(job=job, version=version, parent=parent, size_bytes=1, **{**settings, **members})


def long_history(attempts: int, each: int) -> Lineage:
    nodes: list[LineageNode] = []
    parent = None
    for attempt in range(1, attempts + 1):
        for index in range(each):
            version = Version(100 * (attempt * each // 2 + index), attempt)
            tags = ("best",) if index == each // 2 and attempt == 1 else ()
            entry = made_up(
                "r50-0123abcd", version, None, state="restorable" if index > each - 3 else "retired", tags=tags,
                pinned=bool(tags) or index == each - 1,
            )  # fmt: skip
            nodes.append(LineageNode("r50-0123abcd", version, parent, entry))
            parent = nodes[-1].key
        parent = nodes[-max(1, each // 3)].key if nodes else None
    return Lineage("r50-0123abcd", tuple(reversed(nodes)))


@pytest.mark.parametrize(("attempts", "each"), [(1, 0), (1, 1), (1, 3), (4, 50), (12, 3)])
def test_the_picture_shows_every_version_and_no_labels_that_meet(attempts: int, each: int) -> None:
    lineage = long_history(attempts, each)
    picture = ElementTree.fromstring(draw_svg(lineage))
    space = {"svg": "http://www.w3.org/2000/svg"}
    dots = picture.findall("svg:g/svg:circle", space)
    pinned = sum(node.pinned for node in lineage.nodes)
    assert len(dots) == len(lineage.nodes) + pinned
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    assert all(0 < float(dot.attrib["cx"]) < width and 0 < float(dot.attrib["cy"]) < height for dot in dots)
    steps = [text for text in picture.findall("svg:text", space) if (text.text or "").isdecimal()]
    rows: dict[str, list[tuple[float, float]]] = {}
    for text in steps:
        half = 3.3 * len(text.text or "")
        rows.setdefault(text.attrib["y"], []).append((float(text.attrib["x"]) - half, float(text.attrib["x"]) + half))
    assert not each or len(rows) == attempts
    for spans in rows.values():
        spans.sort()
        assert all(left[1] < right[0] for left, right in pairwise(spans))


def test_names_in_the_picture_are_no_markup(tmp_path: Path) -> None:
    node = LineageNode("<script>&", Version(1, 1), None, made_up("<script>&", Version(1, 1), None, tags=('"><b>',)))
    picture = draw_svg(Lineage("<script>&", (node,)))
    assert "<script>" not in picture
    ElementTree.fromstring(picture)


def test_reading_a_long_history_looks_at_the_tiers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    train(run, [1, 2])
    for step in range(100, 1100):
        CatalogueJournal(run).note_shard(manifest(step), "n0")
    reads: list[Path] = []
    read: Callable[..., Manifest] = Manifest.read.__func__  # type: ignore[attr-defined]

    def counted(cls: type[Manifest], path: Path, *, digests: bool = True) -> Manifest:
        reads.append(path)
        return read(cls, path, digests=digests)

    monkeypatch.setattr(Manifest, "read", classmethod(counted))
    assert len(catalogue(run).entries()) == 1002
    assert len(reads) == 2, "one of each rank of each version that is still there"
