"""Run the hub's own client, written for text-generation-inference, against the service: unchanged, over real HTTP.

Through the proxy with a JWT, against the mock engine. Its `text_generation` posts to the address that it is given: the
root, or one of the two routes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import huggingface_hub
import huggingface_hub.errors
import pytest
import requests
from huggingface_hub import InferenceClient, TextGenerationInputGrammarType

from tests.integration.service import ROOT, Service, bearer, in_parallel, running_service

PROMPT = "abcde"
NEXT_DIGITS = "5678901234"
"""What the mock says after five ids: the last digit of each position."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running_service(proxy=True, INFERENCE_API_MOCK_FAULTS="error:fail here") as service:
        yield service


@pytest.fixture(scope="module")
def slow() -> Iterator[Service]:
    """A service with one row, no queue, and 100 tokens a second."""
    with running_service(
        proxy=True,
        INFERENCE_API_ROWS="1",
        INFERENCE_API_QUEUE_REQUESTS="0",
        INFERENCE_API_PREFILL_CHUNK_TOKENS="64",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="100",
    ) as service:
        yield service


@pytest.fixture(autouse=True)
def _connections() -> Iterator[None]:
    """Close what the hub's one session keeps open."""
    yield
    huggingface_hub.close_session()


def client(service: Service, path: str = "") -> InferenceClient:
    authorization = bearer()["Authorization"].removeprefix("Bearer ")
    return InferenceClient(base_url=service.proxy_url + path, api_key=authorization, timeout=30)


def test_the_documented_snippet_runs_as_it_is(service: Service) -> None:
    page = (ROOT / "docs" / "clients.md").read_text("utf-8")
    (snippet,) = re.findall(r"<!-- run: tgi -->\n```python\n(.*?)```", page, re.DOTALL)
    program = snippet.replace("127.0.0.1:1223", f"127.0.0.1:{service.proxy_port}")
    environ = {**os.environ, "AUTHORIZATION": bearer()["Authorization"]}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True, text=True)
    assert done.stdout.split("\n") == ["4567890123456789"] * 2


def test_a_text_is_continued(service: Service) -> None:
    with client(service) as hub:
        assert hub.text_generation(PROMPT, max_new_tokens=10) == NEXT_DIGITS
        assert hub.text_generation(PROMPT, max_new_tokens=3, return_full_text=True) == PROMPT + NEXT_DIGITS[:3]
        assert hub.text_generation(PROMPT, stop=["78"]) == "56"


def test_details_name_every_token_and_the_end(service: Service) -> None:
    with client(service, "/generate") as hub:
        answer = hub.text_generation(
            PROMPT, max_new_tokens=4, details=True, decoder_input_details=True, top_n_tokens=2, seed=5, do_sample=True
        )
    details = answer.details
    assert answer.generated_text == NEXT_DIGITS[:4]
    assert (details.finish_reason, details.generated_tokens, details.seed) == ("length", 4, 5)
    assert "".join(token.text for token in details.tokens) == answer.generated_text
    assert [token.logprob for token in details.tokens] == [0.0] * 4
    assert "".join(token.text for token in details.prefill) == PROMPT
    assert [len(top) for top in details.top_tokens] == [2] * 4


def test_best_of_returns_one_answer_and_tells_the_others(service: Service) -> None:
    with client(service) as hub:
        answer = hub.text_generation(PROMPT, max_new_tokens=2, details=True, best_of=3, do_sample=True)
    assert answer.generated_text == NEXT_DIGITS[:2]
    assert [other.generated_text for other in answer.details.best_of_sequences] == [NEXT_DIGITS[:2]] * 2


@pytest.mark.parametrize("path", ["", "/generate_stream"])
def test_a_stream_comes_token_by_token_and_its_last_token_tells_the_end(service: Service, path: str) -> None:
    with client(service, path) as hub:
        events = list(hub.text_generation(PROMPT, max_new_tokens=10, stream=True, details=True))
        assert "".join(hub.text_generation(PROMPT, max_new_tokens=10, stream=True)) == NEXT_DIGITS
    assert [event.index for event in events] == list(range(1, 11))
    assert "".join(event.token.text for event in events) == NEXT_DIGITS
    assert [event.generated_text for event in events] == [None] * 9 + [NEXT_DIGITS]
    details = events[-1].details
    assert (details.finish_reason, details.generated_tokens, details.input_length) == ("length", 10, 5)


def test_a_stream_ends_before_a_stop_sequence(service: Service) -> None:
    with client(service) as hub:
        events = list(hub.text_generation(PROMPT, stop=["78"], stream=True, details=True))
    assert events[-1].generated_text == "56" == "".join(event.token.text for event in events)
    assert (events[-1].details.finish_reason, events[-1].details.generated_tokens) == ("stop_sequence", 4)


