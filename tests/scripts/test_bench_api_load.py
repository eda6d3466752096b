"""Check what the bench `api` makes of load tools: what they are told to send, their reports, and who takes part."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_api.model_image import build_mock_image
from inference_api.server.tokenizer import Tokenizer
from tests.scripts.benching import ROOT


@pytest.fixture(autouse=True)
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable as scripts/bench makes it."""
    monkeypatch.syspath_prepend(ROOT / "scripts")


def module(name: str) -> Any:
    return importlib.import_module(f"benches.{name}")


def tool_run(*latencies: float, **more: Any) -> Any:
    return module("api_run").ToolRun(latencies, latencies, latencies, 10 * len(latencies), 2.0, **more)


def test_runs_are_pooled_and_a_p95_needs_forty_requests() -> None:
    pooled = module("api_run").pooled_figures
    few = pooled([tool_run(*range(20)), tool_run(*range(19), num_errors=1, first_error="refused")])
    assert (few["requests"], few["errors"], few["first_error"]) == (39, 1, "refused")
    assert "latency_ms_p95" not in few
    many = pooled([tool_run(*range(20)), tool_run(*range(20))])
    assert (many["latency_ms_p50"], many["latency_ms_p95"], many["tokens_per_second"]) == (9.5, 18, 100.0)
    assert "first_error" not in many


def served(**more: Any) -> Any:
    members = {"temperature": 0, "ignore_eos": True}
    target = module("service").Target(7, "a-bearer")
    return module("api_served").Served(
        **{"name": "ours", "target": target, "pid": 1, "model": "m", "members": members} | more
    )


LOAD = {"num_requests": 3, "num_users": 2, "prompt_tokens": 8, "answer_tokens": 4}


def test_guidellm_sends_the_same_load_everywhere_and_no_member_that_a_server_refuses(tmp_path: Path) -> None:
    make_scenario, load = module("api_guidellm").make_scenario, module("api_tool").Load(**LOAD)
    scenario = make_scenario(served(), load, tmp_path, 5, tmp_path / "report.json")
    assert scenario["data"] == [{"kind": "synthetic_text", "prompt_tokens": 8, "output_tokens": 4}]
    assert (scenario["profile"]["streams"], scenario["constraints"][0]["count"]) == ([2], 3)
    assert scenario["backend"]["api_key"] == "a-bearer"
    assert scenario["backend"]["extras"]["body"] == {"temperature": 0, "ignore_eos": True}
    other = served(members={"temperature": 0}, target=module("service").Target(7))
    backend = make_scenario(other, load, tmp_path, 5, tmp_path / "report.json")["backend"]
    assert backend["extras"]["body"] == {"temperature": 0, "ignore_eos": None, "stream_options": None}
    assert "api_key" not in backend


def guidellm_request(start: float, tokens: int) -> dict[str, object]:
    times = {"request_start_time": start, "request_end_time": start + 2.0, "request_latency": 2.0}
    return {**times, "time_to_first_token_ms": 500.0, "inter_token_latency_ms": 50.0, "output_tokens": tokens}


def test_guidellms_report_is_read_request_by_request() -> None:
    failed = [{"info": {"error": "503 Service Unavailable"}}]
    requests = {"successful": [guidellm_request(10.0, 4), guidellm_request(12.0, 1)], "errored": failed}
    run = module("api_guidellm").read_report({"benchmarks": [{"requests": requests}]})
    assert (run.latency_ms, run.first_token_ms, run.inter_token_ms) == ([2000.0] * 2, [500.0] * 2, [50.0])
    assert (run.num_tokens, run.seconds, run.num_errors, run.first_error) == (5, 4.0, 1, "503 Service Unavailable")


