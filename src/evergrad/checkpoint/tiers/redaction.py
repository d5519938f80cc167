"""Keeps credentials out of messages: of a tier's options, of URLs, of the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

_SECRET = re.compile(r"key|secret|token|pass|pwd|user|cred|account|auth|sas|connection|signature|cookie", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(r"(?<=[?&])([^=&\s]*(?:key|secret|token|pass|sig|auth|cred)[^=&\s]*)=[^&\s'\"]+", re.IGNORECASE)
_FROM_ENVIRONMENT = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_SHORTEST = 4


class Redaction:
    """What must not be shown, and a way to show the rest.

    >>> hide = Redaction({"secret": "hunter22", "client_kwargs": {"endpoint_url": "http://me:pw@store:9000"}})
    >>> hide("signing with hunter22 failed at http://me:pw@store:9000/b?X-Amz-Signature=0af")
    'signing with *** failed at http://***@store:9000/b?X-Amz-Signature=***'
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        found = set(_secrets(options or {}, secret=False))
        self._secrets = sorted(found, key=lambda text: (-len(text), text))  # the longest first: one may hold another

    def __call__(self, text: object) -> str:
        """The text without what must not be shown."""
        shown = str(text)
        environment = [os.environ.get(name, "") for name in _FROM_ENVIRONMENT]
        for secret in (*self._secrets, *environment):
            if len(secret) >= _SHORTEST:
                shown = shown.replace(secret, "***")
        return _QUERY.sub(r"\1=***", _USERINFO.sub("***@", shown))


def _secrets(value: Any, *, secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            # `client_kwargs` holds secrets under names of its own; a name that says so makes all below it one.
            yield from _secrets(inner, secret=secret or bool(_SECRET.search(str(key))))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets(inner, secret=secret)
    elif secret and isinstance(value, str):
        yield value
