"""Digests of a rank's state: compared between ranks when somebody has joined and at the end, and by tests between runs.

With EVERGRAD_RECORD_WEIGHTS=1 in its environment, a job that closes records one event on its timeline:

    {"event": "weight_digests", "rank": 1, "uid": 4, "generation": 2, "steps": 24, "weights": "9f3c…", "state": "02ab…"}

Equal digests mean the same names, dtypes, shapes and bytes, in the same order; NaNs of other bits differ, and so do 0.0
and -0.0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from evergrad._digest import digest_bytes, digest_labelled
from evergrad.recovery.guard.replicas import gather_digests, gather_json, replica_of, shown_value
from evergrad.recovery.membership import Fingerprint, first_difference
from evergrad.recovery.process_group import Group

RECORD_WEIGHTS = "EVERGRAD_RECORD_WEIGHTS"
"""The name in the environment."""


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of named tensors (xxh3, 128 bits), wherever they are.

    >>> digest([("a", torch.ones(2))]) == digest([("a", torch.ones(2).t())])
    True
    >>> digest([("a", torch.zeros(1))]) == digest([("a", -torch.zeros(1))])
    False
    """
    return digest_labelled((f"{name}\0{one.dtype}\0{tuple(one.shape)}\0".encode(), one) for name, one in tensors)


def record_weights(model: nn.Module | None, tell: Callable[..., None], **about: int) -> None:
    """Record the digests of parameters (`weights`), and of parameters and buffers (`state`), if that is asked for."""
    if model is None or os.environ.get(RECORD_WEIGHTS) != "1":
        return
    parameters = [*model.named_parameters()]
    tell("weight_digests", **about, weights=digest(parameters), state=digest([*parameters, *model.named_buffers()]))


def fingerprint_of(model: nn.Module | None, optimizers: Sequence[Optimizer], step: int) -> Fingerprint:
    """The fingerprint of what this rank trains: parameters, optimizer state, hyper-parameters."""
    replica = replica_of(model, optimizers)
    digests = replica.digests(replica.tensors)
    values = {path: shown_value(value.read()) for path, value in replica.values.items()}
    return Fingerprint(step, values, {path: digest[:8].hex() for path, digest in digests.items()})


def compare_ranks(group: Group, mine: Fingerprint) -> tuple[str, str]:
    """The first difference between all ranks' fingerprints, as `first_difference` has it; all ranks get the same."""
    if len(set(gather_digests(group, digest_bytes(mine.to_json().encode())))) == 1:
        return "", ""
    texts = gather_json(group, mine.to_json())
    return first_difference({rank: Fingerprint.from_json(text) for rank, text in enumerate(texts)})
