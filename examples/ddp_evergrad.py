"""The loop of `ddp_plain.py`, going on when ranks are lost: the same losses, to the last bit, as long as none is.

evergrad run -n 4 --spares 1 --fail "kill rank=2 step=10 bucket=0" examples/ddp_evergrad.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evergrad as eg

torch.manual_seed(0)
inputs = torch.randn(768, 32)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
net = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 2))

job = eg.join()
torch.manual_seed(job.rank)  # each rank draws its own dropout
model = job.wrap(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
job.track(scheduler=scheduler)
loader = DataLoader(data, batch_size=16, shuffle=True)

for _ in range(2):
    for x, y in job.batches(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if job.step(optimizer):
            scheduler.step()
            if job.rank == 0:
                print(f"step {job.applied}: loss {loss.item():.9g}")
