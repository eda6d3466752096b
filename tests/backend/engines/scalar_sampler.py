"""Draw one id in plain Python, number by number: what the sampler's results are compared with.

Written from the rules in docs/engines.md and independent of the sampler: it shares the uniform numbers alone. Beside
each id it says how close the decision was, so that a test can leave out what rounding decides.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from inference_api.backend.engines.base import SampleSpec
from inference_api.backend.engines.philox import uniform
from inference_api.messages import SamplingParams

BORDER = 1e-6
"""So close to a border, sums in another order or in fp32 may fall on either side."""

IMPOSSIBLE = -math.inf


def single(value: float) -> float:
    """Round to fp32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def exact(value: float) -> float:
    """Leave an fp64 value as it is."""
    return value


def changed_logits(logits: list[float], spec: SampleSpec, rounded: Callable[[float], float] = exact) -> list[float]:
    """Return the logits after mask, allowed, banned and barred ids, bias and penalties."""
    params = spec.params
    mask = spec.mask.allowed(spec.known_ids) if spec.mask is not None else None
    completion = list(spec.known_ids[spec.num_prompt_tokens :])
    changed = []
    for token_id, value in enumerate(logits):
        fits_form = mask is None or mask[token_id // 8] >> token_id % 8 & 1
        is_listed = not params.allowed_ids or token_id in params.allowed_ids
        if not fits_form or not is_listed or token_id in params.banned_ids or token_id in spec.barred_ids:
            changed.append(IMPOSSIBLE)
            continue
        if token_id in params.logit_bias:
            value = rounded(value + rounded(params.logit_bias[token_id]))
        if token_id in spec.known_ids:
            penalty = rounded(params.repetition_penalty)
            value = rounded(value / penalty if value > 0 else value * penalty)
        if token_id in completion:
            loss = params.presence_penalty + params.frequency_penalty * completion.count(token_id)
            value = rounded(value - rounded(loss))
        changed.append(value)
    return changed


def _share(order: list[int], weights: dict[int, float], share: float) -> tuple[list[int], float]:
    """Return the first ids of `order` that hold the share, and how close its border is to another id."""
    total, mass, margin = math.fsum(weights[i] for i in order), 0.0, math.inf
    for count, token_id in enumerate(order, start=1):
        mass += weights[token_id]
        margin = min(margin, abs(mass / total - share))
        if mass >= share * total:
            return order[:count], margin
    return order, margin


def probabilities_of(logits: list[float], params: SamplingParams) -> tuple[dict[int, float], float]:
    """Return the probability of every id that temperature, top_k, top_p, min_p and typical_p leave; and the margin."""
    order = sorted((i for i in range(len(logits)) if logits[i] > IMPOSSIBLE), key=lambda i: (-logits[i], i))
    if params.top_k:
        order = order[: params.top_k]
    highest = logits[order[0]]
    log_weights = {i: (logits[i] - highest) / params.temperature for i in order}
    weights = {i: math.exp(log_weights[i]) for i in order}
    margin = math.inf
    if params.top_p < 1:
        order, margin = _share(order, weights, params.top_p)
    if params.min_p > 0:
        margin = min([margin, *(abs(weights[i] - params.min_p) for i in order if weights[i] < 1)])
        order = [i for i in order if weights[i] >= params.min_p]
    if params.typical_p < 1:
        order = [i for i in order if weights[i] > 0]
        total = math.fsum(weights[i] for i in order)
        shares = {i: weights[i] / total for i in order}
        entropy = -math.fsum(p * math.log(p) for p in shares.values() if p > 0)
        surprise = {i: abs(-(log_weights[i] - math.log(total)) - entropy) for i in order}
        by_surprise = sorted(order, key=lambda i: (round(surprise[i], 9), i))
        order, near = _share(by_surprise, weights, params.typical_p)
        margin = min(margin, near)
        for dropped in by_surprise[len(order) : len(order) + 1]:
            gap = surprise[dropped] - surprise[order[-1]]
            margin = min(margin, gap if logits[dropped] != logits[order[-1]] else math.inf)
    total = math.fsum(weights[i] for i in order)
    return {i: weights[i] / total for i in sorted(order)}, margin


def reference_draw(
    logits: list[float], spec: SampleSpec, rounded: Callable[[float], float] = exact
) -> tuple[int, float]:
    """Return the id, and how close the decision was; raises ValueError if no id may be drawn."""
    changed, params = changed_logits(logits, spec, rounded), spec.params
    if max(changed) == IMPOSSIBLE:
        raise ValueError("no id is left")
    if params.temperature == 0 or params.top_k == 1:
        return max(range(len(changed)), key=lambda i: (changed[i], -i)), math.inf
    probabilities, margin = probabilities_of(changed, params)
    number = uniform(params.seed, spec.choice, spec.position)
    cumulative = 0.0
    for token_id, probability in probabilities.items():
        cumulative += probability
        margin = min(margin, abs(cumulative - number))
        if cumulative > number:
            return token_id, margin
    return max(i for i, probability in probabilities.items() if probability > 0), margin


def reference_logprobs(logits: list[float], token_id: int, num_top: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the logarithm of an id's probability, and the most likely ids with theirs; of the logits as they are."""
    highest = max(logits)
    total = highest + math.log(math.fsum(math.exp(value - highest) for value in logits))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    return logits[token_id] - total, [(i, logits[i] - total) for i in order[:num_top]]
