"""The rules of the house: one-way imports, complete exports, no torch where none is needed."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from programs import run_python

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "evergrad"

# Each part may import the parts before it that are named here, and nothing else of ours.
_BASE = {"_digest", "_files", "_forkserver", "_jsonl", "_wire", "errors", "wording", "dtypes", "records"}
"""One place for one concept each: all parts may use them, and they use each other as said below."""

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "wording": {"errors"},
    "dtypes": set(),
    "records": {"dtypes"},
    "_digest": {"errors"},
    "_files": {"errors"},
    "_forkserver": {"records", "wording"},
    "_jsonl": {"_files"},
    "_wire": {"errors", "records"},
    "state": _BASE,
    "formats": {*_BASE, "state"},
    "injection": {*_BASE, "state", "formats"},
    "checkpoint": {*_BASE, "state", "formats"},
    "timeline": {*_BASE},
    "recovery": {*_BASE, "state", "formats", "injection", "checkpoint", "timeline"},
    "training": {*_BASE, "state", "formats", "injection"},
    "study": {*_BASE, "state", "formats", "injection", "checkpoint", "recovery", "training"},
    "report": {*_BASE, "state", "formats", "checkpoint", "recovery", "timeline", "training", "study"},
    "testing": {*_BASE, "state", "formats", "injection", "checkpoint", "timeline", "recovery", "study", "cli"},
    "doctor": {*_BASE, "evergrad"},
    "integrations": {*_BASE, "state", "formats", "checkpoint"},
    "cli": {
        *_BASE,
        *("evergrad", "doctor", "state", "formats", "injection", "checkpoint", "recovery", "timeline"),
        *("training", "study", "report"),
    },
    "__init__": {"errors", "records", "state", "formats", "injection", "checkpoint", "recovery", "study"},
    "__main__": {"cli"},
}

MODULES = sorted(SOURCE.rglob("*.py"))

# Modules that are used where torch is not: by the agent of a node, and on the machine of whoever reads results.
WITHOUT_TORCH = (
    "evergrad.timeline",
    "evergrad.checkpoint.agent.agent",
    "evergrad.recovery.decide",
    "evergrad.study.statistics",
    "evergrad.study.tables",
    *(f"evergrad.report.{path.stem}" for path in MODULES if path.parent == SOURCE / "report"),
)

MOST_DOTS = 3  # evergrad.checkpoint.agent.pipeline

SMALL = 120
"""A module of fewer lines that only one other imports belongs into that one."""

# Modules that are small for a reason: variants of a contract, and programs that are started by their name.
MAY_BE_SMALL = (
    "evergrad.formats.",
    "evergrad.checkpoint.tiers.",
    "evergrad.training.mechanisms.",
    "evergrad.study.executors.",
    "evergrad.cli.demo.trainer",
)


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def _part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _is_module(name: str) -> bool:
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            modules = [alias.name for alias in node.names if node.module == "evergrad" and _is_module(alias.name)]
            found |= {f"evergrad.{name}" for name in modules}
            if len(modules) < len(node.names):
                found.add(node.module)
    return found


def _modules_imported_by(path: Path) -> set[str]:
    """The modules of the package that one imports anywhere in it, `from package import module` among them."""
    known, found = set(map(_module_name, MODULES)), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {inner[name] if inner[name] in known else node.module for name in inner}
    return (found & known) - {_module_name(path)}


@pytest.mark.check
def test_no_module_lies_deeper_than_three_below_the_package() -> None:
    deep = [name for name in map(_module_name, MODULES) if name.count(".") > MOST_DOTS]
    assert deep == [], f"modules more than {MOST_DOTS} below evergrad: merge or move them"


@pytest.mark.check
def test_no_public_class_name_is_defined_twice() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(_module_name(path))
    twice = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert twice == {}, "public classes with the same name: rename all but one of each"


@pytest.mark.check
def test_no_small_module_is_imported_by_one_other_only() -> None:
    importers: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for name in _modules_imported_by(path):
            importers[name].append(_module_name(path))
    small = {}
    for path in MODULES:
        name = _module_name(path)
        is_small = len(importers[name]) == 1 and path.read_text().count("\n") < SMALL
        if is_small and path.name != "__init__.py" and not f"{name}.".startswith(MAY_BE_SMALL):
            small[name] = importers[name][0]
    assert small == {}, f"modules below {SMALL} lines with one importer: merge each into it"


@pytest.mark.check
def test_imports_go_one_way() -> None:
    for path in MODULES:
        allowed = MAY_IMPORT[_part(path)] | {_part(path)}
        for name in _imports(path):
            if name.split(".")[0] == "evergrad":
                part = name.split(".")[1] if "." in name else "evergrad"
                assert part in allowed, f"{_module_name(path)} may not import {name}"


@pytest.mark.check
def test_packages_say_what_they_export() -> None:
    for path in MODULES:
        if path.name != "__init__.py":
            continue
        module = importlib.import_module(_module_name(path))
        exported = module.__all__
        by_kind = sorted(exported, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
        assert exported == by_kind, f"{path}: constants, then classes, then functions, each sorted"
        assert len(set(exported)) == len(exported), path
        for name in exported:
            assert getattr(module, name) is not None


@pytest.mark.check
def test_every_public_name_of_the_package_has_a_home() -> None:
    import evergrad

    assert set(evergrad.__all__) == set(evergrad._HOMES)
    assert set(evergrad.__all__) <= set(dir(evergrad))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = evergrad.no_such_name


@pytest.mark.check
def test_no_part_of_the_package_hides_a_public_name() -> None:
    # Importing evergrad.inject would replace the function of that name by the module.
    import evergrad

    assert not set(evergrad.__all__) & {_part(path) for path in MODULES}


@pytest.mark.check
@pytest.mark.parametrize(
    "code",
    [
        "import evergrad",
        "import evergrad.state, evergrad.formats, evergrad.cli",
        "import evergrad as eg; eg.open_checkpoint('tests/data/lightning.ckpt').close()",
        "import evergrad as eg; ck = eg.open_checkpoint('tests/data/trainer/checkpoint-4')\n"
        "ck.read_bits(min(ck.tensors))",
        "import evergrad as eg; eg.compare('tests/data/sharded', 'tests/data/sharded')",
        "import evergrad as eg; eg.inject('tests/data/lightning.ckpt', eg.BitFlip('exponent'), count=9, dry_run=True)",
        "from evergrad.cli import main; main(['inspect', 'tests/data/user_class.pt', '--json'])",
    ],
)
def test_torch_is_not_imported_before_a_tensor_is_made(code: str) -> None:
    check = f"{code}\nimport sys\nassert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.check
def test_agent_reports_and_statistics_import_no_torch() -> None:
    check = f"""
