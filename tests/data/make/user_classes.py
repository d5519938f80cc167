"""Makes tests/data/user_class.pt and tests/data/whole_module.pt: pickles of classes that their reader cannot import.

    pip install torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
    python tests/data/make/user_classes.py

The classes are saved as members of acme_training.config, a module that exists only while this script runs.
"""

import sys
from dataclasses import dataclass, field
from types import ModuleType

import torch
from expect import DATA, tensors_of_pickle, write_expected
from torch import nn


@dataclass
class Config:
    """Has a tensor for an attribute."""

    width: int = 6
    name: str = "acme"
    betas: tuple[float, float] = (0.9, 0.95)
    class_weights: torch.Tensor = field(default_factory=lambda: torch.tensor([0.25, 0.5, 1.0]))


class Extra(dict):
    """A dict that has an attribute besides its items."""

    def __init__(self, note: str, **items: object) -> None:
        super().__init__(items)
        self.note = note


class Net(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(4, config.width)
        self.norm = nn.BatchNorm1d(config.width)
        self.register_buffer("scale", torch.arange(3, dtype=torch.bfloat16), persistent=False)


def move_to_acme(*classes: type) -> None:
    """Let pickle find the classes in a module of our making."""
    package, module = ModuleType("acme_training"), ModuleType("acme_training.config")
    sys.modules.update({package.__name__: package, module.__name__: module})
    for cls in classes:
        cls.__module__ = module.__name__
        setattr(module, cls.__name__, cls)


def main() -> None:
    move_to_acme(Config, Extra, Net)
    torch.manual_seed(0)
    config = Config()
    model = Net(config)
    extra = Extra("best so far", step=7, best={"loss": torch.tensor(0.125), "by/epoch 100%": torch.arange(4)})
    torch.save({"model": model.state_dict(), "config": config, "extra": extra}, DATA / "user_class.pt")
    torch.save(model, DATA / "whole_module.pt")
    for name in ("user_class", "whole_module"):
        write_expected(name, tensors_of_pickle(DATA / f"{name}.pt"))


if __name__ == "__main__":
    main()
