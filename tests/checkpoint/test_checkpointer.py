"""Saving and restoring as a user sees it; the chain runs in a thread, which is the same chain as the agent's."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import evergrad as eg
from evergrad.checkpoint import Version
from evergrad.checkpoint.run_folder import find_arenas
from evergrad.checkpoint.tiers import Work
from evergrad.errors import CheckpointError, RestoreError, SaveRefused, StateError, TierError, UsageError

Make = Callable[..., eg.Checkpointer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Checkpointers of one run folder, closed at the end."""
    made = []

    def checkpointer(**settings: Any) -> eg.Checkpointer:
        made.append(eg.Checkpointer(tmp_path / "run", **{"agent": False, **settings}))
        return made[-1]

    yield checkpointer
    for each in made:
        each.close()


def state(value: float, size: int = 1000) -> dict[str, Any]:
    return {"a": torch.full((size,), value), "b": {"c": torch.full((3, 3), value + 0.5)}, "epoch": int(value)}


def holds(found: dict[str, Any], value: float) -> bool:
    return bool((found["a"] == value).all() and (found["b"]["c"] == value + 0.5).all() and found["epoch"] == value)


class Gate:
    """A module that holds the chain until it is opened."""

    name = "gate"
    after = "digest"

    def __init__(self) -> None:
        self.open = threading.Event()

    def run(self, work: Work) -> None:
        assert self.open.wait(60)


class Recorder:
    """A module that notes what passes."""

    name = "recorder"

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def run(self, work: Work) -> None:
        self.seen.append((work.version.step, work.rank, len(work.manifest.digests)))


class Broken:
    """A module that fails."""

    name = "broken"
    after = "memory"

    def run(self, work: Work) -> None:
        raise ValueError("as it always does")


def test_what_was_saved_comes_back(make: Make) -> None:
    ck = make()
    ck.save(7, state(7)).wait()
    live = state(0)
    assert ck.restore(live) == 7
    assert holds(live, 7)


def test_with_nothing_there_restore_gives_none_and_touches_nothing(make: Make) -> None:
    live = state(3)
    assert make().restore(live) is None
    assert holds(live, 3)


def test_the_state_may_change_as_soon_as_save_returns(make: Make) -> None:
    ck, live = make(), state(1)
    for step in range(1, 20):
        live["a"].fill_(step), live["b"]["c"].fill_(step + 0.5), live.update(epoch=step)
        pending = ck.save(step, live)
        live["a"].fill_(-1), live["b"]["c"].fill_(-1)
    pending.wait()
    assert ck.restore(live) == 19
    assert holds(live, 19)


def test_a_new_checkpointer_finds_what_an_earlier_one_saved(make: Make) -> None:
    first = make()
    first.save(5, state(5)).wait()
    first.close()
    live = state(0)
    assert make().restore(live) == 5
    assert holds(live, 5)


def test_after_a_reboot_the_local_tier_has_it(make: Make, shm: Path) -> None:
    first = make()
    first.save(5, state(5)).wait()
    first.close()
    for file in shm.rglob("rank-*"):
        file.unlink()
    ck, live = make(), state(0)
    assert ck.restore(live) == 5
    assert ck.restored is not None
    assert ck.restored.tier == "local"
    assert holds(live, 5)


def test_the_nearest_tier_is_read(make: Make) -> None:
    ck = make()
    ck.save(5, state(5)).wait()
    ck.restore(state(0))
    assert ck.restored is not None
    assert ck.restored.tier == "memory"


def test_notes_come_back_with_the_version(make: Make) -> None:
    ck = make()
    ck.save(5, state(5), meta={"loss": 0.25, "tags": ["best"]}).wait()
    ck.restore(state(0))
    assert ck.restored is not None
    assert ck.restored.meta == {"loss": 0.25, "tags": ["best"]}
    assert ck.versions()[0].meta == ck.restored.meta


