"""Full, read-only, rotten: what was committed is restored, one line says what is wrong and where, training goes on."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import resource
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import evergrad as eg
from evergrad.checkpoint import Pending, Version
from evergrad.checkpoint.agent.inventory import CompletionLog
from evergrad.checkpoint.agent.pipeline import Flusher, Pipeline
from evergrad.checkpoint.catalogue.catalogue import Catalogue
from evergrad.checkpoint.checkpointer import CheckpointWarning
from evergrad.checkpoint.run_folder import find_arenas
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.errors import CheckpointError, EvergradError, RestoreError, TierError
from evergrad.testing import FullStorage, ReadOnlyStorage, SlowStorage, StorageCalls

SECONDS = 100.0


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((15_001,), float(step)), "b": torch.full((7,), -step)}, "step": step}


def assert_holds(found: dict[str, Any], step: int) -> None:
    expected = state(step)
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in expected["model"].items())
    assert found["step"] == step


def restored(ck: eg.Checkpointer, **asked: Any) -> int | None:
    live = state(0)
    step = ck.restore(live, **asked)
    assert_holds(live, step or 0)
    return step


def save(ck: eg.Checkpointer, step: int) -> Pending:
    return ck.save(step, state(step))


@contextmanager
def checkpointer(folder: Path, tiers: str = "memory+local", *, keep: int = 2, **more: Any) -> Iterator[eg.Checkpointer]:
    """In one process, so that its storage can be replaced; the local tier is below `disk`."""
    made: dict[str, Any] = {"memory": eg.Memory(), "local": eg.Local(folder / "disk", keep=keep)}
    made["persistent"] = eg.Persistent(str(folder / "bucket"), keep=keep, patience_s=1.0)
    with eg.Checkpointer(
        folder / "run", tiers=[made[name] for name in tiers.split("+")], **{"agent": False, **more}
    ) as ck:
        yield ck


def saved(folder: Path, tiers: str = "memory+local", steps: tuple[int, ...] = (1, 2)) -> None:
    """Some versions, and nobody who uses them."""
    with checkpointer(folder, tiers) as ck:
        for step in steps:
            save(ck, step).wait(timeout=SECONDS)


def goes_on(folder: Path, tiers: str = "memory+local", *, found: int | None) -> None:
    """The next trainer finds a step, and saves more; so does the one after."""
    with checkpointer(folder, tiers) as ck:
        assert restored(ck) == found
        for more in (1, 2, 3):
            save(ck, (found or 0) + more).wait(timeout=SECONDS)
    with checkpointer(folder, tiers) as ck:
        assert restored(ck) == (found or 0) + 3


def sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


# --- storage that refuses -----------------------------------------------------------------------------------------


REFUSALS: dict[str, tuple[Callable[[Path, int], StorageCalls], str]] = {
    "full": (lambda disk, size: FullStorage(0, disk), "no space left on device. Free some space"),
    "room for half a shard": (lambda disk, size: FullStorage(size // 2, disk), "no space left on device"),
    "no room for a manifest": (lambda disk, size: FullStorage(size + 100, disk), "no space left on device"),
    "read-only": (lambda disk, size: ReadOnlyStorage(disk), "read-only file system"),
}


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("kind", REFUSALS)
def test_training_goes_on_while_a_tier_refuses(kind: str, keep: int, tmp_path: Path) -> None:
    make, message = REFUSALS[kind]
    disk = tmp_path / "disk"
    with checkpointer(tmp_path, keep=keep) as ck:
        for step in (1, 2, 3):
            save(ck, step).wait(timeout=SECONDS)
        if "room" in kind:
            for spare in disk.rglob(".spare-*"):  # it would be room
                spare.unlink()
        before = sizes(disk)
        with make(disk, max(before.values())):
            pending = save(ck, 4)
            assert pending.wait("memory", timeout=SECONDS).step == 4
            said = f"step 4 .* is not in tier local: rank 0: {re.escape(str(disk))}.*{message}"
            with pytest.raises(TierError, match=said):
                pending.wait(timeout=SECONDS)
            for step in (5, 6):
                with pytest.warns(CheckpointWarning, match=f"step {step - 1} .* is not in tier local.*{message}"):
                    pending = save(ck, step)
                assert pending.wait("memory", timeout=SECONDS).step == step
                with pytest.raises(TierError, match=message):
                    pending.wait(timeout=SECONDS)
            kept = {name: size for name, size in sizes(disk).items() if ".spare" not in name}
            assert kept == {name: size for name, size in before.items() if ".spare" not in name}, "nothing half done"
            assert restored(ck) == 6
        with pytest.warns(CheckpointWarning, match="step 6"):
            save(ck, 7).wait(timeout=SECONDS)
        save(ck, 8).wait(timeout=SECONDS)
    with checkpointer(tmp_path, "local", keep=keep) as ck:
        assert restored(ck) == 8
    assert len([name for name in sizes(disk) if name.endswith(".json")]) == keep


@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_what_was_committed_before_a_tier_refused_is_restored(kind: str, tmp_path: Path, shm: Path) -> None:
    saved(tmp_path, "local")
    with checkpointer(tmp_path, "local") as ck, REFUSALS[kind][0](tmp_path / "disk", 0):
        assert restored(ck) == 2
        with pytest.raises(TierError):
            save(ck, 3).wait(timeout=SECONDS)
    for files in find_arenas(next(shm.glob("*/*/*/")), 0):  # as after a reboot
        files.remove()
    goes_on(tmp_path, "local", found=2)


def test_a_save_that_failed_is_taken_up_by_the_next_trainer(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as ck, FullStorage(below=tmp_path / "disk"), pytest.raises(TierError):
        save(ck, 1).wait(timeout=SECONDS)
    with checkpointer(tmp_path) as ck:
        save(ck, 2).wait(timeout=SECONDS)
        assert {(record.step, record.tiers) for record in ck.versions()} == {
            (2, ("memory", "local")),
            (1, ("memory", "local")),
        }


def test_a_full_memory_tier_is_said_and_the_disk_gets_the_version(tmp_path: Path, shm: Path) -> None:
    class NoManifests(StorageCalls):
        def before(self, call: Any) -> None:
            if ".json" in call.path and call.name == "create":
                raise OSError(28, "No space left on device", call.path)

    with checkpointer(tmp_path) as ck, NoManifests(below=shm):
        pending = save(ck, 1)
        pending.wait(timeout=SECONDS)
        with pytest.raises(TierError, match=r"is not in tier memory: rank 0: .*rank-00000\.0\.json: cannot be written"):
            pending.wait("memory", timeout=SECONDS)
        with pytest.warns(CheckpointWarning, match="tier memory"):
            save(ck, 2).wait(timeout=SECONDS)
    goes_on(tmp_path, found=2)


def test_a_slow_disk_makes_nobody_wait_but_the_one_who_asks(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as ck:
        save(ck, 1).wait(timeout=SECONDS)
        with SlowStorage(0.02, below=tmp_path / "disk"):
            pending = save(ck, 2)
            assert not pending.done("local")
            assert pending.wait("memory", timeout=SECONDS) == pending.version
            pending.wait(timeout=SECONDS)
        assert restored(ck) == 2


# --- real file systems --------------------------------------------------------------------------------------------

_NEWNS, _NEWUSER = 0x20000, 0x10000000
_RDONLY, _REMOUNT, _PRIVATE = 1, 32, 1 << 18 | 1 << 14
_CANNOT = 77


def _mount(target: Path | str, flags: int, options: str = "", kind: str = "tmpfs") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", str(target).encode(), kind.encode(), flags, options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def _alone() -> None:
    """Mounts of our own, seen by nobody else; in a user namespace, if this is not root."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(_NEWNS if user == 0 else _NEWNS | _NEWUSER):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount("/", _PRIVATE)


