"""What people see of a job: whole lines, whose they are, and nothing that is lost or waited for."""

from __future__ import annotations

import os
import pty
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from evergrad.recovery.launch.output import JobStatus, OutputRelay
from evergrad.recovery.launch.processes import Child

STATUS = JobStatus(step=120, ranks=3, num_ranks=4, spares=1, failures=2, generation=2)


class Printer:
    """A process as a relay sees it: the ends of two pipes."""

    def __init__(self, uid: int, label: str) -> None:
        out, self.out = os.pipe()
        error, self.error = os.pipe()
        self.child = Child(uid, label, 0, out, error)

    def print(self, text: str | bytes, *, to_error: bool = False) -> None:
        data = text.encode() if isinstance(text, str) else text
        fd = self.error if to_error else self.out
        while data:
            data = data[os.write(fd, data) :]

    def end(self) -> None:
        os.close(self.out)
        os.close(self.error)


@contextmanager
def relaying(logs: Path, *printers: Printer, all_to_stderr: bool = False) -> Iterator[OutputRelay]:
    relay = OutputRelay(logs, all_to_stderr=all_to_stderr, status=lambda: STATUS)
    try:
        for printer in printers:
            relay.add(printer.child)
        relay.begin()
        yield relay
    finally:
        relay.close()


def test_every_line_says_whose_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rank, spare = Printer(0, "rank 0"), Printer(4, "spare 4")
    with relaying(tmp_path, rank, spare) as relay:
        rank.print("one\ntw")
        rank.print("o\n\n")
        rank.print("wrong\n", to_error=True)
        spare.print("waiting\n")
        relay.print_line("2 ranks")
        rank.end()
        spare.end()
        relay.close("finished")
    out, error = capfd.readouterr()
    assert [line for line in out.splitlines() if "rank 0" in line] == ["[rank 0] one", "[rank 0] two", "[rank 0] "]
    assert "[spare 4] waiting\n" in out
    assert sorted(error.splitlines()[:-1]) == ["[rank 0] wrong", "evergrad: 2 ranks"]
    assert error.endswith("\nevergrad: finished\n")
    assert (tmp_path / "4.log").read_text() == "waiting\n"


