"""`evergrad run`: starts the processes of a job, on one machine or several, stays with them, and leaves nothing behind.

settings.py      what a job is launched with · placing.py where each process starts · summary.py how it ended
launcher.py      the launcher of one machine, or the head of several: store, coordinator, processes, signals
processes.py     real processes, and forks of the launcher once it has imported torch
crowd.py         the contract of processes near and far · household.py those of this machine
lookout.py       who lives and is not there · respawning.py who is started again
announcing.py    what people are told · status.py output and the status line
hosts.py         which machine this is, and where the head is · posts.py what machines tell each other
nodes.py         what the head sees of other nodes · reception.py who comes and goes · outpost.py the others' launcher
"""

__all__: list[str] = []
