"""What many tests share: real files of every format, and a way to run code under limits."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from living_agents import end_agents
from repeated import pytest_runtest_setup, pytest_terminal_summary, pytest_timeout_set_timer  # noqa: F401
from unprivileged import Unprivileged

DATA = Path(__file__).parent / "data"

# Before anyone imports torch or numpy: several workers share the cores, and threads that wait for each other spin.
for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

# A DDP never lets go of its process group, which is four open files; a worker makes hundreds of them.
_hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (_hard if 0 <= _hard < 65536 else 65536, _hard))

# A shell that starts tests in the background lets them ignore SIGINT, and whatever they start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on how fast the machine is.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

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
def unprivileged() -> Iterator[Unprivileged]:
    """For files that may be read and not written."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        os.chmod(folder, 0o755)
        yield Unprivileged(Path(folder))


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


@pytest.fixture(scope="session", autouse=True)
def workers_shared_memory() -> Iterator[None]:
    """Jobs of this worker meet no others of this machine, and leave nothing behind."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="evergrad-test-", dir=root, ignore_cleanup_errors=True) as folder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EVERGRAD_SHM", folder)
            yield
        end_agents(Path(folder))


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in shared memory that only this test uses; no agent outlives the test."""
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="evergrad-test-", dir=root))
    monkeypatch.setenv("EVERGRAD_SHM", str(folder))
    monkeypatch.setenv("EVERGRAD_LINGER", "0.3")
    monkeypatch.delenv("EVERGRAD_NODE", raising=False)
    yield folder
    end_agents(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def own_shared_memory(request: pytest.FixtureRequest) -> None:
    """Tests of the checkpointer never see each other's arenas, nor anybody's on this machine."""
    if request.path.parent.name == "checkpoint":
        request.getfixturevalue("shm")
