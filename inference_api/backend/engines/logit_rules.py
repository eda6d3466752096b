"""Change one row's logits by what its request asks for before temperature; decode thread of PROCESS 2.

In this order: ids that may not be drawn (the mask of a form, allowed, banned and barred ids, ends of bad sequences)
become impossible, then logit_bias is added, then come the penalties for ids that the sequence holds already and for
repetitions of several, and last top_n_sigma, which no temperature changes. Works in place on a copy that the
sampler makes, in the logits' own precision. Only rows with such an option come here. Knows no temperature and no draw.
"""

from __future__ import annotations

import collections
import math
from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from inference_api.backend.engines.base import MaskError, SampleSpec, TokenMask
from inference_api.backend.engines.repetition import repetition_losses
from inference_api.backend.engines.sampling_rules import total_of


class RuleError(Exception):
    """Say why a row can draw no id; the text is safe to show."""


def only_id(spec: SampleSpec, vocab: int) -> int | None:
    """Return the id that a row draws in any case: the only one that its mask allows, where nothing else has a say.

    None if it must be drawn, or fails, which `mask_bits` tells of again.
    """
    if spec.mask is None or spec.params.mirostat or spec.changes_logits:
        return None
    try:
        allowed = int.from_bytes(_bits(spec.mask, spec.known_ids, vocab), "little")
    except Exception:  # whatever it is, `mask_bits` meets it again
        return None
    return allowed.bit_length() - 1 if allowed.bit_count() == 1 else None


def mask_bits(spec: SampleSpec, vocab: int) -> bytes | None:
    """Return the bits of the ids that a row's mask allows; None without a mask.

    Raises RuleError for a mask of another length than the vocabulary's, and whatever a mask raises.
    """
    return None if spec.mask is None else _bits(spec.mask, spec.known_ids, vocab)


def change_logits(logits: Tensor, spec: SampleSpec) -> None:
    """Change `logits` (vocab,) of one row, finite but for what its mask rules out, in place, by its other options.

    Ids that may not be drawn become -inf. `check_highest` tells whether the result can be drawn from.
    """
    params = spec.params
    if params.allowed_ids:
        ids = _ids(params.allowed_ids)
        values = logits[ids]
        logits.fill_(-math.inf)
        logits[ids] = values
    if params.banned_ids or spec.barred_ids:
        logits[_ids([*params.banned_ids, *spec.barred_ids])] = -math.inf
    if params.bad_sequences and (ends := _ends_of_bad(spec)):
        logits[_ids(ends)] = -math.inf
    if params.logit_bias:
        logits[_ids(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype)
    if params.reads_known_ids:
        _penalize(logits, spec)
    if params.dry_multiplier and (losses := repetition_losses(spec.known_ids, params, spec.breakers)):
        logits[_ids(losses)] -= torch.tensor(list(losses.values()), dtype=logits.dtype)
    if params.top_n_sigma > 0:
        _cut_tail(logits, params.top_n_sigma)


def check_highest(highest: float) -> None:
    """Raise RuleError if the highest of a row's changed logits says that no id is left, or that a logit overflowed."""
    if highest == -math.inf:
        raise RuleError("No id may be drawn next: this request's own parameters rule all of them out.")
    if not math.isfinite(highest):
        raise RuleError("This request's own parameters carry a logit beyond what a number can hold.")


def _penalize(logits: Tensor, spec: SampleSpec) -> None:
    """Apply the penalties: repetition to ids of prompt and completion, presence and frequency to the completion's.

    Repetition: Keskar et al., "CTRL", 2019, section 4.1, with transformers' rule for negative logits; the others as in
    OpenAI's API.
    """
    params = spec.params
    if params.repetition_penalty != 1:
        ids = _ids(spec.known_ids)  # an id that comes twice is written twice, with the same number
        values = logits[ids]
        penalty = params.repetition_penalty
        logits.scatter_(0, ids, torch.where(values < 0, values * penalty, values / penalty))
    if params.presence_penalty or params.frequency_penalty:
        counts = collections.Counter(spec.known_ids[spec.num_prompt_tokens :])
        losses = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        if losses:
            logits[_ids(counts)] -= torch.tensor(losses, dtype=logits.dtype)


def _ends_of_bad(spec: SampleSpec) -> list[int]:
    """Return the ids that would complete a bad sequence in the completion."""
    completion = tuple(spec.known_ids[spec.num_prompt_tokens :])
    return [bad[-1] for bad in spec.params.bad_sequences if completion[1 - len(bad) :] == bad[:-1]]


def _cut_tail(logits: Tensor, num_sigmas: float) -> None:
    """Keep the logits that are at most so many standard deviations of the possible ones below the highest.

    Tang et al., "Top-n-sigma: not all logits are you need", 2024, algorithm 1; over the possible ids alone, as in
    llama.cpp, src/llama-sampling.cpp, `llama_sampler_top_n_sigma_apply`.
    """
    exact = logits.double()  # (vocab,)
    possible = exact if float(logits.amin()) > -math.inf else exact[exact > -math.inf]  # (possible,)
    if possible.numel():
        mean = total_of(possible) / possible.numel()
        sigma = math.sqrt(total_of((possible - mean).square_()) / possible.numel())
        logits.masked_fill_(exact < float(possible.max()) - num_sigmas * sigma, -math.inf)


def _ids(ids: Iterable[int]) -> Tensor:
    return torch.frombuffer(array("q", ids), dtype=torch.int64)  # a tenth of torch.tensor's time; at least one id


def _bits(mask: TokenMask, known_ids: Sequence[int], vocab: int) -> bytes:
    try:
        bits = mask.allowed(known_ids)
    except MaskError as error:
        raise RuleError(str(error)) from None
    if len(bits) != (vocab + 7) // 8:
        raise RuleError(
            f"The form of this request allows ids by {len(bits)} bytes, where {(vocab + 7) // 8} hold the vocabulary."
        )
    return bits