def test_shard_and_arena_are_ordinary_safetensors_files(make: Make, tmp_path: Path, shm: Path) -> None:
    ck = make(tiers=[eg.Memory(), eg.Local(tmp_path / "disk")])
    ck.save(5, state(5)).wait()
    shards = [*(tmp_path / "disk").rglob("rank-00000.safetensors"), *shm.rglob("rank-00000.*.safetensors")]
    assert len(shards) == 2
    for shard in shards:
        tensors = safetensors.torch.load_file(shard)
        assert tensors["a"].eq(5).all()
        with eg.open_checkpoint(shard) as opened:
            assert eg.unflatten({name: opened.read(name) for name in opened.tensors}, opened.skeleton)["epoch"] == 5


def test_a_tier_keeps_as_many_versions_as_it_is_told(make: Make, tmp_path: Path) -> None:
    ck = make(tiers=[eg.Local(tmp_path / "disk", keep=3)])
    for step in range(1, 8):
        ck.save(step, state(step)).wait()
    ck.close()
    ck = make(tiers=[eg.Local(tmp_path / "disk", keep=3)])
    assert [record.step for record in ck.versions()] == [7, 6, 5]
    folders = [path.parent.name for path in (tmp_path / "disk").rglob("rank-00000.safetensors")]
    assert sorted(folders) == ["v0000000005-01", "v0000000006-01", "v0000000007-01"]


@pytest.mark.parametrize("asked", [6, Version(6, 1)])
def test_a_version_can_be_asked_for(make: Make, asked: Any) -> None:
    ck, live = make(), state(0)
    for step in (5, 6, 7):
        ck.save(step, state(step)).wait()
    assert ck.restore(live, version=asked) == 6
    assert holds(live, 6)
    with pytest.raises(UsageError, match=r"there is no version 99\. There are 7, 6"):
        ck.restore(live, version=99)


def test_a_step_that_is_saved_again_is_another_attempt(make: Make) -> None:
    ck, live = make(), state(0)
    for value in (1, 2):
        ck.save(5, state(value)).wait()
    assert [record.version.name for record in ck.versions()] == ["v0000000005-02", "v0000000005-01"]
    assert ck.restore(live) == 5
    assert holds(live, 2)


def test_after_going_back_the_new_attempt_is_newer_whatever_its_step(make: Make, tmp_path: Path) -> None:
    ck, live = make(tiers=[eg.Local(keep=3)]), state(0)
    for step in (10, 20):
        ck.save(step, state(step)).wait()
    ck.restore(live, version=10)
    ck.save(15, state(15)).wait()
    assert ck.restore(live) == 15
    manifest = next((tmp_path / "run").rglob("v0000000015-02/rank-00000.json"))
    assert json.loads(manifest.read_text())["parent"] == "v0000000010-01"


def test_part_of_a_state_can_be_restored(make: Make) -> None:
    ck, live = make(), state(0)
    ck.save(5, state(5)).wait()
    assert ck.restore(live, where="b/*") == 5
    assert live["a"].eq(0).all()
    assert live["b"]["c"].eq(5.5).all()


def test_a_mismatch_names_path_expected_and_found_and_touches_nothing(make: Make) -> None:
    ck = make()
    ck.save(5, state(5)).wait()
    live = state(0, size=999)
    with pytest.raises(StateError, match=r"a: .*999.*1000|a: .*1000.*999"):
        ck.restore(live)
    assert holds(live, 0)
    assert ck.restore(live, strict=False) == 5
    assert live["a"].eq(0).all()
    assert live["b"]["c"].eq(5.5).all()


def test_a_save_that_finds_both_arenas_in_use_is_refused_if_so_wished(make: Make) -> None:
    gate = Gate()
    ck = make(when_busy="refuse", modules=[gate])
    first, second = ck.save(1, state(1)), ck.save(2, state(2))
    with pytest.raises(SaveRefused, match="both arenas are in use"):
        ck.save(3, state(3))
    gate.open.set()
    first.wait(), second.wait()
    ck.save(4, state(4)).wait()
    live = state(0)
    assert ck.restore(live) == 4
    assert holds(live, 4)