def test_lines_of_different_processes_do_not_mix(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = [Printer(uid, f"rank {uid}") for uid in range(3)]
    with relaying(tmp_path, *ranks):
        for index in range(500):
            for rank in ranks:
                rank.print(f"{index} begins")
            for rank in ranks:
                rank.print(f" and ends {'.' * (index % 90)}\n")
        for rank in ranks:
            rank.end()
    lines = capfd.readouterr().out.splitlines()
    for uid in range(3):
        mine = [line.removeprefix(f"[rank {uid}] ") for line in lines if line.startswith(f"[rank {uid}] ")]
        assert mine == [f"{index} begins and ends {'.' * (index % 90)}" for index in range(500)]


def test_a_line_without_an_end_is_not_lost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rank = Printer(0, "rank 0")
    with relaying(tmp_path, rank):
        rank.print("last words")
        rank.end()
    assert capfd.readouterr().out == "[rank 0] last words\n"
    assert (tmp_path / "0.log").read_text() == "last words"


def test_what_was_printed_is_passed_on_although_somebody_holds_the_pipe(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = Printer(0, "rank 0")
    with relaying(tmp_path, rank):
        rank.print("x" * 60_000 + "\nlast words")
    assert capfd.readouterr().out == f"[rank 0] {'x' * 60_000}\n[rank 0] last words\n"
    rank.end()


def test_a_line_that_is_too_long_comes_in_pieces(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rank, text = Printer(0, "rank 0"), "".join(f"{number:08d}" for number in range(30_000))
    with relaying(tmp_path, rank):
        rank.print(text + "\nshort\n")
        rank.end()
    *pieces, short = capfd.readouterr().out.splitlines()
    assert short == "[rank 0] short"
    assert "".join(piece.removeprefix("[rank 0] ") for piece in pieces) == text
    assert max(map(len, pieces)) == 65536 + len("[rank 0] ")
    assert (tmp_path / "0.log").read_text() == text + "\nshort\n"


def test_bytes_that_are_no_text_pass_unchanged(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    rank = Printer(0, "rank 0")
    with relaying(tmp_path, rank):
        rank.print(b"\xff\x00\r50%\n")
        rank.end()
    assert capfdbinary.readouterr().out == b"[rank 0] \xff\x00\r50%\n"


def test_with_json_nothing_but_the_summary_is_on_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rank = Printer(0, "rank 0")
    with relaying(tmp_path, rank, all_to_stderr=True):
        rank.print("one\n")
        rank.end()
    assert capfd.readouterr() == ("", "[rank 0] one\n")


def test_a_reader_that_leaves_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    rank = Printer(0, "rank 0")
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with relaying(tmp_path, rank):
            rank.print("one\n")
            assert os.read(reader, 100) == b"[rank 0] one\n"
            os.close(reader)
            for _ in range(1000):
                rank.print("x" * 999 + "\n")  # more than pipes hold: somebody reads
            rank.end()
    assert (tmp_path / "0.log").stat().st_size == 4 + 1_000_000


def test_a_reader_that_stops_reading_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # whoever starts us may leave it so
    rank = Printer(0, "rank 0")
    os.set_blocking(rank.out, False)
    with os.fdopen(writer, "w") as out, os.fdopen(reader, "rb") as lines:
        monkeypatch.setattr(sys, "stdout", out)
        with relaying(tmp_path, rank) as relay:
            written = 0
            with pytest.raises(BlockingIOError):
                while True:
                    written += os.write(rank.out, b"x" * 99 + b"\n")
            relay.print_line("not held up")  # returns at once
            rank.end()
            out_text = b"".join(lines.readline() for _ in range(written // 100))
    assert out_text.count(b"[rank 0] " + b"x" * 99 + b"\n") == written // 100


def test_a_disk_that_is_full_ends_the_log_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "0.log").symlink_to("/dev/full")
    rank = Printer(0, "rank 0")
    with relaying(tmp_path, rank):
        rank.print("one\n")
        rank.end()
    out, error = capfd.readouterr()
    assert out == "[rank 0] one\n"
    assert error == "evergrad: the log of rank 0 ends here: No space left on device\n"


def test_on_a_terminal_lines_scroll_above_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    rank, seen = Printer(0, "rank 0"), b""
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        with relaying(tmp_path, rank):
            rank.print("loss \x1b[1m0.25\x1b[0m\n")
            rank.print("[bold]no markup[/bold]\n", to_error=True)
            while b"generation 2" not in seen or b"no markup" not in seen:
                seen += os.read(ours, 4096)
            rank.end()
    with suppress(OSError):  # nobody holds the other end any more: that is all
        while more := os.read(ours, 4096):
            seen += more
    os.close(ours)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert "step 120 · 3 of 4 ranks · 1 spare waiting · 2 failures survived · generation 2" in plain
    assert "[rank 0] loss 0.25\r\n" in plain
    assert "[rank 0] [bold]no markup[/bold]\r\n" in plain
    assert b"\x1b[36m[rank 0] " in seen
    assert seen.endswith(b"\x1b[2K")  # the status is gone from the terminal in the end


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (
            JobStatus(None, 4, 4, 0, 0, 0),
            "starting · 4 of 4 ranks · 0 spares waiting · 0 failures survived · generation 0",
        ),
        (JobStatus(7, 1, 2, 1, 1, 1), "step 7 · 1 of 2 ranks · 1 spare waiting · 1 failure survived · generation 1"),
    ],
)
def test_the_status_in_words(status: JobStatus, text: str) -> None:
    assert str(status) == text
