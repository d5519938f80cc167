"""Files that Evergrad 0.1 wrote are read, restored, continued and undone: data/make/version_0_1.py made them.

Every test works on a copy, so on run folders that were moved, and compares with what 0.1 said about such a copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evergrad as eg
from evergrad.checkpoint import Version
from evergrad.cli import main
from programs import run_python

SET = Path(__file__).parent / "data" / "version_0_1"
EXPECTED: dict[str, Any] = json.loads((SET / "expected.json").read_text())
# Files that a verb writes or brings back, by the bytes they then have; new logs name their own place.
WRITTEN = ("out.*", "tables/*.csv", "injected/*.pt", "injected/*.npz", "injected/*.safetensors", "injected/*/v*/*")
# Sentences for people, and the place of a page, are no promise; nor is when, and how long, a verb worked.
NOT_PROMISED = ("answer", "facts", "notes", "page", "reason", "seconds", "sections", "verified_at")
TIMELINE = ("outcome", "message", "steps", "exact", "ranks", "spares", "samples_lost")
FAILURE = ("kind", "what", "left", "joined", "step", "strategy", "ranks_before", "ranks", "steps_redone", "exact")


@pytest.fixture
def old(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the set in which verbs start, its arenas in shared memory, on the node that it was made on."""
    home = Path(shutil.copytree(SET, tmp_path / "set"))
    arenas = Path(shutil.copytree(SET / "arenas", shm / f"evergrad-{os.getuid()}"))
    for folder in (arenas, *(path for path in arenas.rglob("*") if path.is_dir())):
        folder.chmod(0o700)
    monkeypatch.setenv("EVERGRAD_NODE", "n0")
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a verb in this process: exit code and JSON."""

    def call(*words: object) -> tuple[int, Any]:
        capsys.readouterr()
        code = main([*map(str, words), "--json"])
        out = capsys.readouterr()
        assert out.out, out.err
        return code, json.loads(out.out)

    return call


def names() -> dict[str, str]:
    """The jobs' identities and a trial of each study, which the names of some files and words have in them."""
    found = {path.parent.name: json.loads(path.read_text())["id"] for path in SET.glob("*/job.json")}
    for study in ("flips", "program"):
        first = (SET / f"study-{study}/out/journal.jsonl").read_text().splitlines()[1]
        found[study] = json.loads(first)["trial"]["id"]
    return found


def written(home: Path) -> dict[str, str]:
    """The digests of the files that verbs write."""
    found = [path for pattern in WRITTEN for path in home.glob(pattern) if path.is_file() and path.suffix != ".jsonl"]
    return {str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def promised(told: Any) -> Any:
    """What a verb says, without sentences for people."""
    if isinstance(told, dict):
        return {name: promised(value) for name, value in told.items() if name not in NOT_PROMISED}
    return [promised(value) for value in told] if isinstance(told, list) else told


def failures(told: dict[str, Any]) -> dict[str, Any]:
    """Who failed in a run, what followed, and how it ended."""
    found = []
    for failure in told["failures"]:
        lost = [[one["uid"], one["who"], one["how"], one["injected"]] for one in failure["lost"]]
        found.append({name: failure[name] for name in FAILURE} | {"lost": lost})
    members = [[one["number"], one["members"], one["first_step"]] for one in told["generations"]]
    processes = [[one["uid"], one["label"], one["node"], one["code"], one["ranks"]] for one in told["processes"]]
    return {name: told[name] for name in TIMELINE} | {"failures": found, "members": members, "processes": processes}


@pytest.mark.parametrize("told", EXPECTED["commands"], ids=lambda told: " ".join(told["words"]))
def test_a_verb_says_and_writes_what_0_1_did(told: dict[str, Any], old: Path, shm: Path, say: Any) -> None:
    places = [
        word.replace("SHARED/", f"file://{old}/") + "/shared" * word.startswith("SHARED/") for word in told["words"]
    ]
    before = written(old)
    code, found = say(*(word.format(**names()) for word in places))
    found = json.loads(json.dumps(found).replace(str(old), "{set}").replace(str(shm), "{shm}"))
    expected = told["json"]
    if told["words"][0] == "timeline":
        found, expected = failures(found), failures(expected)
    if told["words"][:2] == ["study", "replay"]:  # another CPU may round otherwise, and hits the same bits all the same
        code = told["code"]
        found, expected = ({name: one[name] for name in ("trial", "was", "hits")} for one in (found, expected))
    assert (code, promised(found)) == (told["code"], promised(expected))
    changed = {name: digest for name, digest in written(old).items() if before.get(name) != digest}
    if told["words"][0] == "checkpoints":  # the order in which an export names tied tensors is not fixed
        assert changed.keys() == told["files"].keys()
    else:
        assert changed == {name: digest for name, digest in told["files"].items() if not name.endswith(".jsonl")}


# Checkpoints.


def live(*, rng: bool = False) -> dict[str, Any]:
    """A state to restore into, of the form that the set's have, with other values."""
    model = nn.Linear(3, 2)
    weight = torch.zeros(2, 3)
    tensors = {"weight": weight, "tied": weight, "half": torch.zeros(5).bfloat16(), "none": torch.empty(0, 3)}
    values = {"epoch": -1, "history": [(1, 0.5), (0, 0.25)], "name": "?"}
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "tensors": tensors, "values": values}
    return state | {"rng": eg.rng_state()} if rng else state


