"""Check that clients that leave as soon as they have asked cost the proxy no descriptor, not even for a while."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.proxy_process import ProxyProcess, RawClient
from tests.integration.service import wait_for

NUM_LEAVERS = 150
NUM_PUBLIC_TURNS = 4


def num_descriptors(pid: int) -> int:
    """Return the number of open descriptors of a process (proc_pid_fd(5))."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def worker_pid(proxy: ProxyProcess) -> int:
    """Return the id of the proxy's one worker, its arbiter's only child (proc_tid_children(5))."""
    pid = proxy.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.fixture
def unanswering_port() -> Iterator[int]:
    """A port whose backlog is full: the kernel drops a connection's SYN, so that a connect waits (listen(2))."""
    with contextlib.ExitStack() as cleanup:
        listener = cleanup.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = cleanup.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_clients_that_leave_while_the_upstream_is_connected_to_leave_no_socket_behind(unanswering_port: int) -> None:
    with ProxyProcess(unanswering_port, PROXY_CONNECT_TIMEOUT_SECONDS="60") as proxy, contextlib.ExitStack() as leavers:
        with RawClient(proxy.port) as client:  # answered by the worker itself, which is up and at rest after it
            client.send("GET /rows HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            client.read_to_end()
        worker = worker_pid(proxy)
        before = num_descriptors(worker)
        for number in range(NUM_LEAVERS):
            leaver = leavers.enter_context(RawClient(proxy.port))
            if number < NUM_PUBLIC_TURNS:
                leaver.request("GET", "/docs")
            else:
                leaver.request("POST", "/inference/m", body=b"{}")
        wait_for(lambda: num_descriptors(worker) >= before + 2 * NUM_LEAVERS, 10.0, "a connect for each client")
        leavers.close()
        wait_for(lambda: num_descriptors(worker) <= before, 5.0, f"{before} descriptors, as before the leavers")
