"""Compile the form that a completion must keep to; PROCESS 2.

Beside grammar_masks.py the only module that knows llguidance. Threads of the grammar queue call
`GrammarCompiler.compile`, the mask lanes what it returns. What one grammar may cost, in its text, while it compiles and
in a step, is bounded here; how long it may take is the caller's business. Knows no sequences, no rows and no requests.
"""

from __future__ import annotations

import collections
import json
import threading
from typing import Final

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from inference_api.backend.grammar_masks import GrammarMask, UnlockedSteps, shortened, told
from inference_api.backend.schema_bounds import find_excess
from inference_api.messages import Grammar, GrammarKind
from inference_api.model_image import ModelImage

MAX_GRAMMAR_BYTES: Final = 64 << 10
"""Of a grammar's text in UTF-8."""

MAX_COMPILED: Final = 8
"""Grammars that are kept compiled: several answers of one call have one grammar, and a program sends its own again."""

_BLANKS = r"[ ]?|\n[ ]{0,16}"
"""Between the parts of JSON: room to be read, and an end, where a small model would go on with blanks for ever."""


def _limits(step_items: int, row_items: int) -> LLParserLimits:
    """Bound what a grammar costs, in items of its parser a step and a byte; the rest is below its defaults."""
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=step_items,
        max_items_in_row=row_items,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


_LIMITS = _limits(step_items=50_000, row_items=10_000)
"""Above llguidance's default are the items of a byte, which objects of hundreds of optional members need.

So the worst schemas and regular expressions found compile in 0.6 s and cost 30 ms a step; a lexer's state takes 1 to
2 kB.
"""

_LARK_LIMITS = _limits(step_items=20_000, row_items=500)
"""A Lark grammar may be ambiguous, and then its items cost time that grows with their square: seven seconds a step for
the worst one found under the other limits, under these 60 ms, after shorter ones that showed that it is slow."""

_NAMES = {
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.JSON_OBJECT: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.CHOICE: "list of texts",
    GrammarKind.LARK: "Lark grammar",
}


_Key = tuple[str, GrammarKind, str]
"""With the tenant, so that no time tells one which grammars another one uses."""


class GrammarError(Exception):
    """Say why a grammar cannot be used, beginning with a verb whose subject is the grammar; safe to show."""


class GrammarCompiler:
    """Compile grammars over one vocabulary, the latest ones once. Any number of threads may call it."""

    def __init__(self, image: ModelImage, *, takes_lark: bool = True) -> None:
        """Blocks for some 0.2 s with a vocabulary of 49,152 ids, in which no other thread gets to run."""
        self._takes_lark = takes_lark
        self._image = image
        self._tokenizer = _Vocabulary(image).opened
        self._executor = LLExecutor(1)
        self._idle = LLMatcher(self._tokenizer, "", log_level=0)
        # At the beginning of their texts, and never stepped: each sequence steps a copy of its own.
        self._compiled: collections.OrderedDict[_Key, LLMatcher] = collections.OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar, num_prompt_tokens: int, tenant: str = "") -> GrammarMask:
        """Return the mask of a sequence whose completion begins after `num_prompt_tokens` ids.

        Blocks for milliseconds, under a second for the worst that is let through, and hardly at all for one that the
        `tenant` asked for lately; other threads run meanwhile. Raises GrammarError for what is no grammar of its kind,
        too large, or leaves nothing to say.
        """
        if grammar.kind is GrammarKind.LARK and not self._takes_lark:
            raise GrammarError("is in Lark's syntax, which this service takes with INFERENCE_API_LARK_GRAMMARS=1 only.")
        size_bytes = len(grammar.text.encode())
        if size_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"is {size_bytes} bytes long, of at most {MAX_GRAMMAR_BYTES}.")
        key = tenant, grammar.kind, grammar.text
        matcher = self._recall(key)
        if matcher is None:
            # Outside the lock, so that one grammar holds up no other: two threads may build the same one.
            matcher = self._build(grammar)
            self._keep(key, matcher)
        steps = UnlockedSteps(self._executor, self._idle.deep_copy()) if grammar.kind is GrammarKind.LARK else None
        return GrammarMask(matcher.deep_copy(), num_prompt_tokens, self._image, steps)

    def _build(self, grammar: Grammar) -> LLMatcher:
        limits = _LARK_LIMITS if grammar.kind is GrammarKind.LARK else _LIMITS
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one costs most, and shows that a text can begin
        if matcher.is_error():
            raise GrammarError(f"is no usable {_NAMES[grammar.kind]}: {told(matcher)}")
        return matcher

    def _recall(self, key: _Key) -> LLMatcher | None:
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
            return matcher

    def _keep(self, key: _Key, matcher: LLMatcher) -> None:
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
        raise GrammarError(f"is no {_NAMES[grammar.kind]}: {shortened(str(error))}") from None
