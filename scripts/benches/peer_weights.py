"""Give each peer the same weights in the form that it reads: GGUF files by quantization, or a checkpoint's folder.

All of them are made from the source of the model image: the requantized files from its GGUF, the fp32 folder from the
image itself. Blocks for a download and for seconds of quantizing, once a folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benches.service import BenchError
from inference_api.config import Settings
from inference_api.model_image import ModelImage
from inference_api.model_source import fetch_default


def source_gguf(folder: Path) -> Path:
    """Return the GGUF file that the service's model comes from; the default one is fetched into `folder`.

    Raises BenchError if the model has none, ModelError if it cannot be fetched.
    """
    model = Settings.from_environ().model
    if model:
        path = Path(model).expanduser()
        if path.suffix.lower() != ".gguf":
            raise BenchError("reads GGUF, and INFERENCE_API_MODEL is none")
        return path
    found = sorted(folder.glob("*.Q4_1.gguf"))
    return found[0] if found else fetch_default(folder, None, lambda stage: print(stage, file=sys.stderr))


def quantized_gguf(folder: Path, quantize: Path, quantization: str) -> Path:
    """Return the model at another quantization, made with llama.cpp's own program if it is not there."""
    source = source_gguf(folder)
    target = folder / f"{source.name.split('.')[0]}.{quantization}.gguf"
    if not target.exists():
        half = target.with_suffix(".half")
        command = [str(quantize), "--allow-requantize", str(source), str(half), quantization]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"llama-quantize to {quantization}: {done.stderr.splitlines()[-1:]}")
        half.rename(target)
    return target


def checkpoint_folder(folder: Path, image: ModelImage) -> Path:
    """Return a folder of links to an image's fp32 weights, with the one file that a checkpoint has and an image not."""
    target = folder / image.path.name
    target.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        link = target / name
        if not link.exists():
            os.symlink(image.path / name, link)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": image.eos_text}
    (target / "tokenizer_config.json").write_text(json.dumps(described))
    return target
