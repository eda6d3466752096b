"""Check that Flask's secret key is the setting's and that no answer ever sets a cookie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flask import Flask


def test_the_secret_key_is_the_settings_or_none(make_app: Callable[..., Flask]) -> None:
    assert make_app(flask_secret="a-key-of-one's-own").secret_key == "a-key-of-one's-own"
    assert make_app().secret_key is None


@pytest.mark.parametrize("secret", ["", "a-key-of-one's-own"])
@pytest.mark.parametrize("path", ["/", "/health", "/nothing", "/info", "/inference/mock"])
def test_no_answer_sets_a_cookie(make_app: Callable[..., Flask], secret: str, path: str) -> None:
    answer = make_app(flask_secret=secret).test_client().get(path)
    assert "Set-Cookie" not in answer.headers
