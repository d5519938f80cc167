"""Any program at all can be studied: what it prints is read, what it does is bounded, nothing of it stays."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evergrad.errors import UsageError
from evergrad.study.external_process import LineSplitter
from evergrad.study.external_training import (
    NumberExtractor,
    ProgramReadings,
    ThinnedNumbers,
    check_command,
    make_golden,
    run_trial,
)
from evergrad.study.trials import Command, Observation, Outcome, Rules, Trial, TrialEnd, judge

# A training of 16 float32 that are 1, without any import that takes time: behind 128 bytes of .npy header.
PROGRAM = """
import json, os, subprocess, sys, time
from array import array
def load(path):
    return array("f", open(path, "rb").read()[128:])
def save(path, numbers):
    head = b"\\x93NUMPY\\x01\\x00v\\x00{'descr': '<f4', 'fortran_order': False, 'shape': (16,), }"
    open(path, "wb").write(head.ljust(127) + b"\\n" + numbers.tobytes())
clean = array("f", [1.0] * 16)
path = sys.argv[1]
"""
HEALTHY = """
numbers = load(path)
for epoch in range(2):
    numbers = array("f", [n * 0.5 for n in numbers])
    print(json.dumps({"epoch": epoch, "loss": sum(numbers), "accuracy": 1 - abs(sum(numbers) - 4) / 100}))
if len(sys.argv) > 2:
    save(sys.argv[2], numbers)
"""
# What a program does once it meets a fault.
IF_HIT = "if load(path) != clean:\n"
LEAVE_ONE = """
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=sys.stderr)
    open("child", "w").write(str(child.pid))
"""


class Study:
    """A program in a folder of its own, with its golden run."""

    def __init__(self, folder: Path, body: str, arguments: str = "{checkpoint}", **settings: object) -> None:
        self.folder = folder / "the study's folder"
        self.folder.mkdir()
        (self.folder / "train.py").write_text(PROGRAM + body)
        np.save(self.folder / "clean.npy", np.ones(16, np.float32))
        told = {"command": f"python -S train.py {arguments}", "checkpoint": "clean.npy", "folder": str(self.folder)}
        self.command = Command(**told | settings)  # type: ignore[arg-type]
        self.place = folder / "golden"
        self.place.mkdir()
        self.golden, self.checkpoint = make_golden(self.command, self.place)
        self.scratch = folder / "scratch"
        self.scratch.mkdir()

    def trial(self, flips: int = 1, fault: str = "bitflip:bits=sign", **settings: object) -> Observation:
        told = {"where": "", "seed": 1} | settings
        trial = Trial(id="t", axes={}, repetition=0, training=self.command, fault=fault, flips=flips, **told)  # type: ignore[arg-type]
        before = self._kept()
        seen = run_trial(self.command, self.checkpoint, self.golden, trial, self.scratch)
        assert list(self.scratch.iterdir()) == []
        assert self._kept() == before
        return seen

    def _kept(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.place.rglob("*") if path.is_file()}

    def has_left_one(self) -> bool:
        child = self.folder / "child"
        return child.exists() and child.read_text() != ""

    def left_behind(self) -> int:
        return int((self.folder / "child").read_text())


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_trial_sees_the_metrics_losses_and_final_state_of_a_program(tmp_path: Path) -> None:
    study = Study(tmp_path, HEALTHY, "{checkpoint} {output}")
    assert study.golden.end is TrialEnd.FINISHED
    assert study.golden.metrics == (0.96, 1.0)
    assert study.golden.losses.values == (8.0, 4.0)
    assert study.golden.seconds > 0
    unhurt = study.trial(flips=0)
    assert (unhurt.metrics, unhurt.digest) == (study.golden.metrics, study.golden.digest)
    assert judge(unhurt, study.golden) is Outcome.IDENTICAL
    hurt = study.trial(flips=2)
    assert (hurt.injected, hurt.changed, hurt.places, hurt.steps) == (2, 2, 16 * 32, 2)
    assert hurt.losses.values == (6.0, 3.0)
    assert hurt.digest not in ("", study.golden.digest)
    assert judge(hurt, study.golden) is Outcome.CHANGED
    assert replace(study.trial(flips=2), seconds=0) == replace(hurt, seconds=0), "a trial replayed alone is the same"


def test_numbers_are_found_by_a_pattern_and_prepare_writes_the_checkpoint(tmp_path: Path) -> None:
    body = """
if sys.argv[2:] == ["prepare"]:
    save(path, clean)
else:
    print(f"[epoch 1] loss={sum(load(path)):.3f}, top-1 {len(load(path))} %", end="")
    save(path, array("f", [7.0] * 16))
