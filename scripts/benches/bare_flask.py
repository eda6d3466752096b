"""Stand beside the service as its yardstick: a bare Flask generator that writes one digit a chunk and no more.

Runs under the service's own gunicorn settings (same worker class, same threads). It has no queue, no validation, no
tokenizer and no stop: what it reaches is what gunicorn and Flask leave to anything that writes a chunk a token.
"""

from __future__ import annotations

from collections.abc import Iterator

from flask import Flask, Response, request

_DIGITS = [b"%d" % digit for digit in range(10)]


def create_app() -> Flask:
    """Return the application: POST anything with `max_tokens`, get that many digits."""
    app = Flask("bare")

    @app.get("/health")
    def health() -> str:
        return "OK"

    @app.post("/inference/falcon40b")
    def inference() -> Response:
        content = request.get_json()
        return Response(_digits(len(content["text"]), content["max_tokens"]), content_type="text/event-stream")

    return app


def _digits(num_prompt_tokens: int, max_tokens: int) -> Iterator[bytes]:
    for position in range(num_prompt_tokens, num_prompt_tokens + max_tokens):
        yield _DIGITS[position % 10]
