"""Draw an id so that its surprise stays near a target: mirostat, versions 1 and 2; decode thread of PROCESS 2.

Basu et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity", ICLR 2021, algorithms 1 and
2, as in llama.cpp, src/llama-sampling.cpp, `llama_sampler_mirostat_apply` and `llama_sampler_mirostat_v2_apply`. Its
one state, mu in bits, comes in and goes out with each draw. Looks at one row, in fp64; knows no sequence and no seed.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from inference_api.backend.engines.sampling_rules import LOWEST_LOG_WEIGHT, invert, top_k_ids, total_of
from inference_api.sampling_params import SamplingParams

# llama.cpp, common/sampling.cpp, the last argument of llama_sampler_init_mirostat: version 1 fits a law to so many ids.
_NUM_FITTED = 100


def first_mu(params: SamplingParams) -> float:
    """Return the state before a sequence's first draw."""
    return 2 * params.mirostat_tau


def draw_with_mirostat(logits: Tensor, params: SamplingParams, mu: float, number: float) -> tuple[int, float]:
    """Draw one id of the logits (vocab,) of a row, whose highest is finite; return it and the state after it.

    `number` is in [0, 1). The surprise is that among the ids that were left, as llama.cpp has it.
    """
    scaled = logits.double()  # (vocab,)
    log_weights = (scaled - scaled.max()).div_(params.temperature).clamp_(min=LOWEST_LOG_WEIGHT)  # (vocab,)
    weights = torch.exp(log_weights)  # (vocab,)
    if params.mirostat == 1:
        count = _num_kept(logits, params.temperature, mu)
        kept = top_k_ids(logits, count) if count < logits.numel() else None
    else:
        least = math.log(total_of(weights)) - mu * math.log(2)
        kept = torch.nonzero(log_weights >= min(least, 0.0)).squeeze(1)  # (kept,), ascending
        if least > 0:
            kept = kept[:1]  # the highest is too surprising itself
    if kept is not None:
        weights = weights[kept]
    index = invert(weights, number)
    surprise = math.log2(total_of(weights) / float(weights[index]))
    return index if kept is None else int(kept[index]), mu - params.mirostat_eta * (surprise - params.mirostat_tau)


def _num_kept(logits: Tensor, temperature: float, mu: float) -> int:
    """Return how many of the highest ids version 1 leaves: by the slope of the highest ones' logarithms over rank's.

    The paper's equation for k, in logarithms: its powers leave what numbers hold for flat and for steep slopes.
    """
    vocab = logits.numel()
    highest = [value for value in logits.topk(min(_NUM_FITTED, vocab)).values.tolist() if value > -math.inf]
    ranks = [math.log((rank + 2) / (rank + 1)) for rank in range(len(highest) - 1)]
    falls = [(high - low) / temperature for high, low in itertools.pairwise(highest)]
    slope = sum(rank * fall for rank, fall in zip(ranks, falls, strict=True)) / (
        sum(rank * rank for rank in ranks) or 1
    )
    excess = slope - 1
    shape = excess / -math.expm1(-excess * math.log(vocab)) if excess and vocab > 1 else 1 / math.log(max(vocab, 2))
    power = math.log(shape) + mu * math.log(2)
    if power <= 0:
        return 1
    return vocab if power >= slope * math.log(vocab) else max(1, int(math.exp(power / slope)))
