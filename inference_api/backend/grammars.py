"""Compile the form that a completion must keep to, and say after each id which ids keep to it; PROCESS 2.

The only module that knows llguidance. Threads of the grammar queue call `GrammarCompiler.compile`, the decode thread
the masks that it returns. What one grammar may cost, in its text, while it compiles and in a step, is bounded here; how
long it may take is the caller's business. Knows no sequences, no rows and no requests.
"""

from __future__ import annotations

import collections
import json
import re
import threading
from collections.abc import Sequence
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from inference_api.backend.engines.base import MaskError
from inference_api.backend.schema_bounds import find_excess
from inference_api.messages import Grammar, GrammarKind
from inference_api.model_image import ModelImage

MAX_GRAMMAR_BYTES: Final = 64 << 10
"""Of a grammar's text in UTF-8."""

MAX_COMPILED: Final = 8
"""Grammars that are kept compiled: several answers of one call have one grammar, and a program sends its own again."""

MAX_ERROR_CHARS: Final = 300

_BLANKS = r"[ ]?|\n[ ]{0,16}"
"""Between the parts of JSON: room to be read, and an end, where a small model would go on with blanks for ever."""

_SPACES = re.compile(r"\s+")

_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_items_in_row=10_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Below llguidance's defaults but for the items in a row, which objects of hundreds of optional members need.

So the worst grammars found compile in 0.6 s and cost 30 ms a step; a lexer's state takes 1 to 2 kB.
"""

_NAMES = {
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.JSON_OBJECT: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.CHOICE: "list of texts",
    GrammarKind.LARK: "Lark grammar",
}


class GrammarError(Exception):
    """Say why a grammar cannot be used, beginning with a verb whose subject is the grammar; safe to show."""


class GrammarMask:
    """The mask of one sequence; see `TokenMask`. Steps through the ids that it has not seen yet at each call."""

    def __init__(self, matcher: LLMatcher, num_prompt_tokens: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_seen = num_prompt_tokens
        self._num_bytes = (vocab_size + 7) // 8

    def allowed(self, ids: Sequence[int]) -> bytes:
        """Return the bits for the id after `ids`, prompt and completion; once the form is whole, only ends are set.

        Raises MaskError if the completion leaves the form, or following it costs more than one step may.
        """
        new_ids = ids[self._num_seen :]
        if new_ids and not self._matcher.consume_tokens(list(new_ids)):
            raise MaskError(f"its answer cannot go on in its form: {_told(self._matcher)}")
        self._num_seen = len(ids)
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise MaskError(f"its answer cannot go on in its form: {_told(self._matcher)}")
        return bits[: self._num_bytes]


class GrammarCompiler:
    """Compile grammars over one vocabulary, the latest ones once. Any number of threads may call it."""

    def __init__(self, image: ModelImage, *, takes_lark: bool = True) -> None:
        """Blocks for some 0.2 s with a vocabulary of 49,152 ids, in which no other thread gets to run."""
        self._takes_lark = takes_lark
        self._vocab_size = image.vocab_size
        self._tokenizer = _Vocabulary(image).opened
        # At the beginning of their texts, and never stepped: each sequence steps a copy of its own.
        self._compiled: collections.OrderedDict[tuple[GrammarKind, str], LLMatcher] = collections.OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar, num_prompt_tokens: int) -> GrammarMask:
        """Return the mask of a sequence whose completion begins after `num_prompt_tokens` ids.

        Blocks for milliseconds, under a second for the worst that is let through, and hardly at all for one that was
        asked for lately; other threads run meanwhile. Raises GrammarError for what is no grammar of its kind, too
        large, or leaves nothing to say.
        """
        if grammar.kind is GrammarKind.LARK and not self._takes_lark:
            raise GrammarError("is in Lark's syntax, which this service takes with INFERENCE_API_LARK_GRAMMARS=1 only.")
        size_bytes = len(grammar.text.encode())
        if size_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"is {size_bytes} bytes long, of at most {MAX_GRAMMAR_BYTES}.")
        key = grammar.kind, grammar.text
        matcher = self._recall(key)
        if matcher is None:
            # Outside the lock, so that one grammar holds up no other: two threads may build the same one.
            matcher = self._build(grammar)
            self._keep(key, matcher)
        return GrammarMask(matcher.deep_copy(), num_prompt_tokens, self._vocab_size)

    def _build(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one costs most, and shows that a text can begin
        if matcher.is_error():
            raise GrammarError(f"is no usable {_NAMES[grammar.kind]}: {_told(matcher)}")
        return matcher

    def _recall(self, key: tuple[GrammarKind, str]) -> LLMatcher | None:
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
            return matcher

    def _keep(self, key: tuple[GrammarKind, str], matcher: LLMatcher) -> None:
        with self._lock:
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)


class _Vocabulary(TokenizerWrapper):
    """What LLTokenizer reads of a tokenizer, without one."""

    def __init__(self, image: ModelImage) -> None:
        # Not the base's own: that reads all this from a tokenizer, and tries it out.
        self.is_tokenizer_wrapper = True
        self.eos_token_id = min(image.stop_ids)
        self.bos_token_id = None
        self.tokens = image.token_bytes
        self.special_token_ids = sorted(image.special_ids)
        self.opened = LLTokenizer(self, n_vocab=image.vocab_size, eos_token=sorted(image.stop_ids))

    def __call__(self, text: str) -> list[int]:
        """Cut a text into the longest ids: where one text only can follow, llguidance allows one way to write it."""
        return self.opened.greedy_tokenize(text)


def _source(grammar: Grammar) -> str:
    """Return the grammar in llguidance's own form; raises GrammarError for what is not JSON where it should be."""
    try:
        match grammar.kind:
            case GrammarKind.JSON_OBJECT | GrammarKind.JSON_SCHEMA:
                schema = grammar.text or '{"type": "object"}'
                if (excess := find_excess(json.loads(schema))) is not None:
                    raise GrammarError(excess)
                return LLMatcher.grammar_from_json_schema(
                    # A schema's own `x-guidance` could let keywords be left out of account.
                    schema,
                    overrides={"whitespace_pattern": _BLANKS, "lenient": False, "coerce_one_of": False},
                )
            case GrammarKind.CHOICE:
                return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, json.loads(grammar.text)))}")
            case GrammarKind.REGEX:
                return LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.LARK:
                return LLMatcher.grammar_from_lark(grammar.text)
    except (ValueError, TypeError, RecursionError) as error:
        raise GrammarError(f"is no {_NAMES[grammar.kind]}: {_short(str(error))}") from None


def _told(matcher: LLMatcher) -> str:
    return _short(matcher.get_error())


def _short(text: str) -> str:
    line = _SPACES.sub(" ", text).strip()
    return line if len(line) <= MAX_ERROR_CHARS else f"{line[:MAX_ERROR_CHARS]}…"
