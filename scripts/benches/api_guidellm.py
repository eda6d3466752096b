"""Run guidellm against an OpenAI server, and read its report: synthetic prompts, a number of streams, no download.

The bearer goes to it in a file that only this user can read, never in a command line. Knows guidellm's scenario and
report; not who is measured.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benches.api_run import ToolRun
from benches.api_served import Served
from benches.api_tool import Load, Tool

ITS_MEMBERS = ("ignore_eos", "stream_options")
"""Members that guidellm sends by itself; one that is null is left out, which a server needs that would refuse it."""

ENVIRON = {
    "GUIDELLM__MAX_WORKER_PROCESSES": "1",  # each more takes from the server, and starts for seconds
    "HF_HUB_OFFLINE": "1",
}


def run_guidellm(tool: Tool, served: Served, load: Load, tokenizer: Path, seed: int) -> ToolRun:
    """Run it once; blocks to its end. Raises BenchError if it ends without a report.

    `tokenizer` is the folder of a checkpoint; the same seed makes the same prompts.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        report, scenario = Path(folder) / "report.json", Path(folder) / "scenario.json"
        scenario.write_text(json.dumps({"spec": make_scenario(served, load, tokenizer, seed, report)}))
        return read_report(
            json.loads(tool.run(["run", "--config", str(scenario), "--disable-console"], ENVIRON, report))
        )


def make_scenario(served: Served, load: Load, tokenizer: Path, seed: int, report: Path) -> dict[str, object]:
    """Return what guidellm is told to do."""
    taken_away = {} if "ignore_eos" in served.members else dict.fromkeys(ITS_MEMBERS)
    backend: dict[str, object] = {
        "kind": "openai_http",
        "target": served.base_url,
        "model": served.model,
        "request_format": "/v1/completions",
        "http2": False,
        "extras": {"body": {**served.members, **taken_away}},
    }
    if served.target.bearer is not None:
        backend["api_key"] = served.target.bearer
    lengths = {"prompt_tokens": load.prompt_tokens, "output_tokens": load.answer_tokens}
    return {
        "backend": backend,
        "profile": {"kind": "concurrent", "streams": [load.num_users]},
        "constraints": [{"kind": "max_requests", "count": load.num_requests}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(tokenizer)},
        "data": [{"kind": "synthetic_text", **lengths}],
        "seed": {"kind": "static", "value": seed},
        "outputs": [{"kind": "json", "path": str(report)}],
    }


def read_report(report: dict[str, Any]) -> ToolRun:
    """Return the figures of a report with one benchmark."""
    (benchmark,) = report["benchmarks"]
    answered, failed = benchmark["requests"]["successful"], benchmark["requests"]["errored"]
    spans = [(request["request_start_time"], request["request_end_time"]) for request in answered]
    return ToolRun(
        latency_ms=[1000 * request["request_latency"] for request in answered],
        first_token_ms=[request["time_to_first_token_ms"] for request in answered],
        inter_token_ms=[request["inter_token_latency_ms"] for request in answered if request["output_tokens"] > 1],
        num_tokens=sum(request["output_tokens"] for request in answered),
        seconds=max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0.0,
        num_errors=len(failed),
        first_error=str(failed[0]["info"].get("error") or "no reason told")[:300] if failed else "",
    )
