"""Locks on files and logs of JSON lines: who is taken for a holder, and what is left of a torn line."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from evergrad._files import appearing, is_locked, link_or_rename, take_lock
from evergrad._jsonl import Appender, read_lines, split_whole


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT)


def test_those_who_only_look_do_not_take_each_other_for_the_holder(tmp_path: Path) -> None:
    looking = opened(tmp_path / "lock")
    take_lock(looking, shared=True)  # as another process does in the middle of `is_locked`
    assert not is_locked(tmp_path / "lock")
    assert is_locked(tmp_path / "lock", shared=True)
    os.close(looking)
    holding = opened(tmp_path / "lock")
    take_lock(holding)
    assert is_locked(tmp_path / "lock")
    os.close(holding)
    assert not is_locked(tmp_path / "lock", shared=True)
    assert not is_locked(tmp_path / "none")


def test_a_lock_that_is_held_is_not_waited_for(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "lock"), opened(tmp_path / "lock")
    take_lock(first)
    for shared in (False, True):
        with pytest.raises(BlockingIOError):
            take_lock(second, shared=shared)
    os.close(first)
    take_lock(second)
    os.close(second)


def test_a_name_that_is_taken_is_never_given_to_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    for _ in range(2):
        with pytest.raises(FileExistsError):
            link_or_rename(tmp_path / "a", tmp_path / "b")
        with pytest.raises(FileExistsError), appearing(tmp_path / "b") as temporary:
            temporary.write_text("c")
        monkeypatch.setattr(os, "link", refuse)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "a", "b": "b"}
    link_or_rename(tmp_path / "a", tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]


def test_a_torn_line_ends_where_the_next_writer_begins_if_it_is_the_only_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b"')
    with Appender(path, end_torn_line=True) as log:
        log.append(b'{"c": 3}\n')
        assert log.size == path.stat().st_size
    assert path.read_bytes() == b'{"a": 1}\n{"b"\n{"c": 3}\n'
    with Appender(path, end_torn_line=True), Appender(path):
        pass
    assert path.read_bytes() == b'{"a": 1}\n{"b"\n{"c": 3}\n'


def test_lines_that_cannot_be_made_durable_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    with Appender(tmp_path / "log.jsonl") as log:
        log.append_durably(b"1\n")
        monkeypatch.setattr(os, "fdatasync", refuse)
        with pytest.raises(OSError, match="input/output"):
            log.append_durably(b"2\n3\n")
    log.close()
    assert (tmp_path / "log.jsonl").read_bytes() == b"1\n"


def test_nothing_but_a_file_is_appended_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="named pipe"):
        Appender(tmp_path / "pipe")


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 40])
def test_a_line_that_is_too_long_is_cut_and_counts_once(length: int, end: bytes) -> None:
    found = list(read_lines(io.BytesIO(b"one\n" + b"x" * length + b"\ntwo\n" + b"y" * length + end), longest=8))
    assert [(line.number, line.is_torn) for line in found] == [(1, False), (2, False), (3, False), (4, not end)]
    assert [line.data for line in found] == [b"one\n", (b"x" * length + b"\n")[:8], b"two\n", (b"y" * length + end)[:8]]


def test_whole_lines_and_the_rest_are_told_apart() -> None:
    assert split_whole(b"a\nb\nc") == (b"a\nb\n", b"c")
    assert split_whole(b"a\n") == (b"a\n", b"")
    assert split_whole(b"a") == (b"", b"a")
