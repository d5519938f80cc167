"""`evergrad run`: starts the processes of a job on one or several machines, and leaves none behind.

settings.py          what a job is launched with, and the environment of its processes
launcher.py          the launcher of one machine, or of the head node: store, coordinator, signals, liveness, respawning
processes.py         child processes; local_processes.py: those of this machine
remote_nodes.py              the other nodes as the head sees them; node.py: the launcher on each of them
node_protocol.py     the messages between head and nodes; rendezvous.py: which node this is, and where the head is
output.py            log lines, the status line, events; summary.py: how the job ended, and its run folder
"""

__all__: list[str] = []
