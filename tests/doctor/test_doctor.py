"""The doctor: it says what is there, what to do, leaves nothing behind, and goes on whatever is broken."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from evergrad import doctor
from evergrad.cli import main
from evergrad.doctor import CheckResult, examine, worst
from evergrad.wording import install_hint
from unprivileged import Unprivileged

SOUND = {
    "numpy": {"version": "2.0"},
    "xxhash": {"version": "4.0"},
    "torch": {"version": "2.13.0+cpu", "cuda": None},
    "cuda": {"built": None, "devices": []},
    "transports": {"gloo": True, "nccl": False},
    "gloo": {"works": True},
}


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """As if torch had answered so; it is imported once, in the test of the probe itself."""

    measure = doctor.measure
    monkeypatch.setattr(doctor, "measure", lambda folder: measure(folder, most_bytes=1 << 22))

    def answer(**parts: dict[str, object]) -> None:
        monkeypatch.setattr(doctor, "probe_torch", lambda: SOUND | parts)

    answer()
    return answer


def named(checks: list[CheckResult], name: str) -> CheckResult:
    return next(check for check in checks if check.name == name)


def test_torch_is_asked_in_another_process() -> None:
    found = doctor.probe_torch()
    assert found["torch"]["version"]
    assert found["gloo"] == {"works": True}
    assert {check.verdict for check in doctor.check_torch(found) if check.name in ("gloo", "nccl")} == {"ok"}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('echo \'{"numpy": {"version": "2.0"}}\'; kill -SEGV $$', "ended with SIGSEGV"),
        ("exit 7", "ended with exit code 7"),
        ("echo noise; echo '[1]'; exit 0", "ended with exit code 0"),
        ("exec sleep 60", "no answer within 0 s"),
    ],
)
def test_a_torch_that_crashes_or_hangs_is_told_and_not_caught(body: str, why: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    found = doctor.probe_torch(str(python), limit_s=0.3 if "sleep" in body else 60)
    assert why in found["torch"]["error"]
    assert named([*doctor.check_software(found)], "torch").verdict == "failed"
    assert named([*doctor.check_torch(found)], "gloo").verdict == "unknown"
    assert ("error" in found["numpy"]) is ("numpy" not in body)


def test_without_an_interpreter_it_is_told(tmp_path: Path) -> None:
    assert "no process could be started" in doctor.probe_torch(str(tmp_path / "none"))["torch"]["error"]


def test_every_extra_for_users_is_explained() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ours = {"bench", "rivals", "docs", "test", "dev"}
    assert set(doctor.EXTRAS) == set(project["optional-dependencies"]) - ours


def test_a_missing_extra_says_what_it_is_for_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["rich>=13", 'nosuchthing>=1; extra == "hdf5"', 'rich>=999; extra == "s3"', 'rich>=1; extra == "zstd"']
    monkeypatch.setattr(doctor, "_required", lambda: lines)
    found = [*doctor.check_extras()]
    missing = named(found, "hdf5")
    assert (missing.verdict, missing.todo) == ("degraded", install_hint("hdf5"))
    assert missing.found == "nosuchthing is missing (HDF5 files: Keras, Chainer, PyTorch)"
    assert "is older than 999" in named(found, "s3").found
    assert named(found, "zstd").verdict == "ok"
    assert named(found, "dask").verdict == "unknown"


def test_the_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = doctor.measure(tmp_path, most_bytes=1 << 22)
    assert found["intact"]
    assert found["written_bytes"] == 1 << 22
    assert min(found["write_bytes_per_s"], found["read_bytes_per_s"], found["durable_write_s"]) > 0
    assert os.listdir(tmp_path) == []


def test_a_kill_in_the_measurement_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom evergrad import doctor\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), 9)\ndoctor.measure(Path(sys.argv[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], check=False).returncode == -9
    assert os.listdir(tmp_path) == []


def test_a_disk_that_gives_back_other_bytes_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_read_back", lambda *_: -1)
    assert next(doctor.check_disk(tmp_path)).verdict == "failed"


def test_a_folder_that_may_not_be_written_has_failed(unprivileged: Unprivileged) -> None:
    with unprivileged:
        found = next(doctor.check_disk(unprivileged.folder))
    assert found.verdict == "failed"
    assert "cannot be written: permission denied" in found.found
    assert "--folder" in found.todo


def test_a_slow_or_full_disk_is_degraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"write_bytes_per_s": 1e6, "read_bytes_per_s": 1e9, "durable_write_s": 0.2, "skew_s": -90.0, "direct": False}
    monkeypatch.setattr(doctor, "measure", lambda folder: {**slow, "intact": True, "written_bytes": 1})
    verdicts = {check.name: (check.verdict, check.found) for check in doctor.check_disk(tmp_path)}
    assert verdicts["disk"][0] == "degraded"
    assert verdicts["disk's clock"] == ("degraded", "90 s behind this machine's")


def test_a_small_shared_memory_is_degraded_and_says_for_how_large_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERGRAD_SHM", str(tmp_path))
    monkeypatch.setattr(doctor, "available_bytes", lambda: 64_000_000)
    monkeypatch.setattr(doctor, "filesystem_of", lambda place: "tmpfs")
    (found,) = doctor.check_shared_memory()
    assert found.verdict == "degraded"
    assert "a state of up to 32.0 MB, or 4.0 MB on each of 8 ranks" in found.found
    assert "--shm-size" in found.todo
    monkeypatch.setattr(doctor, "filesystem_of", lambda place: "ext4")
    assert "it is on ext4, not in memory" in next(doctor.check_shared_memory()).found
    monkeypatch.setenv("EVERGRAD_SHM", str(tmp_path / "none"))
    assert next(doctor.check_shared_memory()).verdict == "failed"


def test_arenas_that_others_can_open_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_SHM", str(tmp_path))
    own = tmp_path / f"evergrad-{os.getuid()}"
    own.mkdir()
    own.chmod(0o755)
    assert "is not yours alone" in next(doctor.check_shared_memory()).found
    own.chmod(stat.S_IRWXU)
    assert next(doctor.check_shared_memory()).verdict != "failed"


def test_the_file_system_is_that_of_the_innermost_mount() -> None:
    mounts = "a / ext4 rw 0 0\nb /dev tmpfs rw 0 0\nc /dev/shm tmpfs rw 0 0\nd /my\\040disk nfs4 rw 0 0\nshort\n"
    assert doctor.filesystem_of(Path("/nowhere/at/all"), mounts) == "ext4"
    assert doctor.filesystem_of(Path("/my disk/x"), mounts) == "nfs4"
    assert doctor.filesystem_of(Path("/nowhere"), "") == ""


def test_limits_of_cgroups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("3000000000\n")
    (tmp_path / "memory.current").write_text("1000000000\n")
    assert doctor.cgroup_cores(tmp_path) == 1.5
    assert doctor.cgroup_memory(tmp_path) == (3_000_000_000, 1_000_000_000)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.cgroup_cores(tmp_path) is None
    assert doctor.cgroup_memory(tmp_path) is None
    assert doctor.cgroup_cores(tmp_path / "none") is None
    monkeypatch.setattr(doctor, "cgroup_cores", lambda: 1.0)
    monkeypatch.setattr(doctor, "cgroup_memory", lambda: (10**9, 10**9 - 5))
    verdicts = {check.name: check.verdict for check in doctor.check_machine()}
    assert (verdicts["cores"], verdicts["memory"]) == ("degraded", "degraded")
    assert doctor.available_bytes() == 5


def test_few_open_files_are_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    found = named([*doctor.check_machine()], "open files")
    assert (found.verdict, found.todo) == ("degraded", "ulimit -n 1024")


@pytest.mark.parametrize(
    ("there", "verdict"), [(set(), "ok"), ({"sbatch"}, "degraded"), ({"sbatch", "squeue", "scancel", "srun"}, "ok")]
)
def test_slurm_counts_only_as_a_whole(there: set[str], verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}" if name in there else None)
    assert named([*doctor.check_environment(Path())], "slurm").verdict == verdict


def test_the_cgroup_that_leaves_least_counts_and_the_page_cache_does_not(tmp_path: Path) -> None:
    own, job = tmp_path / "own", tmp_path / "slurm" / "job_7"
    job.mkdir(parents=True)
    own.write_text("0::/slurm/job_7\n")
    for group, limit, used in ((job, 8_000, 7_000), (job.parent, 9_000, 8_500)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
    (job.parent / "memory.stat").write_text("anon 400\ninactive_file 8000\n")
    (job / "cpu.max").write_text("max 100000\n")
    (job.parent / "cpu.max").write_text("400000 100000\n")
    assert doctor.cgroup_memory(tmp_path, own) == (8_000, 7_000)
    assert doctor.cgroup_cores(tmp_path, own) == 4
    (job / "memory.stat").write_text("inactive_file 6900\n")
    assert doctor.cgroup_memory(tmp_path, own) == (8_000, 100)


def test_a_clock_that_was_never_set_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.time, "time", lambda: 86_400.0)
    assert named([*doctor.check_environment(Path())], "clock").verdict == "failed"


def test_secrets_in_the_environment_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_SECRET", "hush")
    monkeypatch.setenv("EVERGRAD_LINGER", "7")
    told = named([*doctor.check_environment(Path())], "settings").found
    assert "hush" not in told
    assert "EVERGRAD_LINGER=7" in told


@pytest.mark.parametrize(
    ("cuda", "there", "verdict"),
    [
        ({"built": None, "devices": []}, False, "ok"),
        ({"built": None, "devices": []}, True, "degraded"),
        ({"built": "13.0", "devices": []}, True, "degraded"),
        ({"error": "RuntimeError: driver"}, True, "failed"),
        ({"built": "13.0", "devices": [{"name": "H", "free_bytes": 1, "total_bytes": 2}]}, True, "ok"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_told(
    cuda: dict[str, object], there: bool, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_has_gpu", lambda: there)
    assert next(doctor.check_torch(SOUND | {"cuda": cuda})).verdict == verdict


def test_a_check_that_crashes_is_unknown_and_the_others_go_on(
    probed: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("boom")

    for name in ("_look_disk", "_cores", "_clock", "_system"):
        monkeypatch.setattr(doctor, name, crash)
    found = dict(examine(tmp_path))
    assert named(found["machine"], "cores").found == "the check itself failed (RuntimeError: boom)"
    assert named(found["storage"], "disk").verdict == "unknown"
    assert named(found["machine"], "memory").verdict in ("ok", "degraded")


def test_the_worst_verdict_is_that_of_all() -> None:
    assert worst([]) == "ok"
    assert worst([CheckResult("a", verdict, "") for verdict in ("ok", "unknown", "degraded")]) == "degraded"
    assert worst([CheckResult("a", verdict, "") for verdict in ("degraded", "failed")]) == "failed"


def test_the_command_prints_a_line_a_check_within_80_columns(
    probed: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    monkeypatch.setattr("evergrad.cli.machine.console", lambda: Console(width=80, highlight=False))
    assert main(["doctor", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert max(map(len, said.splitlines())) <= 80
    for word in ("software", "extras", "devices", "machine", "storage", "around", "/dev/shm", "gloo", "clock"):
        assert word in said
    assert os.listdir(tmp_path) == []


def test_json_has_every_check_and_a_failure_is_exit_code_1(
    probed: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probed(torch={"error": "ImportError: libtorch.so: cannot open"}, gloo={"error": "ImportError"})
    assert main(["doctor", "--folder", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "failed"
    torch = next(check for check in told["checks"] if check["name"] == "torch")
    assert torch["group"] == "software"
    assert "cannot be imported: ImportError: libtorch.so" in torch["found"]
    assert torch["todo"].startswith("pip install")
    assert {check["verdict"] for check in told["checks"]} <= {"ok", "degraded", "failed", "unknown"}


def test_the_doctor_does_not_import_torch_itself() -> None:
    code = (
        "import sys\nfrom evergrad import doctor\nfrom evergrad.doctor import examine\nfrom pathlib import Path\n"
        "doctor.probe_torch = lambda: {n: {'error': 'x'} for n in "
        "('numpy', 'xxhash', 'torch', 'cuda', 'transports', 'gloo')}\n"
        "list(examine(Path(sys.argv[1])))\nassert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, "/tmp"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
