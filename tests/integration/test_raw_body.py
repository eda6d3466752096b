"""Send prompts as whole bodies through the proxy, with curl and over bare sockets, to the service on the mock."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
import requests

from tests.integration.raw_http import RawStream
from tests.integration.service import ROOT, Service, bearer, running_service, wait_for

FORM = "application/x-www-form-urlencoded"
QUEUE_SECONDS = 0.5
PROMPT = "a+b=%41&c;\U0001f642 secret"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running_service(proxy=True, INFERENCE_API_INSECURE_DEV="0") as running:
        yield running


@pytest.fixture(scope="module")
def full() -> Iterator[Service]:
    """A service of one row, which a stream holds, and one place in the queue, at 20 tokens a second."""
    with running_service(
        proxy=True,
        INFERENCE_API_ROWS="1",
        INFERENCE_API_QUEUE_REQUESTS="1",
        INFERENCE_API_PREFILL_CHUNK_TOKENS="64",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="20",
        INFERENCE_API_QUEUE_SECONDS=str(QUEUE_SECONDS),
    ) as running:
        with RawStream(running.port, "/inference/mock", {"text": "x", "max_tokens": 2000}) as holder:
            assert holder.read_chunk()
            yield running
        wait_for(lambda: running.num_rows_in_use() == 0, 2.0, "a free row")


def post(service: Service, body: str | bytes, content_type: str | None = FORM) -> requests.Response:
    headers = {**bearer(), **({"Content-Type": content_type} if content_type else {})}
    data = body.encode() if isinstance(body, str) else body
    return requests.post(f"{service.proxy_url}/", data=data, headers=headers, timeout=30)


def digits_after(prompt: str, count: int = 128) -> str:
    """Return what the mock says after a prompt: the last digit of each position."""
    begin = len(prompt.encode())
    return "".join(str(position % 10) for position in range(begin, begin + count))


def test_the_documented_curl_line_answers(service: Service) -> None:
    page = (ROOT / "docs" / "clients.md").read_text("utf-8")
    (line,) = re.findall(r"```sh\n(curl http://127\.0\.0\.1:1223/ .*?)\n```", page)
    command = line.replace("127.0.0.1:1223", f"127.0.0.1:{service.proxy_port}").replace("curl ", "curl -sS --fail ")
    environ = {"AUTHORIZATION": bearer()["Authorization"], "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-euc", command], env=environ, capture_output=True, check=True, text=True)
    prompt = "The capital of France is"
    assert json.loads(done.stdout) == [{"generated_text": prompt + digits_after(prompt)}]


@pytest.mark.parametrize("content_type", [FORM, "text/plain", "text/plain; charset=utf-8", None])
def test_a_body_passes_the_proxy_and_the_server_byte_for_byte(service: Service, content_type: str | None) -> None:
    answer = post(service, PROMPT, content_type)
    assert (answer.status_code, answer.json()) == (200, [{"generated_text": PROMPT + digits_after(PROMPT)}])


def test_a_body_that_arrives_in_pieces_is_one_prompt(service: Service) -> None:
    content = PROMPT.encode()
    head = ["POST / HTTP/1.1", "Host: x", f"Authorization: {bearer()['Authorization']}", f"Content-Type: {FORM}"]
    head += [f"Content-Length: {len(content)}", "Connection: close", "", ""]
    with socket.create_connection(("127.0.0.1", service.proxy_port or 0), timeout=30) as sock:
        sock.sendall("\r\n".join(head).encode())
        for place in range(0, len(content), 3):
            sock.sendall(content[place : place + 3])
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert json.loads(answer.rpartition(b"\r\n\r\n")[2])[0]["generated_text"].startswith(PROMPT)


def test_json_with_inputs_is_still_tgis(service: Service) -> None:
    answer = post(service, '{"inputs": "hello", "parameters": {"max_new_tokens": 3}}', "application/json")
    assert answer.json() == [{"generated_text": digits_after("hello", 3)}]
    refused = post(service, '{"article": "a", "question": "q"}', "application/json")
    assert (refused.status_code, "article" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"", FORM, 400),
        (b"ab\xff", "text/plain", 400),
        (b"Paris is the [MASK] of France.", "text/plain", 400),
        (b"x" * 2049, "text/plain", 400),
        (b'{"inputs": "x"}', FORM, 400),
        (b"x", "multipart/form-data; boundary=x", 400),
        (b"x" * (256 * 1024 + 1), "text/plain", 413),
    ],
)
def test_what_is_no_prompt_is_refused(service: Service, body: bytes, content_type: str, status: int) -> None:
    answer = post(service, body, content_type)
    assert answer.status_code == status
    assert answer.json().keys() == {"status_code", "message"} and answer.json()["status_code"] == status


def test_without_a_bearer_nothing_is_answered(service: Service) -> None:
    refused = requests.post(f"{service.proxy_url}/", data=b"x", timeout=10)
    assert (refused.status_code, refused.json()["status_code"]) == (401, 401)
    assert requests.post(f"{service.url}/", data=b"x", timeout=10).status_code == 401


def test_a_long_wait_is_a_504_and_a_full_queue_a_503_at_once_with_nothing_of_the_prompt(full: Service) -> None:
    with requests.Session() as session:
        began = time.monotonic()
        waiting = session.post(f"{full.url}/", data=PROMPT.encode(), headers={"Content-Type": FORM}, timeout=30)
        assert waiting.status_code == 504 and time.monotonic() - began >= QUEUE_SECONDS
        assert waiting.json() == {"status_code": 504, "message": "No row became free within 0.5 seconds."}
    with RawStream(full.port, "/inference/mock", {"text": "y", "max_tokens": 5}):
        wait_for(lambda: full.rows()["num_waiting"] == 1, 2.0, "a full queue")
        began = time.monotonic()
        refused = post(full, PROMPT)
        seconds = time.monotonic() - began
    assert (refused.status_code, refused.json()["message"]) == (503, "Service overloaded, try again later.")
    assert int(refused.headers["Retry-After"]) >= 1
    assert seconds < QUEUE_SECONDS, "told at once, not after the wait"
    for told in (waiting, refused):
        assert "secret" not in told.text and "Traceback" not in told.text
