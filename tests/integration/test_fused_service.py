"""Run the whole service on the `fused` engine: a stream of the real model, and what the service says of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service import Service, in_parallel, running_service

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

BODY = {"text": "The capital of France is", "top_k": 1, "max_tokens": 16}


@pytest.fixture(scope="module")
def service(model_image_path: Path) -> Iterator[Service]:
    with running_service(mock=False, INFERENCE_API_ENGINE="fused") as it:
        yield it


def test_the_service_streams_from_the_engine_and_names_it(service: Service) -> None:
    with service.post("/inference/falcon40b", BODY, stream=True) as answer:
        chunks = [chunk for chunk in answer.iter_content(chunk_size=None) if chunk]
    assert b"".join(chunks).decode().startswith(" Paris")
    assert len(chunks) > 1
    assert "fused on cpu (4-bit and int8 weights" in service.log.read_text()


def test_a_text_is_the_same_alone_and_among_31_others(service: Service) -> None:
    alone = service.ask("/inference/falcon40b", BODY)
    others = [{"text": f"Count from {n}:" * (n % 7 + 1), "max_tokens": 20, "seed": n} for n in range(31)]
    bodies = [*others[:16], BODY, *others[16:]]
    texts = in_parallel([lambda body=body: service.ask("/inference/falcon40b", body) for body in bodies])
    assert texts[16] == alone
