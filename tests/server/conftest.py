"""Build a worker's application around a fake client, for the tests of the routes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

from inference_api.config import Settings
from inference_api.model_image import ModelImage, build_mock_image
from inference_api.server.app import create_app
from inference_api.server.chat_template import ChatTemplate
from inference_api.server.context import ServerContext
from inference_api.server.disconnects import DisconnectWatcher
from inference_api.server.identity import Identity
from inference_api.server.output_router import OutputRouter
from inference_api.server.tokenizer import Tokenizer
from inference_api.server.validation import NativeLimits
from tests.server.fakes import FakeClient

INTERNAL_KEY = b"k" * 32
NOW = 1_700_000_000.0


@pytest.fixture(scope="session")
def mock_image(tmp_path_factory: pytest.TempPathFactory) -> ModelImage:
    """Return the mock engine's image, built once."""
    return build_mock_image(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def fake_client() -> FakeClient:
    """Return the client that the application talks to."""
    return FakeClient()


@pytest.fixture
def watcher() -> Iterator[DisconnectWatcher]:
    """Return a running watcher."""
    watcher = DisconnectWatcher(on_death=lambda: None)
    watcher.start()
    yield watcher
    assert watcher.num_watched == 0, "a client's socket is still watched"
    watcher.stop()


@pytest.fixture
def context(
    mock_image: ModelImage, fake_client: FakeClient, watcher: DisconnectWatcher, tmp_path: Path
) -> ServerContext:
    """Return a worker's parts: all real but the client."""
    tokenizer = Tokenizer.load(mock_image.tokenizer_path)
    template = ChatTemplate(mock_image.chat_template or "", tokenizer, eos_text=mock_image.eos_text)
    return ServerContext(
        settings=Settings(engine="mock", run_dir=str(tmp_path), insecure_dev=True, body_bytes=2048),
        client=fake_client,  # type: ignore[arg-type]
        router=OutputRouter(),
        watcher=watcher,
        tokenizer=tokenizer,
        chat_template=template,
        limits=NativeLimits(
            context_tokens=64,
            eos_text=mock_image.eos_text,
            vocab_size=mock_image.vocab_size,
            stop_ids=mock_image.stop_ids,
        ),
        model_names=("mock", "alias"),
    )


@pytest.fixture
def make_app(context: ServerContext) -> Callable[..., Flask]:
    """Return a factory of applications; `settings` are changes of the settings, `parts` of the context."""

    def make(parts: dict[str, Any] | None = None, *, anonymous: bool = True, **settings: Any) -> Flask:
        changed = dataclasses.replace(
            context, settings=dataclasses.replace(context.settings, **settings), **(parts or {})
        )
        return create_app(changed, Identity(INTERNAL_KEY, lambda: NOW, allow_anonymous=anonymous))

    return make
