"""Stand in for a model without torch: digits at a set rate, an echo, or noise that depends on the row alone.

Runs in the decode thread like any engine, on the byte-level image. All other code of the service is the real one. What
a row produces depends on its own ids, seed and position only. Faults are scripted by settings, never by default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import struct
import threading
import time
from collections.abc import Mapping

from inference_api.backend.engines.base import (
    EngineInfo,
    MaskError,
    PrefillBudget,
    RowError,
    RowPlan,
    RowResult,
    SampleSpec,
    ScoreSpec,
    StepPlan,
    StepResult,
    TokenMask,
)
from inference_api.errors import SettingError
from inference_api.messages import Pooling
from inference_api.model_image import ModelImage
from inference_api.sampling_params import TokenLogprobs

PREFILL_TOKENS = 512
"""Prompt tokens that a step takes in: few enough that a long prompt needs several steps, as with a model."""

DRAFT_TOKENS = 8
"""Drafts a row and step; none where the script says itself what a step does: with a rate, blocks or faults."""

IMPOSSIBLE = -9999.0
"""The logprob of an id that is not drawn; OpenAI's value for "very unlikely"."""

BLOCK_TOKENS = 8
"""Ids a row and step in the mode digits without a rate or faults, as of a speculating engine whose drafts all hold."""

EMBEDDING_SIZE = 16

_DIGITS = tuple(ord("0") + position % 10 for position in range(10 + BLOCK_TOKENS))
_CLOSERS = b'"}]'
CLOSING_POSITIONS = 4
_BLANKS = sum(1 << blank for blank in b" \n\r\t")
_ROW_FAULTS = {
    "nan": "The model's logits are not finite.",
    "memory": "There is no memory for this row.",
    "error": "Sampling failed.",
}
_LETTERS = b"abcdefghijklmnopqrstuvwxyz "


@dataclasses.dataclass(frozen=True, slots=True)
class MockScript:
    """What the mock does: `mode` digits, echo or noise; a rate in ids a second over all rows (0: no limit); faults."""

    mode: str = "digits"
    tokens_per_second: float = 0.0
    faults: Mapping[bytes, str] = dataclasses.field(default_factory=dict)
    block_tokens: int = 1
    """Ids that a row gets in one step; more than one so that the mock is not what a load test measures."""

    @property
    def draws_freely(self) -> bool:
        """Tell whether it sets neither a rate nor blocks nor faults."""
        return not self.tokens_per_second and self.block_tokens == 1 and not self.faults

    @classmethod
    def parse(cls, mode: str, tokens_per_second: float, faults: str) -> MockScript:
        """Parse faults written as KIND:TEXT, comma-separated; raise SettingError on an unknown kind."""
        parsed: dict[bytes, str] = {}
        for fault in filter(None, faults.split(",")):
            kind, _, text = fault.partition(":")
            if kind not in (*_ROW_FAULTS, "crash", "hang") or not text:
                kinds = f"{', '.join(_ROW_FAULTS)}, crash or hang"
                raise SettingError(f"INFERENCE_API_MOCK_FAULTS={faults!r}: {fault!r} is not KIND:TEXT, KIND {kinds}.")
            parsed[text.encode()] = kind
        is_plain_load = mode == "digits" and not tokens_per_second and not parsed
        block_tokens = BLOCK_TOKENS if is_plain_load else 1
        return cls(mode, tokens_per_second, parsed, block_tokens)


