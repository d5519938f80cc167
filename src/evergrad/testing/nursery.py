"""A process that has imported torch, and forks a launcher for every job that a test runs: quick, and as real.

It has no threads, so a fork of it is as good as a new process; the launcher in that fork forks its ranks in turn. It
reads a `Request` a line from stdin and answers with how the job ended. When whoever started it is gone, so is it, with
the job that is under way.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from evergrad.errors import RecoveryError
from evergrad.testing.hang_report import Ending, await_end

_SERVE = "from evergrad.testing.nursery import serve; serve()"
_NO_CODE = 70


@dataclass(frozen=True, slots=True)
class Request:
    """A job to launch."""

    words: Sequence[str]
    """What comes after `evergrad run --out RUN`."""
    folder: str
    """Where `run`, `stdout` and `stderr` will be; it exists."""
    cwd: str
    env: Mapping[str, str]
    """The whole environment."""
    timeout_s: float

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return Path(self.folder, "run")

    def command(self, *options: str) -> list[str]:
        """The words of `evergrad`."""
        return ["run", "--out", str(self.run), *options, *self.words]


class Nursery:
    """The tests' end of it; for one job at a time. The process is started with the first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._is_possible = True

    def launch(self, request: Request) -> Ending:
        """Run a job to its end; from nothing, if there can be no such process."""
        process = self._started()
        if process is None:
            return launch_plainly(request)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(asdict(request)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:  # a test's own limit: the answer would be taken for that of the next job
            self.close()
            raise
        if not answer:
            self.close()
            raise RecoveryError(
                f"{request.folder}: the process that launches jobs ended in the middle of this one. Was it killed, for "
                "memory perhaps? run_job(…, preload=False) does without it"
            )
        return Ending.from_json(json.loads(answer))

    def close(self) -> None:
        """End it, and what it runs. Twice is fine; the next job starts another one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _started(self) -> subprocess.Popen[str] | None:
        if self._process is not None and self._process.poll() is not None:  # somebody has killed it between two jobs
            self.close()
        if self._process is None and self._is_possible:
            self._process = subprocess.Popen(
                # -P: the folder of the tests is not where scripts find their modules.
                [sys.executable, "-P", "-c", _SERVE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={"OMP_NUM_THREADS": "1"} | os.environ,
                start_new_session=True,  # Ctrl-C is for the tests, which then close it
            )
            assert self._process.stdout is not None
            if self._process.stdout.readline() != "ready\n":
                self._is_possible = False  # what it said of that is on stderr
                self.close()
        return self._process


def launch_plainly(request: Request) -> Ending:
    """Run a job to its end as a command line would: everyone imports torch for themselves."""
    with open(f"{request.folder}/stdout", "wb") as out, open(f"{request.folder}/stderr", "wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "evergrad", *request.command()],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=request.cwd,
            env=dict(request.env),
            start_new_session=True,
        )
    try:
        ending = await_end(process.pid, request.run, request.timeout_s)
    except BaseException:
        process.kill()
        process.wait()
        raise
    process.returncode = ending.exit_code  # reaped already
    return ending


def serve() -> None:
    """The process itself: until stdin ends."""
    from evergrad.recovery.launch.forking import preload

    preload()
    faulthandler.enable()  # and so in every fork: see watching.py
    # An abort that asks for stacks shall leave no core behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    print("ready", flush=True)
    while line := sys.stdin.buffer.readline():
        request, nursery = Request(**json.loads(line)), os.getpid()
        pid = os.fork()
        if pid == 0:
            code = _NO_CODE
            try:
                code = _launch(request, nursery)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        ending = await_end(pid, request.run, request.timeout_s, unless=sys.stdin.fileno())
        with suppress(BrokenPipeError):  # nobody waits for it any more
            print(json.dumps(ending.to_json()), flush=True)
    os._exit(0)  # nothing is left to do, and taking torch apart takes its time


def _launch(request: Request, nursery: int) -> int:
    from evergrad.cli import main
    from evergrad.recovery.launch.forking import end_with_parent

    end_with_parent(nursery)
    os.setsid()
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{request.folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    return main(request.command("--preload"))
