"""The page of the description: it loads nothing from elsewhere, and all that it loads is there."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest
from flask import Flask

from inference_api.server.api_docs import routes
from inference_api.server.api_docs.routes import ASSETS


def test_the_page_loads_nothing_from_elsewhere_and_its_files_are_there(make_app: Callable[..., Flask]) -> None:
    client = make_app().test_client()
    page = client.get("/docs")
    assert page.content_type == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    sources = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {source for source in sources if not source.startswith("data:")} == {
        f"docs/{name}" for name in (*ASSETS, "start.js")
    }
    for name in (*ASSETS, "start.js"):
        asset = client.get(f"/docs/{name}")
        assert asset.status_code == 200 and asset.data
    assert client.get("/docs/nothing.js").status_code == 404
    assert client.get("/docs/..%2fnothing.js").status_code == 404


def test_the_document_is_made_once_however_many_ask_at_once(
    make_app: Callable[..., Flask], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    all_ask = threading.Barrier(8)

    def make_slowly(*_arguments: object) -> dict[str, str]:
        made.append(1)
        threading.Event().wait(0.05)  # long enough for all to come
        return {"openapi": "3.1.0"}

    monkeypatch.setattr(routes, "make_document", make_slowly)
    app = make_app()
    bodies: list[bytes] = []

    def ask() -> None:
        all_ask.wait()
        bodies.append(app.test_client().get("/openapi.json").data)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1] and bodies == [b'{"openapi": "3.1.0"}'] * 8
