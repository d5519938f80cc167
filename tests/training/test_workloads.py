"""Workloads by name and of one's own: what fits is made, what does not is one line that says what would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evergrad.errors import UsageError
from evergrad.training import Training, Workload
from evergrad.training.settings import Direction
from evergrad.training.workloads.registry import DATA, MODELS, compatible_data, make_workload


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERGRAD_DATA", raising=False)


@pytest.mark.check
def test_plans_list_the_names_without_torch() -> None:
    check = "import evergrad.training.workloads.registry, sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns_from_what_fits_it(model: str) -> None:
    before = torch.get_rng_state()
    workload = make_workload(Training(model=model, data=compatible_data(model)[0], width=0.05, samples=16))
    assert torch.equal(torch.get_rng_state(), before), "making a workload draws nothing"
    data = workload.data
    assert len(data.train_x) == len(data.train_y) == 16
    made = workload.model().eval()
    assert workload.facts["parameters"] == f"{sum(weight.numel() for weight in made.parameters()):,}"
    with torch.no_grad():
        outputs = made(data.test_x[:8])
    if model == "edsr":  # gives images, judged in dB
        assert outputs.shape == data.test_y[:8].shape
        assert workload.metric(outputs, data.test_y[:8]) > 0
    else:
        assert outputs.shape[:-1] == data.test_y[:8].shape
        assert outputs.shape[-1] > int(data.train_y.max())
        assert 0 <= workload.metric(outputs, data.test_y[:8]) <= 1
    assert workload.loss(outputs, data.test_y[:8]).isfinite()


def test_facts_tell_width_parameters_data_and_what_differs() -> None:
    facts = make_workload(Training(model="vgg16", width=0.125, samples=500)).facts
    assert facts["model"] == "vgg16"
    assert facts["width"] == "0.125"
    assert facts["data"].startswith("digits: the first 500 of 1437 training and 360 test samples of 8×8 pixels; scikit")
    assert "digits of 8×8 pixels instead of ImageNet" in facts["differs"]
    assert facts["differs"].endswith("0.125 of the published width")
    whole = make_workload(Training(model="gpt", data="text")).facts
    assert "published width" not in whole["differs"]
    assert "Python's own documentation" in whole["data"]


def test_the_first_samples_are_taken() -> None:
    few, all_of_them = (make_workload(Training(width=0.05, samples=samples)).data for samples in (100, 0))
    assert torch.equal(few.train_x, all_of_them.train_x[:100])
    assert torch.equal(few.train_y, all_of_them.train_y[:100])
    assert torch.equal(few.test_x, all_of_them.test_x)
    with pytest.raises(UsageError, match="digits has 1437 training samples, found 1438"):
        make_workload(Training(width=0.05, samples=1438))


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({"model": "resnet51"}, r"model: expected alexnet, .* or edsr, found 'resnet51'. Did you mean 'resnet5?1?0?"),
        ({"data": "digit"}, r"data: expected digits, .* or photos, found 'digit'. Did you mean 'digits'\?"),
        ({"model": "gpt"}, "data: model gpt learns from text, found 'digits'"),
        ({"data": "text"}, "data: model alexnet learns from digits, fashion-mnist or mnist, found 'text'"),
    ],
)
def test_wrong_names_list_those_that_will_do(told: dict[str, str], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        make_workload(Training(**told))


def test_every_name_of_data_fits_some_model() -> None:
    assert {data for model in MODELS for data in compatible_data(model)} == set(DATA)


MINE = """
import torch
from evergrad.training import Dataset, Workload
from beside import FEATURES

def mine():
    x, y = torch.randn(60, FEATURES), torch.randint(0, 2, (60,))
    data = Dataset("noise", x[:50], y[:50], x[50:], y[50:], chance=0.5)
    return Workload(model=lambda: torch.nn.Linear(FEATURES, 2), data=data)

def of_the_training(training):
    workload = mine()
    assert training.width == 0.5
    return workload
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside.py").write_text("FEATURES = 20\n")
    return tmp_path