def test_a_save_that_finds_both_arenas_in_use_waits_by_default(make: Make) -> None:
    gate = Gate()
    ck = make(modules=[gate])
    pendings = [ck.save(1, state(1)), ck.save(2, state(2))]
    third = threading.Thread(target=lambda: pendings.append(ck.save(3, state(3))))
    third.start()
    third.join(0.3)
    assert third.is_alive()
    assert not pendings[0].done()
    gate.open.set()
    third.join(60)
    for pending in pendings:
        pending.wait()
    live = state(0)
    assert ck.restore(live, version=2) == 2
    assert holds(live, 2)


def test_in_memory_alone_the_newest_version_is_never_overwritten(make: Make) -> None:
    ck, live = make(tiers=[eg.Memory()]), state(0)
    for step in range(1, 6):
        ck.save(step, state(step)).wait()
        assert ck.versions()[0].step == step
        assert ck.restore(live) == step
        assert holds(live, step)


def test_waiting_for_a_tier_by_name(make: Make) -> None:
    gate = Gate()
    gate.after = "memory"
    ck = make(modules=[gate])
    pending = ck.save(1, state(1))
    assert pending.wait(tier="memory", timeout=60) == Version(1, 1)
    assert pending.done("memory")
    assert not pending.done()
    with pytest.raises(TimeoutError, match="tier local"):
        pending.wait(timeout=0.01)
    gate.open.set()
    assert pending.result(timeout=60) == Version(1, 1)
    assert pending.exception() is None
    pending.captured()
    with pytest.raises(UsageError, match="unknown tier 'tape'"):
        pending.wait(tier="tape")


def test_modules_of_the_users_own_see_every_version(make: Make) -> None:
    recorder = Recorder()
    ck = make(modules=[recorder])
    for step in (1, 2):
        ck.save(step, state(step)).wait()
    ck.close()
    assert recorder.seen == [(1, 0, 2), (2, 0, 2)]


def test_a_module_that_fails_is_reported_and_the_rest_of_the_chain_goes_on(make: Make) -> None:
    ck = make(modules=[Broken()])
    ck.save(1, state(1)).wait(tier="local")
    with pytest.warns(eg.CheckpointWarning, match="as it always does"):
        ck.save(2, state(2)).wait()


def test_a_module_in_a_place_that_does_not_exist_is_refused(make: Make) -> None:
    gate = Gate()
    gate.after = "tape"
    with pytest.raises(UsageError, match="wants to follow 'tape'"):
        make(modules=[gate]).save(1, state(1))


def test_the_memory_it_takes_is_stated(make: Make, shm: Path) -> None:
    ck = make(reserve=state(0))
    files = [path.stat() for path in shm.rglob("*.safetensors")]
    assert ck.memory_bytes == sum(status.st_size for status in files)
    assert ck.memory_bytes == pytest.approx(sum(status.st_blocks * 512 for status in files), abs=2 * 4096)
    before = ck.memory_bytes
    for step in range(1, 5):
        ck.save(step, state(step)).wait()
    assert ck.memory_bytes == before
    assert len(find_arenas(ck._folder)) == 2


def test_a_state_that_grows_gets_larger_arenas(make: Make) -> None:
    ck, live = make(), state(0, size=50_000)
    ck.save(1, state(1)).wait()
    for step in (2, 3, 4):
        ck.save(step, state(step, size=50_000)).wait()
    assert ck.restore(live) == 4
    assert holds(live, 4)
    ck.save(5, state(5)).wait()
    assert ck.restore(state(0)) == 5


def test_in_a_forked_process_it_says_whose_it_is(make: Make) -> None:
    ck = make()
    ck.save(1, state(1)).wait()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            ck.save(2, state(2))
        except UsageError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"make one of your own" in os.read(reading, 1000)
    os.close(reading), os.close(writing)
    ck.save(3, state(3)).wait()


