"""Start the whole service with a model of one's own: a checkpoint folder, through the command's own option."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_api.model_image import build_mock_image
from tests.backend.engines.tiny_models import FAMILIES, build_model, generated, save_checkpoint
from tests.integration.service import Service, in_parallel, running_service

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

PROMPT = "hello"


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(*FAMILIES["llama"])


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint; the image that the first start makes of it lies beside it for the next."""
    beside = tmp_path_factory.mktemp("own")
    return save_checkpoint(model, beside / "my-llama", build_mock_image(beside / "mock").tokenizer_path)


@contextlib.contextmanager
def serving(folder: Path, *options: str, **settings: str) -> Iterator[Service]:
    cache = str(folder.parent / "cache")
    given = {"INFERENCE_API_CACHE_DIR": cache, "INFERENCE_API_ROWS": "4", **settings}
    with running_service("--model", str(folder), *options, mock=False, **given) as service:
        yield service


def test_a_checkpoint_folder_is_served_exactly_and_answers_as_generate_does(model: Any, folder: Path) -> None:
    ids = generated(model, list(PROMPT.encode()), 12)
    with serving(folder, "--dtype", "fp32") as service:
        info = service.get("/info").json()
        assert (info["engine"], info["device"]) == ("transformers", "cpu, because INFERENCE_API_DTYPE is fp32")
        answer = service.post(f"/inference/{info['models'][0]}", {"text": PROMPT, "top_k": 1, "max_tokens": 12})
        assert answer.status_code == 200
        expected = bytes(token_id for token_id in ids if token_id < 256)
        assert answer.content == expected.decode("utf-8", "replace").encode()
    assert not (folder.parent / "cache" / "tvm_cache").exists()


def test_without_a_compiler_the_fast_engine_serves_in_torch_and_the_card_says_why(folder: Path) -> None:
    with serving(folder, PATH="/nonexistent") as service:
        info = service.get("/info").json()
        body = {"text": PROMPT, "max_tokens": 12, "seed": 5}
        alone = service.ask(f"/inference/{info['models'][0]}", body)
        asked = [lambda: service.ask(f"/inference/{info['models'][0]}", body)] * 3
        assert in_parallel(asked) == [alone] * 3
        device = (
            "cpu (4-bit and int8 weights, int8 and int16 activations, int8 KV, torch), because g++ is not installed"
        )
        assert (info["engine"], info["device"], info["row_independent"]) == ("fused", device, True)
        log = service.log.read_text()
        assert f"fused on {device}, digest " in log
        assert "engine fused in torch, some thirty times slower, because g++ is not installed" in log