import importlib, sys
for name in {WITHOUT_TORCH}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"{{name}} imports torch"
"""
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.check
def test_asking_for_help_imports_neither_torch_nor_numpy() -> None:
    check = (
        "from evergrad.cli import main\nmain(['--help'])\nimport sys\nassert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.check
def test_examples_in_docstrings_run() -> None:
    for path in MODULES:
        if ">>>" in path.read_text(encoding="utf-8"):
            results = doctest.testmod(importlib.import_module(_module_name(path)), optionflags=doctest.ELLIPSIS)
            assert results.failed == 0, path
            assert results.attempted or "+SKIP" in path.read_text(encoding="utf-8"), path


@pytest.mark.check
def test_nothing_in_the_source_unpickles_or_evaluates() -> None:
    for path in MODULES:
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not names & {"eval", "exec", "__import__"}, path
        assert not _imports(path) & {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}, path


# What changes file systems other than by `_files`, or appends to files other than by `_jsonl`, and why.
MAY_CALL: dict[str, set[str]] = {
    "_files.py": {"os.fsync", "os.rename", "os.link", "fcntl.flock"},
    "_jsonl.py": {"os.O_APPEND", "os.fdatasync"},
    "doctor.py": {"os.fsync"},  # how long that takes is what it measures
    "checkpoint/agent/agent.py": {"os.O_APPEND"},  # what the agent prints
    "recovery/launch/output.py": {"os.O_APPEND"},  # what ranks print
    "recovery/traceback_log.py": {"os.O_APPEND"},  # the same files
    "study/executors/worker_process.py": {"os.O_APPEND"},  # what workers print
}


@pytest.mark.check
def test_files_are_made_durable_renamed_locked_and_appended_to_in_one_place() -> None:
    names = {"fsync", "fdatasync", "replace", "rename", "renames", "link", "O_APPEND", "flock", "lockf"}
    for path in MODULES:
        called = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id in ("os", "fcntl") and node.attr in names:
                    called.add(f"{node.value.id}.{node.attr}")
            elif isinstance(node, ast.ImportFrom):
                assert node.module not in ("os", "fcntl") or not names & {alias.name for alias in node.names}, path
            elif isinstance(node, ast.Call):
                function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                modes = [*node.args[:2], *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
                if function in ("open", "fdopen") and any(
                    isinstance(mode, ast.Constant) and re.fullmatch("a[bt+]*", str(mode.value)) for mode in modes
                ):
                    called.add("os.O_APPEND")
        assert called == MAY_CALL.get(str(path.relative_to(SOURCE)), set()), path


@pytest.mark.check
@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/checkpointing.md",
        "docs/placement.md",
        "docs/catalogue.md",
        "docs/recovery.md",
        "docs/studies.md",
        "docs/quickstart.md",
        "docs/extending.md",
    ],
)
def test_snippets_run_and_print_what_they_say(page: str, tmp_path: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert snippets, f"{page} shows no Python"
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / page).read_text(), re.S):
        (tmp_path / name).write_text(text)  # what later ones may import
    code = "\n".join(["import warnings", "warnings.simplefilter('error')", *snippets])
    environment = os.environ | {"EVERGRAD_SHM": str(tmp_path), "EVERGRAD_LINGER": "0"}
    done = run_python("-c", code, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    claimed = re.findall(r"# → (.*)", "\n".join(snippets))
    assert done.stdout.splitlines() == claimed
