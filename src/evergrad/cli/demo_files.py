"""The demo's chapter of files: bits that flip in a checkpoint, what they do, and how they are found and undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from evergrad.records import Json

_SEED = 1
_FLIP = ("--bits", "exponent-msb", "--count", "1", "--where", "model/4.weight", "--seed", str(_SEED))
_FLIPS, _TRIALS = 10, 10


def tell(folder: Path, say: Callable[[str], None], run: Callable[..., None]) -> dict[str, Json]:
    """Parts 1 to 8."""
    import torch

    import evergrad as eg

    facts: dict[str, Json] = {}
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
    return facts


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
