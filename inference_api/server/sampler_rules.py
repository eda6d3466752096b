"""Say which rules of drawing go together, whichever surface asked for them: what makes no sense is refused by its name.

Runs in PROCESS 1. The names of these rules are llama.cpp's on every surface. Pure; knows no HTTP, no bodies and no
logits.
"""

from __future__ import annotations

from typing import NamedTuple

from inference_api.sampling_params import SamplingParams

# llama.cpp, common/common.h, common_params_sampling::dry_sequence_breakers.
DRY_BREAKERS = ("\n", ":", '"', "*")
"""Taken where a request names none."""

# llama.cpp, src/llama-sampling.cpp, llama_sampler_init_dry, MAX_CHAR_LEN: it cuts a longer one off.
MAX_BREAKER_CHARS = 40
MAX_BREAKERS = 16
"""Each is looked for once in a whole prompt while everybody waits: 2 ms at worst for one of 130 KB."""

_NOT_BESIDE_MIROSTAT = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "xtc_probability": 0.0,
}
"""Rules that decide how many ids are left, as mirostat does itself, and the values that turn them off."""


class Conflict(NamedTuple):
    """A parameter that makes no sense beside the others, and why."""

    name: str
    reason: str


def find_conflict(params: SamplingParams) -> Conflict | None:
    """Return the first parameter that could not have its effect beside the others; None if all can."""
    if params.mirostat:
        if params.temperature == 0:
            return Conflict("mirostat", "needs a temperature above 0: at 0 there is one token to draw.")
        for name, off in _NOT_BESIDE_MIROSTAT.items():
            if getattr(params, name) != off:
                return Conflict(
                    name, "cannot be combined with mirostat, which decides itself how many tokens are left."
                )
    if params.xtc_probability > 0 and params.temperature == 0:
        return Conflict("xtc_probability", "needs a temperature above 0: at 0 the likeliest token is drawn.")
    return None


def breakers_as_bytes(breakers: list[str] | None) -> tuple[bytes, ...]:
    """Return the texts over which no repetition goes on, as they cross; llama.cpp's own for None."""
    return tuple(dict.fromkeys(text.encode() for text in (DRY_BREAKERS if breakers is None else breakers)))
