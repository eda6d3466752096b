"""Check the parts of the `peers` bench that need no peer: its jobs, its figures, its bound, and a peer that breaks."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from inference_api.model_image import build_mock_image
from inference_api.server.tokenizer import Tokenizer
from tests.integration.service import wait_for

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable as scripts/bench makes it."""
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(build_mock_image(tmp_path_factory.mktemp("image") / "mock").tokenizer_path)


@pytest.fixture
def sleeping() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def module(name: str) -> Any:
    return importlib.import_module(f"benches.{name}")


def timeline(*times: float) -> Any:
    return module("peer_contender").Timeline(0.0, times[-1], times, len(times))


def test_a_job_of_n_ids_is_a_text_that_encodes_to_them(tokenizer: Tokenizer) -> None:
    workload = module("peer_workloads").Workload("mixed", 20, 4, (3, 40), (1, 5))
    jobs = workload.make_jobs(tokenizer, 0)
    assert all(tokenizer.encode(job.text) == list(job.prompt_ids) for job in jobs)
    assert all(3 <= len(job.prompt_ids) <= 40 and 1 <= job.num_tokens <= 5 for job in jobs)
    assert jobs == workload.make_jobs(tokenizer, 0) != workload.make_jobs(tokenizer, 1)


def test_an_event_arrives_with_the_chunk_that_ends_it() -> None:
    answer = module("streams").Answer(0.0, 3.0, {}, [(1.0, b'data: {"to'), (2.0, b'kens": [5]}\n\ndata: [DONE]\n')])
    arrivals, events = module("peer_contender").read_events(answer, lambda event: "tokens" in event)
    assert (arrivals, events) == ([2.0], [{"tokens": [5]}])


def test_a_turn_counts_tokens_from_the_first_send_to_the_last_byte() -> None:
    workloads = module("peer_workloads")
    turn = workloads.Turn([timeline(1.0, 1.5), timeline(2.0, 4.0)], 0.0)
    figures = turn.figures(workloads.Workload.fixed(2, 8, 2))
    assert figures["tokens_per_second"] == 4 / 4.0
    assert (figures["first_token_ms_p50"], figures["first_token_ms_max"]) == (1000.0, 2000.0)
    assert (figures["gap_ms_p50"], figures["gap_ms_max"]) == (500.0, 2000.0)


def test_only_a_prompt_alone_has_a_rate_of_its_prefill() -> None:
    workloads = module("peer_workloads")
    turn = workloads.Turn([timeline(2.0)], 0.0)
    assert turn.figures(workloads.Workload.one_prompt(1000))["prefill_tokens_per_second"] == 500.0
    assert "prefill_tokens_per_second" not in turn.figures(workloads.Workload.fixed(1, 1000, 128))


def test_a_p99_that_one_round_lacks_is_left_out_and_the_longest_stays() -> None:
    workloads = module("peer_workloads")
    many, few = (
        workloads.Turn([timeline(*range(1, count + 2))], 0.0).figures(workloads.Workload.fixed(8, 128, 128))
        for count in (1000, 999)
    )
    assert (many["gap_ms_p99"], many["gap_p99_over_p50"]) == (1000.0, 1.0)
    for turns in ((many, few), (few, many)):
        figures = workloads.medians(turns)
        assert not {"gap_ms_p99", "gap_p99_over_p50"} & figures.keys()
        assert figures["gap_ms_max"] == 1000.0
    assert workloads.medians([many, many])["gap_ms_p99"] == 1000.0


def test_gaps_beside_an_admission_are_kept_apart_from_the_others() -> None:
    contender = module("peer_contender")
    row = timeline(1.0, 2.0, 5.0, 6.0)
    trigger = timeline(1.0, 2.5)
    prompt = contender.Timeline(2.5, 4.5, (4.5,), 1)
    figures = module("peer_workloads").Admission(1, 8, 8, 1, 8).figures([row, trigger, prompt])
    assert (figures["gaps_beside"], figures["gap_ms_p99_beside"], figures["gap_ms_p50_alone"]) == (1, 3000.0, 1000.0)
    assert figures["p99_beside_over_p50_alone"] == 3.0


