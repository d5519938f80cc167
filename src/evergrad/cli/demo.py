"""`evergrad demo`: what there is, with real files and real output, in under a minute."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evergrad.cli.output import JsonOption, console, print_json
from evergrad.errors import FileAccessError, UsageError

if TYPE_CHECKING:
    import torch

    from evergrad.records import Json

__all__ = ["EPILOG", "demo"]

EPILOG = "Example:\n\n  evergrad demo --keep /tmp/evergrad-demo\n\nExit codes: 0 everything worked · 2 usage."

_SEED = 1
_FLIP = ("--bits", "exponent-msb", "--count", "1", "--where", "model/4.weight", "--seed", str(_SEED))
_FLIPS, _TRIALS = 10, 10
_STEPS, _KILL_AT = 60, 40


def demo(
    keep: Annotated[Path | None, typer.Option(help="Keep the files in this folder: a new or an empty one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train, flip bits of a checkpoint and see what that does; kill trainers, preempt jobs, lose ranks, and go on."""
    if keep is not None:
        _make_folder(keep)
        _tell(keep, as_json)
    else:
        with tempfile.TemporaryDirectory(prefix="evergrad-demo-") as folder:
            _tell(Path(folder), as_json)
        if not as_json:
            console().print(f"\n{folder} is removed again; 'evergrad demo --keep FOLDER' leaves everything in FOLDER.")


def _make_folder(folder: Path) -> None:
    """A new or empty folder: what someone keeps there already is not the demo's to replace."""
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder}: is no folder. Choose a new or an empty one.")
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder}: is not empty. Choose a new or an empty folder.")
    except OSError as error:
        what = f"cannot be made: {(error.strerror or str(error)).lower()}"
        raise FileAccessError(folder, what) from error


def _tell(folder: Path, as_json: bool) -> None:
    say: Callable[[str], None] = (lambda _: None) if as_json else console().print
    facts: dict[str, Json] = {}

    import torch

    import evergrad as eg
    from evergrad.cli import main

    def run(*arguments: str) -> None:
        shown = (str(Path(a).relative_to(folder)) if a.startswith(f"{folder}/") else a for a in arguments)
        say(f"\n[bold]$ evergrad {' '.join(shown)}[/bold]")
        with redirect_stdout(StringIO()) if as_json else nullcontext():
            code = main(arguments)
        if code > 1:
            raise typer.Exit(code)

    say("[bold]1. Train a small network and save it as everyone does[/bold]")
    model, optimizer, data = _train(torch)
    clean, flipped, twin = folder / "model.pt", folder / "flipped.pt", folder / "model.safetensors"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, clean)
    facts["accuracy"] = _accuracy(torch, clean, data)
    say(f"model.pt: accuracy {facts['accuracy']:.1%}")

    say("\n[bold]2. Its tensors, by name, without reading them and without running its pickle[/bold]")
    run("inspect", str(clean), "--where", "model")

    say("\n[bold]3. A soft error: flip the top exponent bit of one weight[/bold]")
    run("inject", str(clean), *_FLIP, "--out", str(flipped))
    log = eg.InjectionLog.load(f"{flipped}.faults.jsonl")
    hit = next(log.faults())
    facts.update(before=hit.old_value, after=hit.new_value, accuracy_after_flip=_accuracy(torch, flipped, data))
    say(f"flipped.pt: accuracy {facts['accuracy_after_flip']:.1%}; torch.load reads the file without a word")
    run("diff", str(clean), str(flipped))

    say("\n[bold]4. Without the clean file: the checksum was kept valid, but the value gives it away[/bold]")
    run("verify", str(flipped))
    facts["verify"] = eg.verify(flipped).verdict.value

    say("\n[bold]5. Undo it, byte for byte[/bold]")
    run("undo", f"{flipped}.faults.jsonl")
    facts["undone"] = flipped.read_bytes() == clean.read_bytes()
    say(f"flipped.pt is model.pt again: {'yes' if facts['undone'] else 'no'}")

    say(f"\n[bold]6. Which bits matter? {_FLIPS} flips of each kind in the weights, {_TRIALS} times[/bold]")
    fields = _by_field(folder, clean, lambda path: _accuracy(torch, path, data))
    facts["accuracy_by_field"] = {field: list(results) for field, results in fields.items()}
    for field, (mean, worst) in fields.items():
        say(f"{field:13} accuracy {'█' * round(mean * 40):40} {mean:6.1%} on average, {worst:6.1%} at worst")

    say("\n[bold]7. The same state in another format: exact, optimizer, epoch and all[/bold]")
    run("convert", str(clean), str(twin))
    run("diff", str(clean), str(twin))
    facts["conversion_exact"] = eg.compare(clean, twin).equal

    say("\n[bold]8. A file that would run a command when it is loaded is read, and runs nothing[/bold]")
    trap, mark = folder / "trap.pt", folder / "it-ran"
    try:
        torch.save({"weight": torch.ones(3), "payload": _Trap(mark)}, trap)
        run("inspect", str(trap))
        with eg.open_checkpoint(trap) as ck:
            facts["trap_tensors"] = len(ck.tensors)
        facts["trap_ran"] = mark.exists()
    finally:
        trap.unlink(missing_ok=True)  # it is live: nobody should find it in a folder that was kept
    say(f"command executed: {'yes' if facts['trap_ran'] else 'no'}")

    say(f"\n[bold]9. Kill a trainer right after its save of step {_KILL_AT}, and go on in another process[/bold]")
    facts.update(_survive(folder / "run", say))

    from evergrad.cli.demo_versions import preempt_and_move, rot_and_restore

    say("\n[bold]10. Preempt a job that also flushes to shared storage, and go on elsewhere[/bold]")
    facts.update(preempt_and_move(folder, say, run))

    say("\n[bold]11. Soft errors in a version, and what a restore makes of them[/bold]")
    facts.update(rot_and_restore(folder, say, run))

    from evergrad.cli.demo_recovery import lose_a_rank

    say("\n[bold]12. Kill a rank in the middle of training: the others go on; a spare takes its place[/bold]")
    facts.update(lose_a_rank(folder, say))
    if as_json:
        print_json(facts)


