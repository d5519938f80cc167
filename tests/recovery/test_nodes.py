"""Several nodes: one launcher each, as real processes; nodes that die, hang, leave and come back, and the head."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Machine, Machines

from evergrad.cli import main


@pytest.fixture(scope="module")
def stable() -> Iterator[Machines]:
    found = Machines()
    yield found
    found.close()


@pytest.fixture
def machines(stable: Machines, tmp_path: Path, shm: Path) -> Iterator[Machines]:
    stable.folder = tmp_path
    yield stable
    stable.close_all()


def started(machines: Machines, node: str) -> dict[int, int]:
    """What a node's launcher has started: process numbers by uid."""
    lines = (machines.folder / "run" / f"timeline-{node}.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return {event["uid"]: event["pid"] for event in events if event["event"] == "process_started"}


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in b"ZX"
    except OSError:
        return True


def finished_alike(machines: Machines, *launchers: Machine) -> None:
    for launcher in launchers:
        assert launcher.wait() == 0, launcher.said
    assert len({result["weights"] for result in machines.results().values()}) == 1


def test_a_rank_that_dies_on_another_node_is_replaced_there(machines: Machines) -> None:
    options, arguments = ("-n", 4, "--respawn"), ("--gate", 5, "--gate", 10, "--steps", 16, "--world", 4)
    head, other = (machines.start(rank, *options, arguments=arguments) for rank in range(2))
    machines.at_gate(5, 0, 1, 2, 3)
    os.kill(started(machines, "n1")[3], signal.SIGKILL)
    machines.open_gate(5)
    machines.at_gate(10, 0, 1, 2)
    machines.until(lambda: machines.events("change_requested"))  # the new one waits
    machines.open_gate(10)
    finished_alike(machines, head, other)
    results = machines.results()
    assert sorted(results) == [0, 1, 2, 4]
    assert {result["world_size"] for result in results.values()} == {4}
    place = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "EVERGRAD_NODE": "n1"}
    assert results[4]["told"] == place
    assert results[1]["told"] == place | {"GROUP_RANK": "0", "EVERGRAD_NODE": "n0"}
    [death] = machines.events("process_lost")
    assert (death["uid"], death["how"]) == (3, "SIGKILL")
    # All of it is one timeline in the end, and the secret is gone.
    assert {event["source"] for event in machines.events("process_exited")} == {"launcher", "launcher n1"}
    left = {path.name for path in (machines.folder / "run").iterdir()}
    assert left == {"head.json", "logs", "run.json", "timeline.jsonl"}


@pytest.mark.slow
def test_a_rank_that_is_stopped_on_another_node_is_lost_and_killed_there(machines: Machines) -> None:
    head, other = (machines.start(rank, "-n", 3, arguments=("--gate", 5), nodes=2) for rank in range(2))
    machines.at_gate(5, 0, 1, 2)
    there = started(machines, "n1")
    os.kill(there[2], signal.SIGSTOP)
    machines.until(lambda: machines.events("process_lost"))
    machines.until(lambda: is_gone(there[2]))
    machines.open_gate(5)
    finished_alike(machines, head, other)
    assert sorted(machines.results()) == [0, 1]
    [death] = machines.events("process_lost")
    assert (death["uid"], death["how"][:21]) == (2, "has been stopped for ")
    assert "node_trainer.py" in death["stack"]


def test_a_node_that_dies_is_survived_and_the_job_grows_when_it_comes_back(machines: Machines) -> None:
    options, arguments = ("-n", 4), ("--gate", 5, "--gate", 10, "--steps", 16, "--world", 4)
    head, other = (machines.start(rank, *options, arguments=arguments) for rank in range(2))
    machines.at_gate(5, 0, 1, 2, 3)
    ranks = started(machines, "n1")
    other.kill()
    machines.until(lambda: all(is_gone(pid) for pid in ranks.values()))
    machines.open_gate(5)
    machines.at_gate(10, 0, 1)
    again = machines.start(1, *options, arguments=arguments)
    machines.until(lambda: machines.events("change_requested"))
    machines.open_gate(10)
    finished_alike(machines, head, again)
    assert sorted(machines.results()) == [0, 1, 4, 5]
    assert {result["world_size"] for result in machines.results().values()} == {4}
    assert "rank 2, rank 3 are on node n1" in head.said
    assert "which cannot be heard for" in head.said
    assert "node n1 is back" in head.said


def test_a_node_that_is_stopped_is_lost_and_ends_itself_when_it_wakes(machines: Machines) -> None:
    options = {"arguments": ("--gate", 5, "--steps", 12), "nodes": 3}
    head, second, third = (machines.start(rank, "-n", 3, **options) for rank in range(3))
    machines.at_gate(5, 0, 1, 2)
    [rank] = started(machines, "n1").values()
    os.kill(second.pid, signal.SIGSTOP)
    machines.until(lambda: machines.events("node_left"))
    machines.open_gate(5)
    assert (head.wait(), third.wait()) == (0, 0), head.said
    assert {result["world_size"] for result in machines.results().values()} == {2}
    os.kill(second.pid, signal.SIGCONT)
    assert second.wait() == 5
    assert is_gone(rank)
    assert "evergrad: n1: the head" in second.said


