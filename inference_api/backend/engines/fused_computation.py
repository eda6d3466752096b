"""Fix the contract between the `fused` engine and what computes its steps, in the decode thread of PROCESS 2.

A computation holds the weights and the KV cache on one numeric path: C++ (fused_cpp.py) or plain torch
(fused_torch.py). It knows tokens at positions of rows, logits and states; not plans, sampling, pooling or sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from inference_api.backend.engines.selection import Selection


class KvCopy(NamedTuple):
    """The first `num_tokens` positions of one row's KV, for another row."""

    from_row: int
    to_row: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of one step: those of a row are neighbours and ascend by position. Ids and positions are checked."""

    token_ids: Sequence[int]
    rows: Sequence[int]
    positions: Sequence[int]
    outputs: Sequence[int]
    """Ascending indices of the tokens whose logits, or states, are wanted."""
    copies: Sequence[KvCopy] = ()
    """What is copied before anything is computed, from rows that none of them writes."""


class Computation(Protocol):
    """Compute steps so that a token's numbers depend on its own row alone, bit for bit."""

    numeric_path: str
    """The arithmetic, for people: on the card and in `/info`."""
    identity: str
    """The arithmetic and what may change its bits, for the digest."""
    embedding_size: int
    weight_bytes: int
    kv_bytes: int
    selection: Selection
    """Finds the highest of the logits that it made."""

    def run(self, tokens: StepTokens, logits: Tensor) -> Sequence[int]:
        """Compute `tokens`, store their keys and values, and fill `logits` (outputs, vocab), fp32; blocks for a step.

        Returns for each token 0 if its hidden state is NaN or infinite, else 1: after the last layer where it is an
        output, else before it.
        """
        ...

    def run_states(self, tokens: StepTokens, states: Tensor) -> Sequence[int]:
        """Do as `run` does, but fill `states` (outputs, hidden), fp32, after the last norm: what the head would see."""
        ...

    def scrub(self, row: int, num_slots: int) -> None:
        """Zero at least a row's first slots; what was copied beyond them too, which comes in whole blocks."""
        ...
