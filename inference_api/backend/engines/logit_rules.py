"""Change one row's logits by what its request asks for before temperature; decode thread of PROCESS 2.

In this order: ids that may not be drawn (the mask of a form, allowed, banned and barred ids) become impossible, then
logit_bias is added, then come the penalties for ids that the sequence holds already. Works in place on a copy that the
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

_BARRED_BY_OCTET = torch.tensor([[not octet >> bit & 1 for bit in range(8)] for octet in range(256)]).view(torch.int64)
"""(256, 1): the eight booleans of an octet of a mask, true where its bit is not set, as one number: copied at once."""


class RuleError(Exception):
    """Say why a row can draw no id; the text is safe to show."""


def changes_logits(spec: SampleSpec) -> bool:
    """Tell whether a row has an option that works on the logits themselves."""
    params = spec.params
    return bool(
        spec.barred_ids
        or spec.mask is not None
        or params.allowed_ids
        or params.banned_ids
        or params.logit_bias
        or params.reads_known_ids
    )


def change_logits(logits: Tensor, spec: SampleSpec) -> None:
    """Change the finite `logits` (vocab,) of one row in place; ids that may not be drawn become -inf.

    Raises RuleError for a mask of another length than the vocabulary's, and whatever a mask raises. `check_highest`
    tells whether the result can be drawn from.
    """
    params = spec.params
    if spec.mask is not None:
        logits.masked_fill_(_barred(_bits(spec.mask, spec.known_ids), logits.numel()), -math.inf)
    if params.allowed_ids:
        ids = _ids(params.allowed_ids)
        values = logits[ids]
        logits.fill_(-math.inf)
        logits[ids] = values
    if params.banned_ids or spec.barred_ids:
        logits[_ids([*params.banned_ids, *spec.barred_ids])] = -math.inf
    if params.logit_bias:
        logits[_ids(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype)
    if params.reads_known_ids:
        _penalize(logits, spec)


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


def _ids(ids: Iterable[int]) -> Tensor:
    return torch.frombuffer(array("q", ids), dtype=torch.int64)  # a tenth of torch.tensor's time; at least one id


def _bits(mask: TokenMask, known_ids: Sequence[int]) -> bytes:
    try:
        return mask.allowed(known_ids)
    except MaskError as error:
        raise RuleError(str(error)) from None


def _barred(bits: bytes, vocab: int) -> Tensor:
    """Return as booleans (vocab,) where a mask's bits are not set."""
    if len(bits) != (vocab + 7) // 8:
        raise RuleError(
            f"The form of this request allows ids by {len(bits)} bytes, where {(vocab + 7) // 8} hold the vocabulary."
        )
    octets = torch.frombuffer(bytearray(bits), dtype=torch.uint8).int()  # (bytes,)
    return _BARRED_BY_OCTET.index_select(0, octets).view(torch.bool).flatten()[:vocab]  # (vocab,)