def test_the_heads_death_ends_every_node_and_the_job_resumes_when_it_is_started_again(machines: Machines) -> None:
    arguments = ("--gate", 8, "--steps", 12, "--checkpoints", machines.folder / "checkpoints")
    head, other = (machines.start(rank, "-n", 2, arguments=arguments) for rank in range(2))
    machines.at_gate(8, 0, 1)
    ranks = [event["pid"] for event in machines.events("process_started")] + [*started(machines, "n1").values()]
    head.kill()
    assert other.wait() == 5
    assert "is gone: 1 process killed" in other.said
    assert len(ranks) == 2
    machines.until(lambda: all(is_gone(pid) for pid in ranks))
    machines.open_gate(8)
    head, other = (machines.start(rank, "-n", 2, name="again", arguments=arguments) for rank in range(2))
    finished_alike(machines, head, other)
    assert [result["first"] for result in machines.results().values()] == [5, 5]


@pytest.mark.slow
def test_a_scheduled_failure_reaches_ranks_of_other_nodes(machines: Machines) -> None:
    arguments = ("--strike", "0:5:2,1:rank", "--steps", 10)
    head, other = (machines.start(rank, "-n", 4, arguments=arguments) for rank in range(2))
    finished_alike(machines, head, other)
    assert sorted(machines.results()) == [0, 3]
    assert {event["uid"]: event["code"] for event in machines.events("process_exited")} == {0: 0, 1: -9, 2: -9, 3: 0}


def test_a_whole_node_is_killed_with_its_launcher_and_its_spares(machines: Machines) -> None:
    options, arguments = ("-n", 2, "--spares", 2), ("--strike", "1:5:1:node", "--steps", 10, "--gate", 5)
    head, other = (machines.start(rank, *options, arguments=arguments) for rank in range(2))
    machines.at_gate(5, 0, 1)
    there = started(machines, "n1")
    assert sorted(there) == [1, 3]
    machines.open_gate(5)
    assert (head.wait(), other.wait()) == (0, -9), head.said
    assert all(is_gone(pid) for pid in there.values())
    assert sorted(machines.results()) == [0, 2]  # the head's own spare took the place


def test_a_signal_for_the_head_ends_every_node(machines: Machines) -> None:
    head, other = (machines.start(rank, "-n", 2, arguments=("--gate", 5)) for rank in range(2))
    machines.at_gate(5, 0, 1)
    ranks = started(machines, "n1").values()
    os.kill(head.pid, signal.SIGINT)
    assert (head.wait(), other.wait()) == (130, 130), head.said
    assert all(is_gone(pid) for pid in ranks)
    late = machines.start(1, "-n", 2, arguments=("--gate", 5))
    assert late.wait() == 2
    assert f"(process {head.pid} on " in late.said
    assert "cannot be reached: Connection refused. Has it ended?" in late.said


@pytest.mark.slow
def test_a_node_that_is_asked_to_leave_does_and_the_others_go_on(machines: Machines) -> None:
    head, other = (machines.start(rank, "-n", 2, arguments=("--gate", 5, "--gate", 8)) for rank in range(2))
    machines.at_gate(5, 0, 1)
    os.kill(other.pid, signal.SIGTERM)
    machines.until(lambda: "SIGTERM: passed on to 1 process" in other.said)
    machines.open_gate(5)
    machines.until(lambda: machines.events("node_left"))
    machines.open_gate(8)
    assert (head.wait(), other.wait()) == (0, 143), head.said
    assert machines.results()[0]["world_size"] == 1
    assert "node n1 has left" in head.said


def test_a_second_launcher_for_a_node_is_refused_and_so_is_a_second_head(machines: Machines) -> None:
    head, other = (machines.start(rank, "-n", 2, arguments=("--gate", 5)) for rank in range(2))
    machines.at_gate(5, 0, 1)
    double = machines.start(1, "-n", 2, arguments=("--gate", 5))
    assert double.wait() == 2
    assert "node n1 has a launcher already" in double.said
    second = machines.start(0, "-n", 2)
    assert second.wait() == 2
    assert f"the head of a job in it: process {head.pid}" in second.said
    different = machines.start(1, "-n", 2, "--strategy", "forward", arguments=("--gate", 5))
    assert different.wait() == 2
    assert "--strategy: expected what the head of this job was started with" in different.said
    machines.open_gate(5)
    finished_alike(machines, head, other)


def test_a_node_that_does_not_come_ends_the_job_with_its_name(machines: Machines) -> None:
    head = machines.start(0, "-n", 2, "--rendezvous-timeout", 0.5)
    assert head.wait() == 2
    assert "fatal: n1 did not come within 0.5 s" in head.said


def test_a_node_without_a_head_says_so(machines: Machines) -> None:
    alone = machines.start(1, "-n", 2, "--rendezvous-timeout", 0.2)
    assert alone.wait() == 2
    assert "no head.json after 0.2 s (there is no such folder)" in alone.said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--multinode", "--nnodes", "2", "--node-rank", "2", "--out", "x"], "--node-rank: expected 0 to 1"),
        (["--multinode", "--nnodes", "2", "--node-rank", "0"], "--multinode: expected --out DIR"),
        (["--multinode", "--node-rank", "0", "--out", "x"], "--multinode: expected --nnodes N"),
        (["--multinode", "--nnodes", "2", "--out", "x"], "--multinode: expected --node-rank I"),
        (["--node-rank", "1"], "--node-rank: expected --multinode with it"),
        (
            ["--multinode", "--nnodes", "2", "--node-rank", "0", "--out", "x", "--master-addr", "192.0.2.77"],
            "--master-addr 192.0.2.77",
        ),
    ],
)
def test_wrong_options_are_one_line(
    words: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert main(["run", "-n", "2", *words, "train.py"]) == 2
    error = capfd.readouterr().err
    assert expected in error
    assert len(error.splitlines()) == 1
