"""The launcher: what its processes are told, how it ends, and that it leaves nothing behind. Real processes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from evergrad._wire import Secret
from evergrad.cli import main
from evergrad.errors import UsageError
from evergrad.recovery.failures.schedule import Failures
from evergrad.recovery.launch.launcher import launch
from evergrad.recovery.launch.settings import LaunchSettings, ProcessPlacement, environment_of
from evergrad.recovery.launch.summary import Summary
from evergrad.recovery.membership import MembershipPlan, PointKind, StoreKeys, SurvivorReport
from evergrad.recovery.store import PREFIX, SignedStore
from evergrad.timeline import read_events

# A process that does nothing by itself: the test speaks for it, and tells it when to leave. It blocks that signal: with
# a handler and `signal.pause`, one that came right before the pause would not end it.
_PUPPET = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
names = ("EVERGRAD_STORE", "RANK", "LOCAL_RANK", "EVERGRAD_SPARE", "EVERGRAD_NODE")
print(os.getpid(), *(os.environ.get(name) for name in names))
signal.sigwait({signal.SIGUSR1})
"""


class Jobs:
    """Runs scripts in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"

    def script(self, code: str) -> str:
        path = self.folder / "train.py"
        path.write_text(textwrap.dedent(code))
        return str(path)

    def launch(self, code: str, *, meanwhile: Callable[[], None] | None = None, **settings: Any) -> Summary:
        """Launch it in this process, with something to do in another thread."""
        settings = {"num_ranks": 2, "out": self.run, "grace_period_s": 5.0} | settings
        job = LaunchSettings(script=self.script(code), **settings)
        with ThreadPoolExecutor(1) as pool:
            doing = pool.submit(self._or_end, meanwhile) if meanwhile is not None else None
            summary = launch(job)
            if doing is not None:
                doing.result()
        return summary

    def _or_end(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException:  # its processes would wait for ever
            for event in self.events("process_started"):
                with suppress(ProcessLookupError):
                    os.kill(event["pid"], signal.SIGKILL)
            raise

    @contextmanager
    def start(self, code: str, *options: str, by: tuple[str, ...] = (), **how: Any) -> Iterator[subprocess.Popen[str]]:
        """The command line, in a process group of its own; it does not outlive the test. `by` starts it, if given."""
        command = [*by, sys.executable, "-m", "evergrad", "run", "--out", str(self.run), *options, self.script(code)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "process_group": 0}
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, **(pipes | how)) as launcher:
            try:
                yield launcher
            finally:
                launcher.kill()  # the kernel ends its processes with it

    def log(self, uid: int) -> str:
        path = self.run / "logs" / f"{uid}.log"
        return path.read_text() if path.exists() else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.run / "timeline.jsonl"
        return [dict(event.fields) for event in read_events(path) if event.event == name] if path.exists() else []


class Puppets:
    """The processes of a job whose script is `_PUPPET`."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        address = self.told(0)[1]
        # Not a client that can be cut: with the server in this process, it would hold, and cut, others' connections.
        tcp = TCPStore("127.0.0.1", int(address.rpartition(":")[2]), None, False, timedelta(seconds=30), False)
        self.store = SignedStore(PrefixStore(PREFIX, tcp), Secret.read(jobs.run / "secret"))

    def told(self, uid: int) -> list[str]:
        wait_until(lambda: self._jobs.log(uid).endswith("\n"))
        return self._jobs.log(uid).split()

    def join(self, uid: int, **what: Any) -> None:
        self.store.set(StoreKeys.joined(uid), json.dumps(what))
        assert self.store.has(StoreKeys.joined(uid))  # an answer: the launcher sees it too, whatever happens next

    def send(self, uid: int, number: int) -> None:
        os.kill(int(self.told(uid)[0]), number)

    def lose_rank_1(self) -> None:
        """Of two ranks that have joined one is killed, and the other says what it saw."""
        self.join(0)
        self.join(1)
        self.send(1, signal.SIGKILL)
        self.store.get(StoreKeys.broken(0))
        self.store.set(StoreKeys.report(0, 0), SurvivorReport(0, 0, 0, point=3, kind=PointKind.STEP, step=12).to_json())

    def plan(self, generation: int) -> MembershipPlan:
        return MembershipPlan.from_json(self.store.get(StoreKeys.plan(generation)))


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Jobs(tmp_path)


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def is_gone(pidfd: int, seconds: float = 30.0) -> bool:
    return bool(select.select([pidfd], [], [], seconds)[0])


