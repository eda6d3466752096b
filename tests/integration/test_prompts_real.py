"""Compare what clients are told of prompts, logprobs and embeddings, with plain forwards of the same models.

A tiny model runs on the `transformers` engine, whose arithmetic is the reference's; the real one on `fused`, which
rounds weights and activations.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_api.model_image import build_mock_image
from tests.backend.engines.tiny_models import FAMILIES, build_model, save_checkpoint
from tests.integration.service import Service, in_parallel, running_service

PROMPT = "h\u00e9llo \U0001f642, how are you?"
SENTENCES = (
    "A dog sleeps in the warm sun.",
    "A puppy naps outside in the sunshine.",
    "The central bank raised interest rates by half a point.",
)


@pytest.fixture(scope="module")
def tiny_model() -> Any:
    return build_model(*FAMILIES["llama"])


@pytest.fixture(scope="module")
def tiny(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    beside = tmp_path_factory.mktemp("tiny")
    folder = save_checkpoint(tiny_model, beside / "tiny", build_mock_image(beside / "mock").tokenizer_path)
    settings = {"INFERENCE_API_CACHE_DIR": str(beside / "cache"), "INFERENCE_API_ROWS": "1"}
    settings["INFERENCE_API_PREFILL_CHUNK_TOKENS"] = "16"  # a prompt takes several steps
    with running_service("--model", str(folder), "--dtype", "fp32", mock=False, **settings) as service:
        yield service


@pytest.fixture(scope="module")
def real(model_image_path: Path) -> Iterator[Service]:
    with running_service(mock=False, INFERENCE_API_ENGINE="fused") as service:
        yield service


def served(service: Service) -> str:
    name: str = service.get("/v1/models").json()["data"][0]["id"]
    return name


def told(service: Service, prompt: object, **members: object) -> dict[str, Any]:
    """Return the logprobs of a prompt and of nothing else."""
    body = {"model": served(service), "prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 5, **members}
    answer = service.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    logprobs: dict[str, Any] = answer.json()["choices"][0]["logprobs"]
    return logprobs


def embeddings(service: Service, texts: list[str], **members: object) -> list[bytes]:
    """Return the embeddings of texts, little-endian fp32."""
    body = {"model": served(service), "input": texts, "encoding_format": "base64", **members}
    answer = service.post("/v1/embeddings", body)
    assert answer.status_code == 200, answer.text
    return [base64.b64decode(one["embedding"]) for one in answer.json()["data"]]


def numbers(packed: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(packed) // 4}f", packed)


def likeness(one: bytes, other: bytes) -> float:
    """Return the cosine between two embeddings."""
    left, right = numbers(one), numbers(other)
    return math.fsum(a * b for a, b in zip(left, right, strict=True)) / (math.hypot(*left) * math.hypot(*right))


def forward(model: Any, ids: list[int]) -> tuple[Any, Any]:
    """Return the log-softmax (tokens, vocab) and the states after the last norm (tokens, hidden) of a plain forward."""
    import torch

    with torch.inference_mode():
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return torch.log_softmax(output.logits[0].double(), dim=-1), output.hidden_states[-1][0].double()


@pytest.mark.torch
def test_a_tiny_models_prompt_logprobs_are_its_log_softmax(tiny: Service, tiny_model: Any) -> None:
    ids = list(PROMPT.encode())
    expected, _ = forward(tiny_model, ids)
    found = told(tiny, PROMPT)
    assert found["token_logprobs"][0] is None
    by_place = [expected[place, token_id].item() for place, token_id in enumerate(ids[1:])]
    assert found["token_logprobs"][1:] == pytest.approx(by_place, abs=1e-5)
    body = {"model": served(tiny), "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 5}
    by_id = tiny.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    for place, (token_id, likely) in enumerate(zip(ids[1:], by_id[1:], strict=True)):
        top = {int(key): one["logprob"] for key, one in likely.items() if one["rank"] is not None}
        best = expected[place].topk(5)
        assert top == pytest.approx(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)), abs=1e-5)
        assert likely[str(token_id)]["logprob"] == found["token_logprobs"][place + 1]


@pytest.mark.torch
def test_a_tiny_models_answer_goes_on_from_the_same_distribution(tiny: Service, tiny_model: Any) -> None:
    ids = list(b"hello")
    found = told(tiny, ids, max_tokens=1, temperature=0)
    expected, _ = forward(tiny_model, ids)
    assert found["token_logprobs"][len(ids)] == pytest.approx(expected[-1].max().item(), abs=1e-5)


@pytest.mark.torch
def test_a_tiny_models_embeddings_are_its_states(tiny: Service, tiny_model: Any) -> None:
    _, states = forward(tiny_model, list(PROMPT.encode()))
    for pooling, expected in (("mean", states.mean(dim=0)), ("last", states[-1])):
        (found,) = embeddings(tiny, [PROMPT], pooling=pooling, normalize=False)
        assert numbers(found) == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)
        (found,) = embeddings(tiny, [PROMPT], pooling=pooling)
        assert numbers(found) == pytest.approx((expected / expected.norm()).tolist(), abs=1e-6)


@pytest.mark.model
@pytest.mark.timeout(400)
def test_the_real_models_embedding_is_the_same_bytes_alone_and_among_31_others(real: Service) -> None:
    others = [f"Sentence number {place}: {'word ' * (place % 9)}" for place in range(31)]
    alone = {text: embeddings(real, [text])[0] for text in (SENTENCES[0], *others[:3])}
    together = embeddings(real, [*others[:16], SENTENCES[0], *others[16:]])
    assert together[16] == alone[SENTENCES[0]] and together[:3] == [alone[text] for text in others[:3]]
    at_once = in_parallel([lambda text=text: embeddings(real, [text])[0] for text in [*others, SENTENCES[0]]])
    assert at_once[-1] == alone[SENTENCES[0]] and at_once[:31] == [*together[:16], *together[17:]]
    assert all(math.hypot(*numbers(one)) == pytest.approx(1.0, abs=1e-6) for one in together)


@pytest.mark.model
@pytest.mark.timeout(400)
def test_the_real_models_numbers_are_a_plain_forwards_as_far_as_its_rounding_goes(
    real: Service, model_image_path: Path
) -> None:
    import tokenizers
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model_image_path, dtype=torch.float32).eval()
    text = " ".join(SENTENCES)
    ids = tokenizers.Tokenizer.from_file(str(model_image_path / "tokenizer.json")).encode(text).ids
    expected, states = forward(reference, ids)
    found = told(real, text)
    assert "".join(found["tokens"]) == text
    by_place = [expected[place, token_id].item() for place, token_id in enumerate(ids[1:])]
    gaps = [abs(one - other) for one, other in zip(found["token_logprobs"][1:], by_place, strict=True)]
    assert max(gaps) < 0.5 and sum(gaps) / len(gaps) < 0.1
    for pooling, state in (("mean", states.mean(dim=0)), ("last", states[-1])):
        (mine,) = embeddings(real, [text], pooling=pooling)
        assert likeness(mine, struct.pack(f"<{len(state)}f", *state.tolist())) > 0.99


@pytest.mark.model
@pytest.mark.timeout(400)
def test_the_real_model_finds_alike_what_means_the_same(real: Service) -> None:
    dog, puppy, bank = embeddings(real, list(SENTENCES))
    assert likeness(dog, puppy) > likeness(dog, bank)
    assert likeness(dog, puppy) > likeness(puppy, bank)
