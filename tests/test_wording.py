"""A misspelled word of any setting is answered by the word that was meant, and hints name commands that work here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import evergrad as eg
from evergrad.checkpoint.catalogue.export import _target_format
from evergrad.checkpoint.tiers.base import read_tiers
from evergrad.cli import main
from evergrad.injection.faults import fault_of
from evergrad.recovery.failures.schedule import Failure
from evergrad.study.comparisons import compare_cells
from evergrad.study.plan import Plan
from evergrad.study.plan_files import parse, read_plan_text
from evergrad.study.results import Results
from evergrad.training.settings import Training
from evergrad.training.workloads.registry import check_fit
from refusals import refusal

SOURCE = Path(eg.__file__).parent
STUDY = 'study = "mine"\n[axes]\nflips = [1, 2]\n'


def plan(more: str = "", scale: str | None = None) -> Plan:
    return Plan.of(parse(more + STUDY if "=" in more.partition("\n")[0] else STUDY + more, "mine.toml"), scale)


def no_results() -> Results:
    from evergrad.study.folder import JournalContents
    from evergrad.study.results import StudyProgress, results_from

    return results_from(StudyProgress.of(plan()), JournalContents())


MISSPELLED: dict[str, tuple[Callable[[], Any], str]] = {
    "a bit field": (lambda: eg.BitFlip(bits="exponant"), "exponent"),
    "a bit field in capitals": (lambda: eg.BitFlip(bits="Mantisa"), "mantissa"),
    "a bit field of stuck bits": (lambda: eg.StuckAt(value=1, bits="exponent-mbs"), "exponent-msb"),
    "a bit field in words": (lambda: fault_of("bitflip:bits=exponant"), "exponent"),
    "a fault": (lambda: fault_of("bitflop"), "bitflip"),
    "a setting of a fault": (lambda: fault_of("scale:facter=3"), "factor"),
    "a role": (lambda: eg.inject("m.pt", eg.BitFlip(), count=1, where="role:modle", dry_run=True), "model"),
    "a way to sample": (lambda: eg.inject("m.pt", eg.BitFlip(), count=1, sampling="tensors", dry_run=True), "tensor"),
    "an element type": (
        lambda: eg.inject("m.pt", eg.BitFlip(), count=1, dtypes=["flaot32"], dry_run=True),
        "float32",
    ),
    "a digest": (lambda: eg.inject("m.pt", eg.BitFlip(), count=1, digest="block", dry_run=True), "blocks"),
    "a format": (lambda: eg.convert("m.pt", "x.bin", to="safetensers"), "safetensors"),
    "an ending": (lambda: eg.convert("m.pt", "x.safetensers"), ".safetensors"),
    "a format of an export": (lambda: _target_format(Path("x"), "x", "safetensers"), "safetensors"),
    "a tier": (lambda: read_tiers([{"kind": "memroy"}]), "memory"),
    "a codec": (lambda: eg.Compress("zst"), "zstd"),
    "a protocol": (lambda: eg.Persistent("gcss://bucket/x"), "gcs"),
    "what to do when busy": (lambda: eg.Checkpointer("run", when_busy="refues"), "refuse"),
    "a failure": (lambda: Failure.parse("kil rank=1 step=2"), "kill"),
    "a model": (lambda: check_fit("alexent", "digits"), "alexnet"),
    "data": (lambda: check_fit("alexnet", "digts"), "digits"),
    "a precision": (lambda: Training(precision="flaot32"), "float32"),
    "an optimizer": (lambda: Training(optimizer="adma"), "adam"),
    "a mechanism": (lambda: plan('[training]\nmechanism = "dpp"\n'), "ddp"),
    "a study of the gallery": (lambda: read_plan_text("bitflip-nve"), "bitflip-nev"),
    "a scale": (lambda: Plan.of(read_plan_text("bitflip-nev"), "papper"), "paper"),
    "a rule": (lambda: plan('[rules]\nabandon = ["nonfinite"]\n'), "non-finite"),
    "a watch": (lambda: plan('[rules]\nwatch = ["gaurds"]\n'), "guards"),
    "rows": (lambda: plan('rows = "flip"\n'), "flips"),
    "a target": (lambda: plan('[trial]\ntarget = "gradient"\n'), "gradients"),
    "a threshold's result": (lambda: plan('[thresholds]\nresult = "weight"\n'), "weights"),
    "a direction": (lambda: plan_of_command('direction = "lower"'), "lower_is_better"),
    "an axis": (lambda: compare_cells(no_results(), axis="flip"), "flips"),
}


def plan_of_command(more: str) -> Plan:
    command = 'command = "python x {checkpoint}"\nprepare = "python x {checkpoint}"\n'
    return Plan.of(parse(f'study = "c"\n[command]\n{command}{more}\n', "mine.toml"))


def test_a_misspelled_word_is_answered_by_the_one_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": torch.zeros(8)}}, "m.pt")
    for what, (use, meant) in MISSPELLED.items():
        said = refusal(use)
        assert f"Did you mean '{meant}'?" in said, f"{what}: {said}"
        assert "\n" not in said, f"{what}: {said}"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("inject m.pt --count 1 --bits exponant --out b.pt", "exponent"),
        ("inject m.pt --count 1 --fault bitflop --out b.pt", "bitflip"),
        ("inject m.pt --count 1 --fault stuckat:value=1 --out b.pt", "stuckat"),
        ("inject m.pt --count 1 --where role:modle --out b.pt", "model"),
        ("convert m.pt x.safetensers", ".safetensors"),
        ("run --strategy rolback train.py", "rollback"),
        ("study show bitflip-nev --scale papper", "paper"),
        ("study run bitflip-nev --executor dsk", "dask"),
        ("demo recvery", "recovery"),
        ("injct m.pt", "inject"),
    ],
)
def test_so_it_is_on_the_command_line_with_exit_code_2(
    words: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": torch.zeros(8)}}, "m.pt")
    Path("train.py").write_text("")
    assert main(words.split()) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert f"Did you mean '{meant}'" in told.err


@pytest.fixture
def installed(tmp_path: Path) -> Callable[..., str]:
    """The hint that a package says which lies in a site folder beside the record that pip keeps of its origin."""

    def hint(origin: object = None, *, package: Path | None = None, here: Path | None = None) -> str:
        site = tmp_path / "site"
        record = site / "evergrad-9.9.dist-info"
        record.mkdir(parents=True, exist_ok=True)
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: evergrad\nVersion: 9.9\n")
        if origin is not None:
            text = origin if isinstance(origin, str) else json.dumps(origin)
            (record / "direct_url.json").write_text(text)
        package = package or site / "evergrad"
        package.mkdir(parents=True, exist_ok=True)
        for name in ("__init__.py", "errors.py", "wording.py"):
            shutil.copy(SOURCE / name, package)
        code = "from evergrad.wording import install_hint; print(install_hint('report'))"
        paths = os.pathsep.join(dict.fromkeys([str(package.parent), str(site)]))
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            env={"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
            cwd=here or tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return hint


def test_a_hint_for_a_clone_installs_the_clone_from_wherever_it_is_typed(
    installed: Callable[..., str], tmp_path: Path
) -> None:
    clone = tmp_path / "my clone"
    (clone / "src").mkdir(parents=True)
    (clone / "pyproject.toml").write_text("")
    editable = {"url": clone.as_uri(), "dir_info": {"editable": True}}
    package = clone / "src" / "evergrad"
    assert installed(editable, package=package, here=clone) == "pip install -e '.[report]'"
    assert installed(editable, package=package) == f"pip install -e '{clone}[report]'"
    assert installed("{}", package=package, here=clone) == "pip install -e '.[report]'", "on the path, not installed"
    copied = {"url": clone.as_uri(), "dir_info": {}}
    assert installed(copied, here=clone) == "pip install '.[report]'", "a copy in a site folder"
    assert installed(copied) == f"pip install '{clone}[report]'"


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "pip install 'evergrad[report]'"),
        ({}, "pip install 'evergrad[report]'"),
        ("no JSON", "pip install 'evergrad[report]'"),
        ("[1]", "pip install 'evergrad[report]'"),
        ({"url": "file:///gone/clone", "dir_info": {}}, "pip install 'evergrad[report]'"),
        (
            {"url": "https://git.example/e.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}},
            "pip install 'evergrad[report] @ git+https://git.example/e.git@abc123'",
        ),
        (
            {"url": "https://host.example/evergrad-9.9.whl", "archive_info": {}},
            "pip install 'evergrad[report] @ https://host.example/evergrad-9.9.whl'",
        ),
    ],
)
def test_a_hint_for_an_installed_package_names_where_it_came_from(
    installed: Callable[..., str], origin: object, expected: str
) -> None:
    assert installed(origin) == expected


@pytest.mark.check
def test_every_hint_is_made_by_one_function_and_names_an_extra_that_there_is() -> None:
    extras = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if path.name != "wording.py":
            assert not re.search(r"pip install \S*evergrad", text), path
        found |= set(re.findall(r"install_hint\(['\"](\w+)['\"]\)", text))
    assert found >= {"report", "studies", "s3", "zstd", "dask", "slurm", "yaml", "hdf5"}
    assert found <= set(extras)