class MockEngine:
    """An Engine over remembered ids: a row's "KV cache" is the list of ids computed there."""

    def __init__(self, image: ModelImage, num_rows: int, context_tokens: int, script: MockScript) -> None:
        self._script = script
        self._eos_id = min(image.stop_ids)
        self._rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.rows_in_use: set[int] = set()
        """Rows that have computed something since they were released."""
        self._done = threading.Event()
        # Ids of a block are computed in the next step like a prompt's: there is room for those of every row.
        prefill_tokens = PREFILL_TOKENS + (num_rows * script.block_tokens if script.block_tokens > 1 else 0)
        self._info = EngineInfo(
            engine="mock",
            model=image.name,
            device="none",
            num_rows=num_rows,
            context_tokens=min(context_tokens, image.context_tokens),
            vocab_size=image.vocab_size,
            row_independent=True,
            digest=f"mock-{script.mode}-{image.digest[:16]}",
            prefill_budget=PrefillBudget(prefill_tokens, prefill_tokens),
            copies_prefixes=True,
            max_draft_tokens=DRAFT_TOKENS if script.draws_freely else 0,
            embedding_size=EMBEDDING_SIZE,
        )

    @property
    def info(self) -> EngineInfo:
        """Describe this engine."""
        return self._info

    def execute(self, plan: StepPlan) -> StepResult:
        """Remember the plan's ids and answer for each row that samples, in the time that the rate sets."""
        began = time.monotonic()
        results = []
        self._begin_rows(plan)
        for row_plan in plan.rows:
            ids = self._rows[row_plan.row]
            if len(ids) != row_plan.start:
                raise RuntimeError(f"row {row_plan.row} holds {len(ids)} ids, the plan starts at {row_plan.start}")
            ids.extend(row_plan.token_ids)
            result = self._answer(row_plan, ids)
            if result is not None:
                results.append(result)
        if self._script.tokens_per_second:
            # The device's own time: nothing else runs in the decode thread during a forward pass either.
            self._done.wait(max(0.0, began + len(results) / self._script.tokens_per_second - time.monotonic()))
        return StepResult(tuple(results))

    def release(self, row: int) -> None:
        """Let another sequence begin in the row, with the ids that it holds or without."""
        self.rows_in_use.discard(row)

    def scrub(self, row: int) -> None:
        """Forget the ids that a row holds."""
        self._rows[row] = []

    def _begin_rows(self, plan: StepPlan) -> None:
        """Empty the rows that begin a sequence, or copy what it begins with. Raises RuntimeError for a wrong source."""
        beginning = {row.row for row in plan.rows if row.start == 0 or row.prefix is not None}
        for row in plan.rows:
            if row.prefix is not None:
                source_row, num_tokens = row.prefix.source_row, row.prefix.num_tokens
                held = self._rows[source_row]
                if len(held) < num_tokens or source_row in beginning - {row.row}:
                    raise RuntimeError(f"row {source_row} does not hold the {num_tokens} ids that row {row.row} copies")
                self._rows[row.row] = held[:num_tokens]
            elif row.start == 0 and row.row not in self.rows_in_use:
                self._rows[row.row] = []
            self.rows_in_use.add(row.row)

    def _answer(self, plan: RowPlan, ids: list[int]) -> RowResult | None:
        """Return what a row is to say, now that it holds the known `ids`; None: nothing."""
        pools = plan.pool is not None and plan.pool.is_last
        if plan.sample is None and plan.score is None and not pools:
            return None
        if self._script.faults:
            error = self._fault(bytes(token_id for token_id in ids if token_id < 256))
            if error is not None:
                return RowResult(plan.row, error=error)
        scores = () if plan.score is None else _scores(plan.start, plan.score)
        embedding = _embedding(plan.pool.pooling, ids) if plan.pool is not None and pools else None
        result = RowResult(plan.row) if plan.sample is None else self._sample(plan, plan.sample, ids)
        return dataclasses.replace(result, scores=scores, embedding=embedding)

    def _sample(self, plan: RowPlan, sample: SampleSpec, ids: list[int]) -> RowResult:
        if self._script.block_tokens > 1 and sample.mask is None:
            first = sample.position % 10
            return _with_logprobs(RowResult(plan.row, _DIGITS[first : first + self._script.block_tokens]), sample)
        try:
            drawn = [self._draw(sample, ids)]
        except MaskError as error:
            return RowResult(plan.row, error=RowError("sampling_failed", f"Sampling failed for this request: {error}"))
        with contextlib.suppress(MaskError):  # the next step draws there again
            for index, draft_id in enumerate(plan.draft_ids, 1):
                if draft_id != drawn[-1]:
                    break
                known_ids = (*sample.known_ids, *plan.draft_ids[:index])
                after = dataclasses.replace(sample, position=sample.position + index, known_ids=known_ids)
                drawn.append(self._draw(after, [*ids, *plan.draft_ids[:index]]))
        ids += plan.draft_ids[: len(drawn) - 1]
        return _with_logprobs(RowResult(plan.row, tuple(drawn)), sample)

    def _draw(self, sample: SampleSpec, ids: list[int]) -> int:
        return self._next_id(sample, ids) if sample.mask is None else self._draw_masked(sample, sample.mask, ids)

    def _draw_masked(self, sample: SampleSpec, mask: TokenMask, ids: list[int]) -> int:
        """Return the script's id if the mask allows it, else the lowest that it does, a blank last of all.

        Every fourth position ends what it can, so that texts in JSON are short and their form comes to its end. Raises
        MaskError.
        """
        bits = int.from_bytes(mask.allowed(sample.known_ids), "little")
        if not bits:
            raise MaskError("No id may be drawn next.")
        wanted = [*(_CLOSERS if sample.position % CLOSING_POSITIONS == 0 else ()), self._next_id(sample, ids)]
        marks = bits & ~_BLANKS or bits
        lowest_id = (marks & -marks).bit_length() - 1
        return next((token_id for token_id in wanted if bits >> token_id & 1), lowest_id)

    def _next_id(self, sample: SampleSpec, ids: list[int]) -> int:
        if self._script.mode == "digits":
            return ord("0") + sample.position % 10
        index = sample.position - sample.num_prompt_tokens
        if self._script.mode == "echo":
            return ids[index] if index < sample.num_prompt_tokens else self._eos_id
        key = repr((sample.params.seed, sample.choice, sample.position, ids)).encode()
        return _LETTERS[hashlib.blake2b(key, digest_size=8).digest()[0] % len(_LETTERS)]

    def _fault(self, text: bytes) -> RowError | None:
        """Set off the fault whose text stands in a row's ids, if any."""
        for needle, kind in self._script.faults.items():
            if needle not in text:
                continue
            if kind in _ROW_FAULTS:
                return RowError("generation_failed", _ROW_FAULTS[kind])
            if kind == "crash":
                raise RuntimeError("scripted crash")
            self._done.wait()
        return None


