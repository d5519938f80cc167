"""Where versions live: one file a tier, nearest first."""

from evergrad.checkpoint.tiers.base import (
    Copy,
    Gone,
    Site,
    Store,
    Tier,
    Torn,
    Work,
    read_tiers,
    without_password,
    without_secrets,
)
from evergrad.checkpoint.tiers.compress import Compress, join_compression
from evergrad.checkpoint.tiers.local import Local
from evergrad.checkpoint.tiers.memory import Memory
from evergrad.checkpoint.tiers.persistent import Persistent

__all__ = [
    "Compress",
    "Copy",
    "Gone",
    "Local",
    "Memory",
    "Persistent",
    "Site",
    "Store",
    "Tier",
    "Torn",
    "Work",
    "join_compression",
    "read_tiers",
    "without_password",
    "without_secrets",
]
