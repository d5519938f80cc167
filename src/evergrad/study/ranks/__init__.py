"""The processes of a training that is spread over ranks, kept warm from trial to trial.

group.py      a group of ranks as its worker sees it: call a function on all of them, learn what became of each
keeping.py    the group that a worker keeps warm
nursery.py    the process that has torch loaded and forks ranks, so that a group starts in a blink
tending.py    the nursery as its worker sees it
rank.py       a rank: joins its group, then does what it is told
"""

# Nothing is imported here: every rank comes through this package.
__all__: list[str] = []