def test_the_bound_is_the_slower_of_multiplying_and_reading() -> None:
    bound = module("peer_bound")
    sizes = bound.ModelSizes(layer_macs=100, head_macs=10, cache_numbers=5)
    workload = module("peer_workloads").Workload.fixed(2, 4, 2)
    layers, head = 2 * 5 * 100, 2 * 2 * 10
    read = 2 * (100 * bound.LAYER_WEIGHT_BYTES + 10 * bound.HEAD_WEIGHT_BYTES) + 2 * 2 * 5 * 5 * bound.CACHE_BYTES
    names = ("macs_per_second_4_bits", "macs_per_second_8_bits", "read_bytes_per_second")
    for peaks in ((2 * layers, 2 * head, 10 * read), (10 * layers, 10 * head, read)):
        rates = dict(zip(names, peaks, strict=True))
        assert bound.bound_tokens_per_second(workload, sizes, rates) == pytest.approx(4.0)


def test_the_bound_counts_the_linear_layers_of_a_llama(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 16, "vocab_size": 32}))
    sizes = module("peer_bound").ModelSizes.read(tmp_path / "config.json")
    assert sizes.layer_macs == 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)
    assert (sizes.head_macs, sizes.cache_numbers) == (8 * 32, 3 * 2 * 4)


def test_a_tree_that_is_held_still_stops_until_it_is_let_go_on(sleeping: int) -> None:
    process = module("peer_process")
    process.hold_still(sleeping)
    wait_for(lambda: state_of(sleeping) == "T", 5.0, "a stopped process")
    process.let_go_on(sleeping)
    wait_for(lambda: state_of(sleeping) == "S", 5.0, "a sleeping process")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_peer_waits_as_it_likes_and_sees_no_setting_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("INFERENCE_API_ROWS", "3")
    environ = module("peer_process").peer_environ({"VLLM_CPU_KVCACHE_SPACE": "2"})
    assert not {"OMP_WAIT_POLICY", "INFERENCE_API_ROWS"} & environ.keys()
    assert environ["VLLM_CPU_KVCACHE_SPACE"] == "2"


class Scripted:
    """A contender that answers each job with one token after a second, or breaks from its second turn on."""

    def __init__(self, pid: int, *, breaks: bool = False) -> None:
        self.pid = pid
        self._breaks = breaks
        self._turns = 0

    def serve(self, jobs: Sequence[Any], num_users: int) -> list[Any]:
        self._turns += 1
        if self._breaks and self._turns > 1:
            raise module("service").BenchError("it broke")
        return [timeline(1.0, 2.0) for _ in jobs]


def test_a_peer_that_breaks_is_a_line_and_the_others_go_on(tokenizer: Tokenizer, sleeping: int) -> None:
    peers = module("peers")
    size = peers.SIZES["tiny"]
    with contextlib.ExitStack() as stack:
        field = peers.Field(stack, tokenizer, size)
        field.add("ours", lambda: contextlib.nullcontext(Scripted(sleeping)))
        field.add("steady", lambda: contextlib.nullcontext(Scripted(sleeping)))
        field.add("breaking", lambda: contextlib.nullcontext(Scripted(sleeping, breaks=True)))
        field.take_turns(size.workloads[0], 0)
    assert field.reasons == {"breaking": "it broke"}
    assert field.summary(size.workloads[0]).keys() == {"ours", "steady"}
    ratios = module("peer_comparison").ratios(field.summary(size.workloads[0]))
    assert ratios["tokens_per_second"] == {"ours_over_best": 1.0, "best": "steady"}


def test_a_turn_is_told_with_the_rate_that_its_workload_is_there_for(
    tokenizer: Tokenizer, sleeping: int, capsys: pytest.CaptureFixture[str]
) -> None:
    peers, workload = module("peers"), module("peer_workloads").Workload
    with contextlib.ExitStack() as stack:
        field = peers.Field(stack, tokenizer, peers.SIZES["tiny"])
        field.add("ours", lambda: contextlib.nullcontext(Scripted(sleeping)))
        field.take_turns(workload.fixed(1, 8, 4), 0)
        field.take_turns(workload.one_prompt(8), 0)
    lines = capsys.readouterr().err.splitlines()[-2:]
    assert lines[0].startswith("1_user, ours: 1.0 output tokens/s; others ")
    assert lines[1].startswith("prompt_of_8, ours: 8.0 prompt tokens/s; others ")


def test_the_service_is_set_beside_its_engine_in_every_workload(tokenizer: Tokenizer, sleeping: int) -> None:
    peers, workload = module("peers"), module("peer_workloads").Workload
    mixed, fixed = workload("mixed", 2, 2, (3, 9), (1, 4)), workload.fixed(2, 8, 4)
    rates = {"macs_per_second_4_bits": 1.0, "macs_per_second_8_bits": 1.0, "read_bytes_per_second": 1.0}
    sizes = module("peer_bound").ModelSizes(100, 10, 5)
    with contextlib.ExitStack() as stack:
        field = peers.Field(stack, tokenizer, peers.SIZES["tiny"])
        for name in ("ours", "engine_alone"):
            field.add(name, lambda: contextlib.nullcontext(Scripted(sleeping)))
        field.take_turns(mixed, 0)
        field.take_turns(fixed, 0)
    assert field.efficiency(mixed, sizes, rates) == {"http_over_engine": 1.0}
    assert field.efficiency(fixed, sizes, rates).keys() >= {"http_over_engine", "engine_over_bound"}