"""
    study = Study(
        tmp_path,
        body,
        "{checkpoint}.npy",
        checkpoint="",
        prepare="{python} -S train.py {checkpoint}.npy prepare",
        metric=r"pattern:top-1 (\d+) %",
        loss=r"pattern:loss=(\S+),",
    )
    assert study.checkpoint.name == "checkpoint.npy"
    assert study.checkpoint.stat().st_size == 128 + 64
    assert (study.golden.metrics, study.golden.losses.values) == ((16.0,), (16.0,))
    assert study.trial().losses.values == (14.0,)


def test_a_loss_that_is_no_number_ends_the_program_and_all_it_has_started(tmp_path: Path) -> None:
    abandon = IF_HIT + LEAVE_ONE + '    print(\'{"loss": NaN}\\n{"loss": 3}\'); time.sleep(1000)'
    study = Study(tmp_path, abandon + HEALTHY)
    seen = study.trial()
    assert (seen.end, seen.reason) == (TrialEnd.ABANDONED, "non-finite loss after step 1")
    assert (seen.nonfinite_at, seen.nonfinite_in, seen.steps) == (1, "loss", 1)
    assert is_gone(study.left_behind())
    assert judge(seen, study.golden) is Outcome.NEV


def test_without_the_rule_a_program_goes_on_after_what_is_no_number(tmp_path: Path) -> None:
    body = IF_HIT + '    print(\'{"loss": NaN}\\n{"loss": 1e20, "accuracy": "inf"}\')' + HEALTHY
    seen = Study(tmp_path, body).trial(rules=Rules(abandon=()))
    assert (seen.end, seen.steps, len(seen.metrics)) == (TrialEnd.FINISHED, 4, 3)
    assert (seen.nonfinite_at, seen.nonfinite_in, seen.extreme_at, seen.extreme_in) == (1, "loss", 2, "loss")


def test_a_crash_is_told_by_the_last_line_of_its_errors(tmp_path: Path) -> None:
    study = Study(tmp_path, HEALTHY + IF_HIT + '    raise ValueError("bad weights")')
    seen = study.trial()
    assert (seen.end, seen.reason) == (TrialEnd.CRASHED, "exit code 1: ValueError: bad weights")
    assert len(seen.metrics) == 2
    assert judge(seen, study.golden) is Outcome.FAILED


def test_a_program_that_is_killed_or_leaves_a_process_behind_has_ended(tmp_path: Path) -> None:
    study = Study(tmp_path, HEALTHY + IF_HIT + LEAVE_ONE + "    os.kill(os.getpid(), 11)")
    seen = study.trial()
    assert (seen.end, seen.reason) == (TrialEnd.CRASHED, "SIGSEGV: no error was printed")
    assert is_gone(study.left_behind())


def test_a_program_that_overruns_its_limit_is_ended_with_its_children(tmp_path: Path) -> None:
    study = Study(tmp_path, IF_HIT + LEAVE_ONE + "    time.sleep(1000)" + HEALTHY)
    for limit in (0.5, 2.0, 8.0, 32.0):  # until the program has had the time to start its child
        study.command = replace(study.command, timeout_s=limit)
        seen = study.trial()
        assert (seen.end, seen.metrics) == (TrialEnd.OVERTIME, ())
        if study.has_left_one():
            break
    assert is_gone(study.left_behind())


def test_a_program_ends_with_whoever_waits_for_it(tmp_path: Path) -> None:
    program = "import fcntl, time\nfile = open('lock', 'w')\nfcntl.flock(file, 2)\nprint('locked')\ntime.sleep(1000)"
    waiting = (
        "import os, pathlib, sys\nfrom evergrad.study.external_process import run_program\n"
        "run_program([sys.executable, '-S', '-u', '-c', sys.argv[1]], lambda line: print(line, flush=True),"
        " folder=pathlib.Path('.'), environment=os.environ)"
    )
    whoever = subprocess.Popen([sys.executable, "-c", waiting, program], cwd=tmp_path, stdout=subprocess.PIPE)
    with whoever, (tmp_path / "lock").open("w") as lock:
        assert whoever.stdout is not None
        assert whoever.stdout.readline() == b"locked\n"
        whoever.send_signal(signal.SIGKILL)
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits until the program is gone


def test_a_state_that_is_no_number_at_the_restart_is_not_trained_at_all(tmp_path: Path) -> None:
    study = Study(tmp_path, HEALTHY + IF_HIT + "    open('was-run', 'w')")
    seen = study.trial(fault="setvalue:value=nan")
    assert (seen.end, seen.nonfinite_at, seen.nonfinite_in) == (TrialEnd.ABANDONED, 0, "state")
    seen = study.trial(fault="scale:factor=1e20", rules=Rules(abandon=("extreme",)))
    assert (seen.end, seen.extreme_at, seen.extreme_in) == (TrialEnd.ABANDONED, 0, "state")
    assert not (study.folder / "was-run").exists()


def test_only_numbers_that_the_golden_run_does_not_end_with_are_held_against_a_final_state(tmp_path: Path) -> None:
    mask = "numbers = load(path)\nnumbers[0] = float('inf')\n"
    body = mask + IF_HIT + "    numbers[3] = float('nan')" + "\nprint('{\"accuracy\": 1}')\nsave(sys.argv[2], numbers)"
    study = Study(tmp_path, body, "{checkpoint} {output}")
    unhurt, hurt = study.trial(flips=0), study.trial()
    assert (unhurt.nonfinite_at, unhurt.digest) == (None, study.golden.digest)
    assert (hurt.end, hurt.nonfinite_at, hurt.nonfinite_in) == (TrialEnd.FINISHED, 1, "state")


def test_a_program_that_writes_no_final_state_after_a_fault_is_said_to(tmp_path: Path) -> None:
    seen = Study(tmp_path, IF_HIT + "    sys.argv.pop()" + HEALTHY, "{checkpoint} {output}").trial()
    assert (seen.end, seen.digest) == (TrialEnd.FINISHED, "")
    assert "its final state cannot be read" in seen.reason


def test_a_checkpoint_of_several_files_is_found_by_the_name_that_its_framework_uses(tmp_path: Path, data: Path) -> None:
    body = """
