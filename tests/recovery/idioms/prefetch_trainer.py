"""A loop that fetches the next batch before the step of the present one, as loops with a prefetcher for GPUs do.

python prefetch_trainer.py OUT
"""

import sys

import torch
from tiny_gpt import leave_result
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evergrad as eg

torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
job = eg.join()
model = job.wrap(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for _ in range(2):
    batches = iter(job.batches(DataLoader(data, batch_size=4, shuffle=True)))
    following = next(batches, None)
    while following is not None:
        x, y = following
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        following = next(batches, None)
        loss.backward()
        job.step(optimizer)
leave_result(sys.argv[1], job.rank, job.applied, net, optimizer)
