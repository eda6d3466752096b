"""Answer as a service would that is broken on purpose, for tests of the programs: refusals, faults, cut streams.

Runs in a thread of the test. It knows the few calls that the programs make, and no model.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

INFO = {"models": ["stub"], "engine": "stub", "digest": "stub", "num_rows": 1}

FULL = {"status_code": 503, "message": "Service overloaded, try again later."}


class _Handler(BaseHTTPRequestHandler):
    """One connection; `server.faults` maps a route to what its calls get."""

    protocol_version = "HTTP/1.1"
    server: StubServer

    def do_GET(self) -> None:
        """Answer /info and the figures of any request."""
        if self.server.bearer and self.headers["Authorization"] != self.server.bearer:
            self._send(401, {"status_code": 401, "message": "JWT signature is invalid."})
        elif self.path == "/info":
            self._send(200, INFO)
        else:
            self._send(200, {"num_completion_tokens": 2})

    def do_POST(self) -> None:
        """Answer a generation with the route's fault, or with two chunks."""
        self.rfile.read(int(self.headers["Content-Length"]))
        fault = self.server.faults.get(self.path.split("/")[1], "none")
        if fault in ("500", "503"):
            self._send(int(fault), {"status_code": int(fault), "message": "broken"})
        elif fault == "overloaded":
            self._send(503, FULL, {"Retry-After": "1"})
        elif fault == "warming":
            self._send(503, {"status_code": 503, "message": "not ready"}, {"Retry-After": "1"})
        else:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"3\r\none\r\n" if fault == "cut" else b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
            self.close_connection = fault == "cut"

    def _send(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class StubServer(ThreadingHTTPServer):
    """The server; handler threads are joined when it closes."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, faults: dict[str, str], bearer: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults, self.bearer = faults, bearer


@contextlib.contextmanager
def stub_service(faults: dict[str, str] | None = None, bearer: str = "") -> Iterator[str]:
    """Run the stub until the block ends; yield its URL. A fault is 500, 503, overloaded, warming or cut."""
    with StubServer(faults or {}, bearer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
