"""Slurm in a folder: a controller, munge, and several nodes that are all this machine; gone when it ends."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

_TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
_UP_WITHIN_S = 60.0

_CONF = """
ClusterName=evergrad
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
NodeName=eg[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why there can be no Slurm here; empty if there can."""
    if os.getuid() != 0:
        return "only root can start slurmd"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"Slurm is not installed: no {', '.join(missing)}" if missing else ""


class Cluster:
    """A cluster from `with` to its end."""

    def __init__(self, folder: Path, *, nodes: int) -> None:
        self._folder, self._nodes = folder, nodes
        self._stack = ExitStack()
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "RES_OPTIONS": "timeout:1 attempts:1"}

    def __enter__(self) -> Cluster:
        folder, host = self._folder, socket.gethostname()
        first = _free_ports(self._nodes + 1)
        conf = _CONF.format(
            host=host,
            folder=folder,
            port=first,
            last=self._nodes - 1,
            first_port=first + 1,
            last_port=first + self._nodes,
        )
        (folder / "slurm.conf").write_text(conf)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(64))
        try:
            self._start("munged", "-F", "--force", f"--key-file={key}", *self._munge_files())
            self._until((folder / "munge.socket").exists, "munged")
            self._start("slurmctld", "-D")
            for index in range(self._nodes):
                (folder / f"spool-eg{index}").mkdir()
                self._start("slurmd", "-D", "-N", f"eg{index}")
            self._until(lambda: self._states() == ["idle"] * self._nodes, "slurmctld")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _munge_files(self) -> list[str]:
        files = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        return [f"--{option}={self._folder / name}" for option, name in files.items()]

    def _states(self) -> list[str]:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%t"],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        return done.stdout.split()

    def _start(self, *command: str) -> None:
        log = (self._folder / f"{command[0]}.log").open("ab")
        self._stack.callback(log.close)
        process = subprocess.Popen(
            command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        self._stack.callback(_end, process)

    def _until(self, is_so: Callable[[], bool], who: str) -> None:
        end = time.monotonic() + _UP_WITHIN_S
        while not is_so():
            if time.monotonic() > end:
                logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in self._folder.glob("*.log"))
                raise AssertionError(f"{who} does not come up, nodes are {self._states()}\n{logs}")
            time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def _free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    for first in range(20000, 30000, 50):
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                probe = stack.enter_context(socket.socket())
                probe.bind(("", port))
            return first
    raise AssertionError("no ports are free")
