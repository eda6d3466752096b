"""Compare every option of a row, and random combinations, with the scalar reference; and keep faults in their rows."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import msgspec
import pytest
import torch

from inference_api.backend.engines import sampler
from inference_api.backend.engines.base import MaskError, RowError, RowResult, SampleSpec
from inference_api.backend.engines.sampler import Draw, accepted, drafted_specs, row_result
from inference_api.sampling_params import SamplingParams, TokenLogprobs
from tests.backend.engines.scalar_sampler import (
    BORDER,
    changed_logits,
    exact,
    probabilities_of,
    reference_draw,
    reference_logprobs,
    single,
)

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_torch_thread")]

LOGPROB_TOLERANCE = 1e-4
NUM_ROWS = 32


@dataclasses.dataclass
class FormMask:
    """A mask with fixed bits; they depend on the number of known ids if there are several."""

    bits: Sequence[bytes]

    def forced_id(self, ids: Sequence[int]) -> int | None:
        return None

    def takes(self, ids: Sequence[int], token_id: int) -> bool:
        return bool(self.allowed(ids)[token_id // 8] >> token_id % 8 & 1)

    def allowed(self, ids: Sequence[int]) -> bytes:
        return self.bits[len(ids) % len(self.bits)]


class MaskOfAnotherLength(FormMask):
    """A mask that takes no try, so that its bits are looked at."""

    def takes(self, ids: Sequence[int], token_id: int) -> bool:
        return False


class EndedMask:
    """A mask whose form can go no further, and says why."""

    def forced_id(self, ids: Sequence[int]) -> int | None:
        raise MaskError("it is too complex.")

    def takes(self, ids: Sequence[int], token_id: int) -> bool:
        raise MaskError("it is too complex.")

    def allowed(self, ids: Sequence[int]) -> bytes:
        raise MaskError("it is too complex.")


@dataclasses.dataclass
class BrokenMask:
    """A mask whose form has failed."""

    def forced_id(self, ids: Sequence[int]) -> int | None:
        raise ValueError("secret text of the request")

    def takes(self, ids: Sequence[int], token_id: int) -> bool:
        raise ValueError("secret text of the request")

    def allowed(self, ids: Sequence[int]) -> bytes:
        raise ValueError("secret text of the request")


def bits_of(ids: Sequence[int], vocab: int) -> bytes:
    return sum(1 << token_id for token_id in set(ids)).to_bytes((vocab + 7) // 8, "little")


def plain(seed: int = 0, position: int = 0, temperature: float = 1.0, **options: object) -> SampleSpec:
    return SampleSpec(SamplingParams(temperature, 0, 1.0, seed, **options), 0, position)


def ids_over(logits: torch.Tensor, spec: SampleSpec, draws: int = 300) -> set[int]:
    """Return the ids that many uniform numbers select."""
    specs = [dataclasses.replace(spec, position=position) for position in range(draws)]
    return {draw.token_id for draw in sampler.sample(logits.expand(draws, -1), specs)}


class EvenBreakers:
    """Ids that divide by four are breakers."""

    def num_after(self, ids: Sequence[int]) -> int:
        return next((count for count, token_id in enumerate(reversed(ids)) if self.is_in(token_id)), len(ids))

    def is_in(self, token_id: int) -> bool:
        return token_id % 4 == 0


def random_options(source: random.Random, vocab: int) -> dict[str, object]:
    """Choose some options and their values; at least one id stays possible."""
    some = source.sample(range(vocab), min(vocab, 12))
    choices: dict[str, object] = {
        "min_p": source.choice([0.01, 0.1, 0.5, 1.0]),
        "typical_p": source.choice([0.1, 0.5, 0.95]),
        "repetition_penalty": source.choice([0.5, 1.1, 1.3, 5.0]),
        "presence_penalty": source.choice([-2.0, -0.5, 0.7, 2.0]),
        "frequency_penalty": source.choice([-1.0, 0.3, 2.0]),
        "logit_bias": {token_id: source.choice([-100.0, -1.5, 0.25, 3.0, 100.0]) for token_id in some[:4]},
        "allowed_ids": tuple(some),
        "banned_ids": tuple(some[: vocab // 2 and 5]),
        "logprobs": source.choice([0, 1, 5]),
        "bad_sequences": tuple(tuple(source.choices(range(min(vocab, 4)), k=source.randint(2, 3))) for _ in range(4)),
        "dry_multiplier": source.choice([0.5, 2.0, 1e9]),
        "dry_base": source.choice([1.0, 1.2, 1.75]),
        "dry_allowed_length": source.choice([1, 2, 4]),
        "dry_penalty_last_n": source.choice([0, 8, 20]),
        "top_n_sigma": source.choice([0.3, 1.0, 2.5]),
        "xtc_probability": source.choice([0.3, 1.0]),
        "xtc_threshold": source.choice([0.0, 0.02, 0.1, 0.3]),
    }
    chosen = {name: value for name, value in choices.items() if source.random() < 0.3}
    if "allowed_ids" in chosen and set(chosen.get("banned_ids", ())) >= set(some):
        del chosen["allowed_ids"]
    if source.random() < 0.15:
        chosen |= {"mirostat": source.choice([1, 2]), "mirostat_tau": source.choice([0.5, 2.0, 5.0])}
    return chosen


def random_spec(source: random.Random, vocab: int, index: int) -> SampleSpec:
    num_distinct = source.choice([2, 4, vocab])
    known = [source.randrange(min(vocab, num_distinct)) for _ in range(source.randint(1, 30))]
    allowed = set(range(vocab)) if source.random() < 0.8 else {i for i in range(vocab) if source.random() < 0.7}
    return SampleSpec(
        SamplingParams(
            source.choice([0.0, 0.3, 1.0, 1.7]),
            source.choice([0, 0, 1, 3, 40, 1000]),
            source.choice([0.2, 0.9, 1.0]),
            source.getrandbits(63),
            **random_options(source, vocab),
        ),
        source.randint(0, 3),
        len(known) + index,
        source.randint(0, len(known)),
        known,
        frozenset(source.sample(range(vocab), min(3, vocab - 1)) if source.random() < 0.2 else ()),
        None if len(allowed) == vocab else FormMask([bits_of(sorted(allowed), vocab)]),
        EvenBreakers() if source.random() < 0.5 else None,
        source.choice([None, -3.0, 1.5, 6.0]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["continuous", "tied"])
def test_random_combinations_equal_the_scalar_reference(dtype: torch.dtype, step: float) -> None:
    source = random.Random(f"{dtype} {step}")
    rounded = single if dtype is torch.float32 else exact
    counts = {"compared": 0, "impossible": 0, "border": 0}
    for vocab in (2, 9, 64, 257, 1500):
        logits = torch.randn(NUM_ROWS, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
        logits = ((logits / step).round() * step if step else logits).to(dtype)
        specs = [random_spec(source, vocab, index) for index in range(NUM_ROWS)]
        for row, (spec, draw) in enumerate(zip(specs, sampler.sample(logits, specs), strict=True)):
            try:
                expected, margin = reference_draw(logits[row].tolist(), spec, rounded)
            except ValueError:
                counts["impossible"] += 1
                assert draw.error is not None and "rule all of them out" in draw.error.message
                continue
            counts["border" if margin <= BORDER else "compared"] += 1
            assert margin <= BORDER or draw._replace(logprobs=None, mu=None) == Draw(expected), spec
    assert counts["compared"] > 120 and counts["border"] < 8, counts


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.2},
        {"typical_p": 0.6},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8},
        {"logit_bias": {3: 2.0, 5: -2.0}},
        {"allowed_ids": (1, 3, 5)},
        {"banned_ids": (1, 3, 5)},
        {"min_p": 0.05, "typical_p": 0.9, "repetition_penalty": 1.2},
    ],
    ids=lambda options: "+".join(options),
)
def test_frequencies_under_each_option_follow_the_reference(options: dict[str, object]) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 1.5
    known = (3, 5, 5, 7, 11, 11, 11)
    spec = dataclasses.replace(plain(**options), num_prompt_tokens=2, known_ids=known)
    probabilities, _ = probabilities_of(changed_logits(logits.tolist(), spec), spec.params)
    draws = 4000
    specs = [dataclasses.replace(spec, position=position) for position in range(draws)]
    drawn = [draw.token_id for draw in sampler.sample(logits.expand(draws, -1), specs)]
    chi_square = sum((drawn.count(i) - draws * p) ** 2 / (draws * p) for i, p in probabilities.items())
    assert set(drawn) <= set(probabilities)
    assert chi_square < len(probabilities) - 1 + 4 * math.sqrt(2 * len(probabilities))


@pytest.mark.parametrize("temperature", [1e-7, 1e-40, 5e-324])
def test_a_temperature_next_to_nothing_takes_the_highest(temperature: float) -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(8))
    shapes = [(0, 1.0, {}), (0, 0.9, {}), (40, 0.9, {}), (400, 1.0, {}), (0, 1.0, {"min_p": 0.1})]
    specs = [SampleSpec(SamplingParams(temperature, k, p, 3, **more), 0, 9) for k, p, more in shapes]
    specs.append(plain(temperature=temperature, typical_p=0.5))
    assert sampler.sample(logits, specs) == [Draw(token_id) for token_id in logits.argmax(dim=1).tolist()]


def test_min_p_keeps_what_reaches_a_share_of_the_likeliest() -> None:
    logits = torch.tensor([[math.log(p) for p in (0.5, 0.26, 0.24)]])
    assert ids_over(logits, plain(min_p=0.5)) == {0, 1}
    assert ids_over(logits, plain(min_p=1.0)) == {0}


def test_typical_p_keeps_ids_that_surprise_as_much_as_expected() -> None:
    logits = torch.tensor([[math.log(p) for p in (0.7, 0.1, 0.1, 0.1)]])
    # The entropy is 0.94, the surprises are 0.36 and 2.3: the likely id comes first, of the equal ones the lowest.
    assert ids_over(logits, plain(typical_p=0.5)) == {0}
    assert ids_over(logits, plain(typical_p=0.75)) == {0, 1}
    # Of a flat and a likely part the expected surprise may be the flat one's: the likeliest id goes.
    flat = torch.tensor([[math.log(0.3)] + [math.log(0.07)] * 10])
    assert 0 not in ids_over(flat, plain(typical_p=0.3))


def test_repetition_counts_the_prompt_and_the_others_the_completion_alone() -> None:
    logits = torch.tensor([[3.0, 2.9, 2.8, -5.0]])
    spec = dataclasses.replace(plain(temperature=0.0), known_ids=(0, 1), num_prompt_tokens=1)

    def greedy(**options: object) -> int:
        return sampler.sample(logits, [msgspec_replaced(spec, **options)])[0].token_id

    assert greedy() == 0
    assert greedy(repetition_penalty=1.2) == 2
    assert greedy(presence_penalty=1.0) == 0
    assert greedy(logit_bias={1: 1.0}) == 1
    assert greedy(logit_bias={1: 1.0}, presence_penalty=1.0) == 0
    assert greedy(logit_bias={1: 1.0}, frequency_penalty=1.0) == 0


def msgspec_replaced(spec: SampleSpec, **options: object) -> SampleSpec:
    return dataclasses.replace(spec, params=msgspec.structs.replace(spec.params, **options))


def test_a_mask_is_asked_for_the_ids_so_far_and_bounds_the_draw() -> None:
    logits = torch.zeros(1, 19)
    mask = FormMask([bits_of([2, 18], 19), bits_of([5], 19)])
    even = SampleSpec(SamplingParams(1.0, 0, 1.0, 0), 0, 0, 0, (1, 2), mask=mask)
    assert ids_over(logits, even) == {2, 18}
    assert ids_over(logits, dataclasses.replace(even, known_ids=(1, 2, 3))) == {5}


def test_a_row_draws_the_same_beside_neighbours_with_and_without_options() -> None:
    source = random.Random(11)
    logits = torch.randn(NUM_ROWS, 6400, generator=torch.Generator().manual_seed(2)) * 3
    specs = [random_spec(source, 6400, i) if i % 3 else plain(i, temperature=float(i % 2)) for i in range(NUM_ROWS)]
    together = sampler.sample(logits, specs)
    assert together == [sampler.sample(logits[i : i + 1], [specs[i]])[0] for i in range(NUM_ROWS)]
    order = source.sample(range(NUM_ROWS), NUM_ROWS)
    assert sampler.sample(logits[order], [specs[i] for i in order]) == [together[i] for i in order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logprobs_are_those_of_the_models_own_distribution(dtype: torch.dtype) -> None:
    logits = (torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    logits[2] = logits[2].round()
    for num_top in (0, 1, 5, 20):
        # Bias, penalties and temperature change the draw and nothing of what is reported.
        options = {"logprobs": num_top, "logit_bias": {7: 100.0}, "temperature": 0.5}
        for row, draw in enumerate(sampler.sample(logits, [plain(**options) for _ in range(6)])):
            assert draw.token_id == 7 and draw.logprobs is not None
            logprob, top = reference_logprobs(logits[row].tolist(), 7, num_top)
            assert [i for i, _ in draw.logprobs.top] == [i for i, _ in top]
            found = [draw.logprobs.logprob, *(value for _, value in draw.logprobs.top)]
            expected = [logprob, *(value for _, value in top)]
            assert found == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def test_more_logprobs_than_ids_are_all_ids() -> None:
    (draw,) = sampler.sample(torch.tensor([[0.0, 1.0, 1.0]]), [plain(temperature=0.0, logprobs=20)])
    assert draw.logprobs is not None and [i for i, _ in draw.logprobs.top] == [1, 2, 0]


def faulted(kind: str, logits: torch.Tensor, specs: list[SampleSpec], row: int, source: random.Random) -> None:
    """Put a fault into one row."""
    vocab = logits.shape[1]
    if kind in ("nan", "inf", "-inf"):
        logits[row, source.randrange(vocab)] = float(kind)
    elif kind == "all -inf":
        logits[row] = -math.inf
    elif kind == "position":
        specs[row] = dataclasses.replace(specs[row], params=plain(temperature=1.0).params, position="x")
    else:
        masks = {"mask raises": BrokenMask(), "form ended": EndedMask()}
        masks["short mask"] = MaskOfAnotherLength([b"\xff"])
        masks["long mask"] = MaskOfAnotherLength([b"\1" * vocab])
        masks["nothing allowed"] = FormMask([bytes((vocab + 7) // 8)])
        specs[row] = dataclasses.replace(specs[row], mask=masks[kind])


FAULTS = {
    "nan": "NaN or infinite",
    "inf": "NaN or infinite",
    "-inf": "NaN or infinite",
    "all -inf": "NaN or infinite",
    "position": "TypeError",
    "mask raises": "Sampling failed for this request: ValueError",
    "form ended": "Sampling failed for this request: it is too complex.",
    "short mask": "1 bytes, where 102 hold the vocabulary",
    "long mask": "812 bytes, where 102",
    "nothing allowed": "rule all of them out",
}


def test_150_faults_at_random_rows_change_no_other_row() -> None:
    source = random.Random(150)
    logits = torch.randn(NUM_ROWS, 812, generator=torch.Generator().manual_seed(150)) * 3
    specs = [random_spec(source, 812, i) if i % 2 else plain(i, temperature=i % 4 / 2) for i in range(NUM_ROWS)]
    clean = sampler.sample(logits, specs)
    assert all(draw.error is None for draw in clean)
    for number in range(150):
        kind, row = list(FAULTS)[number % len(FAULTS)], source.randrange(NUM_ROWS)
        broken, broken_specs = logits.clone(), list(specs)
        faulted(kind, broken, broken_specs, row, source)
        draws = sampler.sample(broken, broken_specs)
        error = draws[row].error
        assert isinstance(error, RowError) and FAULTS[kind] in error.message and "secret" not in error.message
        assert draws[row].token_id == -1
        assert draws[:row] + draws[row + 1 :] == clean[:row] + clean[row + 1 :], (kind, row)


def test_a_bias_beyond_what_a_logit_holds_fails_its_row_alone() -> None:
    logits = torch.full((2, 5), 3e38)
    options = {"logit_bias": {1: 3e38}, "temperature": 0.0}
    first, second = sampler.sample(logits, [plain(**options), plain(temperature=0.0)])
    assert first.error is not None and "beyond what a number can hold" in first.error.message
    assert second == Draw(0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 2},
        {"dry_multiplier": 3.0, "dry_allowed_length": 1, "xtc_probability": 0.5, "bad_sequences": ((1, 2),)},
    ],
)
def test_drafted_positions_draw_what_single_steps_would(options: dict[str, object]) -> None:
    prompt, steps, vocab = (3, 1, 2), 6, 50
    # Stands for a model: the logits at a position depend on the position alone.
    logits = torch.randn(len(prompt) + steps, vocab, generator=torch.Generator().manual_seed(4))
    known, singly = list(prompt), []
    for _ in range(steps):
        spec = SampleSpec(SamplingParams(1.0, 20, 0.9, 5, **options), 0, len(known), 3, tuple(known))
        singly += sampler.sample(logits[len(known) : len(known) + 1], [spec])
        known.append(singly[-1].token_id)
    made = [draw.token_id for draw in singly]
    spec = SampleSpec(SamplingParams(1.0, 20, 0.9, 5, **options), 0, 3, 3, prompt)
    for drafts, num_accepted in ((made[:5], 6), ([*made[:2], made[2] ^ 1, made[3]], 3), ([made[0] ^ 1], 1), ([], 1)):
        specs = drafted_specs(spec, drafts)
        assert [later.position for later in specs] == list(range(3, 4 + len(drafts)))
        draws = accepted(sampler.sample(logits[3 : 4 + len(drafts)], specs), drafts)
        assert draws == singly[:num_accepted]
        logprobs = tuple(draw.logprobs for draw in draws) if "logprobs" in options else None
        assert row_result(9, draws) == RowResult(9, tuple(made[:num_accepted]), logprobs)


def test_a_fault_after_accepted_drafts_is_left_to_the_next_step() -> None:
    failed = Draw(-1, error=RowError("sampling_failed", "x"))
    assert accepted([Draw(4), failed, Draw(6)], [4, 5]) == [Draw(4)]
    assert accepted([failed, Draw(5)], [4]) == [failed]
    assert row_result(2, [failed]) == RowResult(2, error=failed.error)


def test_a_row_with_barred_ids_or_mirostat_has_no_drafts() -> None:
    mirostat = msgspec.structs.replace(plain().params, mirostat=2)
    for bound in ({"barred_ids": frozenset({1})}, {"params": mirostat}):
        spec = dataclasses.replace(plain(), **bound)
        assert drafted_specs(spec, []) == [spec]
        with pytest.raises(ValueError, match="has drafts"):
            drafted_specs(spec, [1])


def test_a_draw_carries_logprobs_only_where_they_are_asked_for() -> None:
    with_, without = sampler.sample(torch.zeros(2, 4), [plain(temperature=0.0, logprobs=0), plain(temperature=0.0)])
    assert with_ == Draw(0, TokenLogprobs(pytest.approx(-math.log(4)), []))
    assert without == Draw(0)
