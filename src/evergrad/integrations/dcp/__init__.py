"""torch.distributed.checkpoint on Evergrad's arenas and tiers: its calls, its planners, our storage.

    dcp.async_save(state, async_stager=ArenaStager(ck), storage_writer=TierWriter(ck, step=120))
    dcp.load(state, storage_reader=TierReader(ck))

writer.py    stage a state into an arena, the only part that blocks; wait for the version
reader.py    find the newest intact version, rebuild DCP's metadata from its shards, and answer its reads
"""

from evergrad.integrations.dcp.reader import TierReader
from evergrad.integrations.dcp.writer import ArenaStager, TierWriter

__all__ = ["ArenaStager", "TierReader", "TierWriter"]
