"""Check on the running service that no byte of one stream ever comes out of another, under load and with deserters.

Each text says whose it is. Sizes stand in one table; the small one runs in every test run, the large ones by hand with
`python -m tests.integration.test_isolation nightly`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

from tests.integration.raw_http import RawStream
from tests.integration.service import Service, in_parallel, running_service, wait_for

NUM_REQUESTS = {"test": 2_000, "campaign": 30_000, "nightly": 300_000}
NUM_CLIENTS = 64
LEAVING_SHARE = 0.05


def text_of(number: int) -> str:
    """Return a text that only request `number` may see, of 6 to 60 bytes."""
    return f"[{number:x}é]" * (1 + number % 7)


def run_client(service: Service, numbers: range) -> int:
    """Send one request after another over a kept connection, leaving some early; return how many were read whole."""
    draw = random.Random(numbers.start)
    num_whole = 0
    stream: RawStream | None = None
    try:
        for number in numbers:
            body = {"text": text_of(number)}
            if stream is None:
                stream = RawStream(service.port, "/inference/mock", body)
            else:
                stream.send("/inference/mock", body, version="HTTP/1.1")
            if draw.random() < LEAVING_SHARE:
                leave(stream, draw)
                stream = None
                continue
            assert stream.read_all().decode() == text_of(number)
            assert stream.whole
            num_whole += 1
    finally:
        if stream is not None:
            stream.close()
    return num_whole


def leave(stream: RawStream, draw: random.Random) -> None:
    """Go away before, or after the first chunk; with FIN or with RST."""
    if draw.random() < 0.5:
        stream.read_chunk()
    if draw.random() < 0.5:
        stream.close()
    else:
        stream.reset()


def check_isolation(num_requests: int) -> None:
    """Run so many requests over NUM_CLIENTS threads and look at what is left."""
    with running_service(INFERENCE_API_MOCK_MODE="echo", INFERENCE_API_MOCK_TOKENS_PER_SECOND="0") as service:
        a_client = num_requests // NUM_CLIENTS
        clients: list[Callable[[], int]] = [
            lambda start=start: run_client(service, range(start, start + a_client))  # type: ignore[misc]
            for start in range(0, a_client * NUM_CLIENTS, a_client)
        ]
        num_whole = sum(in_parallel(clients))
        assert num_whole > (1 - 2 * LEAVING_SHARE) * a_client * NUM_CLIENTS
        wait_for(lambda: service.num_rows_in_use() == 0 and not service.rows()["num_waiting"], 5.0, "free rows")
        assert service.metric("inference_api_foreign_tokens_total") == 0
        assert service.metric('inference_api_finished_total{reason="error"}') == 0
        assert service.metric('inference_api_finished_total{reason="stop"}') >= num_whole


def test_no_byte_of_a_stream_comes_out_of_another() -> None:
    check_isolation(NUM_REQUESTS["test"])


if __name__ == "__main__":
    check_isolation(NUM_REQUESTS[sys.argv[1]])
