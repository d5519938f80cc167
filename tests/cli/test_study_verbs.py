"""`evergrad study`: a study from its plan to its tables, on the command line."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evergrad.cli import main

TOYS = Path(__file__).parents[1] / "study" / "toys.py"
PLAN = f"""
study = "toy"
title = "A toy"
source = "nobody"

[axes]
fault = ["bitflip:bits=exponent-msb", "bitflip:bits=mantissa"]
flips = [1, 3]

[training]
workload = "{TOYS}:sensitive"
batch_size = 32

[sampling]
trainings = 4
"""

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """A command in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["study", *map(str, arguments)])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that has been run, by real workers."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "toy.toml").write_text(PLAN)
    assert main(["study", "run", str(folder / "toy.toml"), "--out", str(folder / "out"), "--workers", "2"]) == 0
    return folder / "out"


def test_a_study_ends_in_cells_with_intervals(study: Path, say: Say) -> None:
    code, out, _ = say("table", study, "--json")
    assert code == 0
    told = json.loads(out)
    assert (told["study"], told["trials"], len(told["cells"])) == ("toy", 16, 4)
    for cell in told["cells"]:
        assert set(cell) >= {
            "axes", "trainings", "identical", "changed", "degraded", "nev", "failed", "unknown", "nev_interval",
        }  # fmt: skip
        names = ("identical", "changed", "degraded", "nev", "failed", "unknown")
        assert cell["trainings"] == 4 == sum(cell[name] for name in names)
        low, high = cell["nev_interval"]
        assert 0 <= low <= cell["nev"] / 4 <= high <= 1
        hit = cell["axes"]["fault"] == "bitflip:bits=exponent-msb"
        assert cell["nev"] == (4 if hit else 0), cell
        assert cell["axes"]["flips"] in (1, 3)


def test_a_study_that_is_complete_runs_nothing_again(study: Path, say: Say) -> None:
    before = (study / "journal.jsonl").read_bytes()
    code, out, _ = say("run", study.parent / "toy.toml", "--out", study)
    assert code == 0
    assert "16 trials in" in out
    assert (study / "journal.jsonl").read_bytes() == before
    code, out, _ = say("status", study)
    assert "toy: complete" in out
    assert "16 of 16" in out
    told = json.loads(say("status", study, "--json")[1])
    assert (told["running"], told["done"], told["trials"], told["complete_cells"]) == (False, 16, 16, 4)


@pytest.mark.parametrize("form", ["rich", "csv", "markdown", "latex"])
@pytest.mark.parametrize("layout", ["summary", "paper", "comparisons"])
def test_tables_come_in_every_form_and_say_how_they_were_made(study: Path, say: Say, form: str, layout: str) -> None:
    code, out, _ = say("table", study, "--layout", layout, "--format", form)
    assert code == 0
    text = " ".join(out.split())
    for words in ("sensitive", "wilson, 95", "seed"):
        assert words in text, words
    if layout != "comparisons":
        assert "100" in text


def test_an_export_has_every_trial_and_a_trial_replayed_alone_is_the_same(
    study: Path, say: Say, tmp_path: Path
) -> None:
    code, _, _ = say("export", study, "--to", tmp_path / "out")
    assert code == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *(f"{kind}.{end}" for kind in ("summary", "published", "comparisons") for end in ("csv", "md", "tex")),
        "results.json", "trials.csv", "plan.toml",
    }  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "out" / "trials.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 16
    assert {row["outcome"] for row in rows if "msb" in row["fault"]} == {"nev"}
    code, out, _ = say("replay", study, rows[0]["trial"])
    assert (code, "the same bits as in the study: yes" in out) == (0, True)
    assert "model/weight[" in out
    told = json.loads(say("replay", study, rows[-1]["trial"], "--json")[1])
    assert told["same"]
    assert told["was"]["digest"] == told["now"]["digest"]


def test_a_dry_run_tells_trials_time_and_width_and_touches_nothing(study: Path, say: Say, tmp_path: Path) -> None:
    told = json.loads(say("run", study.parent / "toy.toml", "--dry-run", "--json", "--trials-per-cell", 250)[1])
    assert (told["trials"], told["cells"]) == (1000, 4)
    assert told["seconds"] > 0
    assert 0.061 < told["half_width"]["rate 0.5"] < 0.063
    out = say("run", study.parent / "toy.toml", "--dry-run", "--out", tmp_path / "not")[1]
    assert "trials          16" in out
    assert not (tmp_path / "not").exists()


