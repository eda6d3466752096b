"""Share what several integration modules need; `service` is each module's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.integration.echo_upstream import ScriptedUpstream
from tests.integration.service import Service, wait_for


@pytest.fixture
def streams(service: Service) -> Iterator[contextlib.ExitStack]:
    """A stack that closes a test's streams, and waits until their rows are free."""
    with contextlib.ExitStack() as stack:
        yield stack
    wait_for(lambda: service.num_rows_in_use() == 0, 10.0, "free rows")


@pytest.fixture(scope="module")
def shared_upstream() -> Iterator[ScriptedUpstream]:
    """A server that answers what a test says, for all of a module's tests."""
    with ScriptedUpstream() as running:
        yield running


@pytest.fixture
def upstream(shared_upstream: ScriptedUpstream) -> Iterator[ScriptedUpstream]:
    """The module's scripted server; what a test has left open is closed after it."""
    yield shared_upstream
    shared_upstream.close_exchanges()
