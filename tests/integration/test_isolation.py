"""Check on the running service that no byte of one stream ever comes out of another, under load and with deserters.

Each text says whose it is. The logic is that of scripts/prove-isolation; the large sizes, with backends and workers
that are killed meanwhile, are the campaign's.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.integration.service import bearer, running_service, wait_for

SCRIPTS = Path(__file__).parents[2] / "scripts"
NUM_REQUESTS = 600
LEAVING_SHARE = 0.05


def test_no_byte_of_a_stream_comes_out_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    proving = importlib.import_module("campaigns.self_identifying")
    settings = {"INFERENCE_API_MOCK_MODE": "echo", "INFERENCE_API_MOCK_TOKENS_PER_SECOND": "0"}
    with running_service(proxy=True, **settings) as service:
        bearers = [bearer(tenant)["Authorization"].removeprefix("Bearer ") for tenant in ("alpha", "beta", "gamma")]
        target = proving.Target(service.proxy_url, bearers)
        target.probe()
        result = proving.Prover(target, proving.Load(NUM_REQUESTS, 64, LEAVING_SHARE, seed=1)).run()
        assert (result.faults, result.examples) == (0, [])
        assert result.outcomes.keys() == {"answered", "left"}
        assert result.outcomes.total() == NUM_REQUESTS
        assert result.outcomes["answered"] > (1 - 2 * LEAVING_SHARE) * NUM_REQUESTS
        assert result.peeks.keys() == {404}
        wait_for(lambda: service.num_rows_in_use() == 0 and not service.rows()["num_waiting"], 5.0, "free rows")
        assert service.metric("inference_api_foreign_tokens_total") == 0
        assert service.metric('inference_api_finished_total{reason="error"}') == 0
        assert service.metric('inference_api_finished_total{reason="stop"}') >= result.outcomes["answered"]
