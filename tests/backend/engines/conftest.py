"""Share the tiny models' checkpoints and images among the engines' tests: each is built once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inference_api.model_image import ModelImage, build_mock_image
from tests.backend.engines.tiny_models import FAMILIES, build_model, save_checkpoint


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Compute in one thread: small tensors wait for a second one longer than they compute, on a busy machine."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mock_image(tmp_path_factory.mktemp("mock")).tokenizer_path


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Path) -> Callable[..., tuple]:
    """Return (model, checkpoint folder) of a family; each is built once a session."""
    built: dict[str, tuple] = {}

    def build(family: str) -> tuple:
        if family not in built:
            model = build_model(*FAMILIES[family])
            built[family] = (
                model,
                save_checkpoint(model, tmp_path_factory.mktemp("checkpoint") / family, byte_tokenizer),
            )
        return built[family]

    return build


@pytest.fixture(scope="session")
def tiny_image(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> Callable[[str], ModelImage]:
    """Return the prepared image of a family."""
    from inference_api.prepare import prepare

    cache = tmp_path_factory.mktemp("images")
    return lambda family: prepare(str(tiny_checkpoint(family)[1]), cache, lambda line: None)


@pytest.fixture(scope="session")
def fused_library_of_tests(fused_build_folder: Path):
    """Return the library, opened once a session."""
    from inference_api.backend.engines.fused_library import open_library

    return open_library(fused_build_folder)
