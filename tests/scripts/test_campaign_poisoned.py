"""Check the model that the part `faults_rows` fails rows with, and what the part takes for a fault of such a row."""

from __future__ import annotations

import importlib
import json
import math
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.integration.echo_upstream import Exchange, ScriptedUpstream

ROOT = Path(__file__).parents[2]
EMBEDDING = "model.embed_tokens.weight"
NUMBER_BITS = 32
NUMBERS = {"model.norm.weight": ([2], [7.0, 8.0]), EMBEDDING: ([3, 2], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])}


@pytest.fixture(autouse=True)
def campaigns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"campaigns.{name}")


def write_image(folder: Path) -> Path:
    """Write as much of a model image as a checkpoint is made of, its weights those of NUMBERS."""
    folder.mkdir()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (shape, numbers) in NUMBERS.items():
        packed = struct.pack(f"<{len(numbers)}f", *numbers)
        header[name] = {
            "dtype": f"F{NUMBER_BITS}",
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(packed)],
        }
        data += packed
    told = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(told)) + told + data)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True}))
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text(name)
    return folder


def read_weights(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    content = path.read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", content)
    header, data = json.loads(content[8 : 8 + header_bytes]), content[8 + header_bytes :]
    assert header.pop("__metadata__") == {"format": "pt"}
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(data)
    return {
        name: (entry["shape"], [number for (number,) in struct.iter_unpack("<f", data[slice(*entry["data_offsets"])])])
        for name, entry in header.items()
    }


def test_one_id_cannot_be_read_and_everything_else_of_the_model_stays(tmp_path: Path) -> None:
    image = write_image(tmp_path / "image")
    folder = module("poisoned_model").write_poisoned_checkpoint(image, tmp_path / "poisoned", 1)
    weights = read_weights(folder / "model.safetensors")
    shape, numbers = weights[EMBEDDING]
    assert shape == [3, 2] and [math.isnan(number) for number in numbers] == [False, False, True, True, False, False]
    assert numbers[:2] + numbers[4:] == [0.0, 1.0, 4.0, 5.0]
    assert weights["lm_head.weight"] == NUMBERS[EMBEDDING]
    assert weights["model.norm.weight"] == NUMBERS["model.norm.weight"]
    config = json.loads((folder / "config.json").read_text())
    assert config == {"model_type": "llama", "tie_word_embeddings": False}
    assert (folder / "tokenizer.json").read_text() == "tokenizer.json"


def stream(*chunks: bytes, whole: bool = True) -> Callable[[Exchange], None]:
    """Return an answer of these chunks, with the last one or broken off before it."""

    def answer(exchange: Exchange) -> None:
        exchange.start_stream()
        for chunk in (*chunks, *([b""] if whole else [])):
            exchange.send_chunk(chunk)
        exchange.close()

    return answer


def refused(exchange: Exchange) -> None:
    exchange.answer(b"{}", status="500 Internal Server Error", extra="X-Error-Code: generation_failed\r\n")


def event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


FAILED = {"status_code": 500, "code": "generation_failed"}


@pytest.mark.parametrize(
    ("route", "answer", "told"),
    [
        ("inference", stream(b"a giraffe"), ("a giraffe", "whole")),
        ("inference", stream(b"a giraffe", whole=False), ("a giraffe", "cut")),
        ("inference", refused, ("", "500 generation_failed")),
        ("chat", stream(event("answer", {"message": "a"}), event("close", {})), ("a", "whole")),
        ("chat", stream(event("answer", {"message": "a"}), event("error", FAILED)), ("a", "cut")),
        ("chat", stream(event("answer", {"message": "a"})), ("a", "ends []")),
        (
            "chat",
            stream(event("answer", {"message": "a"}), event("error", FAILED), event("close", {})),
            ("a", "ends ['generation_failed', 'close']"),
        ),
    ],
)
def test_how_a_row_of_the_model_ended_is_told_apart(
    route: str, answer: Callable[[Exchange], None], told: tuple[str, str]
) -> None:
    with ScriptedUpstream() as upstream:
        service = SimpleNamespace(proxy_port=upstream.port)
        found: list[object] = []
        asking = threading.Thread(target=lambda: found.append(module("faults_model")._ask(service, route, {})))
        asking.start()
        answer(upstream.accept())
        asking.join(10.0)
    assert found == [told]
