"""One soft error by hand: train, save, flip, look, train on, compare with the training without it, undo.

python examples/inject_resume.py [FOLDER]

A study does this hundreds of times, with intervals: evergrad study run bitflip-nev --scale tiny --out runs/nev
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import evergrad as eg

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
torch.manual_seed(0)
torch.set_num_threads(1)
inputs = torch.randn(512, 16)
labels = (inputs[:, 0] * inputs[:, 1] > 0).long()


def train(checkpoint: Path | None, epochs: int, save: Path | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    """From the beginning, or from a checkpoint; the accuracy in the end, and the weights."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if checkpoint is not None:
        state = torch.load(checkpoint, weights_only=True)  # it loads the flipped file as if nothing were wrong
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for _ in range(epochs):
        for x, y in zip(inputs.split(64), labels.split(64), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    if save is not None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, save)
    return (model(inputs).argmax(1) == labels).double().mean().item(), model.state_dict()


saved, flipped = folder / "saved.pt", folder / "flipped.pt"
train(None, 10, saved)
golden, weights = train(saved, 5)  # the golden run: no fault
print(f"golden run: accuracy {golden:.0%}")

fault = eg.BitFlip(bits="exponent-msb")
log = eg.inject(saved, fault, count=1, where="model/2.weight", seed=3, out=flipped)
print(next(log.faults()))

found = eg.verify(flipped)["model/2.weight"]
print(f"verify: {found.verdict}, {found.reason.split(':')[0]}")

accuracy, after = train(flipped, 5)
changed = sum(not torch.equal(weights[name], after[name]) for name in weights)
print(f"trained on from it: accuracy {accuracy:.0%}, {changed} of {len(weights)} tensors differ from the golden run's")

eg.undo(log)  # byte for byte
print(f"undone: {'the same file as before' if flipped.read_bytes() == saved.read_bytes() else 'another file'}")
again, weights_again = train(flipped, 5)
same = all(torch.equal(weights[name], weights_again[name]) for name in weights)
print(f"trained on from that: {'the golden run' if same else 'not the golden run'}, to the last bit")
