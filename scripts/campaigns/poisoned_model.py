"""Write a checkpoint of the real model in which one id cannot be read: its embedding is not a number.

For the part `faults_rows`. Everything else is the model's own, so that a text without that id is what the model says,
and a row that takes it in has logits that are not finite, by the engine's own arithmetic. The head, which shares the
embedding's numbers in the model, keeps them: the id can be drawn. Knows no service.
"""

from __future__ import annotations

import json
import math
import mmap
import shutil
import struct
from pathlib import Path
from typing import Any

CARRIED_FILES = ("tokenizer.json", "chat_template.jinja")
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LENGTH = struct.Struct("<Q")
"""What a safetensors file begins with: the length of its header, which is JSON."""


def write_poisoned_checkpoint(image: Path, folder: Path, token_id: int) -> Path:
    """Write into a new `folder` the model of an image, in fp32, whose embedding of `token_id` is all NaN; return it.

    Raises KeyError or OSError for an image that is none of a model with tied embeddings.
    """
    folder.mkdir()
    for name in CARRIED_FILES:
        shutil.copyfile(image / name, folder / name)
    config = json.loads((image / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with (image / WEIGHTS_FILE).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as weights:
        _write_weights(weights, folder / WEIGHTS_FILE, token_id)
    return folder


def _write_weights(weights: mmap.mmap, path: Path, token_id: int) -> None:
    (header_bytes,) = _LENGTH.unpack_from(weights)
    first = _LENGTH.size + header_bytes
    header: dict[str, Any] = json.loads(weights[_LENGTH.size : first])
    embedding = header[EMBEDDING]
    start, end = embedding["data_offsets"]
    num_bytes = len(weights) - first
    head = {**embedding, "data_offsets": [num_bytes, num_bytes + end - start]}
    told = json.dumps({**header, HEAD: head}).encode()
    told += b" " * (-len(told) % 8)  # the format's own alignment
    (vocab_size, width) = embedding["shape"]
    row_bytes = (end - start) // vocab_size
    row = _LENGTH.size + len(told) + start + token_id * row_bytes
    with path.open("xb") as out:
        out.write(_LENGTH.pack(len(told)) + told)
        out.write(memoryview(weights)[first:])
        out.write(memoryview(weights)[first + start : first + end])
        out.seek(row)
        out.write(struct.pack(f"<{width}f", *[math.nan] * width))
