"""Own `/openapi.json` and `/docs`: the description of every route, and a page that shows it without the internet.

Runs in PROCESS 1. The page's script and style are Swagger UI's own files, out of an installed package; nothing is
loaded from elsewhere, which the page's policy also forbids. Open to everybody: it tells what this software is, nothing
of who uses it.
"""

from __future__ import annotations

import importlib.resources
import json
import threading
from collections.abc import Callable, Mapping

from flask import Blueprint, Response, current_app

from inference_api.errors import NotFoundError
from inference_api.server.api_docs.described import DESCRIBED
from inference_api.server.api_docs.document import make_document

ASSETS: Mapping[str, tuple[str, str]] = {
    "swagger-ui.css": ("css/swagger-ui.css", "text/css; charset=utf-8"),
    "swagger-ui-bundle.js": ("js/swagger-ui-bundle.js", "text/javascript; charset=utf-8"),
}
"""Names under /docs, and where the package flask_openapi_swagger has them."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>inference_api</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="page"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
START = 'SwaggerUIBundle({url: "openapi.json", dom_id: "#page", deepLinking: true, validatorUrl: null});\n'
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: Swagger UI sets styles in the page, and draws its arrows from data URLs."""

CACHE_SECONDS = 3600


def make_api_docs_blueprint() -> Blueprint:
    """Return the routes."""
    blueprint = Blueprint("api_docs", __name__)
    pages = _Pages()
    blueprint.add_url_rule("/openapi.json", "document", pages.document)
    blueprint.add_url_rule("/docs", "page", pages.page)
    blueprint.add_url_rule("/docs/<asset>", "asset", pages.asset)
    return blueprint


class _Pages:
    """Answer, and keep what takes long to make: who may ask without a bearer must not have it made every time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, bytes] = {}

    def document(self) -> Response:
        """Return this document."""
        made = self._made_once("openapi.json", lambda: json.dumps(make_document(current_app, DESCRIBED)).encode())
        return Response(made, content_type="application/json")

    def page(self) -> Response:
        """Show this document."""
        return Response(PAGE, content_type="text/html; charset=utf-8", headers={"Content-Security-Policy": POLICY})

    def asset(self, asset: str) -> Response:
        """Return a file of the page."""
        headers = {"Cache-Control": f"max-age={CACHE_SECONDS}", "X-Content-Type-Options": "nosniff"}
        if asset == "start.js":
            return Response(START, content_type="text/javascript; charset=utf-8", headers=headers)
        if asset not in ASSETS:
            raise NotFoundError(f"Unknown file: {asset[:128]}")
        path, content_type = ASSETS[asset]
        file = importlib.resources.files("flask_openapi_swagger").joinpath("templates", "swagger", path)
        return Response(self._made_once(asset, file.read_bytes), content_type=content_type, headers=headers)

    def _made_once(self, name: str, make: Callable[[], bytes]) -> bytes:
        with self._lock:
            if name not in self._made:
                self._made[name] = make()
            return self._made[name]
