"""Start the OpenAI servers that load tools are pointed at: this service behind its proxy, llama.cpp's, transformers'.

Each is loaded once and held still but in its own turns, as in the `peers` bench. What one calls the model, and which
members make it answer greedily at full length, stands here. Knows no tool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from benches import peer_llama, peer_transformers
from benches.api_surface import MODEL
from benches.peer_contender import OURS
from benches.peer_ours import parent_of
from benches.real_model import running_model
from benches.service import Target
from inference_api.model_image import ModelImage

NUM_ROWS = 32
LLAMA_QUANTIZATION = "Q4_0"
"""The faster one of those that the `peers` bench compares, and the nearest to the service's own weights."""


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """A running server: where, its processes' root, the model's name there, and members for a full greedy answer."""

    name: str
    target: Target
    pid: int
    model: str
    members: Mapping[str, object]

    @property
    def base_url(self) -> str:
        """The address without a path."""
        return f"http://127.0.0.1:{self.target.port}"


def starters(
    folder: Path, image: ModelImage, *, context_tokens: int, answer_tokens: int, install: bool
) -> dict[str, AbstractContextManager[Served]]:
    """Return what starts each server when it is entered; a peer's raises BenchError if it does not come up."""
    return {
        OURS: _ours(context_tokens),
        f"llama_{LLAMA_QUANTIZATION.lower()}": _llama(folder, context_tokens, install),
        "transformers": _transformers(folder, image, context_tokens, answer_tokens, install),
    }


@contextlib.contextmanager
def _ours(context_tokens: int) -> Iterator[Served]:
    settings = {
        "INFERENCE_API_ENGINE": "fused",
        "INFERENCE_API_CONTEXT_TOKENS": str(context_tokens),
        "INFERENCE_API_SERVED_MODEL_NAMES": MODEL,
    }
    with running_model(settings) as service:
        members = {"temperature": 0, "ignore_eos": True}
        yield Served(OURS, service.proxied, parent_of(service.pids["backend"]), MODEL, members)


@contextlib.contextmanager
def _llama(folder: Path, context_tokens: int, install: bool) -> Iterator[Served]:
    rows = {"num_rows": NUM_ROWS, "context_tokens": context_tokens}
    with peer_llama.running_llama(LLAMA_QUANTIZATION, folder, install=install, **rows) as server:
        name = f"llama_{LLAMA_QUANTIZATION.lower()}"
        yield Served(name, server.target, server.pid, MODEL, {"temperature": 0, "ignore_eos": True})


@contextlib.contextmanager
def _transformers(
    folder: Path, image: ModelImage, context_tokens: int, answer_tokens: int, install: bool
) -> Iterator[Served]:
    rows = {"num_rows": NUM_ROWS, "context_tokens": context_tokens}
    # It refuses `ignore_eos`; an end that no id has does the same.
    generation = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": answer_tokens}
    members = {"temperature": 0, "generation_config": json.dumps(generation)}
    with peer_transformers.running_transformers(folder, image, install=install, **rows) as server:
        yield Served("transformers", server.target, server.pid, server.model, members)
