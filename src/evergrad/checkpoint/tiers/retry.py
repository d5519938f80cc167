"""Trying again: what may pass is tried for a while, what cannot pass is said at once."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from evergrad.checkpoint.arena import open_files_hint
from evergrad.checkpoint.tiers.redaction import Redaction
from evergrad.errors import EvergradError, TierError

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 10.0
_WILL_NOT_PASS = {
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EMFILE, errno.EMSGSIZE,
    errno.ENAMETOOLONG, errno.ENFILE, errno.ENOENT, errno.ENOSPC, errno.ENOSYS, errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip
# Refused with a 4xx, and right the next time.
_MAY_PASS = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "OperationAborted", "RequestTimeout", "SlowDown",
    "Throttling", "ThrottlingException", "TooManyRequests", "XAmzContentSHA256Mismatch",
}  # fmt: skip
_OURS = (EvergradError, TypeError, ValueError, LookupError, AttributeError, ImportError, AssertionError)
_SETTINGS = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ProfileNotFound"}


class Retry:
    """Calls that may be made any number of times, and are, until one succeeds or patience ends."""

    def __init__(
        self,
        where: str,
        patience_s: float,
        redact: Redaction,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._where, self._patience_s, self._redact = where, patience_s, redact
        self._clock, self._sleep = clock, sleep

    def __call__(self, what: str, call: Callable[[], _T]) -> _T:
        """What the call gives; `FileNotFoundError` and `FileExistsError` as they come, else `TierError`."""
        began, tried, wait_s = self._clock(), 0, FIRST_WAIT_S
        while True:
            tried += 1
            try:
                return call()
            except (FileNotFoundError, FileExistsError, EvergradError):
                raise
            except Exception as error:
                why = self._redact(_in_words(error))
                pause_s = wait_s * random.uniform(0.5, 1.0)  # nodes that failed together must not come back together
                over = self._clock() - began + pause_s > self._patience_s
                if over or not _may_pass(error):
                    times = f" (tried {tried} times)" if tried > 1 else ""
                    raise TierError(f"{self._where}: {what}: {why}{times}.{_hint(error)}") from None
                _log.warning("%s: %s: %s; trying again (%d)", self._where, what, why, tried)
            self._sleep(pause_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def error_code(error: BaseException | None) -> tuple[str, int]:
    """The store's own name of an error, and its HTTP status; an empty name and 0 if it has none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(response.get("Error", {}).get("Code", "")), status if isinstance(status, int) else 0
        error = error.__cause__
    return "", 0


def _may_pass(error: Exception) -> bool:
    code, status = error_code(error)
    if code in _MAY_PASS or status >= 500 or status in (408, 429):
        return status != 501
    if 400 <= status < 500 or isinstance(error, _OURS) or type(error).__name__ in _SETTINGS:
        return False
    return not (isinstance(error, OSError) and error.errno in _WILL_NOT_PASS) and not isinstance(error, PermissionError)


def _in_words(error: Exception) -> str:
    code, status = error_code(error)
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        text = open_files_hint(error)
    named = f"{code} ({status}): " if code and code not in text else ""
    return f"{named}{text}".strip().rstrip(".").replace("\n", " ")[:300]


def _hint(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return " Free some space, or choose another URL."
    if isinstance(error, PermissionError) or number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return " Check the credentials and permissions."
    return ""
