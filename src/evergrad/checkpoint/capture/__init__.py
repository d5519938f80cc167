"""The trainer's part of a save: copy the state into an arena.

capture.py            the cached plan of a state, the copy, and the arenas of a rank
structure_cache.py    finds today's tensors in a state whose structure is known
dtensor.py            what of a DTensor this rank holds
cuda.py               copies from GPUs that overlap with training
"""

__all__: list[str] = []
