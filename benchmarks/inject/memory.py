"""What an injection takes of memory, in a process of its own: `python memory.py FILE COUNT SEED`, then a line on stdin.

The process says "ready" once everything is imported; the peak is then reset. Pages of the file that are mapped count
as resident too, though they are the page cache's: the parent watches what is the process's own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter, sleep

__all__ = ["measure"]

_WATCH_S = 0.001


def measure(path: Path, count: int, seed: int) -> tuple[dict[str, float], Path]:
    """Inject in a fresh process; the growth of its peak in MiB (in all, and its own), and the log that it left."""
    command = [sys.executable, __file__, str(path), str(count), str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{path.name}: failed before anything was injected")
        before = _status(process.pid, "RssAnon")
        process.stdin.write("go\n")
        process.stdin.close()
        own = before
        while process.poll() is None:
            own = max(own, _status(process.pid, "RssAnon"))
            sleep(_WATCH_S)
        if process.returncode:
            raise RuntimeError(f"{path.name}: exit status {process.returncode}")
        answer = json.loads(process.stdout.read())
    return {"growth_mib": answer["growth_kib"] / 1024, "own_mib": (own - before) / 1024}, Path(answer["log"])


def _status(pid: int | str, field: str) -> int:
    """A value of /proc/PID/status in KiB; 0 once the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def _main(path: str, count: str, seed: str) -> None:
    from evergrad import BitFlip, inject, open_checkpoint

    with open_checkpoint(path) as checkpoint:  # whatever reading this format imports
        len(checkpoint.tensors)
    print("ready", flush=True)
    sys.stdin.readline()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    before = _status("self", "VmHWM")
    start = perf_counter()
    log = inject(path, BitFlip(), count=int(count), seed=int(seed), in_place=True)
    took = perf_counter() - start
    print(json.dumps({"growth_kib": _status("self", "VmHWM") - before, "time_s": took, "log": str(log.path)}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
