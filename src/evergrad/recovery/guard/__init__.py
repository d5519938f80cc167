"""The guard against silent data corruption: compare replicas, and repair the minority.

guard.py       the guard in a job: what is checked in which step, and what follows from a finding
replicas.py    compare the replicas of all ranks, by a tree of digests; repair them from the majority; settings
local_state_guard.py     state that only one rank has: its buffers, and the copy that a neighbour holds
digests.py     128-bit digests of tensors, on the CPU and on CUDA
norms.py       checks within one rank: the gradient norm, the range of the parameters
"""

__all__: list[str] = []
