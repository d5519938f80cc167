"""Makes tests/data/version_0_1: files as Evergrad 0.1 writes them, which every later version has to read.

It was run with Evergrad 0.1.0 (tag fence-0.1), torch 2.13.0, on Linux, and is kept as the record of how the set was
made. A later version must not run it again: the files would then be of that version. It refuses any other.

    pip install evergrad==0.1.0 h5py zstandard scikit-learn scipy plotly
    unshare --uts sh -c 'hostname n0; exec python tests/data/make/version_0_1.py'

The set is made below /tmp/evergrad-0.1, on a machine named n0, then moved to tests/data/version_0_1, so that its
absolute paths are those of a moved folder. `expected.json` is what Evergrad 0.1 says about a moved copy; with the
argument `expected` only that file is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import evergrad as eg
from evergrad import cli
from evergrad.errors import CheckpointError

HOME = Path("/tmp/evergrad-0.1")
SET, SHM, COPY = HOME / "set", HOME / "shm", HOME / "moved" / "set"
TARGET = Path(__file__).resolve().parent.parent / "version_0_1"
ENVIRONMENT = {"EVERGRAD_SHM": str(SHM), "EVERGRAD_LINGER": "0.3", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}

FLIPS = """\
study = "flips"
seed = 3
rows = "flips"

[axes]
flips = [1, 1000]

[training]
model = "alexnet"
width = 0.015
samples = 256
learning_rate = 0.003
checkpoint = 4
epochs = 1

[trial]
fault = "bitflip"
where = "role:model"

[sampling]
trainings = 4
"""
PROGRAM_PLAN = """\
study = "program"
seed = 5

[command]
command = "python -S train.py {checkpoint} {output}"
checkpoint = "clean.npy"
metric = "accuracy"
loss = "loss"
chance = 0.1

[axes]
flips = [1, 8]
fault = ["bitflip:bits=sign", "bitflip:bits=exponent"]

[sampling]
trainings = 2
"""
# Halves 16 numbers twice, without any library: the same bits on every machine.
PROGRAM = """\
import json
import sys
from array import array
from pathlib import Path

head, numbers = (data := Path(sys.argv[1]).read_bytes())[:128], array("f", data[128:])
for epoch in range(2):
    numbers = array("f", [n * 0.5 for n in numbers])
    total = sum(numbers)
    print(json.dumps({"epoch": epoch, "loss": total, "accuracy": max(0.0, 1 - abs(total - 4) / 100)}))
Path(sys.argv[2]).write_bytes(head + numbers.tobytes())
"""


def evergrad(*words: object, codes: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
    """Run a verb of the command line."""
    command = [sys.executable, "-m", "evergrad", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HOME)
    assert done.returncode in codes, (words, done.returncode, done.stdout, done.stderr)
    return done


# The states. Each value follows from the step, and all are exact in float32.


def state_of(step: int) -> dict[str, Any]:
    """A model after some steps of Adam, tied and 16-bit tensors, values and random generators."""
    torch.manual_seed(step)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    if step:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    weight = torch.arange(6.0).reshape(2, 3) + step
    tensors = {
        "weight": weight,
        "tied": weight,
        "half": torch.full((5,), step / 8).bfloat16(),
        "none": torch.empty(0, 3),
    }
    values = {"epoch": step // 10, "history": [(1, 0.5), (step, 0.25)], "name": "r50"}
    state = {"model": model, "optimizer": optimizer, "tensors": tensors, "values": values}
    return state | {"rng": eg.rng_state()} if step == 60 else state


def rank_state(rank: int, step: int) -> dict[str, Any]:
    """Under DDP, so replicated; a piece of a DTensor; and a tensor of each rank's own."""
    torch.manual_seed(step)
    net = nn.Linear(3, 2)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    if step:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    rows = distribute_tensor(torch.arange(15.0).reshape(5, 3) + step, mesh, [Shard(0)])
    return {"model": model, "optimizer": optimizer, "rows": rows, "own": torch.full((4,), 100.0 * step + rank)}


def values_of(state: object) -> dict[str, Any]:
    """Every tensor of a state by its path, as numbers."""
    found = {}
    for path, tensor in eg.flatten(state).tensors.items():
        found[path] = {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "values": tensor.flatten().tolist()}
    return found


# Jobs with checkpoints.


def r50_tiers() -> list[Any]:
    shared = f"file://{SET}/r50/shared"
    return [eg.Memory(), eg.Local(keep=2), eg.Compress("zstd"), eg.Persistent(shared, every=2, keep=3)]


