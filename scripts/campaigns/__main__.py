"""Run the chosen parts of the campaign and say what came of them: `python -m campaigns`, for scripts/campaign.

Every part runs, whatever became of the one before. Progress and failures go to stderr; stdout ends with a line that
counts the checks and a JSON object. The exit status is 1 if a check failed, or if one was not run and CI is `true`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import secrets
import sys
import time
import traceback

from benches.figures import machine
from benches.service import BenchError

from campaigns.part import CampaignError, Context
from campaigns.table import PARTS, Part, Tier
from inference_api.config import Settings
from inference_api.errors import InferenceApiError
from inference_api.options import OneLineParser

INTERRUPTED_STATUS = 130
FOLDER = "campaign"
"""In the cache root; scripts/clean knows what is in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a part came to: the part's own totals, its failures and what was not run, and how long it took."""

    totals: dict[str, int]
    passed: int
    failed: list[str]
    not_run: list[str]
    seconds: float

    def figures(self) -> dict[str, object]:
        """Return the part's entry of the JSON line."""
        counted = {"passed": self.passed, "failed": len(self.failed), "not_run": len(self.not_run)}
        return {**self.totals, **counted, "seconds": self.seconds}


def run_part(name: str, part: Part, tier: Tier, seed: int) -> Outcome:
    """Run one part to its end (blocking) and return what it came to; it raises nothing that a part's fault could be."""
    settings = Settings.from_environ()
    folder = settings.cache_path / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    context = Context(name, part.counts(tier), seed, folder)
    context.log(f"{tier} {dict(context.counts)}")
    began = time.monotonic()
    totals: dict[str, int] = {}
    try:
        totals = importlib.import_module(f"campaigns.{part.module}").run(context)
    except (CampaignError, BenchError, InferenceApiError) as fault:
        context.count("the part", str(fault))
    except Exception as bug:
        # The parts that follow are run nevertheless, and all of them are told.
        traceback.print_exc()
        context.count("the part", f"{type(bug).__name__}: {bug}")
    tally, seconds = context.tally, round(time.monotonic() - began, 1)
    if not (tally.passed or tally.failed or tally.not_run):
        context.count("the part", "it made no check")
    context.log(f"{tally.passed} passed, {len(tally.failed)} failed in {seconds:g} s")
    return Outcome(totals, tally.passed, tally.failed, tally.not_run, seconds)


def tell(outcomes: dict[str, Outcome], tier: Tier, seed: int, *, strict: bool) -> int:
    """Print every failure on stderr, the count and the JSON line on stdout; return the exit status."""
    wrong = {name: [*it.failed, *(it.not_run if strict else [])] for name, it in outcomes.items()}
    for name, faults in wrong.items():
        for fault in faults:
            print(f"FAILED {name}: {fault}", file=sys.stderr)
    num_passed = sum(outcome.passed for outcome in outcomes.values())
    num_wrong = sum(map(len, wrong.values()))
    num_skipped = 0 if strict else sum(len(outcome.not_run) for outcome in outcomes.values())
    print(f"{num_passed} passed, {num_wrong} failed" + (f", {num_skipped} skipped" if num_skipped else ""))
    failed = [name for name, faults in wrong.items() if faults]
    if failed:
        print(f"replay with: scripts/campaign {' '.join(failed)} --seed {seed}", file=sys.stderr)
    parts = {name: outcome.figures() for name, outcome in outcomes.items()}
    print(json.dumps({"tier": tier, "seed": seed, "machine": machine(), "failed": failed, "parts": parts}))
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; return the exit status. A wrong option or name is one line and status 2, Ctrl-C one and 130."""
    parser = OneLineParser(prog="scripts/campaign", description="Check what takes too long for scripts/test.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them by default")
    parser.add_argument("--nightly", dest="tier", action="store_const", const="nightly", help="the large counts")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="repeat a run that told this one")
    parser.set_defaults(tier="ci")
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}, only {', '.join(PARTS)}")
    print(f"seed {options.seed}", file=sys.stderr)
    try:
        names = dict.fromkeys(options.parts or PARTS)
        outcomes = {name: run_part(name, PARTS[name], options.tier, options.seed) for name in names}
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS
    return tell(outcomes, options.tier, options.seed, strict=os.environ.get("CI") == "true")


if __name__ == "__main__":
    sys.exit(main())
