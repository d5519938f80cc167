"""Two machines with a network each, joined by a cable that is pulled. Real namespaces: only root can make them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from machines import Machines


def call(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, capture_output=True)


def inside(network: int, *words: str) -> None:
    call("nsenter", f"--net=/proc/{network}/ns/net", *words)


@contextmanager
def new_network() -> Iterator[int]:
    """A network of nothing but a loopback; the number of the process that keeps it."""
    command = ["unshare", "--net", "sh", "-c", "echo up; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        try:
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == b"up\n"
            inside(keeper.pid, "ip", "link", "set", "lo", "up")
            yield keeper.pid
        finally:
            keeper.kill()


@pytest.fixture
def cable() -> Iterator[tuple[int, int]]:
    """Two networks, 10.77.9.1 and 10.77.9.2, joined."""
    if os.getuid() != 0:
        pytest.skip("only root can make a network")
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    with ExitStack() as stack:
        try:
            first, second = (stack.enter_context(new_network()) for _ in range(2))
            inside(first, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second))
        except (subprocess.CalledProcessError, AssertionError) as error:
            pytest.skip(f"this machine allows no namespaces: {error}")
        for index, network in enumerate((first, second), 1):
            inside(network, "ip", "address", "add", f"10.77.9.{index}/24", "dev", "eth0")
            inside(network, "ip", "link", "set", "eth0", "up")
        yield first, second


@pytest.fixture
def machines(tmp_path: Path, shm: Path) -> Iterator[Machines]:
    found = Machines()
    found.folder = tmp_path
    yield found
    found.close_all()
    found.close()


def test_a_node_whose_cable_is_pulled_ends_itself_and_must_come_anew(
    cable: tuple[int, int], machines: Machines
) -> None:
    arguments = ("--gate", 5, "--gate", 60, "--steps", 80, "--world", 4)
    head, other = (machines.start(rank, "-n", 4, net=cable[rank], arguments=arguments) for rank in range(2))
    machines.at_gate(5, 0, 1, 2, 3)
    assert "head at 10.77.9.1:" in other.said
    machines.open_gate(5)
    inside(cable[1], "ip", "link", "set", "eth0", "down")
    machines.until(lambda: machines.events("node_left"))
    assert other.wait() == 5
    assert "does not answer for" in other.said
    assert "2 processes killed" in other.said
    machines.at_gate(60, 0, 1)
    inside(cable[1], "ip", "link", "set", "eth0", "up")
    # What its kernel still has to send, it sends now: none of that counts. A launcher that is started anew does.
    again = machines.start(1, "-n", 4, net=cable[1], arguments=arguments)
    machines.until(lambda: machines.events("change_requested"))
    machines.open_gate(60)
    assert (head.wait(), again.wait()) == (0, 0), head.said
    results = machines.results()
    assert sorted(results) == [0, 1, 4, 5]
    assert len({result["weights"] for result in results.values()}) == 1
    assert [plan["members"] for plan in machines.events("plan")][:2] == [[0, 1, 2, 3], [0, 1]]
    assert all({2, 3}.isdisjoint(plan["members"]) for plan in machines.events("plan")[1:])
    # New processes get their ranks in the order in which they arrive.
    assert machines.events("plan")[-1]["members"] in ([0, 1, 4, 5], [0, 1, 5, 4])
