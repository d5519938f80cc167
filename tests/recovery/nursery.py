"""A process that has imported torch, and forks a launcher for every job that a test runs: quick, and as real.

`python nursery.py` reads requests from stdin, one JSON line each, and answers with exit codes. It has no threads, so a
fork of it is as good as a new process; the launcher in that fork forks its ranks in turn (`--fork`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass
class Ran:
    """What became of a job."""

    code: int
    stdout: str
    stderr: str
    run: Path

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The timeline, or what of it is of one kind."""
        lines = [json.loads(line) for line in (self.run / "timeline.jsonl").read_text().splitlines()]
        return [line for line in lines if kind is None or line["event"] == kind]

    @property
    def results(self) -> dict[int, dict[str, Any]]:
        """What each process that finished has left, by uid."""
        found = (self.run.parent / "out").glob("*.json")
        return {int(path.stem): json.loads(path.read_text()) for path in found}

    @property
    def said(self) -> str:
        """Everything, for a failed assertion."""
        return f"exit code {self.code}\n{self.stdout}\n{self.stderr}"


class Nursery:
    """The tests' end of it."""

    def __init__(self) -> None:
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            # Torch looks up the name of every address it connects to; where no server answers, that takes its time.
            "RES_OPTIONS": "timeout:1 attempts:1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def run(self, folder: Path, *options: object, script: Path = FOLDER / "trainer.py", arguments: Any = ()) -> Ran:
        """`evergrad run OPTIONS script OUT ARGUMENTS` in a folder of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        command = ["run", "--fork", "--out", folder / "run", *options, script, folder / "out", *arguments]
        env = {name: value for name, value in os.environ.items() if name.startswith("EVERGRAD_")}
        request = {"command": [str(word) for word in command], "folder": str(folder), "env": env}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        out, err = ((folder / name).read_text() for name in ("stdout", "stderr"))
        return Ran(code, out, err, folder / "run")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def main() -> None:
    from evergrad.recovery.forking import preload

    preload()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = _launch(request)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _launch(request: dict[str, Any]) -> int:
    from evergrad.cli import main as evergrad

    os.setsid()
    signal.alarm(int(request["env"].get("EVERGRAD_TEST_LIMIT_S", "90")))  # ends the launcher, and so all its processes
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{request['folder']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["env"])
    return evergrad(request["command"])


if __name__ == "__main__":
    main()
