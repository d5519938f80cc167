"""Which version to go on with, its shard verified, and how it gets into the live state."""

__all__: list[str] = []
