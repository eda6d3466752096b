"""Try to get in with bearers that are nearly good: the part `jwt`.

Mutants of good bearers of all four algorithms go to the verifier: each must be refused with a 401 (400 for what reads
as two credentials) of a fixed text, none may raise anything else. Between them come good bearers in other spellings,
which must get in, or refusing all would pass. The sample vectors go through a running proxy in every form of header.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from campaigns.jwt_headers import try_header_forms
from campaigns.jwt_mutations import MUTATIONS, respell, twin
from campaigns.part import CampaignError, Context
from proxy.auth import Authenticator, AuthError, Claims
from tests.proxy.signing import ALGORITHMS, NOW, claims, policy, sign

MAX_FAILURES = 20
MAX_MESSAGE_CHARACTERS = 120
RESPELLED_EVERY = 20
"""One good bearer in so many mutants."""


def run(context: Context) -> dict[str, int]:
    """Try every mutant and every form of header; return how many of each."""
    authenticator = Authenticator.from_policy(policy(), lambda: NOW)
    totals = try_mutants(context, authenticator)
    if context.counts["header_forms"]:
        totals["header_forms"] = try_header_forms(context)
    return totals


def try_mutants(context: Context, authenticator: Authenticator) -> dict[str, int]:
    """Let the verifier judge mutants and respelled bearers; raise CampaignError after many failures."""
    rng = context.random
    goods = {name: [sign(claims(jti=f"j-{number}"), by=name) for number in range(4)] for name in ALGORITHMS}
    totals = dict.fromkeys(["mutants", "respelled", *(mutation.__name__ for mutation in MUTATIONS)], 0)
    for algorithm, texts in goods.items():
        for text in [*texts, *(map(twin, texts) if algorithm == "ES256" else ())]:
            verdict = _verdict(authenticator, text, as_key=False)
            context.count(f"good {algorithm}", None if verdict == "in" else f"{verdict}: {text}")
    for number in range(context.counts["mutants"]):
        algorithm = rng.choice(ALGORITHMS)
        mutation = rng.choice(MUTATIONS)
        mutant = _draw_mutant(rng, mutation, rng.choice(goods[algorithm]), algorithm)
        verdict = _verdict(authenticator, mutant, as_key=rng.random() < 0.2)
        expected = "400" if "," in mutant else "401"
        totals["mutants"] += 1
        totals[mutation.__name__] += 1
        fault = None if verdict == expected else f"{verdict}: {mutant[:2000]!r}"
        context.count(f"mutant {number} by {mutation.__name__} of {algorithm}", fault)
        if number % RESPELLED_EVERY == 0:
            text = respell(rng, algorithm)
            verdict = _verdict(authenticator, text, as_key=rng.random() < 0.2)
            totals["respelled"] += 1
            context.count(f"respelled {algorithm}", None if verdict == "in" else f"{verdict}: {text}")
        if len(context.tally.failed) >= MAX_FAILURES:
            raise CampaignError(f"{MAX_FAILURES} failures after {number + 1} mutants")
    return totals


def _draw_mutant(
    rng: random.Random, mutation: Callable[[random.Random, str, str], str], good: str, algorithm: str
) -> str:
    # A change may undo itself: the same character again, a bit flipped twice.
    while (mutant := mutation(rng, good, algorithm)) == good:
        continue
    return mutant


def _verdict(authenticator: Authenticator, text: str, *, as_key: bool) -> str:
    """Return `in`, the status of a refusal, or what else happened."""
    judge: Callable[[str], Claims] = authenticator.authenticate_api_key if as_key else authenticator.authenticate
    try:
        judge(text if as_key else f"Bearer {text}")
    except AuthError as fault:
        message = fault.message
        if (
            len(message) > MAX_MESSAGE_CHARACTERS
            or not message.isprintable()
            or (len(text) >= 16 and text[-16:] in message)
        ):
            return f"a message that is no fixed text: {message!r}"
        return str(fault.status)
    except Exception as bug:
        return f"{type(bug).__name__}"
    return "in"
