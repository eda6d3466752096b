"""Run real clients, unchanged, over real HTTP through the proxy: the part `clients`, on the mock and on the real model.

Each client runs in an environment of its own pins, its program first, then its snippets of docs/clients.md. The order
of the clients is drawn: none may lean on what another has left behind. Needs Node for two of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from campaigns.client_programs import Place, run_program, run_snippet
from campaigns.client_table import CLIENTS, Client
from campaigns.environments import MIN_NODE_MAJOR, find_node, make_node_environment, make_python_environment
from campaigns.part import Context, ServiceUnderTest

MOCK_SETTINGS = {
    # Slow enough for a client to leave in the middle of an answer; few rows and chunk sizes keep the start short.
    "INFERENCE_API_MOCK_TOKENS_PER_SECOND": "300",
    "INFERENCE_API_PREFILL_CHUNK_TOKENS": "512",
    "INFERENCE_API_ROWS": "4",
}


def run(context: Context) -> dict[str, int]:
    """Install the clients, then run each against a service with the mock and one with the real model."""
    places = {name: _place(name, context) for name in dict.fromkeys(client.environment for client in CLIENTS)}
    for client in CLIENTS:
        if places[client.environment] is None:
            context.count_not_run(client.name, f"there is no node {MIN_NODE_MAJOR} or newer with npm")
    there = [(client, place) for client in CLIENTS if (place := places[client.environment]) is not None]
    random = context.random
    totals = {"clients": len(there)}
    for engine, settings in (("mock", MOCK_SETTINGS), ("model", {})):
        num_before = context.tally.passed + len(context.tally.failed)
        num_rounds = context.counts[f"rounds_on_{engine}"]
        if num_rounds:
            with context.service(mock=engine == "mock", **settings) as service:
                for _ in range(num_rounds):
                    _run_round(context, engine, service, random.sample(there, len(there)))
        totals[f"checks_on_{engine}"] = context.tally.passed + len(context.tally.failed) - num_before
    return totals


def _place(environment: str, context: Context) -> Place | None:
    """Return where an environment's clients run, made first (blocking) if it is not there; None without Node."""
    if environment == "javascript":
        node = find_node()
        return None if node is None else Place(node, make_node_environment(environment, context.folder))
    python = make_python_environment(environment, context.folder)
    return Place(str(python), python.parent.parent)


def _run_round(
    context: Context, engine: str, service: ServiceUnderTest, clients: Sequence[tuple[Client, Place]]
) -> None:
    for client, place in clients:
        began = time.monotonic()
        left_out = client.on_mock_only if engine == "model" else ()
        findings = run_program(client, place, service, left_out)
        findings += [run_snippet(mark, place, service) for mark in client.snippets]
        for finding in findings:
            context.count(f"{client.name} on the {engine}: {finding.check}", finding.fault)
        num_passed = sum(finding.fault is None for finding in findings)
        context.log(f"{engine}: {client.name}: {num_passed} of {len(findings)}, {time.monotonic() - began:.1f} s")
