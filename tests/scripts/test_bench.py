"""Check that each bench runs, at its tiny size, and that its last line is JSON with the promised figures. No rates."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inference_api.config import SWITCHES, Settings
from tests.integration.service import wait_for
from tests.scripts.benching import make_own_model, run_bench

pytestmark = pytest.mark.timeout(300)  # the first test waits for every bench

ROOT = Path(__file__).parents[2]
SPREAD = {"samples", "p50", "max"}


def figures_of(name: str) -> pytest.MarkDecorator:
    """Give a test the argument `figures`: those of a bench, at its tiny size."""
    return pytest.mark.parametrize("figures", [pytest.param(name, marks=pytest.mark.slow)], indirect=True)


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory, fused_build_folder: Path) -> dict[str, str]:
    return make_own_model(tmp_path_factory.mktemp("model"), fused_build_folder)


@pytest.fixture(scope="module")
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Return what each bench that a selected test looks at came to, by name.

    Two run at a time. No rate is looked at, and most of a tiny bench is one core that imports torch.
    """
    calls = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    names = {call.params["figures"]: None for call in calls if call is not None and "figures" in call.params}
    environ = request.getfixturevalue("own_model") if names.keys() - {"frontend", "edge"} else {}
    options = {"peers": ["--peers", str(tmp_path_factory.mktemp("no_peers"))]}
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = {name: pool.submit(run_bench, name, "--tiny", *options.get(name, []), **environ) for name in names}
    return {name: run.result() for name, run in runs.items()}


