"""Say in which forms the real model is asked to answer, and what a row without a form is asked beside each.

Every form is long enough that an answer is cut by its length alone, so that a masked row and a plain one make the same
number of tokens. All are drawn: a small model's greedy answer repeats itself, and guesses ahead of it hold more often
than in any text. Pure: bodies of requests. Knows neither how many rows run nor what is made of their times.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from benches.api_surface import MODEL, Body
from benches.peer_contender import PeerJob
from benches.workload import SEED, WORDS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_CHOICES = 16
NUM_ITEMS, NUM_WORDS = 100, 160
"""Of an array, and of a choice and a regular expression: a word takes a token at least, an item many."""

_WORD = "([a-z]{1,8} )"
UNLIKELY = "\U00031350"
"""Ends an expression that counts nothing: four bytes that the model has no reason to write."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """One way to ask: `members` stand in the body beside the prompt; `plain` is the form that it is set beside."""

    name: str
    path: str
    members: Mapping[str, object]
    plain: str | None = None

    def body(self, job: PeerJob) -> Body:
        """Return the body of a request for exactly the job's tokens, unless its form ends before them."""
        prompt: Body = (
            {"prompt": job.text} if self.path == COMPLETIONS else {"messages": [{"role": "user", "content": job.text}]}
        )
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {
            "model": MODEL,
            "temperature": 1,
            "seed": SEED,
            "max_tokens": job.num_tokens,
            **stream,
            **prompt,
            **self.members,
        }


def _items_schema() -> Body:
    item = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 12},
            "count": {"type": "integer"},
            "kind": {"enum": ["first", "second", "third"]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    }
    items = {"type": "array", "items": item, "minItems": NUM_ITEMS}
    return {
        "type": "object",
        "properties": {"items": items},
        "required": ["items"],
        "additionalProperties": False,
    }


def _choices() -> list[str]:
    source = random.Random(SEED)
    return [" ".join(source.choices(WORDS.split(), k=NUM_WORDS)) for _ in range(NUM_CHOICES)]


_STORE = {"name": "store", "description": "Stores what is found.", "parameters": _items_schema()}
_TOOLS = {"tools": [{"type": "function", "function": _STORE}]}
_FORCED = {"tool_choice": {"type": "function", "function": {"name": "store"}}}
PLAIN, TOOL_TOLD = "plain", "tool_told"
FORMS = {
    form.name: form
    for form in (
        Form(PLAIN, COMPLETIONS, {"ignore_eos": True}),
        Form("json_schema", COMPLETIONS, {"structured_outputs": {"json": _items_schema()}}, PLAIN),
        Form("regex", COMPLETIONS, {"structured_outputs": {"regex": f"{_WORD}+{UNLIKELY}"}}, PLAIN),
        Form("regex_counted", COMPLETIONS, {"structured_outputs": {"regex": f"{_WORD}{{{NUM_WORDS},}}"}}, PLAIN),
        Form("choice", COMPLETIONS, {"structured_outputs": {"choice": _choices()}}, PLAIN),
        # The definition is a long prompt: what a forced call costs is told beside rows that have read it, too.
        Form(TOOL_TOLD, CHAT, {**_TOOLS, "tool_choice": "auto", "ignore_eos": True}),
        Form("tool_forced", CHAT, {**_TOOLS, **_FORCED}, TOOL_TOLD),
    )
}
