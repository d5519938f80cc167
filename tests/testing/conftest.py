"""The kit's fixtures, as users have them."""

from __future__ import annotations

from evergrad.testing.plugin import evergrad_forkserver, run_job

__all__ = ["evergrad_forkserver", "run_job"]
