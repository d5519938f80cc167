"""A script of which one rank waits for ever, in Python, at its third step."""

from __future__ import annotations

import threading

import torch
from torch import nn

import evergrad as eg


def wait_for_nothing() -> None:
    threading.Event().wait()


torch.set_num_threads(1)
job = eg.join()
net = nn.Linear(4, 1)
model = job.wrap(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    for (x,) in job.batches(
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 4)), batch_size=2)
    ):
        if job.rank == 1 and job.applied == 2 and job.generation == 0:
            wait_for_nothing()
        optimizer.zero_grad()
        model(x).mean().backward()
        job.step(optimizer)
