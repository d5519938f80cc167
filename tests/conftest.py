"""What many tests share: real files of every format, and a way to run code under limits."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"

# Memory and time that reading a small file may take, however hostile it is.
_LIMITED = """
import resource, signal, sys
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
signal.alarm({seconds})
"""


@pytest.fixture
def data() -> Path:
    """The folder of real checkpoint files."""
    return DATA


@pytest.fixture
def limited() -> Callable[..., str]:
    """Run Python code in a process of its own with little memory and time; returns what it printed."""

    def run(code: str, *arguments: object, memory: int = 1 << 30, seconds: int = 60) -> str:
        source = _LIMITED.format(memory=memory, seconds=seconds) + textwrap.dedent(code)
        done = subprocess.run(
            [sys.executable, "-c", source, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + 30,
            # One thread: every further one reserves address space.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
