"""Injected failures: a schedule as data, carried out in a running job.

schedule.py         a schedule of failures; its docstring is the reference of the grammar
schedule_files.py   schedules in TOML files and CSV traces; distributions.py: schedules drawn at random
injector.py         carries them out: when (triggers), where in a step (sites), what (signals, slowness, bit flips)
network.py          cuts the network of this process
"""

__all__: list[str] = []