def _with_logprobs(result: RowResult, sample: SampleSpec) -> RowResult:
    """Add the logprobs that were asked for: each drawn id is certain, any other next to impossible."""
    num_top = sample.params.logprobs
    if num_top is None:
        return result
    logprobs = []
    for drawn in result.token_ids:
        others = [(token_id, IMPOSSIBLE) for token_id in range(num_top + 1) if token_id != drawn]
        logprobs.append(TokenLogprobs(0.0, [(drawn, 0.0), *others][:num_top]))
    return dataclasses.replace(result, logprobs=tuple(logprobs))


def _scores(start: int, score: ScoreSpec) -> tuple[TokenLogprobs, ...]:
    """Make up the logprobs of known ids: the most likely one after an odd position, the second after an even one."""
    scores = []
    for position, next_id in enumerate(score.next_ids, start):
        likely = [(next_id, -0.125 * (1 + position % 8))]
        if position % 2 == 0:
            likely.insert(0, (next_id - 1 if next_id else 1, -0.0625))
        taken = {token_id for token_id, _ in likely}
        others = [token_id for token_id in range(score.num_top + 2) if token_id not in taken]
        top = [*likely, *((token_id, IMPOSSIBLE) for token_id in others)]
        scores.append(TokenLogprobs(likely[-1][1], top[: score.num_top]))
    return tuple(scores)


def _embedding(pooling: Pooling, ids: list[int]) -> bytes:
    """Make up EMBEDDING_SIZE numbers in [-1, 1) that every id changes."""
    digest = hashlib.blake2b(repr((pooling.value, ids)).encode(), digest_size=2 * EMBEDDING_SIZE).digest()
    numbers = struct.unpack(f"<{EMBEDDING_SIZE}h", digest)
    return struct.pack(f"<{EMBEDDING_SIZE}f", *(number / (1 << 15) for number in numbers))


def load(image: ModelImage, *, num_rows: int, context_tokens: int, script: MockScript) -> MockEngine:
    """Make the engine; nothing is read or allocated."""
    return MockEngine(image, num_rows, context_tokens, script)
