"""Plans as data: what a grid comes to, and what is said of a wrong one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from evergrad.errors import UsageError
from evergrad.study.plan import SCALES, Plan
from evergrad.study.plan_files import gallery, parse, read_plan_text
from evergrad.training.settings import Training

GOOD = """study = "mine"
seed = 4

[axes]
model = ["alexnet", "vgg11"]
flips = [1, 10]

[training]
epochs = 2
width = 0.125

[trial]
fault = "bitflip:bits=exponent"

[sampling]
trainings = 5

[when.model.vgg11]
learning_rate = 0.001

[scale.tiny.sampling]
trainings = 2

[scale.small.axes]
flips = [7]
"""


def plan(text: str, scale: str | None = None) -> Plan:
    """The text as a plan in a file."""
    return Plan.of(parse(text, "mine.toml"), scale)


PUBLISHED_TRAININGS = {
    **dict.fromkeys(("bitflip-nev", "bit-position", "bit-mask", "precision"), 250),
    "ddp-single": 180,
    "ddp-multi": 18,
}


@pytest.mark.parametrize("name", gallery())
@pytest.mark.parametrize("scale", SCALES)
def test_every_study_of_the_gallery_is_sound_at_every_scale(name: str, scale: str) -> None:
    found = Plan.of(read_plan_text(name), scale)
    assert found.study == name
    assert found.question.endswith("?")
    assert found.source
    assert found.differs
    assert found.trials == sum(cell.trainings for cell in found.cells)
    assert not (scale == "tiny" and found.sampling.stop), "every cell of a tiny study has as many trainings"
    settings = [cell.training for cell in found.cells if isinstance(cell.training, Training)]
    assert len(settings) == len(found.cells)
    widths = {(one.model, one.width) for one in settings}
    assert len(widths) == len(dict(widths)), "a model has one width"
    assert scale != "paper" or {width for _, width in widths} == {1.0}
    if scale == "paper" and name in PUBLISHED_TRAININGS:
        assert {cell.trainings for cell in found.cells} == {PUBLISHED_TRAININGS[name]}


def test_the_gallery_asks_every_published_question_of_soft_errors() -> None:
    one_process = {"bitflip-nev", "bit-position", "bit-mask", "precision", "by-layer", "model-vs-optimizer"}
    ranks = {"ddp-single", "ddp-multi", "live-targets", "propagation", "guard", "overhead", "restart"}
    assert one_process | ranks | {"inference"} == set(gallery())


def test_a_grid_is_every_combination_and_every_trial_has_its_own_seed() -> None:
    found = plan(GOOD)
    assert [dict(cell.axes) for cell in found.cells] == [
        {"model": model, "flips": flips} for model in ("alexnet", "vgg11") for flips in (1, 10)
    ]
    trials = [cell.trial(number) for cell in found.cells for number in range(cell.trainings)]
    assert len({trial.seed for trial in trials}) == len({trial.id for trial in trials}) == found.trials == 8
    rates = {cell.training.learning_rate for cell in found.cells if isinstance(cell.training, Training)}
    assert rates == {0.01, 0.001}


def test_a_scale_changes_what_it_names_and_nothing_else() -> None:
    small = plan(GOOD, "small")
    assert [cell.flips for cell in small.cells] == [7, 7]
    assert {cell.trainings for cell in small.cells} == {5}
    assert {cell.training.epochs for cell in small.cells if isinstance(cell.training, Training)} == {2}


def test_trials_stay_the_same_when_a_plan_grows() -> None:
    before = {cell.trial(number).id for cell in plan(GOOD).cells for number in range(2)}
    grown = plan(GOOD.replace("flips = [1, 10]", "flips = [1, 10, 100]"), "small")
    more = plan(GOOD.replace("flips = [1, 10]", "flips = [1, 10, 100]").replace("trainings = 2", "trainings = 9"))
    assert before < {cell.trial(number).id for cell in more.cells for number in range(9)}
    assert before.isdisjoint(cell.trial(0).id for cell in grown.cells)


def test_what_a_trial_depends_on_is_in_its_id() -> None:
    first = plan(GOOD).cells[0].trial(0).id
    for old, new in [
        ("epochs = 2", "epochs = 3"),
        ("bits=exponent", "bits=sign"),
        ("seed = 4", "seed = 5"),
        ("[training]", "[rules]\nextreme = 1e5\n[training]"),
    ]:
        assert plan(GOOD.replace(old, new)).cells[0].trial(0).id != first, new
    assert plan(GOOD.replace('study = "mine"', 'study = "yours"')).cells[0].trial(0).id == first


def test_without_a_number_of_trainings_the_statistics_say_how_many() -> None:
    text = GOOD.replace("trainings = 5", "half_width = 0.05")
    assert {cell.trainings for cell in plan(text, "small").cells} == {385}
    assert plan(text.replace("0.05", "0.1"), "small").cells[0].trainings == 97


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('"alexnet", "vgg11"', '"alexnet", "vgg12"', 5, "model: expected alexnet, vgg11.* found 'vgg12'. Did you mean"),
        ("epochs = 2", 'epochs = "two"', 9, "epochs: expected a whole number, 0 or more, found 'two'"),
        (
            "epochs = 2",
            "epoch = 2",
            9,
            r"unknown key 'epoch' in \[training\]. Did you mean 'epochs'.* Allowed: workload",
        ),
        ("flips = [1, 10]", "flips = []", 6, "flips: expected a list of values"),
        ("flips = [1, 10]", "flips = [1, 1]", 6, "flips: every value once"),
        ("flips = [1, 10]", "flips = [0]", 6, "flips: expected a whole number, 1 or more, found 0"),
        ("flips = [1, 10]", 'flips = [1, "ten"]', 6, "flips: expected a whole number, 1 or more, found 'ten'"),
        ("flips = [1, 10]", "layers = [1]", 6, "unknown key 'layers' in .axes.. Did you mean 'layer'"),
        ("bits=exponent", "bits=expnent", 13, "expnent"),
        ("trainings = 5", "trainings = 0", 16, "trainings: expected a whole number, 1 or more, found 0"),
        ("trainings = 5", "half_width = 2", 16, "half_width: expected a number between 0 and 0.5"),
        ("width = 0.125", 'precision = "float8"', 10, "precision: expected float16, bfloat16, float32 or float64"),
        ("width = 0.125", 'data = "text"', 10, "alexnet learns from digits, fashion-mnist or mnist"),
        ("width = 0.125", 'mechanism = "dpp"', 10, "mechanism: expected single or ddp, found 'dpp'"),
        ("width = 0.125", 'mechanism = "ddp"\nranks = 3', 8, "batch_size: expected a multiple of the 3 ranks"),
        ("width = 0.125", "ranks = 2", 10, "ranks: the mechanism 'single' has 1, found 2"),
        ("[trial]", "[trial]\ntarget = 'wieghts'", 13, "target: expected state, weights, .*found 'wieghts'"),
        ("[trial]", "[trial]\nsaving = 'rooot'", 13, "saving: expected none, root or evergrad, found 'rooot'"),
        (
            "[trial]",
            "[trial]\ntarget = 'gradients'\nlayer = 'first'",
            14,
            "layer: goes with state.*of gradients say where",
        ),
        ("width = 0.125", 'mechanism = "ddp"\nranks = 200', 11, "ranks: expected at most 128"),
        ("width = 0.125", 'mechanism = "ddp"\nranks = 2\ndevice = "cuda:1"', 12, "device: ranks of ddp find their own"),
        ("[trial]", "[trial]\nstep = -1", 13, "step: expected a whole number, 0 or more, found -1"),
        ("[trial]", "[rules]\nwatch = ['time']\n[trial]", 13, "watch: expected a list of 'spread' and 'guards'"),
        ("learning_rate = 0.001", "learning_rate = 0", 19, "learning_rate: expected a number above 0, found 0"),
        ("learning_rate = 0.001", "flips = 3", 19, r"unknown key 'flips' in \[when.model.vgg11\]"),
        ("seed = 4", "seed = -1", 2, "seed: expected a whole number, 0 or more"),
        ('study = "mine"', "study = 3", 1, "study: expected a text, found 3"),
        ("[trial]", "[trial]\ncorrupt = 4", 13, "impossible cell .*corrupt 4 of 1"),
        ("[trial]", "[thresholds]\nresult = 'loss'\n[trial]", 13, "result: expected metric or weights, found 'loss'"),
        (
            "[trial]",
            "[rules]\nabandon = ['late']\n[trial]",
            13,
            "abandon: expected a list of 'non-finite' and 'extreme'",
        ),
        ("[when.model.vgg11]", "[when.modle.vgg11]", 18, "unknown axis 'modle' in .when.. Did you mean 'model'"),
        ("[scale.small.axes]", "[scale.small.axis]", 24, "unknown key 'axis' in .scale.small."),
    ],
)
def test_a_wrong_plan_names_the_line_and_what_is_allowed(old: str, new: str, line: int, words: str) -> None:
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    scale = "small" if "trainings" in old else None
    with pytest.raises(UsageError) as caught:
        plan(text, scale)
    assert str(caught.value).startswith(f"mine.toml, line {line}: "), caught.value
    assert re.search(words, str(caught.value)), caught.value


def test_what_is_no_plan_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"mine.toml: .*line 1.*A plan is TOML"):
        plan("study = = 3\n")
    with pytest.raises(UsageError, match="scale: expected tiny or small, found 'huge'"):
        plan(GOOD, "huge")
    with pytest.raises(UsageError, match=r"neither a study of the gallery nor a file. Did you mean 'bitflip-nev'"):
        read_plan_text("bitflp-nev")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is no text in UTF-8"):
        read_plan_text(tmp_path / "bytes.toml")


def test_files_that_a_plan_names_are_sought_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GOOD.replace('model = ["alexnet", "vgg11"]', 'workload = ["own.py:make"]')
    (tmp_path / "plan.toml").write_text(text.replace("[when.model.vgg11]\nlearning_rate = 0.001", ""))
    monkeypatch.chdir("/")
    training = Plan.of(read_plan_text(tmp_path / "plan.toml")).cells[0].training
    assert isinstance(training, Training)
    assert (training.workload, training.base) == ("own.py:make", str(tmp_path))
    assert training.key == replace(training, base="/elsewhere").key
    assert training.key != replace(training, workload="other/own.py:make").key


def test_a_plan_over_a_program_is_checked_too(toy_toml: Callable[..., str]) -> None:
    command = 'study = "c"\n[command]\ncommand = "python {check}"\nprepare = "python x {checkpoint}"\n'
    with pytest.raises(UsageError, match=r"mine.toml, line 3: command: .*\{check\}"):
        plan(command)
    with pytest.raises(UsageError, match=r"line 8: result: weights can be compared if the command has \{output\}"):
        plan(
            'study = "c"\n[command]\ncommand = "python a {checkpoint}"\nprepare = "python x {checkpoint}"\n'
            '[axes]\nflips = [1]\n[thresholds]\nresult = "weights"\n'
        )
    good = command.replace("check}", "checkpoint}", 1)
    for wrong in ("target = 'gradients'", "step = 3", "saving = 'root'"):
        with pytest.raises(UsageError, match=r"line 6: \w+: of a command only the checkpoint file can be hit"):
            plan(f"{good}[trial]\n{wrong}\n")
    with pytest.raises(UsageError, match=r"line 2: a plan has .command. or .training., not both"):
        plan(f"{command}[training]\nepochs = 1\n")


def test_a_table_has_other_columns_than_rows() -> None:
    one_axis = plan(
        GOOD.replace('model = ["alexnet", "vgg11"]\n', "").replace("[when.model.vgg11]\nlearning_rate = 0.001", "")
    )
    assert (one_axis.rows, one_axis.columns) == ("flips", "")
    assert (plan(GOOD).rows, plan(GOOD).columns) == ("flips", "model")
