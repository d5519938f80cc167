"""A job on four nodes of a real Slurm goes on when one of them dies."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

ROOT = Path(__file__).parent.parent.parent
TRAINER = ROOT / "tests" / "recovery" / "node_trainer.py"
pytestmark = pytest.mark.slurm


def until(is_so: Callable[[], object], log: Path) -> None:
    end = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < end, f"waited in vain\n{log.read_text()}"
        time.sleep(0.02)


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


@pytest.mark.timeout(240)
def test_a_job_on_four_nodes_goes_on_when_one_dies(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, run, log = tmp_path / "out", tmp_path / "run", tmp_path / "srun.txt"
    words = ["srun", "-N4", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--label"]
    words += [sys.executable, "-m", "evergrad", "run", "--multinode", "--preload", "-n", "8", "--out", str(run)]
    words += [str(TRAINER), str(out), "--steps", "20", "--gate", "5"]
    with log.open("wb") as file:
        job = subprocess.Popen(words, env=cluster.env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=tmp_path)
    try:
        until(lambda: all((out / f"at-5-{uid}").exists() for uid in range(8)), log)
        ranks = {event["uid"]: event["pid"] for event in events(run / "timeline-eg2.jsonl", "process_started")}
        assert sorted(ranks) == [4, 5]
        launcher = parent_of(ranks[4])
        for pid in (launcher, *ranks.values()):
            os.kill(pid, signal.SIGKILL)
        (out / "go-5").touch()
        code = job.wait(120)
    finally:
        job.kill()
        job.wait()
    said = log.read_text()
    with capsys.disabled():
        shown = f"$ {shlex.join(words)}\n{said}srun exits with {code}: that of the task that was killed"
        print("\n" + shown.replace(str(tmp_path), "DIR").replace(f"{ROOT}/", ""))
    summary = json.loads((run / "run.json").read_text())["summary"]
    assert (summary["outcome"], summary["steps"], summary["failures_survived"]) == ("finished", 20, 2), said
    results = {int(path.stem): json.loads(path.read_text()) for path in out.glob("*.json")}
    assert sorted(results) == [0, 1, 2, 3, 6, 7]
    assert len({result["weights"] for result in results.values()}) == 1
    assert [results[uid]["told"]["EVERGRAD_NODE"] for uid in (0, 2, 6)] == ["eg0", "eg1", "eg3"]
    assert "which cannot be heard for" in said
    assert code == 128 + signal.SIGKILL
