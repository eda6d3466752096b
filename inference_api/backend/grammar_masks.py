"""Say after each id of one completion which ids keep to its form, and which ones the form foretells; PROCESS 2.

Steps an llguidance matcher along the ids. One thread at a time calls a mask: mostly a lane (mask_lanes.py), in between
the decode thread. Knows no grammars, no rows and no sampling.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from llguidance import LLExecutor, LLMatcher

from inference_api.backend.engines.base import MaskError
from inference_api.model_image import ModelImage

MAX_ERROR_CHARS: Final = 300

_SPACES = re.compile(r"\s+")


class UnlockedSteps:
    """Step a matcher while other threads of Python run; for grammars that take milliseconds.

    llguidance 1.9.1 keeps the interpreter's lock while one matcher steps, and gives it away while several do
    (python_ext/src/llmatcher.rs, `consume_token_par`): the second one here is idle.
    """

    def __init__(self, executor: LLExecutor, idle: LLMatcher) -> None:
        self._executor = executor
        self._idle = idle

    def consume(self, matcher: LLMatcher, token_ids: Sequence[int]) -> bool:
        """Take in ids; return False if the matcher cannot follow them."""
        return all(
            self._executor.consume_token_par([(matcher, token_id), (self._idle, token_id)])[0] for token_id in token_ids
        )


class GrammarMask:
    """The mask of one sequence; see `LaneMask`. Steps through the ids that it has not seen yet at each call."""

    def __init__(
        self,
        matcher: LLMatcher,
        num_prompt_tokens: int,
        image: ModelImage,
        unlocked: UnlockedSteps | None = None,
    ) -> None:
        """With `unlocked` no other thread waits while the matcher steps, and nothing is guessed."""
        self._matcher = matcher
        self._num_seen = num_prompt_tokens
        self._num_bytes = (image.vocab_size + 7) // 8
        self._stop_ids = image.stop_ids
        self._unlocked = unlocked
        self._num_prepared = -1
        self._draft_ids: tuple[int, ...] = ()
        self._bits: list[bytes] = []
        self._error = MaskError("a guess does not keep to its form.")

    def guess(self, ids: Sequence[int], proposal: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Return the ids that the form forces after `ids`, or else as many of the proposed ones as it allows.

        No end is among them. Nothing is returned for a completion that has left its form.
        """
        if self._unlocked is not None or not self._has_followed(ids):
            return ()
        ahead = self._matcher.deep_copy()
        guessed = ahead.compute_ff_tokens()[:max_tokens]
        if not guessed:
            end = next((index for index, token_id in enumerate(proposal) if token_id in self._stop_ids), max_tokens)
            guessed = list(proposal[: min(end, max_tokens)])
            guessed = guessed[: ahead.validate_tokens(guessed)] if guessed else []
        return tuple(guessed)

    def prepare(self, ids: Sequence[int], draft_ids: Sequence[int] = ()) -> None:
        """Find the bits after `ids`, and after each draft as far as they can be found; `allowed` tells why not."""
        self._num_prepared, self._draft_ids, self._bits = len(ids), tuple(draft_ids), []
        if not self._has_followed(ids):
            self._error = _lost(self._matcher)
        elif self._find_bits(self._matcher) and draft_ids:
            ahead = self._matcher.deep_copy()  # one that met a bound would never work again
            for draft_id in draft_ids:
                if not ahead.consume_token(draft_id) or not self._find_bits(ahead):
                    break

    def forced_id(self, ids: Sequence[int]) -> int | None:
        """Return the only id that may follow `ids`: by the bits, if they were prepared, or else as the form foretells.

        Raises MaskError as `allowed` does.
        """
        if self._is_prepared(ids):
            bits = int.from_bytes(self.allowed(ids), "little")
            return bits.bit_length() - 1 if bits.bit_count() == 1 else None
        if not self._has_followed(ids):
            raise _lost(self._matcher)
        forced = self._matcher.compute_ff_tokens()
        return forced[0] if forced else None

    def takes(self, ids: Sequence[int], token_id: int) -> bool:
        """Tell whether an id may follow `ids`: by the bits, if they were prepared, or else by a step of the matcher.

        Raises MaskError as `allowed` does.
        """
        if self._is_prepared(ids):
            return bool(self.allowed(ids)[token_id // 8] >> token_id % 8 & 1)
        forced_id = self.forced_id(ids)
        if token_id in self._stop_ids:  # a matcher whose form can only end validates nothing more
            return self._matcher.is_accepting()
        return token_id == forced_id if forced_id is not None else self._matcher.validate_tokens([token_id]) == 1

    def allowed(self, ids: Sequence[int]) -> bytes:
        """Return the bits for the id after `ids`, prompt and completion; once the form is whole, only ends are set.

        They are found now if nothing was prepared for `ids`. Raises MaskError if the completion leaves the form, or
        following it costs more than one step may.
        """
        if not self._is_prepared(ids):
            self.prepare(ids)
        num_drafts = len(ids) - self._num_prepared
        if num_drafts >= len(self._bits):
            raise self._error
        return self._bits[num_drafts]

    def _is_prepared(self, ids: Sequence[int]) -> bool:
        num_drafts = len(ids) - self._num_prepared
        return num_drafts >= 0 and tuple(ids[self._num_prepared :]) == self._draft_ids[:num_drafts]

    def _has_followed(self, ids: Sequence[int]) -> bool:
        new_ids = list(ids[self._num_seen :])
        self._num_seen = len(ids)
        if self._unlocked is not None:
            return self._unlocked.consume(self._matcher, new_ids)
        return not new_ids or self._matcher.consume_tokens(new_ids)

    def _find_bits(self, matcher: LLMatcher) -> bool:
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            self._error = _lost(matcher)
            return False
        self._bits.append(bits[: self._num_bytes])
        return True


def _lost(matcher: LLMatcher) -> MaskError:
    return MaskError(f"its answer cannot go on in its form: {told(matcher)}")


def told(matcher: LLMatcher) -> str:
    """Return what a matcher says is wrong, in one line."""
    return shortened(matcher.get_error())


def shortened(text: str) -> str:
    """Return a text in one line of at most MAX_ERROR_CHARS and a sign that something is missing."""
    line = _SPACES.sub(" ", text).strip()
    return line if len(line) <= MAX_ERROR_CHARS else f"{line[:MAX_ERROR_CHARS]}…"
