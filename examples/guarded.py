"""A loop that looks out for silent corruption: a flipped bit on one rank is found, named and healed by the others.

evergrad run -n 4 --fail "flip rank=1 step=9 phase=optimizer where=model/2.weight bits=mantissa" examples/guarded.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evergrad as eg

torch.manual_seed(0)
inputs = torch.randn(768, 32)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

job = eg.join()
model = job.wrap(net)
job.guard(every=10)  # after so many steps all ranks compare what they have
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

for _ in range(2):
    for x, y in job.batches(DataLoader(data, batch_size=16, shuffle=True)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if job.step(optimizer) and job.rank == 0:
            print(f"step {job.applied}: loss {loss.item():.9g}")