import zlib
print(json.dumps({"accuracy": sum(zlib.crc32(open(path + end, "rb").read()) for end in sys.argv[2:])}))
"""
    ends = ".index .data-00000-of-00001"
    study = Study(tmp_path, body, f"{{checkpoint}} {ends}", checkpoint=str(data / "tf_ckpt" / "ckpt"))
    assert study.checkpoint.name == "ckpt"
    assert study.trial(flips=0).metrics == study.golden.metrics
    hurt = study.trial()
    assert hurt.end is TrialEnd.FINISHED
    assert hurt.metrics != study.golden.metrics


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_can_be_studied_as_it_is(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "examples" / "command_study"
    settings = tomllib.loads((folder / "study.toml").read_text())["command"]
    command = Command(**settings | {"folder": str(folder)})
    golden, checkpoint = make_golden(command, tmp_path)
    assert golden.metrics[-1] > 0.8
    trial = Trial(id="t", axes={}, repetition=0, seed=1, training=command, fault="setvalue:value=1e30", flips=9)
    seen = run_trial(command, checkpoint, golden, trial, tmp_path)
    assert judge(seen, golden, chance=command.chance) is Outcome.NEV


@pytest.mark.parametrize(
    ("body", "settings", "expected"),
    [
        ("print('{\"accuracy\": true}')", {}, "metric: expected a number on stdout by the key 'accuracy', found none"),
        ("print('a\\nb', file=sys.stderr); sys.exit(3)", {}, "did not finish: exit code 3: a / b"),
        ('print(\'{"accuracy": 1, "loss": NaN}\')', {}, "did not finish: non-finite loss after step 1"),
        ("time.sleep(1000)", {"timeout_s": 0.2}, "did not finish: ended after"),
        ("print(json.dumps({'accuracy': time.time()}))", {}, r"made twice, differs \(number 1 by the key 'accuracy': "),
        ("print(json.dumps({'accuracy': int(os.environ['EVERGRAD_TRIAL_SEED'])}))", {}, r"accuracy': 0.0 and 1.0\)"),
        (HEALTHY, {"command": "python -S train.py {checkpoint} {output} no"}, ""),
        ("print('{\"accuracy\": 1}')", {"command": "python -S train.py {checkpoint} {output}"}, "no state in {output}"),
        ("", {"checkpoint": "", "prepare": "python -S train.py {checkpoint}"}, "prepare: expected a checkpoint in"),
        ("x", {"checkpoint": "", "prepare": "python -S train.py {checkpoint}"}, "prepare: did not finish: exit code 1"),
    ],
)
def test_a_golden_run_that_trials_cannot_be_judged_by_is_refused(
    tmp_path: Path, body: str, settings: dict[str, object], expected: str
) -> None:
    if not expected:
        assert Study(tmp_path, body, **settings).golden.digest
        return
    with pytest.raises(UsageError, match=expected):
        Study(tmp_path, body, **settings)


def test_a_bound_that_the_golden_run_itself_exceeds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="golden run's own numbers, which reach 8, found 5"):
        Study(tmp_path, HEALTHY).trial(rules=Rules(extreme=5))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"command": "python train.py"}, r"command: expected the place {checkpoint}, which it goes on from"),
        ({"command": "python train.py {checkpiont}"}, "found {checkpiont}. Did you mean 'checkpoint'?"),
        ({"command": "python train.py '{checkpoint}"}, "command: no closing quotation"),
        ({"command": "python tran.py {checkpoint}"}, "command: there is no 'tran.py' in folder"),
        ({"command": "no-such-program {checkpoint}"}, "found no 'no-such-program' on PATH"),
        ({"command": "./train.py {checkpoint}"}, r"found no './train.py' in folder"),
        ({"prepare": "python train.py {checkpoint}"}, "checkpoint: expected either this, .* found both"),
        ({"checkpoint": ""}, "checkpoint: expected either this, .* found neither"),
        ({"checkpoint": "", "prepare": "python train.py"}, "prepare: expected the place {checkpoint}, which it writes"),
        ({"checkpoint": "", "prepare": "python train.py {checkpoint} {output}"}, "prepare: .* found {output}"),
        ({"checkpoint": "no.npy"}, "checkpoint: .*no.npy"),
        ({"checkpoint": "train.py"}, "checkpoint: .*train.py"),
        ({"metric": "pattern:(a"}, r"metric: '\(a' is not a regular expression"),
        ({"loss": "pattern:a"}, "loss: expected a regular expression whose first group is the number"),
        ({"metric": ""}, "metric: expected a key"),
        ({"folder": "/no/such"}, "folder: expected a folder that exists"),
        ({"timeout_s": -1}, "timeout_s: expected seconds"),
        ({"chance": "low"}, "chance: expected"),
        ({"loss": 3}, "loss: expected a text, found 3"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_runs(
    tmp_path: Path, settings: dict[str, object], expected: str
) -> None:
    (tmp_path / "train.py").touch()
    np.save(tmp_path / "clean.npy", np.ones(3))
    right = {"command": "python train.py {checkpoint}", "checkpoint": "clean.npy", "folder": str(tmp_path)}
    check_command(Command(**right))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=expected):
        check_command(Command(**right | settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"a": 0.5}', 0.5),
        (' {"b": "x", "a": -3} ', -3.0),
        ('{"a": -Infinity}', -np.inf),
        ('{"a": "NaN"}', np.nan),
        ('{"a": 1e999}', np.inf),
        ('{"a": -1' + "0" * 400 + "}", -np.inf),
        ('{"a": true}', None),
        ('{"a": "0.5"}', None),
        ('{"a": null}', None),
        ('{"a": 0.5', None),
        ('[{"a": 0.5}]', None),
        ('{"a": ' + "9" * 5000 + "}", None),
        ('{"a":' * 100_000 + "}" * 100_000, None),
        ("a 0.5", None),
    ],
    ids=range(14),
)
def test_numbers_in_json_lines_are_read_strictly(line: str, expected: float | None) -> None:
    read = ProgramReadings("a", "", Rules(abandon=()))
    read.read_line(line)
    np.testing.assert_equal(read.metrics.with_last(), () if expected is None else (expected,))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.5", 0.5), ("-1e-3", -1e-3), (".5", 0.5), ("-INF", -np.inf), ("nan", np.nan)]
    + [(text, None) for text in ("1_000", "٣", "0x10", "1,5", "nano", "", "1e")],
)
def test_numbers_by_a_pattern_are_read_strictly(text: str, expected: float | None) -> None:
    found = NumberExtractor("metric", r"pattern:acc: (\S*)").extract(f"acc: {text}", None)
    np.testing.assert_equal(found, expected)


def test_lines_are_cut_decoded_and_bounded(feed: Callable[..., list[str]]) -> None:
    assert feed(b"one\r", b"tw", b"o\n\xff\xfe", b"end") == ["one", "two", "\ufffd\ufffdend"]
    [long, short] = feed(*[b"x" * (1 << 19)] * 5, b"\nshort")
    assert (len(long), short) == (1 << 20, "short")


@pytest.fixture
def feed() -> Callable[..., list[str]]:
    def run(*pieces: bytes) -> list[str]:
        lines = LineSplitter()
        return [line for piece in pieces for line in lines.feed(piece)] + [lines.rest()]

    return run


def test_many_numbers_are_thinned_and_the_first_and_last_kept() -> None:
    kept = ThinnedNumbers()
    for number in range(10_000):
        kept.add(number)
    series, ends = kept.series(), kept.with_last()
    assert len(series.values) <= 200
    assert series.values == tuple(range(0, 10_000, series.every))
    assert (ends[0], ends[-1], len(ends)) == (0, 9999, len(series.values) + 1)
