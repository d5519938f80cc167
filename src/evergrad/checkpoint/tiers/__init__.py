"""Where versions are stored: one file a tier, nearest first.

base.py            the contract of a tier
memory.py          the arena itself; local.py: a disk of the node; persistent.py: an object store or shared file system
commits.py         COMMIT.json, which makes a version of a shared tier exist
object_store.py    objects over any fsspec file system: retries, bandwidth; s3.py: S3 with resumable uploads
compress.py        `Compress`: zstd frames before a slow tier
"""

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
