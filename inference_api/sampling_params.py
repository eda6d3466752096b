"""Define the part of THE WIRE that says how an id is drawn, and how likely it was; messages.py carries it.

msgspec structs without a tag of their own; what has its default is off and not encoded. Knows no sampler and no text.
"""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a row's next id is drawn, in the order of docs/engines.md; what has its default is off and not encoded.

    `top_k` 0 means no limit. The fields of ids hold ids of the vocabulary, without repetition.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_ids: tuple[int, ...] = ()
    """The only ids that may be drawn; empty: all."""
    banned_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """So many of the most likely ids are reported with each drawn one; None: not even that one's own."""
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    """Runs of two or more ids of which the completion may hold none: the last of one is not drawn after the others."""
    dry_multiplier: float = 0.0
    """Loss of an id that would lengthen a repetition of `dry_allowed_length` ids; `dry_base` times it for each more."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    """So many of the last ids are looked at for repetitions; -1: all."""
    dry_sequence_breakers: tuple[bytes, ...] = ()
    """Texts as bytes over which no repetition goes on."""
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    """Its version, 1 or 2, beside no rule from `top_k` on; 0: off."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1

    @property
    def reads_known_ids(self) -> bool:
        """Tell whether a draw depends on the sequence's earlier ids beyond the logits."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.dry_multiplier != 0
            or bool(self.bad_sequences)
        )

    @property
    def is_greedy(self) -> bool:
        """Tell whether the highest logit is taken without a random number."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def draws_from_all(self) -> bool:
        """Tell whether an id is drawn by its share among all possible ones: no option leaves any out."""
        return (
            self.top_k == 0
            and self.top_p == 1
            and self.min_p == 0
            and self.typical_p == 1
            and self.xtc_probability == 0
            and not self.mirostat
        )


class TokenLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The natural logarithms of probabilities at one position: the drawn id's, and the `top` most likely ids'.

    Of the model's own distribution, before any sampling parameter; `top` descends, equal ones by ascending id.
    """

    logprob: float
    top: list[tuple[int, float]]