def test_closing_twice_is_fine_and_afterwards_nothing_works(make: Make) -> None:
    ck = make()
    pending = ck.save(1, state(1))
    ck.close()
    ck.close()
    assert pending.wait() == Version(1, 1)
    with pytest.raises(UsageError, match="closed"):
        ck.save(2, state(2))
    with pytest.raises(UsageError, match="closed"):
        ck.restore(state(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tiers": []}, "at least one"),
        ({"tiers": [eg.Memory(), eg.Memory()]}, "each kind once"),
        ({"tiers": ["local"]}, "is no tier"),
        ({"tiers": ["memroy"]}, r"'memroy' is no tier .* Did you mean eg\.Memory\(\)\?"),
        ({"tiers": "persistant"}, r"'persistant' is no tier .* Did you mean eg\.Persistent\(url\)\?"),
        ({"when_busy": "panic"}, "expected wait or refuse, found 'panic'"),
    ],
)
def test_wrong_settings_are_refused(make: Make, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**settings)


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules": [5]}, r"modules: 5 is no module: expected an object with an attribute `name` and a method"),
        ({"modules": 5}, r"modules: expected a list of modules, each an object with .*, found 5"),
        ({"modules": [threading.Thread]}, r"modules: <class 'threading.Thread'> is no module"),
        ({"linger_s": "x"}, r"linger_s='x': expected 0 or more seconds"),
        ({"linger_s": -1}, r"linger_s=-1: expected 0 or more seconds"),
        ({"linger_s": float("nan")}, r"linger_s=nan: expected 0 or more seconds"),
        ({"run_dir": ""}, r"run_dir: an empty path names no folder. For the current one: '\.'\."),
        ({"run_dir": 5}, r"run_dir: expected the path of a folder, found 5"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str, agent: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"^{message}"):
        eg.Checkpointer(**{"run_dir": tmp_path / "run", "agent": agent, **settings})
    assert not any(tmp_path.iterdir())
    assert not any(shm.iterdir())


def test_wrong_tiers_are_refused() -> None:
    with pytest.raises(UsageError, match="keep=0"):
        eg.Local(keep=0)
    with pytest.raises(TierError, match="keep=2"):
        eg.Memory(keep=2)


@pytest.mark.parametrize(("step", "meta"), [(-1, None), (1.5, None), ("3", None), (True, None), (1, {"x": object()})])
def test_wrong_steps_and_notes_are_refused(make: Make, step: Any, meta: Any) -> None:
    with pytest.raises(UsageError, match=r"step|meta"):
        make().save(step, state(1), meta=meta)


def test_a_state_that_cannot_be_stored_is_refused_by_path_and_the_next_save_works(make: Make) -> None:
    ck = make()
    with pytest.raises(StateError, match="b/bad"):
        ck.save(1, {"b": {"bad": object()}})
    ck.save(2, state(2)).wait()
    assert ck.restore(state(0)) == 2


