"""Failures on purpose: what goes wrong when, as data, and how it comes true in a running job.

schedule.py        a schedule of failures; its docstring is the grammar's reference
failure.py         one failure · words.py the words of the grammar, checked
chances.py         schedules drawn from distributions · schedule_files.py TOML files and traces
triggers.py        when: the job says where it is, and what is due there happens · sites.py the places of a step
acts.py            what: signals, slowness · network.py a cut · reaching.py other machines
"""

__all__: list[str] = []