def in_child(act: Callable[[], None], *, mounts: dict[Path, str] | None = None, user: int | None = None) -> None:
    """Run something in a forked process, with small file systems of its own, or as somebody else."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            try:
                if mounts:
                    _alone()
                for folder, options in (mounts or {}).items():
                    _mount(folder, 0, options)
                if user is not None:
                    os.setgid(user)
                    os.setuid(user)
            except OSError:
                code = _CANNOT
                raise
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == _CANNOT:
        pytest.skip("mounting, or being somebody else, is not permitted here")
    assert code == 0, "see the traceback of the child"


def fill(folder: Path, *, leave: int = 0) -> Path:
    """Use up a small file system."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        file.write(bytes(free - leave))
    return filler


@pytest.mark.parametrize("room", ["none", "for half a shard", "for a shard without manifest"])
def test_on_a_full_disk_nothing_is_lost_and_training_goes_on(room: str, tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()

    def act() -> None:
        # All are kept: once there is room again, those that had none may come after all, before the end or with it.
        with checkpointer(tmp_path, keep=9) as ck:
            for step in (1, 2):
                save(ck, step).wait(timeout=SECONDS)
            before = sizes(disk)
            shard = -(-max(before.values()) // mmap.PAGESIZE) * mmap.PAGESIZE
            filler = fill(disk, leave={"none": 0, "for half a shard": shard // 2}.get(room, shard))
            with pytest.raises(TierError, match=r"tier local: no space left on device\. Free some space"):
                save(ck, 3).wait(timeout=SECONDS)
            assert sizes(disk) == before | {"filler": filler.stat().st_size}
            with pytest.warns(CheckpointWarning, match="step 3"):
                assert save(ck, 4).wait("memory", timeout=SECONDS).step == 4
            filler.unlink()
        with checkpointer(tmp_path, "local", keep=9) as ck:
            assert restored(ck, version=2) == 2
        goes_on(tmp_path, found=4)

    in_child(act, mounts={disk: "size=400k"})


def test_a_full_run_folder_keeps_no_shard_from_a_disk_that_has_room(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()

    def act() -> None:
        with checkpointer(tmp_path) as ck:
            save(ck, 1).wait(timeout=SECONDS)
            filler = fill(run)
            for step in range(2, 40):  # until the journal would need another block
                pending = save(ck, step)
                pending.wait("memory", timeout=SECONDS)
                pending.wait(timeout=SECONDS)
            assert restored(ck) == 39
            with pytest.raises(eg.EvergradError, match=r"attempts.*no space left"):
                save(ck, 40)
            filler.unlink()
        goes_on(tmp_path, found=39)

    in_child(act, mounts={run: "size=100k"})


@pytest.mark.parametrize("agent", [True, False])
def test_a_disk_that_became_read_only_is_said_when_it_is_used_and_when_it_is_chosen(
    agent: bool, tmp_path: Path
) -> None:
    (disk := tmp_path / "disk").mkdir()

    def act() -> None:
        with checkpointer(tmp_path, agent=agent) as ck:
            save(ck, 1).wait(timeout=SECONDS)
            _mount(disk, _REMOUNT | _RDONLY)
            with pytest.raises(TierError, match=rf"step 2.*{disk}.*read-only file system"):
                save(ck, 2).wait(timeout=SECONDS)
            with pytest.warns(CheckpointWarning, match="read-only"):
                save(ck, 3).wait("memory", timeout=SECONDS)
            assert restored(ck) == 3
        with pytest.raises(TierError, match=rf"{disk}.*read-only file system"), checkpointer(tmp_path):
            pass
        _mount(disk, _REMOUNT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # an agent that is still there may say it again
            goes_on(tmp_path, found=3)

    in_child(act, mounts={disk: "size=1m"})


@pytest.mark.parametrize("reserve", [True, False])
def test_shared_memory_that_is_too_small_is_said_with_what_to_do(reserve: bool, tmp_path: Path, shm: Path) -> None:
    large = {"w": torch.zeros(400_000)}

    def free() -> int:
        return os.statvfs(shm).f_bavail

    def act() -> None:
        with checkpointer(tmp_path) as ck, pytest.raises(TierError):  # the folders that every job has
            ck.save(1, large)
        before = free()
        said = (
            rf"{shm}: an arena of 0\.00. GB does not fit \(no space left.*each rank needs two.*--shm-size.*EVERGRAD_SHM"
        )
        with pytest.raises(TierError, match=said):
            if reserve:
                checkpointer(tmp_path, reserve=large).__enter__()
            else:
                with checkpointer(tmp_path) as ck:
                    ck.save(1, large)
        assert before - free() <= 1, "a block of names"
        with checkpointer(tmp_path) as ck:
            for step in (1, 2, 3):
                with pytest.raises(TierError, match="does not fit"):
                    ck.save(step, large)
                save(ck, step).wait(timeout=SECONDS)
            assert restored(ck) == 3
        goes_on(tmp_path, found=3)

    in_child(act, mounts={shm: "size=1m,mode=700"})


def test_a_version_that_must_not_be_read_does_not_hide_the_others(tmp_path: Path, shm: Path) -> None:
    if os.getuid() == 0:
        for folder in (tmp_path, shm):
            os.chown(folder, 65534, 65534)
        for folder in tmp_path.parents:
            if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
                os.chmod(folder, 0o755)

    def act() -> None:
        saved(tmp_path, "local")
        newest = next((tmp_path / "disk").rglob("v0000000002-01"))
        os.chmod(newest, 0)
        with listening() as heard, checkpointer(tmp_path, "local") as ck:
            assert restored(ck) == 1
            assert [record.step for record in ck.versions()] == [1]
            assert any(f"{newest}/rank-00000.json: cannot be read: permission denied" in line for line in heard)
            for step in (2, 3):
                save(ck, step).wait(timeout=SECONDS)
        os.chmod(newest, 0o700)
        goes_on(tmp_path, "local", found=3)

    in_child(act, user=65534 if os.getuid() == 0 else None)


@contextmanager
def listening() -> Iterator[list[str]]:
    """What is logged, where there is no caplog."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    ear = Ear()
    logging.getLogger("evergrad").addHandler(ear)
    try:
        yield lines
    finally:
        logging.getLogger("evergrad").removeHandler(ear)


# --- rotten bits --------------------------------------------------------------------------------------------------


def arena_of(shm: Path, step: int) -> dict[str, Path]:
    """The files of the arena that holds a step."""
    for files in find_arenas(next(shm.glob("*/*/*/")), 0):
        ticket = files.read_ticket()
        if ticket is not None and ticket.captured and ticket.step == step:
            return {"shard": files.shard, "manifest": files.manifest, "ticket": files.ticket}
    raise AssertionError(f"step {step} is in no arena")


def shard_of(folder: Path, step: int) -> dict[str, Path]:
    """The files of a step in the local tier."""
    version = next((folder / "disk").rglob(f"v{step:010d}-*"))
    return {"shard": version / "rank-00000.safetensors", "manifest": version / "rank-00000.json"}


def flip(path: Path, byte: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    with path.open("rb+") as file:  # in place, as memory and disks do it
        file.write(data)


def data_start(files: dict[str, Path]) -> int:
    return Manifest.read(files["manifest"]).data_start


DAMAGE: dict[str, tuple[Callable[[dict[str, Path]], object], str]] = {
    "a bit of the first tensor": (
        lambda files: flip(files["shard"], data_start(files)),
        "model/[wb]: not what was captured",
    ),
    "the last bit of the last tensor": (lambda files: flip(files["shard"], -1, 7), "model/[wb]: not what was captured"),
    "a bit of the header": (
        lambda files: flip(files["shard"], 40),
        r"{shard}: the header is not what was captured",
    ),
    "a bit of the header's length": (lambda files: flip(files["shard"], 1), r"{shard}: the header is not what was"),
    "a bit of the manifest": (lambda files: flip(files["manifest"], 200), r"{manifest}: the manifest is not as it was"),
    "a bit of the manifest's digest": (
        lambda files: flip(files["manifest"], 20),
        r"{manifest}: the manifest is not as",
    ),
    "an empty manifest": (
        lambda files: files["manifest"].write_bytes(b""),
        r"{manifest}: the manifest is not as it was",
    ),
    "a missing manifest": (lambda files: files["manifest"].unlink(), r"{manifest}: no manifest"),
    "a missing shard": (lambda files: files["shard"].unlink(), r"{shard}: cannot be read: no such file"),
    "a truncated shard": (
        lambda files: os.truncate(files["shard"], 30_000),
        r"{shard}: wrong length \(expected \d+ bytes, found 30000\)",
    ),
    "an empty shard": (lambda files: os.truncate(files["shard"], 0), r"{shard}: wrong length .*found 0"),
    "a longer shard": (
        lambda files: os.truncate(files["shard"], 300_000),
        r"{shard}: wrong length .*found 300000",
    ),
    "a bit of the ticket": (lambda files: flip(files["ticket"], 60), r"{ticket}: is not as it was written"),
    "an empty ticket": (lambda files: os.truncate(files["ticket"], 0), r"{ticket}: is not as it was written"),
}
ON_DISK = [name for name in DAMAGE if "ticket" not in name]
IN_MEMORY = [name for name in DAMAGE if name != "a missing manifest"]


def message_of(what: str, files: dict[str, Path]) -> str:
    text = DAMAGE[what][1]
    for name, path in files.items():
        text = text.replace(f"{{{name}}}", re.escape(str(path)))
    return text


def test_a_capture_whose_manifest_is_missing_is_digested_again(tmp_path: Path, shm: Path) -> None:
    saved(tmp_path, "memory")
    arena_of(shm, 2)["manifest"].unlink()
    with checkpointer(tmp_path, "memory") as ck:
        assert restored(ck) == 2
    goes_on(tmp_path, "memory", found=2)


@pytest.mark.parametrize("what", IN_MEMORY)
def test_of_a_version_that_is_damaged_in_memory_the_copy_on_disk_is_used_and_that_is_said(
    what: str, tmp_path: Path, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    files = arena_of(shm, 2)
    said = message_of(what, files)
    DAMAGE[what][0](files)
    with checkpointer(tmp_path) as ck:
        assert restored(ck) == 2
        assert ck.restored is not None
        assert ck.restored.tier == "local"
    assert re.search(rf"{said}.*Restoring step 2 \(attempt 1\)", caplog.text), caplog.text
    goes_on(tmp_path, found=2)


@pytest.mark.parametrize("what", ON_DISK)
def test_a_version_that_is_damaged_on_disk_is_passed_over_for_the_one_before_and_that_is_said(
    what: str, tmp_path: Path, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, "local")
    for arena in find_arenas(next(shm.glob("*/*/*/")), 0):  # as after a reboot
        arena.remove()
    files = shard_of(tmp_path, 2)
    said = message_of(what, files)
    DAMAGE[what][0](files)
    with checkpointer(tmp_path, "local") as ck:
        assert restored(ck) == 1
    assert re.search(rf"{said}.*Restoring step 1 \(attempt 1\)", caplog.text), caplog.text
    goes_on(tmp_path, "local", found=1)


@pytest.mark.parametrize("what", IN_MEMORY)
def test_a_version_that_is_damaged_in_the_only_memory_is_passed_over_for_the_one_before_and_that_is_said(
    what: str, tmp_path: Path, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, "memory")
    files = arena_of(shm, 2)
    said = message_of(what, files)
    DAMAGE[what][0](files)
    with checkpointer(tmp_path, "memory") as ck:
        assert restored(ck) == 1
    assert re.search(rf"{said}.*Restoring step 1 \(attempt 1\)", caplog.text), caplog.text
    caplog.clear()
    with warnings.catch_warnings():
        if "shard" in what:
            warnings.simplefilter("ignore", CheckpointWarning)  # it is tried again, and said again
        goes_on(tmp_path, "memory", found=1)


@pytest.mark.parametrize("what", ON_DISK)
def test_damage_on_disk_does_not_matter_while_memory_is_intact(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    DAMAGE[what][0](shard_of(tmp_path, 2))
    with checkpointer(tmp_path) as ck:
        assert restored(ck) == 2
        assert ck.restored is not None
        assert ck.restored.tier == "memory"
    assert "Restoring" not in caplog.text
    goes_on(tmp_path, found=2)


@pytest.mark.parametrize("tiers", ["local", "memory"])
def test_where_nothing_is_intact_that_is_an_error_and_nothing_is_touched(tiers: str, tmp_path: Path, shm: Path) -> None:
    saved(tmp_path, tiers, steps=(1,))
    files = shard_of(tmp_path, 1) if tiers == "local" else arena_of(shm, 1)
    if tiers == "local":
        for arena in find_arenas(next(shm.glob("*/*/*/")), 0):
            arena.remove()
    flip(files["shard"], -100)
    with checkpointer(tmp_path, tiers) as ck:
        with pytest.raises(
            RestoreError, match=rf"step 1 \(attempt 1\) in tier {tiers}: model/.: not what was captured"
        ):
            restored(ck)
        live = state(0)
        with pytest.raises(RestoreError, match=r"Nothing was touched\. To start anew, choose another run folder"):
            ck.restore(live)
        assert_holds(live, 0)
        save(ck, 1).wait(timeout=SECONDS)
        assert restored(ck) == 1


def test_every_bit_of_a_manifest_and_of_a_ticket_is_watched(tmp_path: Path, shm: Path) -> None:
    saved(tmp_path)
    whole = {(record.step, record.tiers) for record in _versions(tmp_path)}
    assert (2, ("memory", "local")) in whole
    local, memory = shard_of(tmp_path, 2), arena_of(shm, 2)
    for path in (local["manifest"], memory["manifest"], memory["ticket"]):
        good = path.read_bytes()
        lost = ("memory",) if path == local["manifest"] else ("local",)
        for place in range(0, len(good), 7):
            flip(path, place, place % 8)
            assert (2, lost) in {(record.step, record.tiers) for record in _versions(tmp_path)}, (path, place)
            path.write_bytes(good)
    assert {(record.step, record.tiers) for record in _versions(tmp_path)} == whole


def _versions(folder: Path) -> list[Any]:
    with checkpointer(folder) as ck:
        return ck.versions()


def test_an_agent_that_finds_a_bit_flipped_after_the_digest_does_not_bless_it(tmp_path: Path, shm: Path) -> None:
    """The disk was full when the version was digested; until it is put there, its arena rots."""
    with ExitStack() as stack:
        ck = stack.enter_context(checkpointer(tmp_path))
        save(ck, 1).wait(timeout=SECONDS)
        stack.enter_context(FullStorage(below=tmp_path / "disk"))
        with pytest.raises(TierError):
            save(ck, 2).wait(timeout=SECONDS)
    flip(arena_of(shm, 2)["shard"], -100)
    with checkpointer(tmp_path, agent=True) as ck:  # it puts step 2 on the disk, as it is
        assert restored(ck) == 1
        until = time.monotonic() + SECONDS
        while {record.step for record in ck.versions() if "local" in record.tiers} != {1, 2}:
            assert time.monotonic() < until, ck.versions()
            time.sleep(0.05)
        with pytest.raises(eg.EvergradError, match=r"in tier local: model/.: not what was captured"):
            restored(ck, version=2)


# --- no more open files, and a run folder that is moved -------------------------------------------------------------


@contextmanager
def no_more_files(*, free: int = 0) -> Iterator[None]:
    """This process cannot open another file, or only so many at a time."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    try:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, limits[1]))
        with suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(free):
            os.close(opened.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in opened:
            os.close(fd)


TOO_MANY = r"too many open files in this process: its limit is \d+\. Raise it \(ulimit -n\), or close some\.$"


def test_too_many_open_files_are_not_called_an_arena_that_does_not_fit(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as ck:
        save(ck, 1).wait(timeout=SECONDS)
        with no_more_files(), pytest.raises(TierError, match=TOO_MANY) as found:
            ck.save(2, {"larger": torch.zeros(100_000)})
        assert "does not fit" not in str(found.value)
        save(ck, 3).wait(timeout=SECONDS)
        assert restored(ck) == 3


def test_too_many_open_files_are_not_called_versions_that_are_gone(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as ck:
        save(ck, 1).wait(timeout=SECONDS)
        live = state(0)
        with no_more_files(), pytest.raises(CheckpointError, match=f"nothing can be read: {TOO_MANY}"):
            ck.restore(live)
        assert_holds(live, 0)
        assert restored(ck) == 1


@pytest.mark.parametrize("kinds", ["local", "memory+local"])
@pytest.mark.parametrize("free", range(6))
def test_too_many_open_files_end_the_waiting_and_no_arena_is_lost(
    tmp_path: Path, free: int, kinds: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Pipeline, "_watch", lambda _: None
    )  # it looks for other nodes' news, with descriptors of its own
    with checkpointer(tmp_path, kinds, agent=False) as ck, warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # the next save says what was not finished
        for step in (1, 2):
            save(ck, step).wait(timeout=SECONDS)
        ck._client._pipeline._near.drain()  # type: ignore[attr-defined]  # nothing is open, and nothing will be closed
        with no_more_files(free=free):
            found = [save(ck, step).exception(timeout=SECONDS) for step in (3, 4)]
        for error in found:
            assert (error is None and free > 1) or re.search(TOO_MANY, str(error)), error
        for step in (5, 6, 7):
            save(ck, step).wait(timeout=SECONDS)
        assert restored(ck) == 7
    assert not any(record.exc_info for record in caplog.records), "a traceback was logged"


@pytest.mark.parametrize("kinds", ["persistent", "local+persistent"])
def test_too_many_open_files_at_an_upload_are_said_with_the_limit(
    tmp_path: Path, kinds: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        begun.set()
        assert may_go_on.wait(SECONDS)

    monkeypatch.setattr(
        Pipeline, "_watch", lambda _: None
    )  # it looks for other nodes' news, with descriptors of its own
    with checkpointer(tmp_path, kinds, agent=False) as ck, warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # the next save says what was not finished
        save(ck, 1).wait("persistent", timeout=SECONDS)
        monkeypatch.setattr(Flusher, "_check_worth", wait)
        for free in range(8):
            begun.clear()
            may_go_on.clear()
            pending = save(ck, 2 + free)
            assert begun.wait(SECONDS)
            ck._client._pipeline._near.drain()  # type: ignore[attr-defined]  # only the upload opens files from here on
            with no_more_files(free=free):
                may_go_on.set()
                try:
                    pending.wait("persistent", timeout=SECONDS)
                except TierError as error:
                    assert re.search(TOO_MANY, str(error)), (free, error)
                else:
                    assert free > 0
                ck._client._pipeline._flusher.workers.drain()  # type: ignore[attr-defined]
        save(ck, 30).wait("persistent", timeout=SECONDS)
        assert restored(ck) == 30
    assert "[Errno" not in caplog.text
    assert not any(record.exc_info for record in caplog.records), "a traceback was logged"


@pytest.mark.parametrize("agent", [True, False])
def test_a_checkpointer_that_cannot_open_files_says_so(tmp_path: Path, agent: bool) -> None:
    (tmp_path / "run").mkdir()
    with no_more_files(), pytest.raises(EvergradError, match="too many open files"):
        eg.Checkpointer(tmp_path / "run", agent=agent)


def test_news_that_too_many_open_files_leave_out_is_said_with_the_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "complete").mkdir()
    other, writer = CompletionLog(tmp_path, "other"), CompletionLog(tmp_path, "writer")
    other.note(Version(1, 1), "local", 0, 1)
    with no_more_files(free=1):  # for the list of the journals
        writer.refresh()
    with no_more_files():
        writer.note(Version(2, 1), "local", 0, 1)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines
    assert re.fullmatch(rf"{tmp_path}/complete/other\.jsonl: left out: cannot be read: {TOO_MANY}", lines[0])
    assert re.fullmatch(rf"{tmp_path}/complete/writer\.jsonl: cannot be written now: {TOO_MANY}", lines[1])
    writer.refresh()
    assert writer.is_complete(Version(1, 1), "local")


@pytest.mark.parametrize("free", [0, 1, 3, 6])
@pytest.mark.parametrize("agent", [True, False])
def test_too_many_open_files_at_the_first_save_are_said_with_the_limit(tmp_path: Path, agent: bool, free: int) -> None:
    with checkpointer(tmp_path, agent=agent) as ck:
        with no_more_files(free=free), pytest.raises(EvergradError, match=TOO_MANY):
            save(ck, 1)
        save(ck, 2).wait(timeout=SECONDS)
        assert restored(ck) == 2


@pytest.mark.parametrize("disk", ["", "old", "old/disk", "link/disk"])
@pytest.mark.parametrize("agent", [True, False])
def test_a_run_folder_that_is_moved_is_said_and_not_made_again(
    tmp_path: Path, agent: bool, disk: str, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (tmp_path / "link").symlink_to(old)
    tiers = [eg.Memory(), eg.Local(tmp_path / disk if disk else None)]
    with eg.Checkpointer(old, tiers=tiers, agent=agent, linger_s=20) as ck:
        save(ck, 1).wait(timeout=SECONDS)
        os.rename(old, new)
        with pytest.warns(CheckpointWarning, match=f"{old}: the run folder was moved to {new} since"):
            pending = save(ck, 2)
        with pytest.raises(TierError, match="tier local: the run folder was moved or removed, and is not made again"):
            pending.wait(timeout=SECONDS)
        assert pending.wait("memory", timeout=SECONDS).step == 2
        with pytest.raises(CheckpointError, match=f"moved to {new} since this Checkpointer was made"):
            ck.restore(state(0))
        assert "[Errno" not in caplog.text
        assert not old.exists()
        os.rename(new, old)
        with pytest.warns(CheckpointWarning, match="step 2 .* is not in tier local"):
            save(ck, 3).wait(timeout=SECONDS)
        assert restored(ck) == 3
        assert next(record.step for record in ck.versions()) == 3


def test_a_run_folder_that_is_moved_is_said_once_while_tiers_elsewhere_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with eg.Checkpointer(old, tiers=[eg.Local(tmp_path / "disk")], agent=False) as ck:
        save(ck, 1).wait(timeout=SECONDS)
        os.rename(old, new)
        with pytest.warns(CheckpointWarning, match="was moved to"):
            save(ck, 2).wait(timeout=SECONDS)
        for step in (3, 4, 5):
            save(ck, step).wait(timeout=SECONDS)  # another warning would be an error
    assert caplog.text.count("not noted in the history: no such file or directory") == 1
    assert "[Errno" not in caplog.text
    assert not old.exists()


@pytest.mark.parametrize("agent", [True, False])
def test_a_job_goes_on_at_the_new_path_with_what_was_captured_meanwhile(tmp_path: Path, agent: bool) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with eg.Checkpointer(old, agent=agent, linger_s=20) as ck:
        save(ck, 1).wait(timeout=SECONDS)
        os.rename(old, new)
        with pytest.warns(CheckpointWarning, match="was moved to"):
            assert save(ck, 2).wait("memory", timeout=SECONDS).step == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # that the agent at the old path is gone
        with eg.Checkpointer(new, agent=agent, linger_s=0.3) as ck:
            assert restored(ck) == 2
            save(ck, 3).wait(timeout=SECONDS)
            assert [record.step for record in ck.versions()] == [3, 2]
    assert not old.exists()


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize("disk", ["old/disk", "link/disk"])
def test_what_was_captured_is_finished_where_the_run_folder_is_now_and_nowhere_else(
    tmp_path: Path, agent: bool, disk: str, shm: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (tmp_path / "link").symlink_to(old)
    tiers = [eg.Memory(), eg.Local(tmp_path / disk), eg.Persistent(str(old / "shared"))]
    with eg.Checkpointer(old, tiers=tiers, agent=agent, linger_s=20) as ck:
        save(ck, 1).wait("persistent", timeout=SECONDS)
        os.rename(old, new)
        with pytest.warns(CheckpointWarning, match="was moved to"):
            assert save(ck, 2).wait("memory", timeout=SECONDS).step == 2
    tiers = [eg.Memory(), eg.Local(new / "disk"), eg.Persistent(str(new / "shared"))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # that the agent at the old path is gone
        with eg.Checkpointer(new, tiers=tiers, agent=agent, linger_s=0.3) as ck:
            assert restored(ck) == 2
            until = time.monotonic() + SECONDS
            while ck.versions()[0].tiers != ("memory", "local", "persistent"):
                assert time.monotonic() < until, ck.versions()
                time.sleep(0.01)
            save(ck, 3).wait(timeout=SECONDS)
            assert [record.step for record in ck.versions()][:2] == [3, 2]
    assert not old.exists()
    assert [entry.version.step for entry in Catalogue(new).entries() if "local" in entry.tiers][:2] == [3, 2]