@pytest.fixture
def figures(request: pytest.FixtureRequest, finished: dict[str, subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    ran = finished[request.param]
    assert ran.returncode == 0, ran.stderr
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert (figures["bench"], figures["size"]) == (request.param, "tiny")
    assert figures["machine"].keys() == {"cpus", "cpu", "memory_gib", "python", "commit"}
    return figures


@figures_of("frontend")
def test_the_front_end_bench_counts_rates_costs_lateness_and_first_tokens(figures: dict[str, Any]) -> None:
    unthrottled = figures["unthrottled"]
    for front in ("direct", "proxy", "bare_flask"):
        for num_streams in (32, 256):
            assert unthrottled[f"{front}_{num_streams}_streams"]["tokens_per_second"] > 0
    assert unthrottled["direct_32_streams_one_token_a_step"]["tokens_per_second"] > 0
    assert unthrottled["bare_flask_32_streams"]["tokens_per_chunk"] == 1
    assert unthrottled["errors"] == 0
    for front in ("direct", "proxy"):
        paced = figures["paced"][front]
        assert paced["cpu_us_per_token"].keys() == {"backend", "server", "proxy", "client"}
        assert paced["gap_ms"].keys() >= SPREAD
        assert paced["chunks"] > 0
        assert {"chunks_with_several_tokens", "gaps_over_20_ms"} <= paced.keys()
    for part in ("direct", "through_proxy", "added_by_server_over_engine", "added_by_proxy_at_equal_rank"):
        assert figures["first_token_ms"][part]["samples"] == 3


@figures_of("edge")
def test_the_edge_bench_prices_the_decision_and_every_kind_of_slow_client(figures: dict[str, Any]) -> None:
    ways = {"admit_shared_secret_HS256", *(f"admit_strict_{name}" for name in ("HS256", "RS256", "ES256", "EdDSA"))}
    assert figures["decision_us"].keys() == ways | {"limits", "assertion_and_headers"}
    assert min(figures["decision_us"].values()) > 0
    assert figures["decision_share_of_first_token_percent"].keys() == ways
    slow = {"header_drip", "body_drip", "slow_read", "half_request", "idle"}
    assert figures["kinds"].keys() == slow | {"flood", "flood_refused"}
    for kind in figures["kinds"].values():
        assert kind["connections"] > 0
        assert kind["first_token_ms_alone"]["samples"] == kind["first_token_ms_beside"]["samples"] == 5
        assert kind["health_ms"]["failed"] == 0


@pytest.mark.torch
@figures_of("batching")
def test_the_batching_bench_compares_three_ways_to_serve_the_same_requests(figures: dict[str, Any]) -> None:
    for way in ("continuous", "static_32", "one_at_a_time"):
        assert figures[way]["tokens_per_second"] > 0
        assert figures[way]["first_token_ms"].keys() >= SPREAD
        assert figures[way]["gap_ms"].keys() >= {"samples"}
    assert figures["continuous"]["tokens_a_round"] == figures["static_32"]["tokens_a_round"]
    assert figures["continuous_over_static"] > 0
    assert figures["continuous_over_one_at_a_time"] > 0


@pytest.mark.torch
@figures_of("http")
def test_the_http_bench_sets_the_service_beside_the_engine_alone(figures: dict[str, Any]) -> None:
    assert figures["http_tokens_per_second"] > 0
    assert figures["in_process_tokens_per_second"] > 0
    assert figures["tokens"]["http"] == figures["tokens"]["in_process"] > 0
    assert figures["ratios"] == [figures["ratio"]]


@pytest.mark.torch
@figures_of("engines")
def test_the_engines_bench_times_both_engines_and_the_kernel(figures: dict[str, Any]) -> None:
    for name in ("prefill_tokens_per_second", "step_ms_1_rows_context_8", "step_ms_2_rows_context_8"):
        assert figures[name].keys() == {"transformers", "fused"}
        assert min(figures[name].values()) > 0
    rates = ("peak", "1_rows", "8_rows", "32_rows")
    assert figures["kernel"].keys() == {f"{bits}_bits_{name}" for bits in (4, 8) for name in rates}


@pytest.mark.torch
@figures_of("sampling")
def test_the_sampling_bench_prices_each_rule_beside_greedy_steps(figures: dict[str, Any]) -> None:
    rules = {"temperature", "top_k", "top_p", "top_k_and_top_p", "min_p", "typical_p", "penalties", "logprobs"}
    rules |= {"dry", "top_n_sigma", "xtc", "top_k_and_xtc", "mirostat_1", "mirostat_2"}
    assert figures["step"].keys() == {"greedy", "everything", *rules}
    for step in figures["step"].values():
        assert step["median_ms"] >= step["fastest_ms"] > 0
    assert figures["step"]["greedy"]["over_greedy"] == 0


@pytest.mark.torch
@figures_of("memory")
def test_the_memory_bench_weighs_each_engine_idle_and_filled(figures: dict[str, Any]) -> None:
    engines = figures["engines"]
    assert engines.keys() == {"fused", "transformers"}
    assert engines["fused"]["states"].keys() == {"idle", "32_rows_of_8", "32_rows_of_96"}
    for engine in engines.values():
        filled = list(engine["states"].values())[-1]
        # Each engine reports its whole cache; a state counts what its positions take of it.
        share = int(next(reversed(engine["states"])).rpartition("_")[2]) / engine["context_tokens"]
        assert filled["kv_by_calculation"] == pytest.approx(share * engine["kv_bytes"] / 2**20, abs=0.1)
        assert filled["private"] + filled["shared"] == pytest.approx(filled["resident"], abs=0.2)
        assert 0 < filled["of_files"] < filled["resident"]


@pytest.mark.torch
@figures_of("quality")
def test_the_quality_bench_sets_perplexity_and_agreement_beside_fp32(figures: dict[str, Any]) -> None:
    assert figures["perplexity"] > 1
    assert figures["perplexity_fp32"] > 1
    assert 0 <= figures["greedy_agreement"] <= 1
    assert "KV" in figures["numeric_path"]


@pytest.mark.torch
@figures_of("peers")
def test_the_peers_bench_measures_ours_and_says_why_a_peer_is_missing(figures: dict[str, Any]) -> None:
    assert figures["not_measured"].keys() == {"openvino_q8_0", "llama_q4_0", "llama_q8_0", "vllm_fp32"}
    assert all("not installed" in reason for reason in figures["not_measured"].values())
    for workload in figures["workloads"].values():
        assert workload.keys() == {"ours", "engine_alone"} == figures["memory_mib"].keys()
        assert all(of["tokens_per_second"] > 0 for of in workload.values())
    assert figures["machine_peaks"].keys() == {
        "macs_per_second_4_bits",
        "macs_per_second_8_bits",
        "read_bytes_per_second",
    }
    assert {"engine_over_bound", "http_over_engine"} < figures["efficiency"]["2_users"].keys()
    assert figures["efficiency"]["prompt_of_40"].keys() == {"http_over_engine"}
    assert "gaps_beside" in figures["admission_of_40_beside_2_rows"]


def test_a_service_that_does_not_come_up_is_one_line_and_no_figures(tmp_path: Path) -> None:
    ran = run_bench("batching", "--tiny", INFERENCE_API_MODEL=str(tmp_path / "nothing"))
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert "ERROR: " in ran.stderr


@pytest.mark.parametrize(("argument", "named"), [("nonsense", "frontend"), ("--frobnicate", "name")])
def test_an_unknown_bench_or_option_is_one_line(argument: str, named: str) -> None:
    ran = run_bench(argument)
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert line.startswith("ERROR: ") and named in line and line.endswith("; see scripts/bench --help")


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable as scripts/bench makes it."""
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.mark.usefixtures("benches")
def test_no_setting_of_the_caller_reaches_what_is_measured_but_where_the_model_is() -> None:
    service = importlib.import_module("benches.service")
    names = {name for field in dataclasses.fields(Settings) for name in field.metadata["names"]}
    names |= {name for name, _, _ in SWITCHES} | {"PROXY_REQUESTS_PER_MINUTE", "JWT_SECRET", "JWT_POLICY_FILE"}
    names |= {"INFERENCE_API_NO_SUCH_SETTING"}
    left = service.service_environ({"LOG_FORMAT": "text"}, {"PATH": "/bin", **dict.fromkeys(names, "1")})
    assert left.keys() == {
        "PATH",
        "LOG_FORMAT",
        *("INFERENCE_API_MODEL", "INFERENCE_API_CACHE_DIR", "CACHE_ROOT", "MODEL_WEKA_DIR"),
        *("INFERENCE_API_HF_CACHE", "HF_CACHE", "HF_HUB_CACHE"),
    }
    assert left["LOG_FORMAT"] == "text"


@pytest.mark.usefixtures("benches")
def test_the_engine_alone_gets_the_settings_of_the_service_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    over_http = importlib.import_module("benches.over_http")
    monkeypatch.setenv("FALCON_40B_2LAYER", "1")
    monkeypatch.setenv("INFERENCE_API_ROWS", "3")
    given: list[dict[str, str]] = []

    def start(_command: list[str], *, env: dict[str, str], **_more: object) -> None:
        given.append(env)
        raise OSError("not started")

    monkeypatch.setattr(over_http.subprocess, "Popen", start)
    with pytest.raises(OSError, match="not started"), over_http._EngineAlone.started(Path("image"), None):
        pass
    (environ,) = given
    assert Settings.from_environ(environ).rows == Settings().rows
    assert environ == over_http.service_environ(over_http.SETTINGS)


@contextlib.contextmanager
def bench_with_its_service(scratch: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a bench as from a terminal; yield it with the ids of what it has started once its service is up."""
    command = [str(ROOT / "scripts" / "bench"), "frontend", "--tiny"]
    environ = {**os.environ, "TMPDIR": str(scratch)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        wait_for(lambda: any(map(is_backend, descendants(process.pid))), 30.0, "a service")
        pids = descendants(process.pid)
        try:
            yield process, pids
        finally:
            for pid in living(pids):
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def is_backend(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "inference_api.backend.main" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return False


def living(pids: list[int]) -> list[int]:
    """Return which processes still run; a zombie, which nobody may reap here, does not."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return found


def test_ctrl_c_ends_a_bench_in_one_line_and_its_service(tmp_path: Path) -> None:
    with bench_with_its_service(tmp_path) as (process, pids):
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted" and "Traceback" not in errors
    assert living(pids) == []


def test_a_bench_that_is_killed_leaves_no_service(tmp_path: Path) -> None:
    with bench_with_its_service(tmp_path) as (process, pids):
        process.kill()
        wait_for(lambda: not living(pids), 40.0, "the end of the service")