def values(state: object) -> dict[str, Any]:
    """Every tensor as numbers."""
    return {
        path: {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "values": tensor.flatten().tolist()}
        for path, tensor in eg.flatten(state).tensors.items()
    }


def r50_tiers(home: Path) -> list[Any]:
    shared = f"file://{home}/r50/shared"
    return [eg.Memory(), eg.Local(keep=9), eg.Compress("zstd"), eg.Persistent(shared, keep=9)]


TIERS: dict[str, Any] = {
    "r50": r50_tiers,
    "tuned": lambda _: [eg.Local()],
    "in-memory": lambda _: [eg.Memory()],
    "unfinished": lambda _: [eg.Local()],
    "dcp": lambda _: [eg.Local()],
}


def holds(state: dict[str, Any], step: int) -> bool:
    """Every tensor and value is the step's."""
    expected = {"epoch": step // 10, "history": [(1, 0.5), (step, 0.25)], "name": "r50"}
    return values(state) == EXPECTED["r50"][str(step)] and state["values"] == expected


@pytest.mark.parametrize("job", list(TIERS))
def test_a_checkpointer_lists_the_versions_that_0_1_lists(job: str, old: Path) -> None:
    with eg.Checkpointer(old / job, TIERS[job](old), agent=False) as ck:
        found = [[record.version.name, *record.tiers] for record in ck.versions()]
    assert found == EXPECTED["versions"][job]


@pytest.mark.parametrize(
    ("version", "step", "tier"),
    [
        (None, 60, "memory"),
        (50, 50, "local"),
        ("v0000000030-01", 30, "persistent"),
        (20, 20, "local"),
        ("best", 10, "persistent"),
    ],
)
def test_every_version_is_restored_from_its_tier(version: Any, step: int, tier: str, old: Path) -> None:
    state = live(rng=step == 60)
    with eg.Checkpointer(old / "r50", r50_tiers(old), agent=False) as ck:
        assert ck.restore(state, version=version) == step
        assert ck.restored is not None
        assert (ck.restored.tier, ck.restored.meta) == (tier, {"loss": 1 / step})
    assert holds(state, step)


def test_a_job_goes_on_as_its_next_attempt_and_keeps_its_identity(old: Path, say: Any) -> None:
    state = live(rng=True)
    with eg.Checkpointer(old / "r50", r50_tiers(old)) as ck:
        assert ck.restore(state) == 60
        ck.save(70, state).wait("persistent")
        assert ck.versions()[0].version == Version(70, 3)
    code, told = say("checkpoints", "ls", "r50")
    assert (code, told["job"]) == (0, names()["r50"])
    newest, before = told["versions"][:2]
    assert (
        (newest["version"], newest["parent"])
        == ("v0000000070-03", before["version"])
        == (
            "v0000000070-03",
            "v0000000060-02",
        )
    )
    edges = say("checkpoints", "lineage", "r50")[1]["edges"]
    ends = {(edge["from"].split("/")[1], edge["to"].split("/")[1]) for edge in edges}
    assert {("v0000000060-02", "v0000000070-03"), ("v0000000020-01", "v0000000050-02")} <= ends


def test_another_job_begins_from_a_run_folder_and_from_the_url_of_its_tier(old: Path) -> None:
    for source, step in ((old / "r50", 20), (f"file://{old}/r50/shared", 30)):
        state = live()
        with eg.Checkpointer(old / f"new-{step}", [eg.Local()], agent=False) as ck:
            assert ck.restore(state, source=source, version=step) == step
        assert holds(state, step)


@pytest.mark.parametrize(("job", "step"), [("r50", 60), ("in-memory", 7)])
def test_an_arena_alone_is_restored(job: str, step: int, old: Path) -> None:
    for folder in (old / "r50/local", old / "r50/shared"):
        shutil.rmtree(folder)
    state = live(rng=step == 60)
    with eg.Checkpointer(old / job, [eg.Memory()], agent=False) as ck:
        assert ck.restore(state) == step
        assert ck.restored is not None
        assert ck.restored.tier == "memory"
    assert holds(state, step)


@pytest.mark.parametrize("agent", [True, False])
def test_a_capture_that_its_disk_had_refused_is_finished(agent: bool, old: Path) -> None:
    state = live()
    with eg.Checkpointer(old / "unfinished", [eg.Local()], agent=agent) as ck:
        assert ck.restore(state) == 2
        assert next([record.version.name, *record.tiers] for record in ck.versions()) == ["v0000000002-01", "local"]
    assert holds(state, 2)


def test_two_ranks_go_on_with_what_two_had(old: Path, tmp_path: Path) -> None:
    log = tmp_path / "output.txt"
    program = Path(__file__).with_name("version_0_1_ranks.py")
    assert run_python(program, old, tmp_path, output=log).returncode == 0, log.read_text()
    for rank in (0, 1):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        expected = {path: tensor["values"] for path, tensor in EXPECTED["ranks"].items()}
        expected["own"] = [600.0 + rank] * 4
        versions = ["v0000000007-02", "v0000000006-01"]
        assert told == expected | {"step": 6, "lr": 0.5, "versions": versions}


@pytest.mark.parametrize("shared", [True, False])
def test_one_rank_goes_on_with_what_two_had(shared: bool, old: Path) -> None:
    shutil.rmtree(old / "ranks" / ("local" if shared else "shared"))
    model = nn.ModuleDict({"module": nn.Linear(3, 2)})  # named as under DDP
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "rows": torch.zeros(5, 3), "own": torch.zeros(4)}
    tiers = [eg.Persistent(f"file://{old}/ranks/shared")] if shared else [eg.Local()]
    with eg.Checkpointer(old / "ranks", tiers, agent=False) as ck:
        assert ck.restore(state, resize=lambda path, saved, rank, world_size: sum(saved)) == 6
        assert ck.restored is not None
        assert ck.restored.world_size == 2
    expected = {path: tensor["values"] for path, tensor in EXPECTED["ranks"].items()}
    expected["own"] = [1201.0] * 4
    assert {path: tensor["values"] for path, tensor in values(state).items()} == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:torch.distributed is unavailable")
