"""Choose a bench, run it, print its JSON line: what `python -m benches` does for scripts/bench.

Progress goes to stderr. A bench that meets a wrong answer or a service that does not come up ends with one line and
status 1, and prints no figures.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

from benches.figures import machine
from benches.service import BenchError
from inference_api.errors import InferenceApiError
from inference_api.options import OneLineParser

MODULES = {
    "frontend": "frontend",
    "batching": "batching",
    "http": "over_http",
    "engines": "engines",
    "sampling": "sampling",
    "memory": "memory",
    "quality": "quality",
    "independence": "independence",
    "peers": "peers",
    "api": "api",
    "edge": "edge",
}
WITH_PEERS = ("peers", "api")
API_PARTS = ("surfaces", "forms", "embeddings", "window", "load")
INTERRUPTED_STATUS = 130


def main(arguments: list[str] | None = None) -> int:
    """Run one bench; return the exit status. A wrong option or name is one line and status 2, Ctrl-C one and 130."""
    parser = OneLineParser(prog="scripts/bench", description="Measure this service from a client's socket.")
    parser.add_argument("name", choices=MODULES, help="what to measure")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const="quick", help="about a minute")
    size.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="only to see that it runs")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where `peers` and `api` have their environments")
    parser.add_argument("--part", choices=API_PARTS, help="of `api` only this")
    parser.set_defaults(size="full")
    options = parser.parse_args(arguments)
    if options.peers and options.name not in WITH_PEERS:
        parser.error("--peers belongs to the benches `peers` and `api`")
    if options.part and options.name != "api":
        parser.error("--part belongs to the bench `api`")
    also = {"peers": (options.peers,), "api": (options.peers, options.part)}.get(options.name, ())
    began = time.monotonic()
    try:
        figures = importlib.import_module(f"benches.{MODULES[options.name]}").run(options.size, *also)
    except (BenchError, InferenceApiError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS
    seconds = round(time.monotonic() - began, 1)
    line = {"bench": options.name, "size": options.size, "machine": machine(), "seconds": seconds, **figures}
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
