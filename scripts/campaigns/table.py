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
    # The tests that scripts/test leaves out; once each, whatever the tier.
    "slow_tests": Part("slow_tests", ci={}, nightly={}),
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
    # Mutants of good bearers that the verifier judges, and whether the vectors go through a proxy in all header forms.
    "jwt": Part(
        "jwt_mutants",
        ci={"mutants": 100_000, "header_forms": 1},
        nightly={"mutants": 5_000_000, "header_forms": 1},
    ),
    # Mutants of the raw HTTP vectors over three ways in; the vectors in four segmentations and the forgeries always go.
    "raw_http": Part("raw_http", ci={"mutants": 1000}, nightly={"mutants": 50_000}),
    # Slow connections of each kind, idle ones, strangers who ask without a pause; first tokens timed without and with
    # each, of which 1,000 make a p99. A crowd of twice what fits comes again some 1,000 times a second: nightly's, and
    # known to fail there (docs/campaign.md).
    "slow_clients": Part(
        "slow_clients",
        ci={"slow": 1000, "idle": 2000, "flood": 100, "crowded": 0, "samples": 1000},
        nightly={"slow": 1000, "idle": 10_000, "flood": 500, "crowded": 10_000, "samples": 10_000},
    ),
    # SGLang's own tests of a server; once each, whatever the tier.
    "kits": Part("kits", ci={}, nightly={}),
    # Self-identifying requests over 64 clients, and how often a backend or a worker is killed under them.
    "isolation": Part(
        "isolation",
        ci={"requests": 30_000, "backend_kills": 5, "worker_kills": 4},
        nightly={"requests": 300_000, "backend_kills": 40, "worker_kills": 30},
    ),
    # Requests that carry a canary in every text, half of them with every debug switch on.
    "canary": Part("canary", ci={"requests": 10_000}, nightly={"requests": 100_000}),
    # Clients that leave at each of twelve points, and readers that take nothing of a long answer.
    "leaving": Part("leaving", ci={"leavers": 25, "stalled": 32}, nightly={"leavers": 1000, "stalled": 32}),
    # Redis taken away from two proxies that count together, in four ways in turn.
    "redis": Part("redis_faults", ci={"faults": 8}, nightly={"faults": 80}),
    # Requests at ten times the pace that they can be served at.
    "overload": Part("overload", ci={"requests": 2000}, nightly={"requests": 50_000}),
    # Kills and hangs of the backend, each with so many streams open.
    "faults_backend": Part(
        "faults_backend",
        ci={"kills": 20, "hangs": 5, "streams": 32},
        nightly={"kills": 300, "hangs": 60, "streams": 32},
    ),
    # Rows that fail: on the mock of each kind of fault, on the real model by what its numbers come to.
    "faults_rows": Part(
        "faults_rows",
        ci={"rows_of_each_kind": 50, "model_rows": 12},
        nightly={"rows_of_each_kind": 500, "model_rows": 200},
    ),
    # Kills of the server's workers and of the proxy, each with so many streams open.
    "faults_fronts": Part(
        "faults_fronts",
        ci={"worker_kills": 20, "proxy_kills": 10, "streams": 16},
        nightly={"worker_kills": 200, "proxy_kills": 100, "streams": 16},
    ),
    # Stops under load, and reloads of the proxy and the server in turn.
    "faults_drain": Part("faults_drain", ci={"drains": 10, "reloads": 5}, nightly={"drains": 100, "reloads": 60}),
    "faults_keys": Part("faults_keys", ci={"rotations": 5}, nightly={"rotations": 60}),
    "faults_clock": Part("faults_clock", ci={"turns": 6}, nightly={"turns": 30}),
    "faults_disk": Part("faults_disk", ci={"disks": 3}, nightly={"disks": 20}),
    # Broken bodies over all routes, and texts that are echoed in streams.
    "malformed": Part("malformed", ci={"bodies": 5000, "texts": 200}, nightly={"bodies": 200_000, "texts": 5000}),
    "soak": Part("soak", ci={"seconds": 60}, nightly={"seconds": 3600}),
}
