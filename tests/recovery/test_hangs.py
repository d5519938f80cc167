"""Ranks that live and are not there: stopped, cut off, hung, slow."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forkserver import Ran

Launch = Callable[..., Ran]
SCRIPT = Path(__file__).parent / "hanging_trainer.py"


def lost(ran: Ran) -> list[tuple[int, str]]:
    return [(event["uid"], event["how"]) for event in ran.events("process_lost")]


def weights(ran: Ran) -> set[str]:
    return {result["weights"] for result in ran.results.values()}


@pytest.mark.parametrize(
    "phase", ["backward", *(pytest.param(phase, marks=pytest.mark.slow) for phase in ("data", "optimizer"))]
)
def test_a_stopped_rank_is_noticed_replaced_and_named_with_its_stack(launch: Launch, phase: str) -> None:
    undisturbed = launch("-n", 3, name="undisturbed", arguments=["--epochs", 1])
    ran = launch(
        "-n",
        3,
        "--spares",
        1,
        "--heartbeat-timeout",
        1,
        "--fail",
        f"stop rank=1 step=2 phase={phase}",
        arguments=["--epochs", 1, "--await-spare", 3],
    )
    assert ran.code == 0, ran.said
    (death,) = ran.events("process_lost")
    assert death["uid"] == 1
    assert "has been stopped" in death["how"]
    assert "trainer.py" in death["stack"], "where its script was"
    assert "trainer.py" in ran.stderr
    assert weights(ran) == weights(undisturbed)
    assert 1 not in ran.results


def test_a_short_stop_is_waited_for(launch: Launch) -> None:
    ran = launch("-n", 3, "--fail", "stop rank=1 step=2 for=0.4", arguments=["--epochs", 1])
    assert ran.code == 0, ran.said
    assert not lost(ran)
    assert len(ran.results) == 3


def test_who_is_resumed_after_it_was_declared_dead_ends_without_doing_anything(launch: Launch, tmp_path: Path) -> None:
    """Stopped right before its save, resumed when the others are long past it."""
    ran = launch(
        "-n", 3, "--keep-stopped", "--heartbeat-timeout", 1,
        "--fail", "stop rank=1 step=3 phase=checkpoint for=4", "--fail", "slow rank=0 step=4 by=40 for=5",
        arguments=["--epochs", 4, "--checkpoints", tmp_path / "ck", "--every", 3],
    )  # fmt: skip
    assert ran.code == 0, ran.said
    assert [uid for uid, _ in lost(ran)] == [1]
    assert "taken for dead" in ran.stderr, ran.said
    assert 1 not in ran.results
    wrote = [event for event in ran.events() if event["source"] == "uid 1" and event["event"] == "save_skipped"]
    assert wrote, "it knew that nothing of it counts"
    assert len(weights(ran)) == 1


def test_a_rank_without_network_is_replaced(launch: Launch) -> None:
    undisturbed = launch("-n", 3, name="undisturbed", arguments=["--epochs", 1])
    ran = launch(
        "-n", 3, "--spares", 1, "--heartbeat-timeout", 1, "--fail", "cut rank=1 step=2",
        arguments=["--epochs", 1, "--await-spare", 3],
    )  # fmt: skip
    assert ran.code == 0, ran.said
    ((uid, how),) = lost(ran)
    assert uid == 1
    assert "cannot reach the store" in how
    assert weights(ran) == weights(undisturbed)


def test_a_hung_rank_is_reported_and_then_replaced(launch: Launch) -> None:
    ran = launch("-n", 3, "--warn-after", 0.5, "--hang-timeout", 2, script=SCRIPT)
    assert ran.code == 0, ran.said
    # On a busy machine others may be late too, for a moment.
    (late,) = [event for event in ran.events("rank_late") if event.get("rank") == 1 and event["generation"] == 0]
    assert "wait_for_nothing" in late["stack"]
    ((uid, how),) = lost(ran)
    assert uid == 1
    assert "kept the others waiting" in how


@pytest.mark.slow
def test_a_slow_rank_is_a_straggler_and_is_replaced_if_that_is_wanted(launch: Launch) -> None:
    ran = launch(
        "-n", 3, "--spares", 1, "--straggler-factor", 3, "--replace-stragglers", "--fail", "slow rank=1 step=2 by=10",
        arguments=["--epochs", 12, "--await-spare", 3, "--width", 256],
    )  # fmt: skip
    assert ran.code == 0, ran.said
    ((uid, how),) = lost(ran)
    assert uid == 1
    assert "times as long" in how


def test_a_launcher_that_was_stopped_itself_loses_nobody(tmp_path: Path) -> None:
    """Its store did not answer meanwhile: that is no rank's fault."""
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "evergrad",
        "run",
        "-n",
        "2",
        "--heartbeat-timeout",
        "0.5",
        "--preload",
        "--out",
        str(out),
    ]
    script = [str(Path(__file__).parent / "trainer.py"), str(tmp_path / "out"), "--epochs", "4", "--pause", "0.03"]
    process = subprocess.Popen([*command, *script], stderr=subprocess.PIPE, text=True)
    try:
        timeline = out / "timeline.jsonl"
        while not (timeline.exists() and '"epoch"' in timeline.read_text()):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)  # longer than it would take a rank to be lost
        process.send_signal(signal.SIGCONT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, stderr
    assert '"process_lost"' not in timeline.read_text()
    assert len(list((tmp_path / "out").glob("*.json"))) == 2
