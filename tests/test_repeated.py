"""`make test` repeats a failed test once and names it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent

# Counted in files: the repeat may run in another process.
COUNTED = """
import os, pathlib, time
import pytest

def failures(name):
    with pathlib.Path(name).open("a") as count:
        before = count.tell()
        count.write("x")
    return before
"""


def options() -> list[str]:
    """What `make test` tells pytest, with a single worker."""
    found = re.search(r"^test:.*\n\t\$\(PYTEST\) -n \d+ (.+)$", (HERE.parent / "Makefile").read_text(), re.MULTILINE)
    assert found
    return ["-n", "1", *found[1].split()]


def suite(folder: Path, tests: str, *more: str) -> tuple[int, list[str]]:
    """The exit code and the lines of a run of these tests."""
    (folder / "test_it.py").write_text(COUNTED + textwrap.dedent(tests))
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    plugins = ("xdist", "timeout", "rerunfailures", "repeated")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *(f"-p{name}" for name in (*plugins, "no:cacheprovider")), *more],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(HERE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).rstrip().splitlines()


def test_a_test_that_fails_once_is_repeated_and_named(tmp_path: Path) -> None:
    tests = """
    def test_flaky():
        assert failures("flaky") > 0, "it was too early\\nmore about it"

    def test_sound():
        assert failures("sound") == 0

    @pytest.fixture
    def late():
        if not failures("late"):
            raise OSError("not there yet")

    def test_setup(late):
        pass

    def test_worker_that_dies():
        if not failures("dies"):
            os._exit(3)
    """
    code, lines = suite(tmp_path, tests, *options())
    assert code == 0, lines
    assert lines[-5:-2] == [
        "tests that passed only when repeated: 3",
        "  test_it.py::test_flaky: AssertionError: it was too early",
        "  test_it.py::test_setup: OSError: not there yet",
    ]
    assert re.fullmatch(r"  test_it.py::test_worker_that_dies: worker 'gw0' crashed while running .*", lines[-2])
    assert re.match(r"=+ 4 passed, 3 rerun in ", lines[-1])
    assert (tmp_path / "sound").read_text() == "x"


def test_a_test_that_fails_twice_fails(tmp_path: Path) -> None:
    # The limit passes twice in full: a repeat has one of its own, and a test that hangs always is ended.
    tests = """
    def test_broken():
        failures("broken")
        assert False, "it is broken"

    @pytest.mark.timeout(0.5)
    def test_hangs():
        failures("hangs")
        time.sleep(1000)
    """
    code, lines = suite(tmp_path, tests, *options())
    assert code == 1
    assert lines[-4:-2] == [
        "tests that failed again when repeated: 2",
        "  test_it.py::test_broken: AssertionError: it is broken",
    ]
    assert re.fullmatch(r"  test_it.py::test_hangs: .*Timeout \(>0.5s\).*", lines[-2])
    assert re.match(r"=+ 2 failed, 2 rerun in ", lines[-1])
    assert [(tmp_path / name).read_text() for name in ("broken", "hangs")] == ["xx", "xx"]


def test_a_run_without_repeats_says_so(tmp_path: Path) -> None:
    code, lines = suite(tmp_path, "def test_sound(): pass", *options())
    assert code == 0, lines
    assert lines[-2] == "repeated tests: none"
    assert re.match(r"=+ 1 passed in ", lines[-1])


def test_nothing_is_repeated_outside_make_test(tmp_path: Path) -> None:
    code, lines = suite(tmp_path, "def test_flaky(): assert failures('flaky')")
    assert code == 1
    assert not any(line.startswith(("tests that", "repeated tests")) for line in lines)
    assert (tmp_path / "flaky").read_text() == "x"
