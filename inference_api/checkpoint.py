"""Read the files of a Hugging Face checkpoint folder, as far as it goes without model code; runs inside `prepare`.

Finds the weight files and counts their numbers from the headers, reads the texts that a tokenizer carries and the ids
that end a text. Weights in pickle files are refused here. Imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from inference_api.errors import ModelError
from inference_api.model_image import TEMPLATE_FILE

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "</s>")
"""Specials that end a turn or a text in the families served; many checkpoints name only one of theirs as `eos`."""

FP32_BYTES = 4

_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerTexts:
    """The texts that a tokenizer carries beside its vocabulary."""

    bos_text: str
    eos_text: str
    chat_template: str | None


def weight_files(folder: Path) -> list[Path]:
    """List a checkpoint's safetensors files, every shard of an index included, the index first.

    Raises ModelError for a missing shard, and for a checkpoint that has pickle files only.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(read_json(index).get("weight_map", {}).values()))
        for shard in shards:
            if Path(shard).name != shard or not (folder / shard).is_file():
                raise ModelError(
                    f"checkpoint {folder.name} is broken: shard {shard!r} of its index is missing; fetch it again"
                )
        if shards:
            return [index, *(folder / shard for shard in shards)]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    pickles = [file.name for pattern in _PICKLE_PATTERNS for file in sorted(folder.glob(pattern))]
    if pickles:
        raise ModelError(
            f"checkpoint {folder.name} has only pickle weights ({pickles[0]}), which can run code when read; "
            "convert them to safetensors"
        )
    raise ModelError(f"checkpoint {folder.name} has no weights: neither model.safetensors nor its index is there")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError when the file is missing or holds something else."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent.name} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.parent.name}/{path.name} is broken: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path.parent.name}/{path.name} is broken: it holds no JSON object")
    return content


def optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or an empty one if there is no such file."""
    return read_json(path) if path.is_file() else {}


def num_elements(file: Path) -> int:
    """Count a safetensors file's numbers from its header alone. Raises ModelError for a broken or truncated file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="numpy") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ModelError(
            f"{file.parent.name}/{file.name} is broken or half-downloaded; fetch it again: {one_line(error)}"
        ) from None
    return sum(math.prod(shape) for shape in shapes)


def stored_type(folder: Path, tensor: str) -> str | None:
    """Return the type of a tensor in a checkpoint's safetensors files, such as f32 or bf16; None if none has it.

    Raises ModelError for missing and for broken files.
    """
    from safetensors import SafetensorError, safe_open

    for file in weight_files(folder):
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(str(file), framework="numpy") as tensors:
                if tensor in tensors.keys():  # noqa: SIM118 - not a mapping
                    return str(tensors.get_slice(tensor).get_dtype().lower())
        except SafetensorError as error:
            raise ModelError(f"{folder.name}/{file.name} is broken: {one_line(error)}") from None
    return None


def texts_of(path: Path) -> TokenizerTexts:
    """Read the special texts and the chat template of a checkpoint; what is not there is empty."""
    config = {**optional_json(path / "special_tokens_map.json"), **optional_json(path / "tokenizer_config.json")}

    def special(key: str) -> str:
        value = config.get(key) or ""
        return str(value.get("content", "")) if isinstance(value, dict) else str(value)

    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    file = path / TEMPLATE_FILE
    return TokenizerTexts(
        special("bos_token"), special("eos_token"), file.read_text("utf-8") if file.is_file() else template
    )


def stop_ids_of(
    config: dict[str, Any], generation: dict[str, Any], eos_text: str, specials: dict[str, int]
) -> set[int]:
    """Collect the ids that end a text from both configs, the tokenizer and the known turn ends in `specials`."""
    found = {specials[text] for text in (*TURN_ENDS, eos_text) if text in specials}
    for holder in (config, generation):
        value = holder.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return found


def kv_bytes_per_token(config: Any) -> int:
    """Return the fp32 bytes of one KV slot over all layers, from a parsed transformers config. Raises ModelError."""
    num_heads = getattr(config, "num_attention_heads", None)
    if not num_heads:
        raise ModelError(
            f"model type {config.model_type!r} has no attention heads, so no KV cache: it is not supported"
        )
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    if config.model_type == "falcon":
        # FalconAttention.__init__: `num_kv_heads` counts only in the new decoder; before it, multi_query means one.
        new_or_plain = config.new_decoder_architecture or not config.multi_query
        num_kv_heads = config.num_kv_heads if new_or_plain else 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return int(config.num_hidden_layers * 2 * num_kv_heads * head_dim * FP32_BYTES)


def one_line(error: BaseException) -> str:
    """Name an error's kind and the start of its text, for a message of one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