def _survive(run_dir: Path, say: Callable[[str], None]) -> dict[str, Json]:
    """A trainer is killed as soon as `save` has returned; what it saved is there, and training goes on the same."""
    import signal
    import subprocess
    import sys

    import evergrad as eg
    from evergrad.cli.demo_trainer import train

    command = [sys.executable, "-m", "evergrad.cli.demo_trainer", str(run_dir), str(_STEPS), str(_KILL_AT)]
    killed = subprocess.run(command, check=False).returncode == -signal.SIGKILL
    say(f"trainer killed by SIGKILL: {'yes' if killed else 'no'}; only the agent was left, and it finished the save")
    begin, losses = train(run_dir, _STEPS)
    golden = train(None, _STEPS)[1]
    same = losses == golden[begin:]
    say(f"restored step {begin}, every digest verified, and trained on to step {_STEPS}")
    say(
        f"its {len(losses)} losses are those of a run that was never killed, to the last bit: {'yes' if same else 'no'}"
    )
    with eg.Checkpointer(run_dir, agent=False) as ck:
        for record in ck.versions():
            say(f"  {record.version.name}  loss {record.meta['loss']:.4f}  in {' and '.join(record.tiers)}")
        versions: list[Json] = [record.version.name for record in ck.versions()]
    return {"killed": killed, "restored_step": begin, "losses_identical": same, "versions": versions}


def _by_field(folder: Path, clean: Path, accuracy: Callable[[Path], float]) -> dict[str, tuple[float, float]]:
    """Mean and worst accuracy with flips in each field of the weights."""
    import evergrad as eg

    found: dict[str, tuple[float, float]] = {}
    for field in ("mantissa", "sign", "exponent", "exponent-msb"):
        results = []
        for seed in range(_TRIALS):
            trial = folder / "trial.pt"
            log = eg.inject(clean, eg.BitFlip(field), count=_FLIPS, where="model", seed=seed, out=trial)
            results.append(accuracy(trial))
            trial.unlink()
            assert log.path is not None
            log.path.unlink()
        found[field] = sum(results) / _TRIALS, min(results)
    return found


class _Trap:
    """What a hostile checkpoint looks like: unpickling it would run a command."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (f"touch '{self._mark}'",)


def _train(torch_: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    """Two spirals, three layers, a second."""
    generator = torch_.Generator().manual_seed(7)
    turn = torch_.rand(1000, generator=generator).sqrt() * 9
    label = torch_.arange(1000) % 2
    angle = turn + label * torch_.pi
    points = torch_.stack([angle.cos(), angle.sin()], 1) * turn[:, None] / 9
    with torch_.random.fork_rng():
        torch_.manual_seed(7)
        layer = torch_.nn.Linear
        model = torch_.nn.Sequential(layer(2, 64), torch_.nn.Tanh(), layer(64, 64), torch_.nn.Tanh(), layer(64, 2))
        optimizer = torch_.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(400):
            optimizer.zero_grad()
            torch_.nn.functional.cross_entropy(model(points), label).backward()
            optimizer.step()
    return model, optimizer, (points, label)


def _accuracy(torch_: Any, path: Path, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    layer = torch_.nn.Linear
    model = torch_.nn.Sequential(layer(2, 64), torch_.nn.Tanh(), layer(64, 64), torch_.nn.Tanh(), layer(64, 2))
    model.load_state_dict(torch_.load(path, weights_only=True)["model"])
    with torch_.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).float().mean())
