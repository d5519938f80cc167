"""The agent's part: a captured shard goes through a chain of modules, and versions become complete."""

__all__: list[str] = []
