"""Say how families of models write a call in their text: a table, so that another family is another entry.

Pure data. Every conversation with tools tells the model HERMES; what a family was trained on is read beside it, for a
model may fall back to its own habit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class CallFormat:
    """A call is a JSON object with a `name` and `arguments` (or `parameters`), between two marks."""

    begin: str
    """What a call begins with; empty: the answer is nothing but one call."""
    end: str
    """What may follow it; empty: nothing does."""
    is_list: bool = False
    """Whether calls stand in a JSON list after one mark."""


HERMES = CallFormat("<tool_call>", "</tool_call>")
"""Of Hermes, Qwen2.5, Qwen3 and SmolLM3."""

FORCED = CallFormat("", "")
"""What a grammar makes a model write that has to call a function: the bare object."""

FORMATS: Mapping[str, tuple[CallFormat, ...]] = {
    "mistral": (HERMES, CallFormat("[TOOL_CALLS]", "", is_list=True)),
    "llama": (HERMES, CallFormat("<function_call>", "</function_call>")),
}
"""What is read beside or instead of HERMES, by `model_type` of the model's config.json."""


def formats_of(model_type: str) -> tuple[CallFormat, ...]:
    """Return the formats that calls of a family's models are read in."""
    return FORMATS.get(model_type, (HERMES,))
