"""Decide how many prompt tokens a step may carry beside the rows that decode.

Pure; called by the scheduler in the decode thread of PROCESS 2 for every step. Knows counts, neither sequences nor
time: what a step may cost was measured once, at warm-up.
"""

from __future__ import annotations

from inference_api.backend.engines.base import PrefillBudget

MAX_SHARES = 8
"""Prompts that a step makes room for beside decoding rows: more would hold those up too long at once."""


def prompt_tokens(budget: PrefillBudget, *, num_rows: int, num_decoding: int, num_prompts: int) -> int:
    """Return how many tokens of `num_prompts` prompts the next step may carry beside `num_decoding` rows.

    One prompt leaves the decoding rows their pace, within twice a decode step. The more prompts there are, the more
    callers wait for a first token and the fewer are held up, so each brings a share of its own. A row that does not
    decode leaves its token to a prompt: the step then costs no more than a full one.
    """
    if not num_decoding:
        return budget.alone_tokens
    shares = min(MAX_SHARES, num_prompts)
    left_tokens = max(0, num_rows - 1 - num_decoding)
    return min(budget.alone_tokens, budget.beside_tokens * shares + left_tokens)
