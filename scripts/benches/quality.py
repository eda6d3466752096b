"""Print what the `fused` engine's numbers cost: perplexity and greedy agreement beside the model in fp32.

The text is public domain: the Declaration of Independence, the Gettysburg Address, and Genesis 1 to 10 in the King
James Version. Nothing was calibrated on it, nor on anything else. It is cut into windows that are computed each by
itself, every position's logits on both sides. Knows models and logits; no service, no scheduler, no sampling.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benches.real_model import prepare_image
from inference_api.backend.engines import fused
from inference_api.backend.engines.fused_computation import StepTokens
from inference_api.config import Settings
from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from inference_api.model_image import ModelImage

TEXT = Path(__file__).with_name("data") / "public_domain.txt"
WINDOW_TOKENS = 512
CHUNK_TOKENS = 128
WINDOWS = {"full": 1000, "quick": 4, "tiny": 1}
"""Windows of a size, of those that the text has."""


@dataclasses.dataclass(slots=True)
class Sums:
    """What is added up over all positions that have a next id."""

    losses: list[Tensor] = dataclasses.field(default_factory=list)
    reference_losses: list[Tensor] = dataclasses.field(default_factory=list)
    num_agreeing: int = 0
    divergence: float = 0.0


def run(size_name: str) -> dict[str, object]:
    """Compute the text on both sides; return perplexities, their ratio with its standard error, and the agreement."""
    settings = Settings.from_environ()
    image = ModelImage.open(prepare_image())
    windows = text_windows(image, min(WINDOW_TOKENS, image.context_tokens))[: WINDOWS[size_name]]
    reference = _load_reference(image)
    engine = fused.load(
        image,
        num_rows=1,
        context_tokens=min(WINDOW_TOKENS, image.context_tokens),
        build_folder=settings.cache_path / ARTEFACTS_FOLDER,
        num_threads=settings.torch_threads,
    )
    sums = Sums()
    for index, ids in enumerate(windows):
        print(f"window {index + 1} of {len(windows)}", file=sys.stderr)
        with torch.inference_mode():
            expected = reference(input_ids=torch.tensor([ids])).logits[0]  # (tokens, vocab)
        _add(sums, ids, expected, _logits(engine, ids))
    return {"numeric_path": engine.info.device, "tokens": sum(map(len, windows)), **_figures(sums)}


def text_windows(image: ModelImage, width: int) -> list[list[int]]:
    """Return the ids of the text in windows of `width`, the last one of what is left."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(image.tokenizer_path)).encode(TEXT.read_text()).ids
    return [ids[first : first + width] for first in range(0, len(ids) - 1, width)]


def _load_reference(image: ModelImage) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(image.path, dtype=torch.float32, local_files_only=True).eval()


def _logits(engine: fused.FusedEngine, ids: list[int]) -> Tensor:
    """Return the engine's logits at every position (tokens, vocab)."""
    found = torch.empty(len(ids), engine.info.vocab_size)
    for first in range(0, len(ids), CHUNK_TOKENS):
        part = ids[first : first + CHUNK_TOKENS]
        tokens = StepTokens(part, [0] * len(part), range(first, first + len(part)), range(len(part)))
        engine.computation.run(tokens, found[first : first + len(part)])
    return found


def _add(sums: Sums, ids: list[int], expected: Tensor, found: Tensor) -> None:
    following = torch.tensor(ids[1:])
    ours, theirs = (logits[:-1].double().log_softmax(dim=1) for logits in (found, expected))  # (tokens - 1, vocab)
    sums.losses.append(-ours.gather(1, following.unsqueeze(1)).squeeze(1))
    sums.reference_losses.append(-theirs.gather(1, following.unsqueeze(1)).squeeze(1))
    sums.num_agreeing += int((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum())
    sums.divergence += float((theirs.exp() * (theirs - ours)).sum())


def _figures(sums: Sums) -> dict[str, float]:
    losses, reference_losses = torch.cat(sums.losses), torch.cat(sums.reference_losses)
    added = losses - reference_losses
    return {
        "perplexity_fp32": round(math.exp(float(reference_losses.mean())), 3),
        "perplexity": round(math.exp(float(losses.mean())), 3),
        "added_percent": round(100 * math.expm1(float(added.mean())), 2),
        "added_percent_standard_error": round(100 * float(added.std()) / math.sqrt(len(added)), 2),
        "greedy_agreement": round(sums.num_agreeing / len(added), 4),
        "divergence_nats": round(sums.divergence / len(added), 5),
    }
