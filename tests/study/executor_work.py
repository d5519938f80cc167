"""Work for the tests of executors that nobody else has a use for."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any


def perform(folder: Path, work: dict[str, Any]) -> Any:
    """What `work["do"]` names."""
    match work["do"]:
        case "describe":
            opened = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
            return {"opened": opened, "environment": dict(os.environ), "leads": os.getsid(0) == os.getpid()}
        case "print":
            print("to stdout")
            print("to stderr", file=sys.stderr)
            return {}
        case "crash":
            ctypes.string_at(0)
        case "leave":
            sys.exit("enough")
        case "fork":
            if os.fork():
                os._exit(3)
            signal.pause()  # holds all that its parent held
        case "babble":
            os.write(int(sys.argv[2]), work["text"].encode())
            signal.pause()
        case "give":
            return {"nan": {"loss": float("nan")}, "list": [], "long": {"a": "x" * (9 << 20)}}[work["what"]]
    raise AssertionError(work)
