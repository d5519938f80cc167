"""Restore: find a version, verify its shards, load them in place.

find.py          the newest version that every rank can obtain
shards.py        one rank's shard, mapped and verified
reshard.py       one rank's state out of the shards of several
mismatches.py     what loading will do, and what stands in its way; load_state.py: match a live state, and fill it
copy_in.py       copy a mapped tensor into memory
dcp_folder.py    folders of torch.distributed.checkpoint
"""

__all__: list[str] = []
