"""Waiting for gloo in slices of time: an operation fails by its own error, and never by the end of a slice."""

from __future__ import annotations

from datetime import timedelta

from evergrad.recovery.process_group import GlooGroup


class StandInWork:
    """Stands in for torch's Work: it ends between the time limit of the first wait and the question after it."""

    def __init__(self, error: str | None) -> None:
        self._error = error
        self._has_waited = False

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._has_waited:
            self._has_waited = True
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return True


def waited_for(work: StandInWork) -> str | None:
    group = GlooGroup.__new__(GlooGroup)
    group._reason = None
    return group._await(work, in_slices=True)


def test_an_operation_that_ends_just_after_a_slice_has_not_failed() -> None:
    assert waited_for(StandInWork(None)) is None


def test_an_operation_that_fails_just_after_a_slice_fails_by_its_own_error() -> None:
    assert waited_for(StandInWork("Connection closed by peer")) == "Connection closed by peer"