SUMMARY = {
    "ours": {"tokens_per_second": 300.0, "first_token_ms_p50": 50.0, "first_token_ms_max": 90.0, "rounds": 3},
    "engine_alone": {"tokens_per_second": 310.0, "first_token_ms_p50": 40.0, "first_token_ms_max": 80.0, "rounds": 3},
    "fast": {"tokens_per_second": 200.0, "first_token_ms_p50": 500.0, "first_token_ms_max": 600.0, "rounds": 3},
    "prompt": {"tokens_per_second": 100.0, "first_token_ms_p50": 100.0, "first_token_ms_max": 900.0, "rounds": 3},
}


def test_each_figure_is_set_beside_the_peer_that_is_best_in_it() -> None:
    ratios = module("peer_comparison").ratios(SUMMARY)
    assert ratios == {
        "tokens_per_second": {"ours_over_best": 1.5, "best": "fast"},
        "first_token_ms_p50": {"ours_over_best": 0.5, "best": "prompt"},
        "first_token_ms_max": {"ours_over_best": 0.15, "best": "fast"},
    }


def test_a_figure_that_a_peer_lacks_and_a_run_without_peers_have_no_ratio() -> None:
    comparison = module("peer_comparison")
    spread = {"first_token_ms_p99": 1.0, **SUMMARY["ours"]}
    assert "first_token_ms_p99" not in comparison.ratios({**SUMMARY, "ours": spread, "fast": spread})
    assert comparison.ratios({"ours": SUMMARY["ours"], "engine_alone": SUMMARY["engine_alone"]}) == {}


def test_the_table_has_a_line_a_contender_and_one_a_workload_below() -> None:
    spread = {"gap_ms_p50": 20.0, "gap_ms_max": 90.0, "gap_ms_p99": 50.0, "gap_p99_over_p50": 2.5}
    prompt = {"ours": {**SUMMARY["ours"], "prefill_tokens_per_second": 900.0}}
    workloads = {"32_users": {**SUMMARY, "ours": {**SUMMARY["ours"], **spread}}, "prompt_of_9": prompt}
    efficiency = {"32_users": {"http_over_engine": 0.968, "engine_over_bound": 0.41}, "mixed": {"http_over_engine": 1}}
    table = module("peer_comparison").comparison_table(workloads, efficiency, {"gaps_beside": 7}, {"ours": 812.5})
    head, *lines = table.splitlines()
    assert head.split("  ")[0] == "workload" and head.endswith("p99/p50")
    assert [line.split() for line in lines] == [
        ["32_users", "ours", "300.0", "1.5", "50.0", "0.5", "90.0", "max", "0.15", "20.0", "50.0", "2.5"],
        ["32_users", "engine_alone", "310.0", "1.55", "40.0", "0.4", "80.0", "max", "0.133", "-", "-", "-"],
        ["32_users", "fast", "200.0", "1.0", "500.0", "5.0", "600.0", "max", "1.0", "-", "-", "-"],
        ["32_users", "prompt", "100.0", "0.5", "100.0", "1.0", "900.0", "max", "1.5", "-", "-", "-"],
        ["prompt_of_9", "ours", "900.0", "-", "50.0", "-", "90.0", "max", "-", "-", "-", "-"],
        [],
        ["workload", "HTTP", "over", "engine", "engine", "over", "bound"],
        ["32_users", "0.968", "0.41"],
        ["mixed", "1", "-"],
        [],
        ["prompts", "beside", "decoding", "rows", "ours"],
        ["gaps_beside", "7"],
        [],
        ["contender", "memory", "MiB"],
        ["ours", "812.5"],
    ]


def test_a_fault_of_our_own_service_ends_the_bench(tokenizer: Tokenizer, sleeping: int) -> None:
    peers = module("peers")
    with contextlib.ExitStack() as stack:
        field = peers.Field(stack, tokenizer, peers.SIZES["tiny"])
        field.add("ours", lambda: contextlib.nullcontext(Scripted(sleeping, breaks=True)))
        with pytest.raises(module("service").BenchError, match="it broke"):
            field.take_turns(peers.SIZES["tiny"].workloads[0], 0)
