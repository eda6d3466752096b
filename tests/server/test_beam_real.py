"""Compare the search with transformers' own, over tiny models in fp64 that tell the likeliest ids of each round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_api.backend.engines.base import Engine, RowPlan, SampleSpec, StepPlan
from inference_api.backend.engines.transformers import load
from inference_api.model_image import build_mock_image
from inference_api.prepare import prepare
from inference_api.sampling_params import SamplingParams
from inference_api.server.beam import BeamOptions, BeamSearch
from tests.backend.engines import tiny_models as tiny

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

MAX_TOKENS = 12


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Engine]:
    """Return a model and an engine that computes it."""
    folder: Path = tmp_path_factory.mktemp("beams")
    model = tiny.build_model(*tiny.FAMILIES[request.param])
    tokenizer = build_mock_image(folder / "mock").tokenizer_path
    checkpoint = tiny.save_checkpoint(model, folder / "checkpoint", tokenizer)
    image = prepare(str(checkpoint), folder / "cache", lambda line: None)
    return model.double(), load(image, num_rows=1, context_tokens=tiny.CONTEXT_TOKENS, dtype="float64")


def likeliest_by(engine: Engine, prompt: Sequence[int], num_top: int) -> Callable[[Sequence[int]], Any]:
    """Return what tells the likeliest ids after the prompt and a continuation of it."""
    params = SamplingParams(0.0, 0, 1.0, 0, logprobs=num_top)

    def likeliest(token_ids: Sequence[int]) -> list[tuple[int, float]]:
        known = (*prompt, *token_ids)
        plan = StepPlan((RowPlan(0, 0, known, SampleSpec(params, 0, len(known))),))
        (result,) = engine.execute(plan).rows
        engine.release(0)
        assert result.logprobs is not None
        return result.logprobs[0].top

    return likeliest


def found_by_transformers(model: Any, prompt: Sequence[int], options: BeamOptions) -> list[list[int]]:
    """Return the continuations that transformers finds, the best first, each up to its end."""
    ends = sorted(options.end_ids)
    with torch.inference_mode():
        sequences = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            num_beams=options.width,
            num_return_sequences=options.width,
            max_new_tokens=options.max_tokens,
            min_new_tokens=0,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            eos_token_id=ends or None,
            pad_token_id=0,
        )[:, len(prompt) :].tolist()
    found = []
    for token_ids in sequences:
        end = next((place for place, token_id in enumerate(token_ids) if token_id in options.end_ids), len(token_ids))
        found.append(token_ids[: end + 1])
    return found


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_the_search_finds_what_transformers_finds(pair: tuple[Any, Engine], early_stopping: bool | str) -> None:
    model, engine = pair
    num_ended = 0
    (prompt,) = tiny.random_prompts(1, [7])
    for width, num_ends, penalty in ((2, 0, 1.0), (2, 1, 2.0), (4, 2, 1.0), (4, 2, -0.5), (4, 1, 2.0)):
        # Ids that a search comes across, so that some continuations end and others are cut off.
        met = found_by_transformers(model, prompt, BeamOptions(width, MAX_TOKENS, frozenset()))[0]
        ends = frozenset(met[3 : 3 + 2 * num_ends : 2])
        options = BeamOptions(width, MAX_TOKENS, ends, penalty, early_stopping)
        likeliest = likeliest_by(engine, prompt, options.num_top)
        search = BeamSearch(options)
        while not search.is_done:
            search.take([likeliest(beam.token_ids) for beam in search.live])
        found = [list(beam.token_ids) for beam in search.final]
        wanted = found_by_transformers(model, prompt, options)
        assert found == wanted, (width, ends, penalty)
        num_ended += sum(ids[-1] in ends for ids in found)
    assert num_ended > 3