def test_locusts_report_is_read_and_one_that_was_cut_is_refused() -> None:
    read_report = module("api_locust").read_report
    entries = [
        {"name": "answer", "num_failures": 0, "response_times": {"900": 1, "400": 2}, "total_content_length": 12},
        {"name": "first token", "num_failures": 0, "response_times": {"30": 3}},
        {"name": "failed answer", "num_failures": 1, "response_times": {"5": 1}},
        {"name": "whole run", "num_failures": 0, "response_times": {"1500": 1}, "max_response_time": 1512.5},
    ]
    run = read_report(entries)
    assert (run.latency_ms, run.first_token_ms, run.inter_token_ms) == ([400.0, 400.0, 900.0], [30.0] * 3, [])
    assert (run.num_tokens, run.seconds, run.num_errors) == (12, 1.5125, 1)
    with pytest.raises(module("service").BenchError, match="did not come to its end"):
        read_report(entries[:-1])


def test_locust_counts_the_tokens_that_the_service_does(tmp_path: Path) -> None:
    tool = module("api_tool").Tool(Path(sys.executable).with_name("locust"), tmp_path / "locust.log")
    with module("service").running_service({"INFERENCE_API_SERVED_MODEL_NAMES": "m"}) as service:
        ours = served(target=service.proxied)
        load = module("api_tool").Load(**LOAD)
        run = module("api_locust").run_locust(tool, ours, load, ["one", "two", "three"])
        refused = module("api_locust").run_locust(tool, dataclasses.replace(ours, model="other"), load, ["one"])
    assert (len(run.latency_ms), len(run.first_token_ms), run.num_tokens, run.num_errors) == (3, 3, 12, 0)
    assert (refused.latency_ms, refused.num_tokens, refused.num_errors) == ([], 0, 1)
    assert service.proxied.bearer not in tool.log.read_text()


def test_a_tool_that_leaves_no_report_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    tool = module("api_tool").Tool(Path(sys.executable), tmp_path / "tool.log")
    with pytest.raises(module("service").BenchError, match="no report: no such thing"):
        tool.run(["-c", "raise SystemExit('no such thing')"], {}, tmp_path / "report.json")


class Scripted:
    """A tool's runs: each server's next one, or its fault."""

    def __init__(self, **runs: list[Any]) -> None:
        self._runs = runs

    def __call__(self, _tool: object, server: Any, *_more: object) -> Any:
        run = self._runs[server.name].pop(0)
        if isinstance(run, Exception):
            raise run
        return run


def test_a_server_that_a_tool_cannot_measure_is_a_line_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, error = module("api_load"), module("service").BenchError("it left no report")
    runs = Scripted(ours=[tool_run(1.0), tool_run(1.0)], steady=[tool_run(2.0), tool_run(2.0)], broken=[error, error])
    monkeypatch.setattr(load, "run_guidellm", runs)
    monkeypatch.setattr(load.peer_process, "hold_still", lambda pid: None)
    monkeypatch.setattr(load.peer_process, "let_go_on", lambda pid: None)
    tokenizer = Tokenizer.load(build_mock_image(tmp_path / "mock").tokenizer_path)
    with contextlib.ExitStack() as stack:
        field = load.LoadField(stack, module("api_tool").Load(**LOAD), tmp_path)
        field.tools["guidellm"] = module("api_tool").Tool(tmp_path, tmp_path)
        for name in ("ours", "steady", "broken"):
            field._servers[name] = served(name=name)
        field.take_turns(0, tokenizer)
        field.take_turns(1, tokenizer)
    figures = field.figures()["guidellm"]
    assert field.reasons == {"broken by guidellm": "it left no report"}
    assert figures.keys() == {"ours", "steady"}
    assert (figures["steady"]["requests"], figures["steady"]["ours_over_it_tokens_per_second"]) == (2, 1.0)
    assert "steady" in load.load_table({"guidellm": figures})


def test_a_service_of_ours_that_does_not_come_up_ends_the_bench_and_a_peer_does_not(tmp_path: Path) -> None:
    load, error = module("api_load"), module("service").BenchError

    @contextlib.contextmanager
    def broken() -> Iterator[Any]:
        raise error("not up")
        yield

    with contextlib.ExitStack() as stack:
        field = load.LoadField(stack, module("api_tool").Load(**LOAD), tmp_path)
        field.add_server("transformers", broken())
        assert field.reasons == {"transformers": "not up"}
        with pytest.raises(error, match="not up"):
            field.add_server("ours", broken())