def make_r50() -> dict[str, Any]:
    """One rank, an agent, four tiers, two attempts that part at version 20, a pin and a tag, and retired versions."""
    run, expected = SET / "r50", {}

    def save(ck: eg.Checkpointer, *steps: int) -> None:
        for step in steps:
            state = state_of(step)
            expected[str(step)] = values_of(state)
            pending = ck.save(step, state, meta={"loss": 1 / step})
            pending.wait()
            if step in (10, 30, 50):
                pending.wait("persistent")

    with eg.Checkpointer(run, r50_tiers()) as ck:
        save(ck, 10, 20, 30)
        evergrad("checkpoints", "pin", run, 20)
        save(ck, 40)
    evergrad("checkpoints", "pin", run, 10, "--tag", "best")
    with eg.Checkpointer(run, r50_tiers()) as ck:
        assert ck.restore(state_of(0), version=20) == 20
        save(ck, 50, 60)
    no_agent()
    evergrad("checkpoints", "verify", run)
    return expected


def make_tuned() -> None:
    """A job that began from another one's version, without an agent process."""
    with eg.Checkpointer(SET / "tuned", [eg.Local()], agent=False) as ck:
        assert ck.restore(state_of(0), source=SET / "r50", version=10) == 10
        ck.save(11, state_of(11)).wait()


def make_in_memory() -> None:
    """A version that only an arena has."""
    with eg.Checkpointer(SET / "in-memory", [eg.Memory()], agent=False) as ck:
        ck.save(7, state_of(7)).wait("memory")


def make_unfinished() -> None:
    """A version that was captured, and that its disk refused: an arena with a ticket that owes it to the local tier."""
    run = SET / "unfinished"
    with eg.Checkpointer(run, [eg.Local()], agent=False) as ck:
        ck.save(1, state_of(1)).wait()
        (run / "local").rename(run / "aside")
        (run / "local").write_text("not a folder")
        try:
            ck.save(2, state_of(2)).wait()
        except CheckpointError as error:
            print("as intended:", error)
        else:
            raise AssertionError("version 2 should not have reached the disk")
    (run / "local").unlink()
    (run / "aside").rename(run / "local")


def make_ranks() -> dict[str, Any]:
    """Two ranks under the launcher: replicated, sharded and own tensors, in a local and a shared tier."""
    evergrad("run", "-n", 2, "--out", HOME / "ranks-launch", HOME / "version_0_1.py", "ranks")
    no_agent()
    return json.loads((HOME / "ranks.json").read_text())