def test_output_logs_timeline_and_record_of_a_run(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    summary = jobs.launch(
        """
        import os, sys
        for line in range(3):
            print("line", line)
        print("arguments", sys.argv[1:], file=sys.stderr)
        """,
        arguments=("--lr", "0.1"),
    )
    out, error = capfd.readouterr()
    for rank in range(2):
        mine = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] line {line}" for line in range(3)]
        assert f"[rank {rank}] arguments ['--lr', '0.1']\n" in error
        assert sorted(jobs.log(rank).splitlines()) == ["arguments ['--lr', '0.1']", "line 0", "line 1", "line 2"]
    assert error.splitlines()[0] == f"evergrad: 2 ranks, logs and timeline in {jobs.run}"
    assert error.splitlines()[-1] == f"evergrad: {summary}"
    assert str(summary).startswith("finished: no rank called eg.join: ran as under torchrun (")
    assert (summary.outcome, summary.exit_code) == ("finished", 0)
    names = [event.event for event in read_events(summary.timeline)]
    assert (names[0], names[-1]) == ("launcher_started", "launcher_ended")
    assert sorted(event["label"] for event in jobs.events("process_started")) == ["rank 0", "rank 1"]
    assert [event["code"] for event in jobs.events("process_exited")] == [0, 0]
    record = json.loads((jobs.run / "run.json").read_text())
    assert record["command"][1:] == ["-u", str(jobs.folder / "train.py"), "--lr", "0.1"]
    assert record["summary"]["outcome"] == "finished"
    assert record["settings"]["strategy"] == "rollback"


