"""The guard against silent corruption: replicas that should be alike are compared, and what differs is healed.

settings.py     how closely a job is guarded
guarding.py     the guard in a job: what is looked at in which step, and what becomes of it
comparing.py    replicas compared over all ranks, and healed from the majority · replicas.py what a replica consists of
own_guard.py    what only one rank has: its buffers, and its neighbour's copy of them
digests.py      128 bits of a tensor, on the CPU and on CUDA · digest_tree.py which of many differ, in few messages
norms.py        cheap suspicions that need no other rank: the gradient's norm, the parameters' range
"""

__all__: list[str] = []