@pytest.mark.parametrize("step", [1, 2])
def test_dcp_loads_what_went_through_its_storage_classes(step: int, old: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from evergrad.integrations.dcp import TierReader

    state = live()["tensors"]
    with eg.Checkpointer(old / "dcp", [eg.Local()], agent=False) as ck, TierReader(ck, version=step) as reader:
        dcp.load(state, storage_reader=reader)
    assert values(state) == EXPECTED["dcp"][str(step)]
    again = live()["tensors"]
    with eg.Checkpointer(old / "dcp", [eg.Local()], agent=False) as ck:
        assert ck.restore(again, version=step) == step
    assert values(again) == EXPECTED["dcp"][str(step)]


# Files.


def test_an_hdf5_file_is_loaded(old: Path) -> None:
    state = eg.load_hdf5(old / "files/state.h5")
    assert values(state) == EXPECTED["state.h5"]
    assert state["values"] == {"epoch": 0, "history": [(1, 0.5), (9, 0.25)], "name": "r50"}


@pytest.mark.parametrize("name", ["r50.safetensors", "r50.pt", "r50.h5", "r50-dcp"])
def test_an_exported_version_holds_every_value_and_equals_a_new_export(name: str, old: Path, say: Any) -> None:
    with eg.open_checkpoint(old / "files" / name) as file:
        found = {path.replace(".", "/"): file.read(path).flatten().tolist() for path in file.tensors}
    expected = {path.replace(".", "/"): tensor["values"] for path, tensor in EXPECTED["r50"]["10"].items()}
    assert found == expected
    assert say("checkpoints", "export", "r50", "best", f"new-{name}")[0] == 0
    code, told = say("diff", f"files/{name}", f"new-{name}")
    assert (code, told["verdict"]) == (0, "equal")


# Injections.


@pytest.mark.parametrize(
    ("log", "altered", "original"),
    [
        ("bad.pt.faults.jsonl", "bad.pt", "model.pt"),
        ("altered-model.safetensors.faults.jsonl", "altered-model.safetensors", "model.safetensors"),
        ("altered-packed.npz.faults.jsonl", "altered-packed.npz", "packed.npz"),
        ("version/v0000000050-02.faults.jsonl", "version/v0000000050-02", "../r50/local/*/n0/v0000000050-02"),
        ("stale/v0000000050-02.faults.jsonl", "stale/v0000000050-02", "../r50/local/*/n0/v0000000050-02"),
    ],
)
def test_undo_brings_every_byte_back(log: str, altered: str, original: str, old: Path, say: Any) -> None:
    folder = old / "injected"
    (clean,) = old.glob(original.removeprefix("../")) if original.startswith("..") else [folder / original]

    def content(path: Path) -> dict[str, bytes]:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return {file.name if path.is_dir() else "": file.read_bytes() for file in files}

    assert content(folder / altered) != content(clean)
    code, told = say("undo", folder / log, folder / altered)
    assert (code, told["was"]) == (0, "injected")
    assert content(folder / altered) == content(clean)


def test_two_injections_into_one_file_are_undone_newest_first(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = old / "injected"
    logs = (folder / "twice.pt.faults.jsonl", folder / "twice.pt.faults.2.jsonl")
    assert main(["undo", str(logs[0])]) == 2
    assert "twice.pt.faults.2.jsonl" in capsys.readouterr().err
    assert [main(["undo", str(log)]) for log in reversed(logs)] == [0, 0]
    assert (folder / "twice.pt").read_bytes() == (folder / "model.pt").read_bytes()


def test_a_live_log_hits_the_same_bits_in_a_file_and_in_a_training(old: Path) -> None:
    log = eg.InjectionLog.load(old / "injected/live.faults.jsonl")
    hits = [(hit.tensor, hit.index) for hit in log.faults()]
    assert len(hits) == log.injected == 2
    again = eg.replay(log, old / "injected/other.pt", out=old / "again.pt")
    assert [(hit.tensor, hit.index) for hit in again.faults()] == hits
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    faults = eg.inject_live(model, optimizer, log, step=0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert faults.done
    assert faults.log is not None
    assert [(hit.tensor, hit.index) for hit in faults.log.faults()] == hits


# Runs and studies.


@pytest.mark.parametrize(("run", "ranks"), [("killed", 3), ("shrunk", 2)])
def test_the_page_of_a_run_names_who_died(run: str, ranks: int, old: Path, say: Any) -> None:
    code, told = say("timeline", run)
    assert (code, told["outcome"], told["steps"]) == (
        0,
        "finished",
        json.loads((old / run / "run.json").read_text())["summary"]["steps"],
    )
    (failure,) = told["failures"]
    assert (failure["what"], failure["step"], failure["ranks"]) == ("rank 1 died (SIGKILL)", 4, ranks)
    page = (old / run / "timeline.html").read_text()
    assert "rank 1 died (SIGKILL)" in page


@pytest.mark.parametrize("study", ["flips", "program"])
def test_a_finished_study_goes_on_without_a_trial(study: str, old: Path, say: Any) -> None:
    folder = old / f"study-{study}"

    def trials() -> list[str]:
        lines = (folder / "out/journal.jsonl").read_text().splitlines()
        return [line for line in lines if json.loads(line)["kind"] == "trial"]

    before, golden = trials(), {path: path.read_bytes() for path in (folder / "out/golden").rglob("*.*")}
    code, told = say("study", "run", folder / "plan.toml", "--workers", 1, "--out", folder / "out")
    assert (code, told["trials"]) == (0, 8)
    assert trials() == before
    assert {path: path.read_bytes() for path in (folder / "out/golden").rglob("*.*")} == golden


def test_a_study_that_was_cut_short_runs_the_missing_trial_alone_and_gets_the_same(old: Path, say: Any) -> None:
    folder = old / "study-program"
    journal = folder / "out/journal.jsonl"
    *lines, last = journal.read_text().splitlines()
    journal.write_text("".join(f"{line}\n" for line in lines))
    assert say("study", "status", folder / "out")[1]["done"] == 7
    assert say("study", "run", folder / "plan.toml", "--workers", 1, "--out", folder / "out")[0] == 0
    after = journal.read_text().splitlines()
    assert after[: len(lines)] == lines
    (new,) = [json.loads(line) for line in after[len(lines) :] if json.loads(line)["kind"] == "trial"]
    gone = json.loads(last)
    for told in (new, gone):
        told["observation"].pop("seconds")
        told.pop("sum")
        told["trial"]["training"].pop("base")
    assert new == gone


def test_a_trial_of_a_program_is_replayed_once_the_study_was_run_at_its_new_place(old: Path, say: Any) -> None:
    folder = old / "study-program"
    assert say("study", "run", folder / "plan.toml", "--workers", 1, "--out", folder / "out")[0] == 0
    for line in (folder / "out/journal.jsonl").read_text().splitlines()[1:4]:
        trial = json.loads(line)["trial"]["id"]
        code, told = say("study", "replay", folder / "out", trial)
        assert (code, told["same"], told["now"]["digest"]) == (0, True, told["was"]["digest"])


def test_the_set_names_no_place_of_the_machine_that_made_it() -> None:
    for path in SET.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not any(word in data for word in (b"work/", b"/home/", b"/root/", b"/Users/")), path
    size = sum(path.stat().st_size for path in SET.rglob("*") if path.is_file())
    assert size < 600 << 10
