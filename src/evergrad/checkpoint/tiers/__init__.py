"""Where versions live: one file a tier, nearest first."""

from evergrad.checkpoint.tiers.contract import Copy, Site, Store, Tier, Torn, Work, read_tiers
from evergrad.checkpoint.tiers.local import Local
from evergrad.checkpoint.tiers.memory import Memory

__all__ = ["Copy", "Local", "Memory", "Site", "Store", "Tier", "Torn", "Work", "read_tiers"]
