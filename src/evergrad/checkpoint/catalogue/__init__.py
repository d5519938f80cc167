"""The catalogue of a job: every version that there was, what is left of it, what is pinned, and its lineage.

history.py     what happened to versions: append-only, one file a writer
survey.py      what the tiers hold now; looking changes nothing
catalogue.py   both together: one entry a version; removing a version by hand
pins.py        versions that retention keeps, and their tags
lineage.py     which version was trained from which, as text and as a picture
verify.py      every digest of every copy
export.py      all ranks' shards as one state, and as one file

The agent imports from here, so nothing needs torch before a tensor is made.
"""

__all__: list[str] = []