def test_a_plain_distributed_script_runs_as_it_is(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    summary = jobs.launch(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        print("world", dist.get_world_size(), "total", total.item())
        dist.destroy_process_group()
        """
    )
    out, error = capfd.readouterr()
    assert summary.exit_code == 0, error
    assert sorted(out.splitlines()) == [f"[rank {rank}] world 2 total 3.0" for rank in range(2)]


def test_a_script_that_fails_ends_the_others_and_is_named(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    summary = jobs.launch(
        """
        import os, signal, sys
        if os.environ["RANK"] == "1":
            sys.exit(7)
        signal.pause()
        """
    )
    assert (summary.outcome, summary.exit_code) == ("failed", 1)
    assert "rank 1 ended with exit code 7" in capfd.readouterr().err.splitlines()[-1]
    assert {event["uid"]: event["code"] for event in jobs.events("process_exited")} == {0: -signal.SIGTERM, 1: 7}


def test_a_signal_reaches_every_process_once(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    def ask() -> None:
        wait_until(lambda: "ready" in jobs.log(0) and "ready" in jobs.log(1))
        os.kill(os.getpid(), signal.SIGTERM)

    summary = jobs.launch(
        """
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        print("ready")
        seen = [signal.sigwait({signal.SIGTERM})]
        again = signal.sigtimedwait({signal.SIGTERM}, 0.2)
        print("seen", len(seen) + (again is not None))
        """,
        meanwhile=ask,
        grace_period_s=60.0,
    )
    assert (summary.outcome, summary.exit_code) == ("interrupted", 143)
    told = "evergrad: SIGTERM: passed on to 2 processes; those that still run in 60 s are killed\n"
    assert told in capfd.readouterr().err
    assert {event["uid"]: event["code"] for event in jobs.events("process_exited")} == {0: 0, 1: 0}
    assert [jobs.log(uid) for uid in range(2)] == ["ready\nseen 1\n"] * 2
    assert jobs.events("process_lost") == []  # who leaves because it was asked to is no failure
    assert json.loads((jobs.run / "run.json").read_text())["summary"]["exit_code"] == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_who_does_not_leave_within_the_grace_is_killed(jobs: Jobs) -> None:
    def ask() -> None:
        wait_until(lambda: "ready" in jobs.log(0) and "ready" in jobs.log(1))
        os.kill(os.getpid(), signal.SIGTERM)

    summary = jobs.launch(
        """
        import signal
        signal.signal(signal.SIGTERM, lambda *_: print("stays"))
        print("ready")
        while True:
            signal.pause()
        """,
        meanwhile=ask,
        grace_period_s=0.5,
    )
    assert (summary.outcome, summary.exit_code) == ("interrupted", 143)
    assert {event["uid"]: event["code"] for event in jobs.events("process_exited")} == {
        0: -signal.SIGKILL,
        1: -signal.SIGKILL,
    }


def test_ctrl_c_reaches_processes_through_the_launcher_alone(jobs: Jobs) -> None:
    with jobs.start(
        """
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        print("ready")
        seen = [signal.sigwait({signal.SIGINT})]
        again = signal.sigtimedwait({signal.SIGINT}, 0.3)  # a second one would come now
        print("seen", len(seen) + (again is not None))
        """,
        "-n",
        "2",
    ) as launcher:
        wait_until(lambda: "ready" in jobs.log(0) and "ready" in jobs.log(1))
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
        out, error = launcher.communicate()
    assert launcher.returncode == 130, error
    assert sorted(out.splitlines()) == [f"[rank {rank}] {what}" for rank in range(2) for what in ("ready", "seen 1")]
    assert "interrupted: SIGINT" in error.splitlines()[-1]
    assert "Traceback" not in error


@pytest.mark.parametrize("has_terminal", [False, True])
def test_in_the_background_a_terminal_decides_whether_sigint_is_ignored(jobs: Jobs, has_terminal: bool) -> None:
    """A shell has it ignored there, as Ctrl-C is not meant; without a terminal, whoever sends it means the launcher."""
    ours, theirs = pty.openpty()
    shell = ("/bin/sh", "-c", 'trap \'\' INT; exec "$@" <"$0"', os.ttyname(theirs) if has_terminal else os.devnull)
    code = "import signal; print('ready'); signal.pause()"
    try:
        # Whoever begins a session and opens a terminal has it.
        with jobs.start(code, by=shell, process_group=None, start_new_session=True) as launcher:
            wait_until(lambda: "ready" in jobs.log(0))
            launcher.send_signal(signal.SIGINT)
            launcher.send_signal(signal.SIGTERM)
            _, error = launcher.communicate()
    finally:
        os.close(ours)
        os.close(theirs)
    assert launcher.returncode == (143 if has_terminal else 130), error
    assert f"interrupted: {'SIGTERM' if has_terminal else 'SIGINT'}" in error.splitlines()[-1]


def test_nothing_outlives_a_launcher_that_is_killed(jobs: Jobs) -> None:
    with jobs.start("import os, signal; print(os.getpid()); signal.pause()", "-n", "2", "--spares", "1") as launcher:
        wait_until(lambda: all(jobs.log(uid).endswith("\n") for uid in range(3)))
        pidfds = [os.pidfd_open(int(jobs.log(uid))) for uid in range(3)]
        launcher.kill()
        launcher.communicate()
    for pidfd in pidfds:
        assert is_gone(pidfd)
        os.close(pidfd)


def test_what_a_dead_rank_has_started_goes_with_it_unless_it_detached(jobs: Jobs) -> None:
    summary = jobs.launch(
        """
        import os, subprocess, sys
        worker = subprocess.Popen(["sleep", "300"])
        agent = subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL)
        print(worker.pid, agent.pid)
        sys.stdout.flush()
        sys.stdin.read()  # nothing
        os._exit(3)
        """,
        num_ranks=1,
    )
    assert summary.exit_code == 1
    worker, agent = map(int, jobs.log(0).split())
    try:
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(worker)
            assert is_gone(pidfd)
            os.close(pidfd)
        assert os.waitpid(agent, os.WNOHANG) == (0, 0)  # it lives, and was adopted
    finally:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)


def test_a_stopped_reader_does_not_hide_a_death(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    seen = []

    def read_late() -> None:
        wait_until(lambda: bool(jobs.events("job_failed")))  # nobody has read a line so far
        with os.fdopen(reader) as lines:
            seen.extend(lines)

    with os.fdopen(writer, "w") as out, monkeypatch.context() as patched, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_late)
        patched.setattr(sys, "stdout", out)
        summary = jobs.launch(
            """
            import os, sys, time
            if os.environ["RANK"] == "1":
                log = os.path.join(os.environ["EVERGRAD_RUN"], "logs", "0.log")
                while os.path.getsize(log) < 60_000:  # about as much as a pipe holds
                    time.sleep(0.01)
                sys.exit(5)
            while True:
                print("x" * 1000)
            """,
            grace_period_s=0.5,
        )
        out.close()
        reading.result()
    assert summary.exit_code == 1
    assert seen.count(f"[rank 0] {'x' * 1000}\n") >= len(seen) - 1 >= 59


def test_survivors_go_on_and_a_new_spare_takes_the_dead_ones_node(
    jobs: Jobs, capfd: pytest.CaptureFixture[str]
) -> None:
    def play() -> None:
        ranks = Puppets(jobs)
        ranks.lose_rank_1()
        assert ranks.plan(1).members == (0,)
        assert ranks.told(2)[2:] == ["2", "1", "1", "n1"]  # beyond all ranks, its device, a spare, its node
        ranks.join(2)  # the launcher ends those who have not joined when the job has finished
        ranks.send(0, signal.SIGUSR1)
        assert ranks.store.get(StoreKeys.called(2)) == "-1"
        ranks.send(2, signal.SIGUSR1)

    summary = jobs.launch(_PUPPET, meanwhile=play, num_nodes=2, respawn=True, grace_period_s=60.0)
    out, error = capfd.readouterr()
    assert (summary.outcome, summary.exit_code) == ("finished", 0), error
    assert (summary.steps, summary.failures_survived, summary.generations) == (12, 1, 2)
    assert "evergrad: rank 1 died (SIGKILL): generation 1 goes on with 1 rank (rollback)\n" in error
    assert "[spare 2] " in out
    assert [event["uid"] for event in jobs.events("process_lost")] == [1]


def test_a_rank_that_never_joined_is_not_started_again(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    def play() -> None:
        ranks = Puppets(jobs)
        ranks.join(0)
        ranks.told(2)
        ranks.send(2, signal.SIGKILL)
        wait_until(lambda: len(jobs.events("process_exited")) == 1)
        ranks.send(0, signal.SIGUSR1)
        ranks.send(1, signal.SIGUSR1)

    assert jobs.launch(_PUPPET, meanwhile=play, num_spares=1, respawn=True).outcome == "finished"
    assert "spare 2 is not started again: it ended before it joined the job\n" in capfd.readouterr().err
    assert len(jobs.events("process_started")) == 3


def test_whoever_dies_at_the_same_step_again_and_again_is_not_started_for_ever(
    jobs: Jobs, capfd: pytest.CaptureFixture[str]
) -> None:
    def play() -> None:
        ranks = Puppets(jobs)
        ranks.join(0)
        for uid in (1, 2, 3):
            ranks.told(uid)
            ranks.join(uid)
            ranks.send(uid, signal.SIGKILL)
        wait_until(lambda: len(jobs.events("process_exited")) == 3)
        ranks.store.set(StoreKeys.report(0, 0), SurvivorReport(0, 0, 0, point=3, kind=PointKind.STEP, step=0).to_json())
        ranks.plan(1)
        ranks.send(0, signal.SIGUSR1)

    assert jobs.launch(_PUPPET, meanwhile=play, respawn=True).exit_code == 0
    assert "spare 3 is not started again: 3 died in its place at step 0\n" in capfd.readouterr().err
    assert len(jobs.events("process_started")) == 4


def test_a_relaunch_starts_who_is_missing(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    def play() -> None:
        ranks = Puppets(jobs)
        ranks.join(0, checkpointer=True)
        ranks.send(0, signal.SIGKILL)
        plan = ranks.plan(1)
        assert (plan.members, plan.relaunch) == ((1,), True)
        assert ranks.told(1)[2:4] == ["0", "0"]
        ranks.send(1, signal.SIGUSR1)

    summary = jobs.launch(_PUPPET, meanwhile=play, num_ranks=1)
    error = capfd.readouterr().err
    assert summary.exit_code == 0, error
    assert "rank 0 died (SIGKILL), rank 0 joins: generation 1 goes on with 1 rank (from the newest checkpoint)" in error


def test_too_few_ranks_and_nothing_to_restart_from(jobs: Jobs) -> None:
    def play() -> None:
        ranks = Puppets(jobs)
        ranks.lose_rank_1()

    summary = jobs.launch(_PUPPET, meanwhile=play, min_ranks=2)
    assert (summary.outcome, summary.exit_code) == ("too-few", 4)
    assert {event["uid"]: event["code"] for event in jobs.events("process_exited")} == {
        0: -signal.SIGTERM,
        1: -signal.SIGKILL,
    }


def test_with_json_the_summary_is_all_that_is_on_stdout(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--out", str(jobs.run), "--json", jobs.script("print('hello')"), "--json", "-n", "7"]) == 0
    out, error = capfd.readouterr()
    summary = json.loads(out)
    assert (summary["outcome"], summary["exit_code"], summary["run"]) == ("finished", 0, str(jobs.run))
    assert error.splitlines() == [f"evergrad: 1 rank, logs and timeline in {jobs.run}", "[rank 0] hello"]
    record = json.loads((jobs.run / "run.json").read_text())
    assert record["settings"]["arguments"] == ["--json", "-n", "7"]  # what follows the script is the script's


def test_a_module_and_a_folder_for_the_run_by_default(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(jobs.folder)
    monkeypatch.delenv("OMP_NUM_THREADS")
    jobs.script("import os; print(__spec__.name, os.environ['OMP_NUM_THREADS'])")
    assert main(["run", "-m", "train"]) == 0
    out, error = capfd.readouterr()
    (run,) = (jobs.folder / "runs").iterdir()
    assert run.name.startswith("train-")
    assert out == "[rank 0] train 1\n"
    expected = f"evergrad: 1 rank, logs and timeline in {run}; OMP_NUM_THREADS is 1, set it to change that"
    assert error.splitlines()[0] == expected


def test_what_each_process_is_told(jobs: Jobs) -> None:
    settings = LaunchSettings(
        script=jobs.script(""),
        num_ranks=5,
        num_nodes=2,
        num_spares=3,
        min_ranks=2,
        batch_policy="constant",
        seed=9,
        failures=Failures.parse(["kill random=2 step=3", "kill random=1 step=4 seed=5", "kill node=1 step=7"]),
    )
    places = settings.places()
    assert [place.node for place in places] == [0, 0, 0, 1, 1, 0, 1, 0]
    inherited = {"RANK": "77", "PATH": "/bin", "OMP_NUM_THREADS": "4", "EVERGRAD_SPARE": "1", "WORLD_SIZE": "99"}

    def told(place: ProcessPlacement) -> dict[str, str]:
        nodes = [one.node for one in places]
        return environment_of(place, settings, nodes=nodes, port=4711, run=jobs.run, inherited=inherited)

    rank, spare = told(places[4]), told(places[6])
    assert {name: rank[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "EVERGRAD_NODE")} == {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "4",
        "LOCAL_WORLD_SIZE": "5",
        "EVERGRAD_NODE": "n1",
    }
    assert (rank["MASTER_ADDR"], rank["MASTER_PORT"], rank["EVERGRAD_STORE"]) == ("127.0.0.1", "4711", "127.0.0.1:4711")
    assert (rank["OMP_NUM_THREADS"], rank["PATH"], rank["EVERGRAD_RUN"]) == ("4", "/bin", str(jobs.run))
    assert (rank["EVERGRAD_STRATEGY"], rank["EVERGRAD_MIN_RANKS"], rank["EVERGRAD_BATCH_POLICY"]) == (
        "rollback",
        "2",
        "constant",
    )
    assert json.loads(rank["EVERGRAD_NODES"]) == ["n0", "n0", "n0", "n1", "n1", "n0", "n1", "n0"]
    assert Failures.from_json(rank["EVERGRAD_FAILURES"]).texts == [
        "kill random=2 step=3 seed=9",
        "kill random=1 step=4 seed=5",
        "kill node=n1 step=7",
    ]
    assert "EVERGRAD_SPARE" not in rank
    assert (spare["RANK"], spare["WORLD_SIZE"]) == ("6", "5"), "nobody takes it for a rank"
    assert (spare["EVERGRAD_SPARE"], spare["EVERGRAD_UID"], spare["EVERGRAD_NODE"]) == ("1", "6", "n1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["no.py"], "no.py: no such script"),
        (["-n", "0", "no.py"], "-n: expected the number of ranks, 1 or more, found 0"),
        (["."], ".: is a folder: expected a Python file"),
        (["-m", "not/a/module"], "-m: expected the name of a module, as pkg.train, found 'not/a/module'"),
        (["-n", "0", "train.py"], "-n: expected the number of ranks, 1 or more, found 0"),
        (["--spares", "-1", "train.py"], "--spares: expected the number of spares, 0 or more, found -1"),
        (["-n", "2", "--min-ranks", "3", "train.py"], "--min-ranks: expected at most all ranks (2), found 3"),
        (["-n", "2", "--nnodes", "3", "train.py"], "--nnodes: expected at most as many as ranks (2), found 3"),
        (["--nnodes", "0", "train.py"], "--nnodes: expected the number of nodes, 1 or more, found 0"),
        (
            ["--strategy", "rolback", "train.py"],
            "--strategy: expected one of rollback, forward, restart, found 'rolback'. Did you mean 'rollback'?",
        ),
        (
            ["--batch-policy", "grow", "train.py"],
            "--batch-policy: expected one of shrink, constant, scale_lr, found 'grow'.",
        ),
        (["--grace-period", "nan", "train.py"], "--grace-period: expected a number of seconds, 0 or more, found nan"),
        (["--fail", "kill rnk=1 step=2", "train.py"], "rnk"),
        (["--fail", "kill rank=1 step=2", "train.py"], "rank=1"),
        (["--failures", "no.toml", "train.py"], "no.toml"),
        (["--out", "full", "train.py"], "--out full: expected a new or an empty folder, found something in it"),
        (["--out", "train.py", "train.py"], "train.py: no folder for the run: file exists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "full" / "something").mkdir(parents=True)
    assert main(["run", *options]) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert error.startswith("evergrad: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_job_is_launched_from_the_main_thread(jobs: Jobs) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="from the main thread: signals arrive there"):
        pool.submit(jobs.launch, "pass").result()
    assert not jobs.run.exists()
