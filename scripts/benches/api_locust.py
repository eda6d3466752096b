"""Run locust against an OpenAI server, and read its report: users who each ask again as soon as they are answered.

What a user does stands in api_locustfile.py, which runs in locust's environment and finds what to send in a file that
only this user can read. Locust keeps no sample, only how often each rounded time came. Knows its report, no server.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches.api_run import ToolRun
from benches.api_served import Served
from benches.api_tool import Load, Tool
from benches.service import BenchError

LOCUSTFILE = Path(__file__).with_name("api_locustfile.py")
ORDER_NAME = "BENCH_LOCUST_ORDER"
ANSWER, FIRST_TOKEN, INTER_TOKEN, FAILED, RUN = "answer", "first token", "inter-token", "failed answer", "whole run"
"""Names under which the locustfile reports its times."""


def run_locust(tool: Tool, served: Served, load: Load, prompts: Sequence[str]) -> ToolRun:
    """Send every prompt once; blocks to the end of the last answer. Raises BenchError if there is no report."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        order, report = Path(folder) / "order.json", Path(folder) / "report.json"
        body = {"model": served.model, "max_tokens": load.answer_tokens, "stream": True, **served.members}
        if "ignore_eos" in served.members:
            body["stream_options"] = {"include_usage": True}
        order.write_text(
            json.dumps({"bearer": served.target.bearer, "body": body, "prompts": prompts, "users": load.num_users})
        )
        arguments = ["--locustfile", str(LOCUSTFILE), "--headless", "--only-summary", "--host", served.base_url]
        users = str(load.num_users)
        arguments += ["--users", users, "--spawn-rate", users, "--json-file", str(report.with_suffix(""))]
        return read_report(json.loads(tool.run(arguments, {ORDER_NAME: str(order)}, report)))


def read_report(entries: list[dict[str, Any]]) -> ToolRun:
    """Return the figures of locust's JSON report; raise BenchError if its run did not come to its end."""
    by_name = {entry["name"]: entry for entry in entries}
    if RUN not in by_name:
        raise BenchError("locust's run did not come to its end; locust.log says more")
    num_errors = by_name[FAILED]["num_failures"] if FAILED in by_name else 0
    return ToolRun(
        latency_ms=_samples(by_name.get(ANSWER)),
        first_token_ms=_samples(by_name.get(FIRST_TOKEN)),
        inter_token_ms=_samples(by_name.get(INTER_TOKEN)),
        num_tokens=by_name[ANSWER]["total_content_length"] if ANSWER in by_name else 0,
        seconds=by_name[RUN]["max_response_time"] / 1000,
        num_errors=num_errors,
        first_error="locust.log lists them" if num_errors else "",
    )


def _samples(entry: dict[str, Any] | None) -> list[float]:
    """Return the rounded times of an entry, ascending."""
    times = {} if entry is None else entry["response_times"]
    return sorted(float(time) for time, count in times.items() for _ in range(count))
