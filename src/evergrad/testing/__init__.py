"""Test suites for what users add to Evergrad, and faults for their tests; nothing in Evergrad imports this package.

>>> class TestMyFormat(FormatContract):                                 # doctest: +SKIP
...     format = "mine"
...     def make(self, folder):
...         my_library.save(TENSORS, folder / "a.mine")
...         return folder / "a.mine", TENSORS
...     def load(self, path):
...         return my_library.load(path)
"""

from evergrad.recovery.failures import Failures
from evergrad.testing.crashes import (
    FullStorage,
    ReadOnlyStorage,
    SlowStorage,
    StorageCall,
    StorageCalls,
    kill_after,
)
from evergrad.testing.format_contract import FormatContract, raw_bytes
from evergrad.testing.shared_tier_contract import SharedTierContract
from evergrad.testing.tier_contract import TierContract, captured

__all__ = [
    "Failures",
    "FormatContract",
    "FullStorage",
    "ReadOnlyStorage",
    "SharedTierContract",
    "SlowStorage",
    "StorageCall",
    "StorageCalls",
    "TierContract",
    "captured",
    "kill_after",
    "raw_bytes",
]
