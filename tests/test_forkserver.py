"""Children that are forked from a process with torch: their ends, and that they end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evergrad._forkserver import Forkserver, ForkserverLost, describe_exit, guarded

PATH = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}


def end_with(work: dict[str, Any], *descriptors: int) -> int:
    """In a child: say who handles signals, and end as asked."""
    os.write(descriptors[0], f"{os.getpid()} {signal.getsignal(signal.SIGCHLD).name}\n".encode())
    if work.get("sleeps"):
        time.sleep(1000)
    if "signal" in work:
        os.kill(os.getpid(), work["signal"])
    return int(work["code"])


@pytest.fixture(scope="module")
def server() -> Iterator[Forkserver]:
    found = Forkserver(environment=PATH)
    yield found
    found.close()
    found.close()


def said(descriptor: int) -> list[str]:
    return os.read(descriptor, 100).decode().split()


def await_gone(pid: int) -> None:
    """The kernel ends a child with its parent, and that may take a moment."""
    while (
        Path(f"/proc/{pid}/stat").exists()
        and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    ):
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("work", "code", "words"),
    [({"code": 0}, 0, "exit code 0"), ({"code": 7}, 7, "exit code 7"), ({"signal": 9, "code": 0}, -9, "SIGKILL")],
)
def test_a_child_gets_work_of_any_length_and_its_end_is_known(
    server: Forkserver, work: dict[str, Any], code: int, words: str
) -> None:
    reads, writes = os.pipe()
    child = server.fork("test_forkserver:end_with", {**work, "more": "x" * 300_000}, [writes])
    assert said(reads) == [str(child.pid), "SIG_DFL"]
    assert child.wait() == child.wait() == code
    assert describe_exit(code) == words
    child.kill()  # nobody: it has ended
    os.close(reads)
    os.close(writes)


def test_the_first_that_ends_is_told_and_the_others_live_on(server: Forkserver) -> None:
    reads, writes = os.pipe()
    children = [server.fork("test_forkserver:end_with", {"sleeps": True}, [writes]) for _ in range(3)]
    assert server.first_ended(children, 0.0) is None
    children[1].kill()
    assert server.first_ended(children, 60) is children[1]
    for child in children:
        child.kill()
    assert [child.wait() for child in children] == [-9, -9, -9]
    os.close(reads)
    os.close(writes)


def test_children_end_with_their_forkserver() -> None:
    server = Forkserver(environment=PATH)
    reads, writes = os.pipe()
    child = server.fork("test_forkserver:end_with", {"sleeps": True}, [writes])
    said(reads)
    server.process.kill()
    with pytest.raises(ForkserverLost):
        child.wait()
    await_gone(child.pid)
    assert not server.is_there
    with pytest.raises(ForkserverLost):
        server.fork("test_forkserver:end_with", {}, [writes])
    server.close()
    os.close(reads)
    os.close(writes)


OWNER = """
import os, signal, sys
from evergrad._forkserver import Forkserver
server = Forkserver(environment=os.environ, new_session=True)
child = server.fork("test_forkserver:end_with", {"sleeps": True}, [1])
signal.pause()
"""


def test_forkserver_and_children_end_with_an_owner_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=PATH) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline().split()[0])
        owner.kill()
        assert owner.stdout.read() == b""  # until nobody has it open any more
    await_gone(pid)


def test_a_guarded_command_ends_with_its_parent() -> None:
    code = (
        "import subprocess, sys, time\nfrom evergrad._forkserver import guarded\n"
        "print(subprocess.Popen(guarded([sys.executable, '-c', 'import time; time.sleep(1000)'])).pid, flush=True)\n"
        "time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        assert parent.stdout.read() == b""
    await_gone(pid)
    orphan = [str(os.getppid()) if word == str(os.getpid()) else word for word in guarded(["/bin/true"])]
    assert subprocess.run(orphan, check=False).returncode == 1, "its parent was another one: it had ended"
