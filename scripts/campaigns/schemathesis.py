"""Let schemathesis make requests out of the service's own OpenAPI document: the part `schemathesis`.

Valid and invalid ones, on every route of the document, through the proxy, on the mock: none may be answered 5xx, with a
status that the document does not name, or with a media type that it does not name. The document is open to everybody,
so that it names no model: here it is told the one that is served, or nearly all requests would ask for an unknown one.
The seed draws the requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import requests

from campaigns.environments import make_python_environment
from campaigns.part import CampaignError, Context, ServiceUnderTest

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
PHASES = "examples,coverage,fuzzing"
MAX_SECONDS = 1800.0

NEVER_ACCEPTED = frozenset(
    {
        "DELETE /v1/requests/{request_id}",
        "GET /docs/{asset}",
        "GET /metrics",
        "GET /v1/requests/{request_id}",
        "GET /v1/responses/{response_id}",
        "POST /v1/responses/{response_id}/cancel",
    }
)
"""Operations for which no valid request can be made out of the document: ids, file names, another scope."""


def run(context: Context) -> dict[str, int]:
    """Run schemathesis; return how many requests it made, and on how many operations."""
    python = make_python_environment("schemathesis", context.folder)
    with context.service(INFERENCE_API_MOCK_TOKENS_PER_SECOND="0") as service, tempfile.TemporaryDirectory() as folder:
        report = _run(context, python, service, Path(folder))
    for failure in report["failures"]:
        context.count(f"schemathesis {failure.get('label', '')}", json.dumps(failure)[:1000])
    for error in report["errors"]:
        context.count("schemathesis itself", json.dumps(error)[:1000])
    num_cases, num_operations = report["test_cases"]["generated"], report["operations"]["tested"]
    enough = num_cases >= context.counts["cases"] and num_operations == report["operations"]["total"]
    context.count(
        f"{num_cases} requests on {num_operations} operations",
        None if enough else f"not {context.counts['cases']} requests on all {report['operations']['total']} operations",
    )
    for operation, rates in report["valid_rates"].items():
        num_accepted = sum(phase["accepted"] for phase in rates.values())
        if operation not in NEVER_ACCEPTED:
            context.count(f"accepted {operation}", None if num_accepted else "no request that was made for it is valid")
    return {"cases": num_cases, "operations": num_operations}


def with_model_named(part: Any, name: str) -> Any:
    """Return a part of an OpenAPI document in which whatever is called `model` can be `name` only."""
    if isinstance(part, list):
        return [with_model_named(item, name) for item in part]
    if not isinstance(part, dict):
        return part
    named = {key: with_model_named(value, name) for key, value in part.items()}
    if "model" in named.get("properties", {}):
        named["properties"] = {**named["properties"], "model": {"type": "string", "enum": [name]}}
    if named.get("name") == "model" and named.get("in") == "path":
        named["schema"] = {"type": "string", "enum": [name]}
    return named


def _run(context: Context, python: Path, service: ServiceUnderTest, folder: Path) -> dict[str, Any]:
    """Return the report of a run (blocking); raise CampaignError if there is none."""
    report, document = folder / "report.json", folder / "openapi.json"
    told = requests.get(f"{service.url}/openapi.json", timeout=60).json()
    document.write_text(json.dumps(with_model_named(told, service.model)), "utf-8")
    options = _options(context, service, report)
    command = [str(python.parent / "st"), "run", str(document), *options, "--no-shrink", "--continue-on-failure"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=MAX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CampaignError(f"schemathesis did not end within {MAX_SECONDS:g} seconds") from None
    if not report.is_file():
        raise CampaignError(f"schemathesis ended with status {done.returncode} and no report: {done.stdout[-500:]}")
    found: dict[str, Any] = json.loads(report.read_text("utf-8"))
    return found


def _options(context: Context, service: ServiceUnderTest, report: Path) -> list[str]:
    """Return what the program is told beside the document."""
    options = {
        "--url": service.url,
        "--header": f"Authorization: Bearer {service.jwt}",
        "--checks": CHECKS,
        "--phases": PHASES,
        "--max-examples": str(context.counts["examples_an_operation"]),
        "--seed": str(context.seed),
        "--generation-database": "none",
        "--report": "json",
        "--report-json-path": str(report),
    }
    return [word for pair in options.items() for word in pair]
