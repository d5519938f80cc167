"""Test suites for what users add to Evergrad, and faults for their tests; nothing in Evergrad imports this package.

>>> class TestMyFormat(FormatContract):                                 # doctest: +SKIP
...     format = "mine"
...     def make(self, folder):
...         my_library.save(TENSORS, folder / "a.mine")
...         return folder / "a.mine", TENSORS
...     def load(self, path):
...         return my_library.load(path)

Your own training script under failures: `run_job` and `sweep`; as fixtures in `evergrad.testing.plugin`.

>>> run = run_job("train.py", ranks=4, failures=Failures().kill(rank=1, step=3))    # doctest: +SKIP
>>> run.assert_survived(1)                                                          # doctest: +SKIP
"""

from evergrad.recovery.failures.schedule import Failures
from evergrad.testing.executor_contract import ExecutorContract
from evergrad.testing.format_contract import FormatContract, raw_bytes
from evergrad.testing.hang_report import StuckProcess
from evergrad.testing.jobs import FinalWeights, JobRun, RunJob, close_forkserver, run_job
from evergrad.testing.storage import FullStorage, ReadOnlyStorage, SlowStorage, StorageCall, StorageCalls, kill_after
from evergrad.testing.sweeps import PHASES, Case, Script, Sweep, sweep
from evergrad.testing.tier_contract import SharedTierContract, TierContract, capture_shard

__all__ = [
    "PHASES",
    "Case",
    "ExecutorContract",
    "Failures",
    "FinalWeights",
    "FormatContract",
    "FullStorage",
    "JobRun",
    "ReadOnlyStorage",
    "RunJob",
    "Script",
    "SharedTierContract",
    "SlowStorage",
    "StorageCall",
    "StorageCalls",
    "StuckProcess",
    "Sweep",
    "TierContract",
    "capture_shard",
    "close_forkserver",
    "kill_after",
    "raw_bytes",
    "run_job",
    "sweep",
]
