"""Build the application of the tests of the OpenAI routes: its client answers from a script and ends with a stop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flask import Flask

from inference_api.messages import FinishReason
from tests.server.fakes import FakeClient, finished

STOPPED = finished(FinishReason.STOP, num_tokens=5)


@pytest.fixture
def app(make_app: Callable[..., Flask], fake_client: FakeClient) -> Flask:
    fake_client.end = STOPPED
    return make_app(body_bytes=65_536)