def ranks() -> None:
    """What each of the two ranks does."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    shared = f"file://{SET}/ranks/shared"
    with eg.Checkpointer(SET / "ranks", [eg.Memory(), eg.Local(), eg.Persistent(shared)]) as ck:
        for step in (5, 6):
            state = rank_state(rank, step)
            ck.save(step, state, meta={"note": "two ranks"}).wait("persistent")
    values = values_of(state | {"rows": state["rows"].full_tensor()})
    if rank == 0:
        (HOME / "ranks.json").write_text(json.dumps(values))
    distributed.destroy_process_group()


def make_dcp() -> dict[str, Any]:
    """Versions that torch.distributed.checkpoint wrote through its storage classes of ours."""
    import torch.distributed.checkpoint as dcp

    from evergrad.integrations.dcp import ArenaStager, TierWriter

    with eg.Checkpointer(SET / "dcp", [eg.Local()], agent=False) as ck:
        dcp.save(state_of(1)["tensors"], storage_writer=TierWriter(ck, step=1))
        writer = TierWriter(ck, step=2)
        dcp.async_save(state_of(2)["tensors"], async_stager=ArenaStager(ck), storage_writer=writer).result()
    return {str(step): values_of(state_of(step)["tensors"]) for step in (1, 2)}


# A launched run, studies, injections, files.


def make_run() -> None:
    """Three ranks and a spare; one is killed within a step, which the others do again."""
    fail = "kill rank=1 step=4 bucket=0"
    script = HOME / "version_0_1.py"
    evergrad("run", "-n", 3, "--spares", 1, "--fork", "--fail", fail, "--out", SET / "killed", script, "train")
    evergrad("run", "-n", 3, "--fork", "--fail", fail, "--out", SET / "shrunk", script, "train")


def train() -> None:
    """What each rank of the run does."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    job = eg.join()
    model = job.wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for x, y in job.batches(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if job.step(optimizer) and job.rank == 0:
            print(f"step {job.applied}", flush=True)
        time.sleep(0.3)  # so that the spare has imported everything when it is needed


def make_studies() -> None:
    """A training of torch that flips hit, and a program of the user's own."""
    for name, plan in (("flips", FLIPS), ("program", PROGRAM_PLAN)):
        folder = SET / f"study-{name}"
        folder.mkdir()
        (folder / "plan.toml").write_text(plan)
        if name == "program":
            (folder / "train.py").write_text(PROGRAM)
            np.save(folder / "clean.npy", np.ones(16, np.float32))
        evergrad("study", "run", folder / "plan.toml", "--workers", 1, "--out", folder / "out")


def make_injections() -> None:
    """Copies and files in place, each with its log: checksums that follow, stale ones, packed data, a version."""
    folder = SET / "injected"
    folder.mkdir()
    torch.save({"model": state_of(3)["model"].state_dict(), "tensors": state_of(3)["tensors"]}, folder / "model.pt")
    evergrad("convert", folder / "model.pt", folder / "model.safetensors")
    np.savez_compressed(folder / "packed.npz", a=np.arange(50, dtype=np.float32), b=np.ones((3, 4)))
    options = ("--bits", "exponent", "--count", 5, "--seed", 7)
    evergrad("inject", folder / "model.pt", *options, "--out", folder / "bad.pt")
    scale = ("--fault", "scale", "--factor", 4500, "--count", 3, "--seed", 1)
    for name, given in (("model.safetensors", scale), ("packed.npz", options)):
        shutil.copy(folder / name, folder / f"altered-{name}")
        evergrad("inject", folder / f"altered-{name}", *given, "--in-place")
    stuck = ("--fault", "stuckat", "--value", 1, "--bits", 1, "--count", 2)
    shutil.copy(folder / "model.pt", folder / "twice.pt")
    evergrad("inject", folder / "twice.pt", *stuck, "--seed", 8, "--in-place")
    evergrad("inject", folder / "twice.pt", *stuck, "--seed", 9, "--in-place", "--stale-checksum")
    version = next((SET / "r50/local").glob("*/*/v0000000050-02"))
    for name, more in (("version", ()), ("stale", ("--stale-checksum",))):
        shutil.copytree(version, folder / name / version.name)
        evergrad("inject", folder / name / version.name, *options, "--in-place", "--digest", "full", *more)
    model = state_of(0)["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    faults = eg.inject_live(model, optimizer, eg.BitFlip("exponent"), target="weights", count=2, step=1, seed=4)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    faults.log.save(folder / "live.faults.jsonl")
    torch.save({"model": state_of(0)["model"].state_dict()}, folder / "other.pt")


def make_files() -> None:
    """A state as HDF5, and a version in every form that it can be exported to."""
    folder = SET / "files"
    folder.mkdir()
    eg.save_hdf5(state_of(9), folder / "state.h5")
    for name in ("r50.safetensors", "r50.pt", "r50.npz", "r50.h5", "r50-dcp"):
        only = ("--where", "tensors/weight") if name.endswith("npz") else ()
        evergrad("checkpoints", "export", SET / "r50", "best", folder / name, *only)
    for name in ("ranks.safetensors", "ranks-dcp"):
        evergrad("checkpoints", "export", SET / "ranks", 6, folder / name)


# What 0.1 says about a copy of the set.


def commands() -> list[tuple[str, ...]]:
    """Verbs on a fresh copy each, in which they start; SHARED is a copy's persistent tier as a URL."""
    local = "r50/local/{r50}/n0/v0000000050-02"
    found: list[tuple[str, ...]] = []
    for job, version in (("r50", "best"), ("tuned", "11"), ("ranks", "6"), ("dcp", "2"), ("in-memory", "7")):
        found += [("checkpoints", "ls", job, "--all"), ("checkpoints", "show", job, version)]
        found += [("checkpoints", verb, job) for verb in ("verify", "lineage", "report")]
        found.append(("checkpoints", "export", job, version, "out.safetensors"))
    found += [("checkpoints", verb, "SHARED/r50") for verb in ("ls", "verify", "lineage")]
    found += [("checkpoints", "show", "r50", step) for step in ("10", "20", "30", "40", "50", "latest")]
    found += [("checkpoints", "rm", "r50", "50", "--dry-run"), ("checkpoints", "pin", "r50", "20", "--unpin")]
    found += [("timeline", run) for run in ("killed", "shrunk")]
    for study in ("flips", "program"):
        out = f"study-{study}/out"
        found += [("study", "status", out), ("study", "table", out), ("study", "report", out)]
        found.append(("study", "run", f"study-{study}/plan.toml", "--workers", "1", "--out", out))
    found += [("study", "export", "study-flips/out", "--to", "tables")]
    found.append(("study", "replay", "study-flips/out", "{flips}"))
    files = [
        "files/state.h5",
        "files/r50.safetensors",
        "files/r50.pt",
        "files/r50.npz",
        "files/r50.h5",
        "files/r50-dcp",
    ]
    files += ["files/ranks.safetensors", "files/ranks-dcp", "injected/bad.pt", "injected/model.safetensors"]
    files += ["injected/stale/v0000000050-02", "injected/version/v0000000050-02", local, "ranks/shared/v0000000006-01"]
    found += [(verb, file) for file in files for verb in ("inspect", "verify")]
    found += [("diff", "files/r50.pt", f"files/{name}") for name in ("r50.h5", "r50.safetensors", "r50-dcp")]
    found += [
        ("diff", "files/r50.npz", "files/r50.h5", "--tensors-only"),
        ("diff", "injected/model.pt", "injected/bad.pt"),
    ]
    found += [
        ("diff", local, "injected/version/v0000000050-02"),
        ("diff", "files/ranks.safetensors", "ranks/shared/v0000000006-01"),
    ]
    for log, file in UNDONE:
        found.append(("undo", f"injected/{log}", f"injected/{file}"))
    found += [("undo", f"injected/{log}") for log in ("bad.pt.faults.jsonl", "twice.pt.faults.2.jsonl")]
    replayed = [("bad.pt.faults.jsonl", "model.pt", "out.pt"), ("live.faults.jsonl", "other.pt", "out.pt")]
    replayed += [("altered-packed.npz.faults.jsonl", "packed.npz", "out.npz")]
    replayed += [("altered-model.safetensors.faults.jsonl", "model.safetensors", "out.safetensors")]
    found += [("replay", f"injected/{log}", f"injected/{file}", "--out", out) for log, file, out in replayed]
    return found


UNDONE = [
    ("bad.pt.faults.jsonl", "bad.pt"),
    ("altered-model.safetensors.faults.jsonl", "altered-model.safetensors"),
    ("altered-packed.npz.faults.jsonl", "altered-packed.npz"),
    ("twice.pt.faults.2.jsonl", "twice.pt"),
    ("version/v0000000050-02.faults.jsonl", "version/v0000000050-02"),
    ("stale/v0000000050-02.faults.jsonl", "stale/v0000000050-02"),
]
# Files that a verb writes or brings back, by the bytes they then have.
WRITTEN = ("out.*", "tables/*.csv", "injected/*.pt", "injected/*.npz", "injected/*.safetensors", "injected/*/v*/*")
NOT_PROMISED = ("answer", "facts", "notes", "page", "reason", "seconds", "sections", "verified_at")


def fresh_copy() -> None:
    """The set at another place, as if it had been moved, its arenas in shared memory."""
    shutil.rmtree(COPY.parent, ignore_errors=True)
    shutil.copytree(TARGET, COPY, symlinks=True)
    arenas = SHM / f"evergrad-{os.getuid()}"
    shutil.rmtree(arenas, ignore_errors=True)
    shutil.copytree(COPY / "arenas", arenas)
    for folder in (arenas, *(path for path in arenas.rglob("*") if path.is_dir())):
        folder.chmod(0o700)


def told_by_0_1() -> list[dict[str, Any]]:
    """Each command's exit code, its JSON, and the digests of what it wrote."""
    names = {path.parent.name: json.loads(path.read_text())["id"] for path in TARGET.glob("*/job.json")}
    first = (TARGET / "study-flips/out/journal.jsonl").read_text().splitlines()[1]
    names["flips"] = json.loads(first)["trial"]["id"]
    told = []
    for words in commands():
        fresh_copy()
        places = [word.replace("SHARED/", f"file://{COPY}/") + "/shared" * word.startswith("SHARED/") for word in words]
        given = [word.format(**names) for word in places]
        before = written()
        out = io.StringIO()
        with contextlib.chdir(COPY), contextlib.redirect_stdout(out):
            code = cli.main([*given, "--json"])
        print(code, *words)
        assert code in (0, 1), out.getvalue()
        after = written()
        files = {name: digest for name, digest in after.items() if before.get(name) != digest}
        told.append({"words": words, "code": code, "json": known(out.getvalue()), "files": files})
    return told


def known(output: str) -> Any:
    """What a verb says, but for what follows from the time and the place."""
    return promised(json.loads(output.replace(str(COPY), "{set}").replace(str(SHM), "{shm}")))


def promised(told: Any) -> Any:
    """Without sentences for people, the place of a page, and when a copy was looked at."""
    if isinstance(told, dict):
        return {name: promised(value) for name, value in told.items() if name not in NOT_PROMISED}
    return [promised(value) for value in told] if isinstance(told, list) else told


def written() -> dict[str, str]:
    found = [path for pattern in WRITTEN for path in COPY.glob(pattern) if path.is_file()]
    return {str(path.relative_to(COPY)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(found)}


def versions() -> dict[str, list[dict[str, Any]]]:
    """What `Checkpointer.versions()` says of the moved jobs of one rank."""
    fresh_copy()
    found = {}
    for job in ("r50", "tuned", "in-memory", "unfinished", "dcp"):
        with eg.Checkpointer(COPY / job, TIERS[job](COPY), agent=False) as ck:
            found[job] = [[record.version.name, *record.tiers] for record in ck.versions()]
    return found


TIERS: dict[str, Any] = {
    "r50": lambda home: [
        eg.Memory(),
        eg.Local(keep=9),
        eg.Compress("zstd"),
        eg.Persistent(f"file://{home}/r50/shared"),
    ],
    "tuned": lambda home: [eg.Local()],
    "in-memory": lambda home: [eg.Memory()],
    "unfinished": lambda home: [eg.Local()],
    "dcp": lambda home: [eg.Local()],
}


def keep_arenas() -> None:
    """Arenas as they lie in shared memory, without locks and sockets, which belong to living processes."""
    (root,) = SHM.glob("evergrad-*")
    for path in sorted(root.rglob("*")):
        if path.suffix in (".safetensors", ".ticket", ".json", ".digests") or path.name == "run":
            place = SET / "arenas" / path.relative_to(root)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def no_agent() -> None:
    """Wait until the agents, which stay for 0.3 s, have left."""
    locks = " ".join(str(path) for path in SHM.rglob("agent.lock"))
    for lock in locks.split():
        subprocess.run(["flock", lock, "true"], check=True)


def main() -> None:
    assert eg.__version__ == "0.1.0", f"this set is of Evergrad 0.1.0, found {eg.__version__}"
    if sys.argv[1:] == ["ranks"]:
        return ranks()
    if sys.argv[1:] == ["train"]:
        return train()
    os.environ.update(ENVIRONMENT)
    if sys.argv[1:] == ["expected"]:  # asks 0.1 again about the set that is there
        expected = json.loads((TARGET / "expected.json").read_text())
        return expect(expected)
    shutil.rmtree(HOME, ignore_errors=True)
    for folder in (SET, SHM):
        folder.mkdir(parents=True)
    shutil.copyfile(__file__, HOME / "version_0_1.py")
    expected: dict[str, Any] = {"r50": make_r50(), "ranks": make_ranks(), "dcp": make_dcp()}
    make_tuned()
    make_in_memory()
    make_unfinished()
    for step in (7, 1, 2):
        expected["r50"].setdefault(str(step), values_of(state_of(step)))
    make_run()
    make_studies()
    make_injections()
    make_files()
    keep_set()
    expect(expected | {"state.h5": values_of(state_of(9))})


def expect(expected: dict[str, Any]) -> None:
    """Write what is known of the set, and what 0.1 says of a copy."""
    expected |= {"versions": versions(), "commands": told_by_0_1()}
    (TARGET / "expected.json").write_text(json.dumps(expected) + "\n")
    shutil.rmtree(HOME)


def keep_set() -> None:
    """Move the set to its place, without what belongs to living processes."""
    keep_arenas()
    shutil.rmtree(TARGET, ignore_errors=True)
    shutil.copytree(SET, TARGET)
    for path in [*TARGET.rglob("*.lock"), *TARGET.rglob(".spare-*"), *TARGET.rglob("lock"), *TARGET.rglob("secret")]:
        path.unlink()
    shutil.rmtree(SET)


if __name__ == "__main__":
    main()
