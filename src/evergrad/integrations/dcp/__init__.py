"""torch.distributed.checkpoint on Evergrad's arenas and tiers: its calls, its planners, our storage.

    dcp.async_save(state, async_stager=ArenaStager(ck), storage_writer=TierWriter(ck, step=120))
    dcp.load(state, storage_reader=TierReader(ck))

names.py     which name DCP has for what a shard holds
stager.py    the state into an arena: the only part of a save that blocks
writer.py    waiting for the version, or capturing what was not staged
intact.py    the newest version whose shards are all as they were captured
reader.py    DCP's metadata, rebuilt from the shards, and the answers to its reads
"""

from evergrad.integrations.dcp.reader import TierReader
from evergrad.integrations.dcp.writer import ArenaStager, TierWriter

__all__ = ["ArenaStager", "TierReader", "TierWriter"]
