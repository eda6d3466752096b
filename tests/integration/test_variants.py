"""Start the service with the development variants and saved images: by option and by the original's names.

A tiny Llama of three layers stands for the model; what its first two answer is known from `generate`.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from inference_api.model_image import ModelImage, build_mock_image
from tests.backend.engines.tiny_models import FAMILIES, build_model, generated, save_checkpoint
from tests.integration.raw_http import RawStream
from tests.integration.service import START_SECONDS, Service, running_command, running_service, wait_for

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

PROMPT = "hello"
NUM_TOKENS = 12
SERVER_FILE = "inference_api/inference_api_server.py"
BODY = {"text": PROMPT, "top_k": 1, "max_tokens": NUM_TOKENS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("variants")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    tokenizer = build_mock_image(folder / "mock").tokenizer_path
    return save_checkpoint(build_model(*FAMILIES["llama"]), folder / "my-llama", tokenizer)


@pytest.fixture(scope="module")
def answer_of_two_layers() -> bytes:
    """What the model's first two layers answer, computed without this project."""
    model = build_model(*FAMILIES["llama"])
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    ids = generated(model, list(PROMPT.encode()), NUM_TOKENS)
    return bytes(token_id for token_id in ids if token_id < 256).decode("utf-8", "replace").encode()


@contextlib.contextmanager
def running_model(folder: Path, command: list[str], **environ: str) -> Iterator[Service]:
    """Run a command that starts the service with a model until it is healthy, and then until the block ends."""
    settings: dict[str, Any] = {"INFERENCE_API_CACHE_DIR": str(folder / "cache"), "INFERENCE_API_ROWS": "2"}
    settings |= {"INFERENCE_API_ENGINE": "transformers", **environ}  # whose answers are those of `generate`
    with running_command(command, settings, own_cache=False) as service:
        log, process = service.log, service.process
        wait_for(lambda: service.is_healthy() or process.poll() is not None, START_SECONDS[False], "health")
        assert process.poll() is None, log.read_text()
        yield service


def test_the_server_file_streams_what_two_layers_answer_and_gunicorn_does_so_from_the_saved_image(
    folder: Path, checkpoint: Path, answer_of_two_layers: bytes
) -> None:
    options = ["--model", str(checkpoint), "--layers", "2"]
    command = [sys.executable, SERVER_FILE, *options]
    names = {"FALCON_40B_TTI_SUFFIX": "v7", "INFERENCE_API_LAYERS": "3"}
    with running_model(folder, command, FALCON_40B_SAVE="1", **names) as service:
        with RawStream(service.port, "/inference/my-llama", BODY) as stream:
            assert stream.read_all() == answer_of_two_layers
            assert len(stream.chunks) > 1, "a stream, not one piece"
        assert service.get("/info").json()["variant"] == "layers 2"
        wait_for(lambda: "Ready http" in service.log.read_text(), 5.0, "the card")
        log = service.log.read_text()
        assert "model    my-llama (layers 2), 2 rows" in log
        assert "WARNING: my-llama is a development variant (layers 2)" in log
        assert "backend: loading the weights, " in log and "backend: ready, " in log
        digest = service.get("/info").json()["digest"]
        assert service.stop() == 0
    saved = ModelImage.open(folder / "cache" / "tti_cache" / "my-llama-layers-2-v7")
    assert saved.variant == "layers 2"
    moved = shutil.move(checkpoint, folder / "moved-away")
    for image in (folder / "cache").glob("my-llama-*"):
        shutil.rmtree(image)
    command = [sys.executable, "-m", "gunicorn", "--config", "gunicorn.conf.py"]
    names = {"FALCON_40B_LOAD": "1", "FALCON_40B_TTI_SUFFIX": "v7", "FALCON_40B_2LAYER": "1"}
    names["INFERENCE_API_MODEL"] = str(checkpoint)
    try:
        with running_model(folder, command, **names) as service:
            with RawStream(service.port, "/inference/my-llama", BODY) as stream:
                assert stream.read_all() == answer_of_two_layers
            assert service.get("/info").json()["digest"] == digest
            assert (service.run_dir / "model_image").resolve() == saved.path
            assert service.stop(signal.SIGTERM) == 0
    finally:
        shutil.move(moved, checkpoint)


def test_no_weights_serves_a_hub_id_from_hf_cache_without_network_or_weight_file(
    folder: Path, checkpoint: Path, fused_build_folder: Path
) -> None:
    repository = folder / "hub" / "models--tiny--Llama"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(checkpoint, repository / "snapshots" / commit, ignore=shutil.ignore_patterns("*.safetensors"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    command = [sys.executable, "-m", "inference_api.supervisor", "--model", "tiny/Llama"]
    names = {"FALCON_40B_PYTORCH_NO_WEIGHTS": "1", "HF_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    # What random weights say is no matter, and this engine starts in half the time.
    names["INFERENCE_API_ENGINE"] = "fused"
    shutil.copytree(fused_build_folder, folder / "cache" / ARTEFACTS_FOLDER)
    with running_model(folder, command, **names) as service:
        assert service.get("/info").json()["variant"] == "random weights"
        first = service.post("/inference/llama", {"text": PROMPT, "top_k": 1, "max_tokens": NUM_TOKENS})
        assert first.status_code == 200
        assert "is a development variant (random weights)" in service.log.read_text()


@pytest.mark.parametrize(
    ("arguments", "mock", "text"),
    [
        (["--layers", "2"], True, "INFERENCE_API_LAYERS (FALCON_40B_2LAYER, --layers) is for a model, and the engine"),
        (["--save-image", "--no-weights"], False, "cannot save_tti with pytorch_no_weights."),
        (["--save-image", "--load-image"], False, "--save-image and --load-image exclude each other"),
        (["--load-image", "--image-suffix", "nowhere"], False, "-nowhere, cannot load tti"),
    ],
)
def test_what_does_not_go_together_is_one_line_and_exit_status_1(
    arguments: list[str], mock: bool, text: str, tmp_path: Path
) -> None:
    with running_service(*arguments, wait=False, mock=mock, INFERENCE_API_CACHE_DIR=str(tmp_path / "c")) as service:
        assert service.process.wait(20) == 1
        (line,) = service.log.read_text().splitlines()
        assert line.startswith("ERROR: ") and text in line
    assert not (tmp_path / "c").exists()
