"""The catalogue of a job: every version that there was, what is left of it, what is pinned, and what came from what.

journal.py     what happened to versions: append-only, one file a writer
pins.py        versions that retention must leave alone, and their names
survey.py      what the tiers hold now, looked up without making anything
records.py     the two together: an entry a version
lineage.py     which version was trained from which; graph.py and picture.py draw it
checking.py    every digest of every copy
removal.py     removing one by hand
gathering.py   all ranks' shards as one state; export.py writes it as one file

The agent imports from here, so nothing needs torch before a tensor is made.
"""

__all__: list[str] = []
