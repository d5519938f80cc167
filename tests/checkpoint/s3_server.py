"""A real S3 server in a process of its own, behind a proxy that delays, refuses and cuts requests, and counts them."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

SECRET = "wJalrXUtnFEMI-not-to-be-shown"
_SIGNED = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
_SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass(slots=True)
class Request:
    """One request that came by."""

    number: int
    kind: str
    path: str
    sent_bytes: int = 0
    done: bool = False


@dataclass(slots=True)
class Fault:
    """What happens to the n-th request (of a kind, or of all)."""

    number: int
    how: str
    """A status such as "503"; "cut": half of the body arrives; "lost": it is done, and the answer never comes;
    "short": half of the answer comes."""
    kind: str = ""


@dataclass(slots=True)
class Proxy:
    """What the client talks to."""

    upstream: int
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    hold: threading.Event | None = None
    """While it is not set, objects and parts beyond the first `let_by` wait, and never arrive."""
    let_by: int = 0
    held: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    answered: threading.Condition = field(default_factory=threading.Condition)

    def reset(self) -> None:
        """Nothing has come, and nothing will be done to what comes."""
        if self.hold is not None:
            self.hold.set()
            with self.answered:
                self.answered.notify_all()
        with self.lock:
            self.requests, self.faults, self.hold = [], [], None
            self.held.clear()

    def count(self) -> Counter[str]:
        """Requests by kind."""
        return Counter(request.kind for request in self.requests)

    def sent_bytes(self) -> int:
        """Bytes of bodies that came."""
        return sum(request.sent_bytes for request in self.requests)

    @property
    def options(self) -> dict[str, Any]:
        """For fsspec."""
        url = f"http://127.0.0.1:{self.port}"
        return {
            "key": "AKIAEXAMPLE",
            "secret": SECRET,
            "client_kwargs": {"endpoint_url": url, "region_name": "us-east-1"},
        }

    def begin(self, method: str, path: str) -> tuple[Request, str]:
        """Note a request; gives what is to happen to it."""
        kind = _kind(method, path)
        with self.lock:
            request = Request(len(self.requests) + 1, kind, path)
            self.requests.append(request)
            of_kind = sum(each.kind == kind for each in self.requests)
            for fault in self.faults:
                if fault.number == (of_kind if fault.kind else request.number) and fault.kind in ("", kind):
                    return request, fault.how
            hold = self.hold if kind in ("upload_part", "put") and of_kind > self.let_by else None
        if hold is not None:
            with self.answered:  # what was let by has arrived
                self.answered.wait_for(lambda: hold.is_set() or self._arrived(kind) >= self.let_by)
            self.held.set()
            hold.wait()
            return request, "cut"  # whoever sent it is dead
        return request, ""

    def finish(self, request: Request) -> None:
        """A request was answered."""
        with self.answered:
            request.done = True
            self.answered.notify_all()

    def _arrived(self, kind: str) -> int:
        return sum(request.done and request.kind == kind for request in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _serve(self) -> None:
        proxy = self.server.proxy
        request, fault = proxy.begin(self.command, self.path)
        length = int(self.headers.get("content-length") or 0)
        if fault == "cut":
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        body = self.rfile.read(length)
        if len(body) < length:  # whoever sent it was killed
            self.close_connection = True
            return
        request.sent_bytes = len(body)
        if fault.isdigit():
            self._answer(
                int(fault), {}, b"<Error><Code>InternalError</Code><Message>a bad day</Message></Error>", fault
            )
            return
        upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream, timeout=30)
        try:
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in ("expect", "connection")
            }
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            data = answer.read()
            if fault == "lost":
                self.close_connection = True
            else:
                self._answer(answer.status, dict(answer.getheaders()), data, fault)
        finally:
            upstream.close()
            proxy.finish(request)

    def _answer(self, status: int, headers: dict[str, str], data: bytes, fault: str) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        length = next((v for n, v in headers.items() if n.lower() == "content-length"), str(len(data)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if fault == "short" else data)
        if fault == "short":
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    proxy: Proxy

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is what these tests are about."""


def _kind(method: str, path: str) -> str:
    query = parse_qs(urlsplit(path).query, keep_blank_values=True)
    if method == "PUT":
        return "upload_part" if "partNumber" in query else "put"
    if method == "POST":
        return "create_upload" if "uploads" in query else "complete" if "uploadId" in query else "delete_many"
    if method == "GET":
        listing = {"list-type": "list", "uploads": "list_uploads", "uploadId": "list_parts"}
        return next((kind for name, kind in listing.items() if name in query), "get")
    return "abort" if "uploadId" in query else method.lower()


@contextmanager
def s3_server() -> Iterator[Proxy]:
    """A server with a bucket called `bucket`; it goes when the context ends, or when this process does."""
    environment = os.environ | {"S3_UPLOAD_PART_MIN_SIZE": "1024"}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        proxy = Proxy(int(process.stdout.readline()))
        server = _Server(("127.0.0.1", 0), _Handler)
        server.proxy = proxy
        proxy.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            connection = http.client.HTTPConnection("127.0.0.1", proxy.upstream, timeout=30)
            connection.request("PUT", "/bucket", headers={"Authorization": _SIGNED})
            assert connection.getresponse().status == 200
            connection.close()
            yield proxy
        finally:
            proxy.reset()
            server.shutdown()
            server.server_close()
            thread.join()
    finally:
        process.kill()
        process.communicate()
