"""A training script with a Trainer class, epochs and snapshots, in plain DDP.

torchrun --nproc-per-node 2 mini_plain.py --out out
"""

import argparse
import os

import torch
from tiny_gpt import GPT, TOKENS, await_joiner, die_here, leave_result
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class CharDataset(Dataset):
    def __init__(self, tokens, block):
        self.tokens, self.block = tokens, block

    def __len__(self):
        return (len(self.tokens) - 1) // self.block

    def __getitem__(self, index):
        begin = index * self.block
        return self.tokens[begin : begin + self.block], self.tokens[begin + 1 : begin + self.block + 1]


class Trainer:
    def __init__(self, config, model, optimizer, scheduler, train_data, test_data):
        self.config = config
        self.rank = int(os.environ["RANK"])
        self.train_loader = self._prepare_dataloader(train_data)
        self.test_loader = DataLoader(test_data, batch_size=config.batch)
        self.optimizer, self.scheduler = optimizer, scheduler
        self.epochs_run = 0
        self.steps = 0
        self.model = DDP(model)

    def _prepare_dataloader(self, dataset):
        return DataLoader(dataset, batch_size=self.config.batch, shuffle=False, sampler=DistributedSampler(dataset))

    def _run_batch(self, source, targets, train):
        with torch.set_grad_enabled(train):
            _, loss = self.model(source, targets)
        if train:
            await_joiner(self.steps)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
            self.optimizer.step()
            self.steps += 1
        return loss.item()

    def _run_epoch(self, epoch, loader, train):
        if train:
            loader.sampler.set_epoch(epoch)
        else:
            die_here("eval", self.rank)
        for iteration, (source, targets) in enumerate(loader):
            loss = self._run_batch(source, targets, train)
            if self.rank == 0 and iteration % 2 == 0:
                print(f"epoch {epoch} | iteration {iteration} | {'train' if train else 'eval'} loss {loss:.6f}")

    def _save_snapshot(self, epoch):
        die_here("snapshot", self.rank)
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "finished_epoch": epoch,
        }
        torch.save(snapshot, os.path.join(self.config.out, "snapshot.pt"))

    def train(self):
        for epoch in range(self.epochs_run, self.config.epochs):
            self._run_epoch(epoch, self.train_loader, train=True)
            self.scheduler.step()
            if self.rank == 0 and (epoch + 1) % self.config.save_every == 0:
                self._save_snapshot(epoch)
            self._run_epoch(epoch, self.test_loader, train=False)  # dropout stays on: it draws random numbers


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--clip", type=float, default=1.0)
    config = parser.parse_args()
    os.makedirs(config.out, exist_ok=True)
    init_process_group(backend="gloo")
    torch.manual_seed(42)
    model = GPT(dropout=0.2)
    optimizer = model.configure_optimizer(0.1, 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    torch.manual_seed(1000 + int(os.environ["RANK"]))
    train_data, test_data = CharDataset(TOKENS[:770], 8), CharDataset(TOKENS[770:900], 8)
    trainer = Trainer(config, model, optimizer, scheduler, train_data, test_data)
    trainer.train()
    leave_result(config.out, trainer.rank, trainer.steps, trainer.model.module, optimizer)
    # DDP first: if it is the last to hold the group, torch joins the group's threads while it holds the interpreter,
    # and one of these may wait for that.
    del trainer
    destroy_process_group()


if __name__ == "__main__":
    main()
