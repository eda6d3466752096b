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
    assert field.ratios(size.workloads[0])["tokens_per_second"] == {"ours_over_best": 1.0, "best": "steady"}


def test_a_fault_of_our_own_service_ends_the_bench(tokenizer: Tokenizer, sleeping: int) -> None:
    peers = module("peers")
    with contextlib.ExitStack() as stack:
        field = peers.Field(stack, tokenizer, peers.SIZES["tiny"])
        field.add("ours", lambda: contextlib.nullcontext(Scripted(sleeping, breaks=True)))
        with pytest.raises(module("service").BenchError, match="it broke"):
            field.take_turns(peers.SIZES["tiny"].workloads[0], 0)
