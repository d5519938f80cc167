"""Survivors go on: failures as data, membership, strategies, the training loop, the launcher."""

__all__: list[str] = []