def test_if_no_version_is_intact_that_is_an_error_and_nothing_is_touched(make: Make, tmp_path: Path) -> None:
    ck = make(tiers=[eg.Local(tmp_path / "disk")])
    ck.save(1, state(1)).wait()
    shard = next((tmp_path / "disk").rglob("rank-00000.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    live = state(0)
    with pytest.raises(RestoreError, match=r"none of the versions is intact: step 1 .*tier local: b/c: "):
        ck.restore(live)
    assert holds(live, 0)


def test_a_corrupt_version_is_passed_over_for_the_one_before_and_that_is_said(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ck = make(tiers=[eg.Local(tmp_path / "disk")])
    for step in (1, 2):
        ck.save(step, state(step)).wait()
    shard = next((tmp_path / "disk").rglob("v0000000002-01/rank-00000.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    live = state(0)
    with caplog.at_level(logging.WARNING):
        assert ck.restore(live) == 1
    assert holds(live, 1)
    assert "step 2 (attempt 1) in tier local: b/c: not what was captured. Restoring step 1" in caplog.text


def test_a_tier_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="tier local"):
        eg.Checkpointer(tmp_path / "run", tiers=[eg.Local(tmp_path / "file")], agent=False)


def test_a_version_that_is_being_read_is_not_written_over(make: Make, tmp_path: Path) -> None:
    from evergrad.checkpoint.restore.shards import Shard

    ck = make(tiers=[eg.Local(tmp_path / "disk", keep=1)])
    ck.save(1, state(1)).wait()
    (copy,) = ck._stores["local"].find(0)
    with Shard(copy, ck._run_folder.id) as shard:
        assert shard.verify() == []
        for step in (2, 3, 4):
            ck.save(step, state(step)).wait()
        assert shard.tensor("a").eq(1).all()
        assert shard.verify() == []


def test_versions_that_were_committed_and_are_gone_are_an_error_not_a_new_start(make: Make, tmp_path: Path) -> None:
    ck = make(tiers=[eg.Local(tmp_path / "disk")])
    ck.save(1, state(1)).wait()
    ck.close()
    for file in (tmp_path / "disk").rglob("rank-*"):
        file.unlink()
    with pytest.raises(RestoreError, match=r"step 1 \(attempt 1\) was committed, and no version is left"):
        make(tiers=[eg.Local(tmp_path / "disk")]).restore(state(0))


def test_what_a_killed_trainer_without_agent_captured_is_found_by_the_next_restore(make: Make, tmp_path: Path) -> None:
    gate = Gate()
    first = make(tiers=[eg.Memory()], modules=[gate])
    first.save(1, state(1))
    (arena,) = [files for files in find_arenas(first._folder) if (t := files.read_ticket()) is not None and t.captured]
    assert not arena.manifest.exists()
    live, found = state(0), []
    second = make(tiers=[eg.Memory()])
    waits = threading.Thread(target=lambda: found.append(second.restore(live)))
    waits.start()
    waits.join(0.2)
    assert found == []  # the first one is still at it, and may finish
    gate.open.set()
    waits.join(60)
    assert found == [1]
    assert holds(live, 1)


def test_a_forked_worker_does_not_keep_the_arenas(make: Make) -> None:
    ck = make()
    ck.save(1, state(1)).wait()
    stop, go_on = os.pipe()
    began, begin = os.pipe()
    if (child := os.fork()) == 0:
        os.close(go_on)
        os.write(begin, b"!")
        os.read(stop, 1)  # lives until the test has looked
        os._exit(0)
    assert os.read(began, 1) == b"!"
    arenas = find_arenas(ck._folder)
    assert [files.is_locked() for files in arenas] == [True, True]
    ck._state_capture.release_arenas()
    assert [files.is_locked() for files in arenas] == [False, False]
    os.close(go_on)
    os.waitpid(child, 0)
    for fd in (stop, began, begin):
        os.close(fd)


def test_arenas_of_the_same_size_are_taken_over_as_they_are(make: Make, shm: Path) -> None:
    first = make(tiers=[eg.Memory()])
    for step in (1, 2, 3):
        first.save(step, state(step)).wait()
    first.close()
    before = {path: path.stat().st_ino for path in shm.rglob("*.safetensors")}
    second = make(tiers=[eg.Memory()])
    for step in (4, 5, 6):
        second.save(step, state(step)).wait()
    assert {path: path.stat().st_ino for path in shm.rglob("*.safetensors")} == before


def test_however_many_saves_are_waited_for_late_each_has_its_answer(make: Make) -> None:
    ck = make(tiers=[eg.Memory()])
    pendings = [ck.save(step, state(step)) for step in range(1, 301)]
    assert [pending.wait(timeout=60).step for pending in pendings] == list(range(1, 301))
