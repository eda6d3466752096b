"""Own what several tests of the proxy's event loop share."""

from __future__ import annotations

from collections.abc import Iterator

import gevent
import pytest


@pytest.fixture(scope="module")
def hub() -> Iterator[None]:
    """Make this thread's hub before the first test, so that its own descriptors are no test's, and take it down."""
    made = gevent.get_hub()
    yield
    made.destroy(destroy_loop=True)