def test_the_models_end_is_a_special_token(service: Service) -> None:
    with running_service(proxy=True, INFERENCE_API_MOCK_MODE="echo") as echo, client(echo) as hub:
        events = list(hub.text_generation("smile \U0001f642", stream=True, details=True))
    assert "".join(event.token.text for event in events) == events[-1].generated_text == "smile \U0001f642"
    assert [event.token.special for event in events] == [False] * 10 + [True]
    assert events[-1].details.finish_reason == "eos_token"


def test_each_fault_raises_the_clients_own_error_with_our_message(service: Service) -> None:
    with client(service) as hub:
        with pytest.raises(huggingface_hub.errors.ValidationError, match=r"parameters\.temperature: "):
            hub.text_generation(PROMPT, temperature=0)
        with pytest.raises(huggingface_hub.errors.ValidationError, match="maximum context length is 2048 tokens"):
            hub.text_generation(PROMPT, max_new_tokens=5000)
        with pytest.raises(huggingface_hub.errors.ValidationError, match=r"^parameters\.grammar\.value: "):
            hub.text_generation(PROMPT, grammar=TextGenerationInputGrammarType(type="regex", value="("))
        with pytest.raises(huggingface_hub.errors.GenerationError, match="Sampling failed"):
            hub.text_generation("fail here")
        with pytest.raises(huggingface_hub.errors.GenerationError, match="Sampling failed"):
            list(hub.text_generation("fail here", stream=True))


def test_a_full_queue_raises_the_clients_overloaded_error(slow: Service) -> None:
    with client(slow) as hub:

        def outcome() -> str:
            try:
                hub.text_generation(PROMPT, max_new_tokens=50)
            except huggingface_hub.errors.OverloadedError as error:
                return str(error)
            return "answered"

        outcomes = in_parallel([outcome] * 4)
    assert "answered" in outcomes
    assert "Service overloaded, try again later." in outcomes


def test_a_stream_cut_by_a_lost_backend_raises_the_clients_own_error(slow: Service) -> None:
    with client(slow) as hub:
        events = iter(hub.text_generation(PROMPT, max_new_tokens=500, stream=True))
        assert next(events) == NEXT_DIGITS[0]
        os.kill(slow.backend_pid, signal.SIGKILL)
        with pytest.raises(huggingface_hub.errors.IncompleteGenerationError, match="backend was lost"):
            list(events)


def test_info_tells_what_tgis_clients_look_for(service: Service) -> None:
    info = requests.get(f"{service.proxy_url}/info", headers=bearer(), timeout=30).json()
    assert (info["model_id"], info["max_total_tokens"], info["max_concurrent_requests"]) == ("mock", 2048, 128)


def test_a_text_is_tokenized_and_comes_back_through_the_proxy(service: Service) -> None:
    url, headers = service.proxy_url, bearer()
    text = "Hi <|im_end|> \U0001f642"
    tokens = requests.post(f"{url}/tokenize", json={"content": text}, headers=headers, timeout=30).json()["tokens"]
    assert bytes(tokens) == text.encode()
    back = requests.post(f"{url}/detokenize", json={"tokens": tokens}, headers=headers, timeout=30).json()
    assert back["content"] == text
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    written = requests.post(f"{url}/apply-template", json=messages, headers=headers, timeout=30).json()["prompt"]
    assert written == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_slots_and_properties_are_told_through_the_proxy(service: Service) -> None:
    slots = requests.get(f"{service.proxy_url}/slots", headers=bearer(), timeout=30).json()
    assert [slot["id"] for slot in slots] == list(range(32))
    props = requests.get(f"{service.proxy_url}/props", headers=bearer(), timeout=30).json()
    assert (props["total_slots"], props["eos_token"]) == (32, "<|im_end|>")


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream", "/tokenize", "/detokenize", "/apply-template"])
def test_nobody_gets_in_without_a_bearer(service: Service, path: str) -> None:
    assert requests.post(service.proxy_url + path, json={"inputs": "x"}, timeout=30).status_code == 401


def test_an_answer_has_the_form_of_its_grammar(service: Service) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [12, 34]}}, "required": ["a"]}
    forms = (
        ("json", schema, r'\{"a": ?(12|34)\}'),
        ("json_schema", {"name": "n", "schema": schema}, r'\{"a": ?(12|34)\}'),
        ("regex", "[xy]{3}", "[xy]{3}"),
    )
    with client(service) as hub:
        for kind, value, expected in forms:
            grammar = TextGenerationInputGrammarType(type=kind, value=value)  # type: ignore[arg-type]
            assert re.fullmatch(expected, hub.text_generation(PROMPT, grammar=grammar, max_new_tokens=40))
            stream = hub.text_generation(PROMPT, grammar=grammar, max_new_tokens=40, stream=True)
            assert re.fullmatch(expected, "".join(stream))