def test_the_gallery_is_listed_and_shown(say: Say) -> None:
    told = json.loads(say("list", "--json")[1])
    assert {"bitflip-nev", "inference"} <= {one["study"] for one in told["studies"]}
    assert "bitflip-nev" in say("list")[1]
    out = say("show", "bitflip-nev", "--scale", "paper")[1]
    for words in ("12 cells × 250 trainings = 3,000", "CLUSTER 2021", "differs", "fashion-mnist", "width 1"):
        assert words in out, words
    assert say("show", "bitflip-nev", "--plan")[1].startswith("study = ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "bitflip-nev"], "expected --out DIR"),
        (["run", "bitflip-nevv", "--out", "x"], "Did you mean 'bitflip-nev'"),
        (["run", "bitflip-nev", "--scale", "huge", "--out", "x"], "expected tiny, small, gpu or paper"),
        (["run", "bitflip-nev", "--executor", "cloud", "--out", "x"], "--executor: expected local, dask or slurm"),
        (["run", "bitflip-nev", "--scheduler", "tcp://h:1", "--out", "x"], "scheduler: goes with executor dask"),
        (["table", "nowhere"], "holds no study"),
        (["status", "nowhere"], "holds no study"),
        (["export", "nowhere"], "holds no study"),
        (["replay", "nowhere", "ab"], "holds no study"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = say(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_tables_and_plans_need_no_torch() -> None:
    import subprocess

    code = (
        "import evergrad.study as s, evergrad.study.tables, evergrad.study.results, evergrad.study.statistics, sys\n"
        "s.Plan.of(s.read_plan_text('bitflip-nev'), 'tiny'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


PROGRAM = """
import json, sys
import numpy as np
checkpoint, output = sys.argv[1:3]
if checkpoint == "new":
    np.savez(output, weight=np.linspace(0.1, 0.9, 50, dtype=np.float32))
else:
    weight = np.load(checkpoint)["weight"]
    for epoch in (1, 2):
        print("epoch", epoch, "of a program that knows nothing of studies")
        print(json.dumps({"epoch": epoch, "loss": float(abs(weight).max()), "accuracy": float((weight > 0).mean())}))
    np.savez(output, weight=weight)
"""


def test_any_program_can_be_studied_with_the_same_plan(tmp_path: Path, say: Say) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "plan.toml").write_text(
        'study = "program"\n[command]\nprepare = "python train.py new {checkpoint}.npz"\n'
        'command = "python train.py {checkpoint}.npz {output}.npz"\n'
        '[axes]\nfault = ["bitflip:bits=exponent-msb", "bitflip:bits=sign", "bitflip:bits=31"]\n'
        "[sampling]\ntrainings = 2\n"
    )
    out = tmp_path / "out"
    code, _, err = say("run", tmp_path / "plan.toml", "--out", out, "--workers", 1)
    assert code == 0, err
    cells = json.loads(say("table", out, "--json")[1])["cells"]
    outcomes = ("identical", "changed", "degraded", "nev", "failed", "unknown")
    found = {cell["axes"]["fault"]: [name for name in outcomes if cell[name] == 2] for cell in cells}
    assert found == {
        "bitflip:bits=exponent-msb": ["nev"],
        "bitflip:bits=sign": ["changed"],
        "bitflip:bits=31": ["identical"],
    }
    assert {cell["axes"]["flips"] for cell in cells} == {1}
    # A program that was altered since is not the one that the golden run is of.
    (tmp_path / "train.py").write_text(PROGRAM.replace("(weight > 0)", "(weight > 0.5)"))
    code, _, err = say("run", tmp_path / "plan.toml", "--out", out, "--workers", 1, "--trials-per-cell", 3)
    assert (code, "made twice, differs" in err, "choose another folder" in err) == (2, True, True), err


RISING = """
import json, sys
import numpy as np
checkpoint, output = sys.argv[1:3]
if checkpoint == "new":
    np.savez(output, weight=np.full(50, 2.0, dtype=np.float32))
else:
    weight = np.load(checkpoint)["weight"]
    print(json.dumps({"loss": float((weight**2).mean()), "m": float((weight**2).mean())}))
"""


@pytest.mark.parametrize(
    ("metric", "outcome", "words"),
    [
        ('metric = "loss"', "degraded", "metric loss: lower is better, by its name"),
        ('metric = "m"\ndirection = "lower_is_better"', "degraded", "metric m: lower is better, as the plan states"),
        ('metric = "loss"\ndirection = "higher_is_better"', "changed", "metric loss: higher is better, as the plan"),
    ],
)
def test_a_program_whose_loss_rises_is_degraded_in_every_place_that_says_so(
    tmp_path: Path, say: Say, metric: str, outcome: str, words: str
) -> None:
    (tmp_path / "train.py").write_text(RISING)
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f'study = "rising"\n[command]\nprepare = "python train.py new {{checkpoint}}.npz"\n{metric}\n'
        'command = "python train.py {checkpoint}.npz none"\n[trial]\nfault = "scale:factor=9"\n'
        "[sampling]\ntrainings = 2\n"
    )
    shown = say("show", plan)[1]
    assert words in " ".join(shown.split())
    out = tmp_path / "out"
    code, _, err = say("run", plan, "--out", out, "--workers", 1)
    assert code == 0, err
    (cell,) = json.loads(say("table", out, "--json")[1])["cells"]
    assert cell["golden"] == 4.0
    assert cell["final"] > 4.02, "the loss has risen"
    assert cell[outcome] == 2
    lower = outcome == "degraded"
    assert cell["direction"] == ("lower_is_better" if lower else "higher_is_better")
    table = " ".join(say("table", out)[1].split())
    assert words in table
    side = "higher" if lower else "lower"
    assert f"degraded: metric {side} than the golden run's by more than 0.02" in table
    assert ("above 0 is worse" in table) is lower
    code, told, err = say("report", out)
    assert code == 0, err
    assert ("2 degraded (AccR)" if lower else "2 changed") in told
    page = (out / "report.html").read_text()
    assert ("Final metric, lower is better" in page) is lower
    # The worst trials are those with the highest loss, or none where that is no worsening.
    assert (f"evergrad study replay {out}" in page) is lower
