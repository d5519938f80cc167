"""A forkserver that forks a launcher for every job that a test runs: quick, and as real.

The launcher in such a fork forks its ranks in turn. When whoever started the forkserver is gone, so is it, with the job
that is under way.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evergrad._forkserver import Forkserver, ForkserverLost, OwnChild, detach
from evergrad.errors import RecoveryError
from evergrad.testing.hang_report import LauncherExit, await_end

_NEEDED = ("evergrad.recovery.join_job", "evergrad.testing.forkserver")
_LAUNCH = "evergrad.testing.forkserver:launch"


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


class JobLauncher:
    """Launches one job at a time; its forkserver is started with the first."""

    def __init__(self) -> None:
        self._server: Forkserver | None = None
        self._is_possible = True

    def launch(self, request: Request) -> LauncherExit:
        """Run a job to its end; from nothing, if there can be no forkserver."""
        server = self._started()
        if server is None:
            return launch_plainly(request)
        try:
            launcher = server.fork(_LAUNCH, asdict(request))
            return await_end(launcher, launcher.pidfd, request.run, request.timeout_s)
        except ForkserverLost:
            self.close()
            raise RecoveryError(
                f"{request.folder}: the process that launches jobs ended in the middle of this one. Was it killed, for "
                "memory perhaps? run_job(…, preload=False) does without it"
            ) from None
        except BaseException:  # a test's own limit: the job ends too
            self.close()
            raise

    def close(self) -> None:
        """End the forkserver, and what it runs. Twice is fine; the next job starts another one."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _started(self) -> Forkserver | None:
        if self._server is not None and not self._server.is_there:  # somebody has killed it between two jobs
            self.close()
        if self._server is None and self._is_possible:
            try:
                # A session of its own: Ctrl-C is for the tests, which then close it.
                self._server = Forkserver(*_NEEDED, environment={"OMP_NUM_THREADS": "1"} | os.environ, new_session=True)
            except ForkserverLost:  # it says on stderr why
                self._is_possible = False
        return self._server


def launch_plainly(request: Request) -> LauncherExit:
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
        pidfd = os.pidfd_open(process.pid)
        try:
            ending = await_end(OwnChild(process.pid), pidfd, request.run, request.timeout_s)
        finally:
            os.close(pidfd)
    except BaseException:
        process.kill()
        process.wait()
        raise
    process.returncode = ending.exit_code  # reaped already
    return ending


def launch(work: dict[str, Any]) -> int:
    """A launcher, in a fork."""
    from evergrad.cli import main

    request = Request(**work)
    os.setsid()
    out, err = (
        os.open(f"{request.folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        for name in ("stdout", "stderr")
    )
    os.chdir(request.cwd)
    detach(out, err, request.env)
    faulthandler.enable()  # and so in every fork of it: see hang_report
    # An abort that asks for stacks shall leave no core behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    return main(request.command("--preload"))
