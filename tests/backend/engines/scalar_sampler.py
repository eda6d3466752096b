"""Draw one id in plain Python, number by number: what the sampler's results are compared with.

Written from the rules in docs/engines.md and independent of the sampler: it shares the uniform numbers alone. Beside
each id it says how close the decision was, so that a test can leave out what rounding decides. Repetitions are looked
for by comparing every place with the end, and mirostat is its paper's equations as they are printed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Callable

from inference_api.backend.engines.base import SampleSpec
from inference_api.backend.engines.philox import uniform
from inference_api.sampling_params import SamplingParams

BORDER = 1e-6
"""So close to a border, sums in another order or in fp32 may fall on either side."""

IMPOSSIBLE = -math.inf


def single(value: float) -> float:
    """Round to fp32."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def exact(value: float) -> float:
    """Leave an fp64 value as it is."""
    return value


def changed_logits(logits: list[float], spec: SampleSpec, rounded: Callable[[float], float] = exact) -> list[float]:
    """Return the logits after mask, allowed, banned and barred ids, bias, penalties and top_n_sigma."""
    params = spec.params
    losses = repetition_losses(spec)
    bad_ends = {bad[-1] for bad in params.bad_sequences if _completes(bad, list(spec.known_ids), spec)}
    mask = spec.mask.allowed(spec.known_ids) if spec.mask is not None else None
    completion = list(spec.known_ids[spec.num_prompt_tokens :])
    changed = []
    for token_id, value in enumerate(logits):
        fits_form = mask is None or mask[token_id // 8] >> token_id % 8 & 1
        is_listed = not params.allowed_ids or token_id in params.allowed_ids
        is_barred = token_id in params.banned_ids or token_id in spec.barred_ids or token_id in bad_ends
        if not fits_form or not is_listed or is_barred:
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
        if token_id in losses:
            value = rounded(value - rounded(losses[token_id]))
        changed.append(value)
    possible = [value for value in changed if value > IMPOSSIBLE]
    if params.top_n_sigma > 0 and possible:
        mean = math.fsum(possible) / len(possible)
        sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in possible) / len(possible))
        border = max(possible) - params.top_n_sigma * sigma
        changed = [value if value >= border else IMPOSSIBLE for value in changed]
    return changed


def _completes(bad: tuple[int, ...], known: list[int], spec: SampleSpec) -> bool:
    before = list(bad[:-1])
    return len(known) - spec.num_prompt_tokens >= len(before) and known[len(known) - len(before) :] == before


def repetition_losses(spec: SampleSpec) -> dict[int, float]:
    """Return what DRY takes from the logit of each id."""
    params = spec.params
    window = list(spec.known_ids)
    if params.dry_penalty_last_n >= 0:
        window = window[max(0, len(window) - params.dry_penalty_last_n) :]
    if not params.dry_multiplier or len(window) <= params.dry_allowed_length:
        return {}
    limit = spec.breakers.num_after(window) if spec.breakers is not None else len(window)
    losses: dict[int, float] = {}
    for place in range(1, len(window)):
        length = 0
        while length < min(place, limit) and window[place - 1 - length] == window[-1 - length]:
            length += 1
        if length >= params.dry_allowed_length and not (spec.breakers and spec.breakers.is_in(window[place])):
            exponent = length - params.dry_allowed_length
            if params.dry_base > 1.000001:
                exponent = min(exponent, int(88.7228391 / math.log(params.dry_base)))
            loss = params.dry_multiplier * params.dry_base**exponent
            losses[window[place]] = max(loss, losses.get(window[place], 0.0))
    return losses


def _share(order: list[int], weights: dict[int, float], share: float) -> tuple[list[int], float]:
    """Return the first ids of `order` that hold the share, and how close its border is to another id."""
    total, mass, margin = math.fsum(weights[i] for i in order), 0.0, math.inf
    for count, token_id in enumerate(order, start=1):
        mass += weights[token_id]
        margin = min(margin, abs(mass / total - share))
        if mass >= share * total:
            return order[:count], margin
    return order, margin


def probabilities_of(
    logits: list[float], params: SamplingParams, *, cuts_top: bool = False
) -> tuple[dict[int, float], float]:
    """Return the probability of every id that the rules from temperature to typical_p leave; and the margin.

    With `cuts_top` those that xtc leaves once it takes ids out.
    """
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
    if cuts_top:
        order, near = _without_top(order, weights, params.xtc_threshold)
        margin = min(margin, near)
    total = math.fsum(weights[i] for i in order)
    return {i: weights[i] / total for i in sorted(order)}, margin


