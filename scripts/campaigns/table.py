"""List the parts of the campaign and how much each does by tier: the one place for such a number.

`ci` is for .ci/run on two cores, all parts together within 45 minutes; `nightly` is for a run by hand. Imports no part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

Tier = Literal["ci", "nightly"]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A part of the campaign: a module of this package with `run(context)`, and its counts by tier."""

    module: str
    ci: Mapping[str, int]
    nightly: Mapping[str, int]

    def counts(self, tier: Tier) -> Mapping[str, int]:
        """Return how much the part does in a tier."""
        return self.ci if tier == "ci" else self.nightly


PARTS: Mapping[str, Part] = {
    # Rounds of every client's checks, on the mock and on the real model.
    "clients": Part(
        "real_clients",
        ci={"rounds_on_mock": 1, "rounds_on_model": 1},
        nightly={"rounds_on_mock": 5, "rounds_on_model": 3},
    ),
    # Random JSON schemas whose answers are asked for; a free one's answer may run into max_tokens.
    "schemas": Part(
        "schemas",
        ci={"bounded_on_mock": 500, "free_on_mock": 100, "bounded_on_model": 350, "free_on_model": 50},
        nightly={"bounded_on_mock": 5000, "free_on_mock": 1000, "bounded_on_model": 3000, "free_on_model": 1000},
    ),
    # `cases` is the least number of requests over all operations; the examples are of each operation's fuzzing alone.
    "schemathesis": Part(
        "schemathesis",
        ci={"cases": 2000, "examples_an_operation": 15},
        nightly={"cases": 20000, "examples_an_operation": 500},
    ),
    # SGLang's own tests of a server; once each, whatever the tier.
    "kits": Part("kits", ci={}, nightly={}),
}
