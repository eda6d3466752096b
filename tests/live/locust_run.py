"""Let many users call a running service for a while, with locust: CSV tables and an HTML report.

A program: `locust_run.py --url URL` runs 16 users, 2 more a second, for 180 seconds, without locust's web page. What a
user does stands in locustfile.py. Refusals are counted apart from failures.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.live.client import TargetError
from tests.live.program import (
    AUTHORIZATION_NAME,
    FAILED_STATUS,
    ROOT,
    URL_NAME,
    connected_client,
    make_parser,
    positive,
    print_result,
    run_program,
)

LOCUSTFILE = ROOT / "tests" / "live" / "locustfile.py"
MAX_TOKENS_NAME = "LOCUST_MAX_TOKENS"
OVERLOADED = " overloaded (503)"
"""End of the name under which locust's tables list the refusals of a route."""


def read_counts(table: Path) -> dict[str, int]:
    """Read locust's table of requests: how many there were, how many were refusals, how many failed."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    whole = rows["Aggregated"]
    overloaded = sum(int(row["Request Count"]) for name, row in rows.items() if name.endswith(OVERLOADED))
    return {"requests": int(whole["Request Count"]), "overloaded": overloaded, "failed": int(whole["Failure Count"])}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run locust against the service that the options name; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--users", type=positive, default=16, help="users at once (default: 16)")
    parser.add_argument("--spawn-rate", type=positive, default=2, help="users more a second (default: 2)")
    parser.add_argument("--seconds", type=positive, default=180, help="length of the run (default: 180)")
    parser.add_argument("--max-tokens", type=positive, default=32, help="tokens an answer (default: 32)")
    parser.add_argument("--out", type=Path, default=Path("locust"), help="prefix of CSV and HTML (default: locust)")
    options = parser.parse_args(arguments)
    if not options.out.parent.is_dir():
        raise TargetError(f"--out {options.out}: there is no folder {options.out.parent}; make it first")
    with connected_client(options) as client:
        command = [sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE), "--headless", "--only-summary"]
        command += ["--users", str(options.users), "--spawn-rate", str(options.spawn_rate)]
        command += ["--run-time", f"{options.seconds}s", "--csv", str(options.out), "--html", f"{options.out}.html"]
        target = client.target
        environ = {
            **os.environ,
            URL_NAME: f"{target.base_url}/{target.route}/{target.model}",
            AUTHORIZATION_NAME: target.authorization,
            MAX_TOKENS_NAME: str(options.max_tokens),
        }
        status = subprocess.run(command, env=environ).returncode
        table = Path(f"{options.out}_stats.csv")
        if not table.is_file():
            raise TargetError(f"locust left no {table}; its own message stands above")
        counts = read_counts(table)
        print_result("locust", client, users=options.users, seconds=options.seconds, **counts, csv=str(table))
    return FAILED_STATUS if status or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(run_program(main))
