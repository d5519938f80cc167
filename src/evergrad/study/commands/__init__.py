"""Any training at all: a program that goes on from a checkpoint file and prints what it measures.

running.py      a golden run, and a trial: what the study's workers call
invocations.py  a command line: its words, its placeholders, what is wrong with it
programs.py     one run of a program; keeper.py stays beside it and ends everything that it started
readings.py     metrics and losses out of what it prints
state_files.py  what its checkpoint holds: digests, numbers that are not finite or extreme
"""

from evergrad.study.commands.invocations import check_command
from evergrad.study.commands.running import check_golden, make_golden, run_trial

__all__ = ["check_command", "check_golden", "make_golden", "run_trial"]
