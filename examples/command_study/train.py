"""A training as people have it: it knows nothing of Evergrad.

    python train.py --epochs 3 --save run.pt                  # train, and save
    python train.py --epochs 2 --resume run.pt                # go on from there, for two more epochs

Every epoch prints one JSON line; `study.toml`, beside this, reads them.
"""

from __future__ import annotations

import argparse
import json

import torch
from sklearn.datasets import load_digits
from torch import nn


def main() -> None:
    """Train a small convolutional network on scikit-learn's digits."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--resume", help="a file that --save wrote")
    parser.add_argument("--save")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1437), slice(1437, None)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    begin = 0
    if options.resume:
        state = torch.load(options.resume, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"]

    for epoch in range(begin, begin + options.epochs):
        # The order depends on the epoch alone: a resumed training meets the batches that one without a break does.
        order = torch.randperm(1437, generator=torch.Generator().manual_seed(options.seed + epoch))
        total = 0.0
        for batch in order.split(64):
            loss = nn.functional.cross_entropy(model(images[train][batch]), labels[train][batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        with torch.no_grad():
            right = model(images[test]).argmax(1) == labels[test]
        accuracy = right.double().mean().item()
        print(json.dumps({"epoch": epoch + 1, "loss": total / 1437, "accuracy": accuracy}), flush=True)

    if options.save:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": begin + options.epochs}
        torch.save(state, options.save)


if __name__ == "__main__":
    main()
