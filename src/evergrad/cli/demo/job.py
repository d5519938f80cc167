"""The job that the demo takes a rank from: `evergrad run -n 4 --spares 1 … job.py`.

A training loop as anyone would write it, and the six lines that let it go on: join, wrap, track, guard, batches, step.
"""

from __future__ import annotations

import hashlib
from typing import Any

_EPOCHS, _SAY_EVERY = 4, 8


def main() -> None:
    """Tell two spirals apart; one rank says how it goes."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import evergrad as eg

    torch.manual_seed(7)
    turn, label = torch.rand(960).sqrt() * 9, torch.arange(960) % 2
    angle = turn + label * torch.pi
    points = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None] / 9
    loader = DataLoader(TensorDataset(points, label), batch_size=32, shuffle=True)
    net = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 2))

    job = eg.join()
    model = job.wrap(net)
    optimizer: Any = torch.optim.Adam(net.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    job.track(scheduler=scheduler)
    job.guard(every=5)
    torch.manual_seed(job.rank)  # every rank drops other neurons
    for _ in range(_EPOCHS):
        for x, y in job.batches(loader):
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if job.step(optimizer):
                scheduler.step()
                if job.rank == 0 and job.applied % _SAY_EVERY == 0:
                    print(f"step {job.applied:2}  loss {loss.item():.6f}  {job.world_size} ranks", flush=True)
    if job.rank == 0:
        digest = hashlib.blake2b(b"".join(p.detach().numpy().tobytes() for p in net.parameters()), digest_size=6)
        print(f"final weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
