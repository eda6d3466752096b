"""Give the checks of this folder their service: the one at LLM_CHAT_API_URL, or one with the mock engine.

One service for all of them: they look at answers, not at a state that another could have left. Knows no route.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.live.client import Client, Target
from tests.live.program import AUTHORIZATION_NAME, URL_NAME, mock_target


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """A client of the service that the environment names, else of one that is started here, proxy included."""
    if url := os.environ.get(URL_NAME):
        yield Client(Target.parse(url, os.environ.get(AUTHORIZATION_NAME, ""))).connect()
        return
    with mock_target() as target:
        yield Client(target).connect()