def _without_top(order: list[int], weights: dict[int, float], threshold: float) -> tuple[list[int], float]:
    """Return the ids without those of a share of the threshold, but for the least likely of these; and the margin."""
    total = math.fsum(weights[i] for i in order)
    margin = min(abs(weights[i] / total - threshold) for i in order)
    top = sorted((i for i in order if weights[i] / total >= threshold), key=lambda i: (weights[i], i))
    return [i for i in order if i not in top[1:]], margin


def mirostat_probabilities(logits: list[float], params: SamplingParams, mu: float) -> tuple[dict[int, float], float]:
    """Return the probability of every id that mirostat leaves; and the margin."""
    order = sorted((i for i in range(len(logits)) if logits[i] > IMPOSSIBLE), key=lambda i: (-logits[i], i))
    weights = {i: math.exp((logits[i] - logits[order[0]]) / params.temperature) for i in order}
    total = math.fsum(weights.values())
    shares = {i: weights[i] / total for i in order}
    if params.mirostat == 2:
        surprises = {i: -math.log2(shares[i]) if shares[i] else math.inf for i in order}
        kept = [i for i in order if surprises[i] <= mu] or order[:1]
        margin = min(abs(surprises[i] - mu) for i in order)
    else:
        head = order[:100]
        t = [math.log((i + 2) / (i + 1)) for i in range(len(head) - 1)]
        b = [(logits[high] - logits[low]) / params.temperature for high, low in itertools.pairwise(head)]
        s_hat = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t) if t else 1e9
        epsilon_hat = s_hat - 1
        base = (epsilon_hat * 2**mu) / (1 - len(logits) ** -epsilon_hat)
        # Of an even distribution the power has no bound.
        k = base ** (1 / s_hat) if s_hat > 0.01 else float(len(logits) if base > 1 else 1)
        kept, margin = order[: max(1, int(min(k, len(order))))], abs(k - round(k)) / max(k, 1)
    total = math.fsum(weights[i] for i in kept)
    return {i: weights[i] / total for i in sorted(kept)}, margin


def mirostat_draw(logits: list[float], spec: SampleSpec) -> tuple[int, float, float]:
    """Return the id, mirostat's state after it, and how close the decision was."""
    params = spec.params
    mu = 2 * params.mirostat_tau if spec.mu is None else spec.mu
    probabilities, margin = mirostat_probabilities(logits, params, mu)
    token_id, near = _selected(probabilities, spec, 0)
    surprise = -math.log2(probabilities[token_id])
    return token_id, mu - params.mirostat_eta * (surprise - params.mirostat_tau), min(margin, near)


def reference_draw(
    logits: list[float], spec: SampleSpec, rounded: Callable[[float], float] = exact
) -> tuple[int, float]:
    """Return the id, and how close the decision was; raises ValueError if no id may be drawn."""
    changed, params = changed_logits(logits, spec, rounded), spec.params
    if max(changed) == IMPOSSIBLE:
        raise ValueError("no id is left")
    if params.temperature == 0 or params.top_k == 1:
        return max(range(len(changed)), key=lambda i: (changed[i], -i)), math.inf
    if params.mirostat:
        token_id, _, margin = mirostat_draw(changed, spec)
        return token_id, margin
    margin, stream = math.inf, 0
    if spec.tries_before_mask:
        for stream in (0, 2, 3, 4):
            free = changed_logits(logits, dataclasses.replace(spec, mask=None), rounded)
            unmasked, _ = probabilities_of(free, params, cuts_top=False)
            token_id, near = _selected(unmasked, spec, stream)
            margin = min(margin, near)
            if changed[token_id] != IMPOSSIBLE:
                return token_id, margin
        stream = 5
    cuts_top = uniform(params.seed, spec.choice, spec.position, 1) < params.xtc_probability
    cuts_top = cuts_top and params.xtc_threshold <= 0.5
    probabilities, cut = probabilities_of(changed, params, cuts_top=cuts_top)
    token_id, near = _selected(probabilities, spec, stream)
    return token_id, min(margin, cut, near)


def _selected(probabilities: dict[int, float], spec: SampleSpec, stream: int) -> tuple[int, float]:
    """Return the id at which the cumulative probability exceeds the uniform number, and how close it was."""
    number = uniform(spec.params.seed, spec.choice, spec.position, stream)
    cumulative, margin = 0.0, math.inf
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
