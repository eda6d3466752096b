"""The page of the description: it loads nothing from elsewhere, and all that it loads is there."""

from __future__ import annotations

import re
from collections.abc import Callable

from flask import Flask

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
