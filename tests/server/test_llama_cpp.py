"""Check llama.cpp's views: the rows as slots and the model's properties, and what is not in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flask import Flask

from inference_api.messages import QueryKind, RowView, Snapshot
from inference_api.model_image import MOCK_CHAT_TEMPLATE
from tests.server.fakes import FakeClient

ROWS = [
    RowView(0, "decoding", "local", "req_1", num_prompt_tokens=7, num_completion_tokens=3, running_seconds=1.5),
    RowView(1, "other"),
    RowView(2, "free"),
]


@pytest.fixture
def app(make_app: Callable[..., Flask], fake_client: FakeClient) -> Flask:
    fake_client.snapshot = Snapshot(1, 0, 3, 2, ROWS)
    return make_app()


def test_a_slot_is_a_row_with_the_counts_of_the_callers_own_request(app: Flask, fake_client: FakeClient) -> None:
    own, other, free = app.test_client().get("/slots").get_json()
    assert own == {
        "id": 0,
        "id_task": -1,
        "n_ctx": 64,
        "is_processing": True,
        "n_prompt_tokens": 7,
        "next_token": [{"has_next_token": True, "n_remain": -1, "n_decoded": 3}],
    }
    assert (other["id"], other["is_processing"], other["n_prompt_tokens"]) == (1, True, 0)
    assert other["next_token"][0]["n_decoded"] == 0
    assert (free["id"], free["is_processing"], free["next_token"][0]["has_next_token"]) == (2, False, False)
    assert fake_client.queries == [(QueryKind.ROWS, "local", "")]


def test_no_view_shows_a_prompt_parameters_or_a_request_id(app: Flask) -> None:
    for path in ("/slots", "/props"):
        text = app.test_client().get(path).get_data(as_text=True)
        assert not [word for word in ("params", '"prompt"', "req_1", "local") if word in text]


def test_properties_describe_the_model(app: Flask) -> None:
    body = app.test_client().get("/props").get_json()
    assert body["chat_template"] == MOCK_CHAT_TEMPLATE
    assert (body["eos_token"], body["total_slots"]) == ("<|im_end|>", 4)
    assert body["default_generation_settings"] == {"n_ctx": 64}
    assert (body["model_alias"], body["model_path"]) == ("mock", "mock")
    assert body["modalities"] == {"vision": False, "audio": False}


def test_a_model_without_a_template_has_an_empty_one(make_app: Callable[..., Flask]) -> None:
    assert make_app({"chat_template": None}).test_client().get("/props").get_json()["chat_template"] == ""


def test_without_a_backend_both_are_a_503_in_openais_words(app: Flask, fake_client: FakeClient) -> None:
    fake_client.ready = fake_client.snapshot = None
    for path in ("/slots", "/props"):
        response = app.test_client().get(path)
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        assert response.get_json()["error"]["code"] == "server_is_overloaded"