@pytest.mark.parametrize("function", ["mine", "of_the_training"])
def test_a_workload_of_your_own_is_a_few_lines(folder: Path, function: str) -> None:
    before = list(sys.path)
    workload = make_workload(Training(workload=f"{folder / 'mine.py'}:{function}", width=0.5, samples=40))
    assert isinstance(workload, Workload)
    assert workload.data.train_x.shape == (40, 20)
    assert workload.facts["data"] == "noise: the first 40 of 50 training and 10 test samples"
    assert workload.model()(workload.data.test_x).shape == (10, 2)
    assert sys.path == before
    assert "mine" not in sys.modules


def test_a_workload_may_come_from_a_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    try:
        assert len(make_workload(Training(workload="mine:mine")).data.train_x) == 50
    finally:
        sys.modules.pop("mine", None)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("def f():\n    return 1 / 0\n", r"own\.py:2: ZeroDivisionError: division by zero$"),
        ("x = 1\nimport nowhere_at_all\n", r"own\.py:2: ModuleNotFoundError: No module named 'nowhere_at_all'$"),
        ("def f(:\n", r"own\.py:1: SyntaxError: "),
        ("raise SystemExit\n", r"own\.py:1: SystemExit$"),
        ("import torch\ndef f():\n    torch.zeros(2) @ torch.zeros(3)\n", r"own\.py:3: RuntimeError: "),
        ("def g():\n    pass\n", r"no function 'f' in .*own\.py\."),
        ("def f(a, b):\n    pass\n", r"expected a function of nothing or of the training, found \(a, b\)$"),
        ("def f():\n    return 'model'\n", r"expected an evergrad\.training\.Workload, found 'model'$"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_with_its_place(tmp_path: Path, code: str, line: str) -> None:
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(UsageError, match=line):
        make_workload(Training(workload=f"{tmp_path / 'own.py'}:f"))


@pytest.mark.parametrize(
    ("spelled", "line"),
    [
        ("mine.py", r"expected file\.py:function or package\.module:function, found 'mine\.py'"),
        ("no/such.py:f", r"no file /.*no/such\.py$"),
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'$"),
    ],
)
def test_a_workload_that_is_not_there_is_one_line(spelled: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        make_workload(Training(workload=spelled))


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ("Dataset('d', x, x[:3], x, x)", r"train: expected as many targets as samples, found \[5, 3\]$"),
        ("Dataset('d', x, x, [1], x)", r"test_x: expected a tensor of samples, found \[1\]$"),
        ("Dataset('d', x, x, x[:0], x)", r"test_x: expected a tensor of samples, found tensor\("),
        ("3", r"data: expected an evergrad\.training\.Dataset, found 3$"),
    ],
)
def test_data_of_your_own_are_checked(tmp_path: Path, data: str, line: str) -> None:
    start = "import torch\nfrom evergrad.training import Dataset, Workload\nx = torch.zeros(5, 2)\n"
    (tmp_path / "own.py").write_text(f"{start}def f():\n    return Workload(list, {data})\n")
    with pytest.raises(UsageError, match=line):
        make_workload(Training(workload=f"{tmp_path / 'own.py'}:f"))


@pytest.mark.parametrize("data", ["digits", "text", "photos"])
def test_the_metrics_of_built_in_workloads_are_higher_for_better_answers(data: str) -> None:
    model = {"digits": "alexnet", "text": "gpt", "photos": "edsr"}[data]
    workload = make_workload(Training(model=model, data=data, width=0.125))
    assert workload.judged_by is Direction.HIGHER
    targets = workload.data.test_y
    if data == "photos":
        right, wrong = targets.double(), targets.double() + 0.1
    else:
        right = torch.nn.functional.one_hot(targets).double()
        wrong = -right
    assert workload.metric(right, targets) > workload.metric(wrong, targets)
    assert workload.data.chance is not None
    assert workload.metric(right, targets) > workload.data.chance


def test_a_direction_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom evergrad.training import Dataset, Workload\n"
        "x = torch.zeros(4, 2)\ny = torch.zeros(4).long()\n"
        "def make():\n    return Workload(model=lambda: torch.nn.Linear(2, 2), data=Dataset('d', x, y, x, y), "
        "direction='lower_is_beter')\n"
    )
    with pytest.raises(UsageError, match=r"direction: expected higher_is_better or lower_is_better, found 'lower_is_b"):
        make_workload(Training(workload="own.py:make", base=str(tmp_path)))
