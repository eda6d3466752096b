"""Start the whole service with a model of one's own: a checkpoint folder, through the command's own option."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_api.model_image import build_mock_image
from tests.backend.engines.tiny_models import FAMILIES, build_model, generated, save_checkpoint
from tests.integration.service import running_service

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]


def test_a_checkpoint_folder_is_served_and_answers_as_generate_does(tmp_path: Path) -> None:
    tokenizer = build_mock_image(tmp_path / "mock").tokenizer_path
    model = build_model(*FAMILIES["llama"])
    folder = save_checkpoint(model, tmp_path / "my-llama", tokenizer)
    prompt = "hello"
    ids = generated(model, list(prompt.encode()), 12)
    with running_service(
        "--model", str(folder), mock=False, INFERENCE_API_CACHE_DIR=str(tmp_path / "cache"), INFERENCE_API_ROWS="4"
    ) as service:
        (name,) = service.get("/info").json()["models"]
        answer = service.post(f"/inference/{name}", {"text": prompt, "top_k": 1, "max_tokens": 12})
        assert answer.status_code == 200
        expected = bytes(token_id for token_id in ids if token_id < 256)
        assert answer.content == expected.decode("utf-8", "replace").encode()
