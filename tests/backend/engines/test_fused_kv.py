"""Check on real tensors that nothing of a row is left once it has been scrubbed, and that no other row is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_api.backend.engines import fused, transformers
from inference_api.backend.engines.base import PrefixCopy, RowPlan, SampleSpec, StepPlan
from tests.backend.engines import tiny_models as tiny

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

PROMPT = tuple(range(1, 30))
SHORT = tuple(range(40, 45))


def of_library(engine: Any) -> list[Tensor]:
    """Return what each row of the library's cache holds: (layers, KV heads, bytes)."""
    return list(engine.computation._kv._runs.transpose(0, 1))


def of_torch(engine: Any) -> list[Tensor]:
    """Return what each row of the torch computation's cache holds."""
    cache = engine.computation._cache
    parts = [part for heads in (cache._keys, cache._values) for part in (heads._numbers, heads._scales)]
    return [torch.cat([part[:, row].double().flatten() for part in parts]) for row in range(parts[0].shape[1])]


def of_transformers(engine: Any) -> list[Tensor]:
    """Return what each row of the row cache holds."""
    layers = [tensor for layer in engine._rows._row_kv._layers.values() for tensor in layer]
    return [torch.cat([tensor[row].flatten() for tensor in layers]) for row in range(len(layers[0]))]


Rows = Callable[[Any], list[Tensor]]


@pytest.fixture(params=["library", "torch", "transformers"])
def engine_and_rows(
    request: pytest.FixtureRequest, tiny_image: Any, fused_build_folder: Any, fused_library_of_tests: Any
) -> Iterator[tuple[Any, Rows]]:
    """Each engine with three rows, and what its rows hold."""
    image, num_threads = tiny_image("llama"), torch.get_num_threads()
    sizes = {"num_rows": 3, "context_tokens": image.context_tokens, "num_threads": 1}
    if request.param == "transformers":
        yield transformers.load(image, **sizes), of_transformers
    else:
        is_native = request.param == "library"
        engine = fused.load(image, build_folder=fused_build_folder, native=is_native, **sizes)
        if not is_native:  # its memory comes as it is; a start computes in every row before anybody is served
            for part in (engine.computation._cache._keys, engine.computation._cache._values):
                part._numbers.zero_(), part._scales.zero_()
        yield engine, of_library if is_native else of_torch
    torch.set_num_threads(num_threads)


def compute(engine: Any, row: int, ids: tuple[int, ...], drafts: tuple[int, ...] = (), **members: Any) -> None:
    """Let a row compute ids from its beginning, and guess some."""
    start = members.get("start", 0)
    sample = SampleSpec(tiny.GREEDY, 0, start + len(ids), start + len(ids))
    plan = RowPlan(row=row, token_ids=ids, sample=sample, draft_ids=drafts, **{"start": 0, **members})
    (result,) = engine.execute(StepPlan((plan,))).rows
    assert result.error is None


def is_zero(held: Tensor) -> bool:
    return not bool(held.count_nonzero())


def test_a_scrubbed_row_is_zero_and_the_others_are_as_they_were(engine_and_rows: tuple[Any, Rows]) -> None:
    engine, rows_of = engine_and_rows
    drafts = (7, 8, 9)[: engine.info.max_draft_tokens]
    for row in range(3):
        compute(engine, row, PROMPT, drafts)
        engine.release(row)
    compute(engine, 1, SHORT)  # less than the row has held: what stands behind it goes too
    engine.release(1)
    before = [held.clone() for held in rows_of(engine)]
    assert not any(is_zero(held) for held in before)
    engine.scrub(1)
    after = rows_of(engine)
    assert is_zero(after[1])
    assert torch.equal(after[0], before[0]) and torch.equal(after[2], before[2])


def test_what_was_copied_into_a_row_goes_with_it(engine_and_rows: tuple[Any, Rows]) -> None:
    engine, rows_of = engine_and_rows
    if not engine.info.copies_prefixes:
        assert isinstance(engine, transformers.TransformersEngine)
        return
    compute(engine, 0, PROMPT)
    compute(engine, 2, (50,), start=len(PROMPT) - 1, prefix=PrefixCopy(0, len(PROMPT) - 1))
    engine.release(2)
    engine.scrub(2)
    assert is_zero(rows_of(engine)[2]) and not is_zero(rows_of(engine)[0])


def test_a_row_answers_after_a_scrub_as_a_new_one_does(engine_and_rows: tuple[Any, Rows]) -> None:
    engine, _ = engine_and_rows
    fresh = tiny.Job(list(PROMPT), 6)
    tiny.drive(engine, [fresh])
    engine.scrub(fresh.row)
    again = tiny.Job(list(PROMPT), 6)
    tiny.drive(engine, [again])
    assert (again.output, again.error) == (fresh.output, None)
