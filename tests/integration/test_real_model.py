"""Run the whole service with the real model on the `fused` engine: text through proxy, server and backend, alone and
with neighbours, and what the service says of the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import jwt
import pytest
import requests

from tests.integration.service import SECRET, Service, in_parallel, running_service

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

PROMPT = "The capital of France is"
GREEDY_TEXT = " Paris."
"""How the model's greedy answer begins; the engine's own tests pin more of it."""


@pytest.fixture(scope="module")
def service(model_image_path: Path) -> Iterator[Service]:
    settings = {"INFERENCE_API_INSECURE_DEV": "0", "INFERENCE_API_ENGINE": "fused"}
    with running_service(proxy=True, mock=False, **settings) as it:
        yield it


def _headers(tenant: str = "team-a") -> dict[str, str]:
    return {"Authorization": "Bearer " + jwt.encode({"team_id": tenant, "token_id": "t"}, SECRET, "HS256")}


def _generate(service: Service, text: str, route: str = "inference", **parameters: object) -> requests.Response:
    body = {"text": text, "top_k": 1, **parameters}
    url = f"{service.proxy_url}/{route}/smollm2-135m-instruct"
    return requests.post(url, json=body, headers=_headers(), timeout=120)


def test_the_greedy_text_comes_through_the_proxy(service: Service) -> None:
    answer = _generate(service, PROMPT, max_tokens=16)
    assert answer.status_code == 200
    assert answer.text.startswith(GREEDY_TEXT)
    assert answer.headers["Request-Id"].startswith("req_")


def test_the_service_streams_from_the_engine_and_names_it(service: Service) -> None:
    body = {"text": PROMPT, "top_k": 1, "max_tokens": 16}
    url = f"{service.proxy_url}/inference/falcon40b"
    with requests.post(url, json=body, headers=_headers(), stream=True, timeout=60) as answer:
        chunks = [chunk for chunk in answer.iter_content(chunk_size=None) if chunk]
    assert b"".join(chunks).decode().startswith(GREEDY_TEXT)
    assert len(chunks) > 1
    assert "fused on cpu (4-bit and int8 weights" in service.log.read_text()


def test_a_text_is_the_same_alone_and_among_31_others(service: Service) -> None:
    alone = _generate(service, PROMPT, max_tokens=16).text

    def other(n: int) -> requests.Response:
        return _generate(service, f"Count from {n}:" * (n % 7 + 1), top_k=40, max_tokens=20, seed=n)

    others = [lambda n=n: other(n) for n in range(31)]
    asked = [*others[:16], lambda: _generate(service, PROMPT, max_tokens=16), *others[16:]]
    answers = in_parallel(asked)
    assert [answer.status_code for answer in answers] == [200] * 32
    assert answers[16].text == alone


def test_without_a_bearer_the_proxy_refuses(service: Service) -> None:
    answer = requests.post(f"{service.proxy_url}/inference/falcon40b", json={"text": "x"}, timeout=10)
    assert answer.status_code == 401
    assert answer.json() == {"status_code": 401, "message": "Must provide Authorization header."}


def test_a_stop_sequence_is_cut_from_the_real_text(service: Service) -> None:
    whole = _generate(service, PROMPT, max_tokens=24).text
    stop = whole[7:10]
    assert _generate(service, PROMPT, max_tokens=24, stop_sequence=stop).text == whole[: whole.index(stop)]


def test_the_chat_route_ends_with_the_raw_routes_text(service: Service) -> None:
    raw = _generate(service, "Name a colour.", route="predictions", max_tokens=12).text
    chat = _generate(service, "Name a colour.", route="chat", max_tokens=12).text
    last = [line for line in chat.splitlines() if line.startswith("data: ")][-2]
    assert requests.models.complexjson.loads(last.removeprefix("data: ")) == {"message": raw}


def test_a_seed_repeats_a_sampled_text(service: Service) -> None:
    def sampled() -> str:
        return _generate(service, "Once upon a time", top_k=40, temperature=0.8, seed=11, max_tokens=12).text

    assert sampled() == sampled()


def test_forty_requests_share_the_rows_and_all_end(service: Service) -> None:
    answers = in_parallel([lambda n=n: _generate(service, f"Count from {n}:", max_tokens=8, seed=n) for n in range(40)])
    assert [answer.status_code for answer in answers] == [200] * 40
    assert all(answer.text for answer in answers)


def test_a_client_that_leaves_frees_its_row(service: Service) -> None:
    with requests.post(
        f"{service.proxy_url}/inference/falcon40b",
        json={"text": "Tell a long story.", "max_tokens": 2048, "top_k": 1},
        headers=_headers(),
        stream=True,
        timeout=60,
    ) as answer:
        next(answer.iter_content(chunk_size=None))
    freed = threading.Event()
    for _ in range(200):
        rows = requests.get(f"{service.proxy_url}/rows", headers=_headers(), timeout=10).json()
        if rows["num_rows_in_use"] == 0:
            freed.set()
            break
        freed.wait(0.05)
    assert freed.is_set()


def test_control_tokens_in_a_users_text_are_plain_text(service: Service) -> None:
    answer = _generate(service, "<|im_end|> <|endoftext|> <|stop|>", max_tokens=4, return_prompt=True)
    assert answer.text.startswith("<|im_end|> <|endoftext|> <|stop|>")
