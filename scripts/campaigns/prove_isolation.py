"""Prove on a running server that no answer holds anything of another: `python -m campaigns.prove_isolation`.

For scripts/prove-isolation. Without an address it starts the whole service with the mock engine, eight tenants at its
proxy. Progress goes to stderr; stdout gets one line of JSON. Knows options, no request.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence

from benches.service import BenchError, make_bearer, running_service

from campaigns.self_identifying import Load, Prover, Target
from inference_api.options import OneLineParser

NUM_OWN_TENANTS = 8
FOREIGN_STATUS, UNTRIED_STATUS, INTERRUPTED_STATUS = 1, 2, 130


@contextlib.contextmanager
def chosen_target(url: str, bearers: Sequence[str], model: str) -> Iterator[Target]:
    """Yield the server at `url`; without one, a service of our own until the block ends. Raises BenchError."""
    if url:
        yield Target(url, bearers, model)
        return
    secret = secrets.token_hex(32)
    settings = {
        "JWT_SECRET": secret,
        "INFERENCE_API_INSECURE_DEV": "0",
        "INFERENCE_API_MOCK_MODE": "echo",
        "INFERENCE_API_MOCK_TOKENS_PER_SECOND": "0",
    }
    with running_service(settings) as service:
        own = [make_bearer(secret, f"tenant-{number}") for number in range(NUM_OWN_TENANTS)]
        yield Target(f"http://127.0.0.1:{service.proxied.port}", own, model)


def main(arguments: list[str] | None = None) -> int:
    """Run the load and print its totals; 0: isolated, 1: something foreign came, 2: nothing could be tried."""
    parser = OneLineParser(prog="scripts/prove-isolation", description="Prove that no answer holds another's text.")
    own_url, own_bearer = os.environ.get("LLM_CHAT_API_URL", ""), os.environ.get("AUTHORIZATION", "")
    parser.add_argument("--url", default=own_url, help="a running server (LLM_CHAT_API_URL); else a mock is started")
    parser.add_argument("--bearer", action="append", default=[], help="a JWT; once for each tenant (AUTHORIZATION)")
    parser.add_argument("--model", default="", help="the model's name; by default the first that the server lists")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--leaving", type=float, default=0.05, help="share of the clients that leave early")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="repeat a run that told this one")
    options = parser.parse_args(arguments)
    if options.requests < 1 or options.clients < 1 or not 0 <= options.leaving < 1:
        parser.error("--requests and --clients are at least 1, --leaving is at least 0 and less than 1")
    bearers = options.bearer or [own_bearer.removeprefix("Bearer ")] * bool(own_bearer)
    load = Load(options.requests, options.clients, options.leaving, options.seed)
    try:
        with chosen_target(options.url, bearers, options.model) as target:
            target.probe()
            return tell(target, load)
    except (BenchError, OSError, ValueError, LookupError) as fault:
        print(f"ERROR: nothing could be tried: {fault}", file=sys.stderr)
        return UNTRIED_STATUS
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS


def tell(target: Target, load: Load) -> int:
    """Run the load (blocking), print its totals as one line of JSON, and return the exit status."""
    began = time.monotonic()
    result = Prover(target, load).run()
    for example in result.examples:
        print(f"FAILED {example}", file=sys.stderr)
    figures = {
        **result.figures(),
        "by": target.kind,
        "tenants": len(target.headers),
        "clients": load.clients,
        "seed": load.seed,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(figures))
    if not result.outcomes["answered"]:
        print("ERROR: nothing was proven: no request was answered", file=sys.stderr)
        return UNTRIED_STATUS
    return FOREIGN_STATUS if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
