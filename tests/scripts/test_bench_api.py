"""Check the bench `api`: each part runs at its tiny size, and what its figures are made of is read right. No rates."""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.benching import ROOT, make_own_model, run_bench

pytestmark = pytest.mark.timeout(300)  # the first test waits for every part

PARTS = ("surfaces", "forms", "embeddings", "window", "load")
SURFACES = {
    *("inference", "chat", "v1_completions", "v1_chat", "v1_responses", "v1_messages", "generate_stream", "generate"),
    *("v1_completions_whole", "v1_chat_whole", "v1_responses_whole", "v1_messages_whole"),
}


@pytest.fixture(autouse=True)
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable as scripts/bench makes it."""
    monkeypatch.syspath_prepend(ROOT / "scripts")


def module(name: str) -> Any:
    return importlib.import_module(f"benches.{name}")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, fused_build_folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each part came to; two run at a time."""
    environ = make_own_model(tmp_path_factory.mktemp("model"), fused_build_folder)
    peers = str(tmp_path_factory.mktemp("no_peers"))

    def run(part: str) -> dict[str, Any]:
        ran = run_bench("api", "--tiny", "--part", part, "--peers", peers, **environ)
        assert ran.returncode == 0, ran.stderr
        *tables, line = ran.stdout.splitlines()
        assert len(tables) > 1
        figures: dict[str, Any] = json.loads(line)
        assert (figures["bench"], figures["size"]) == ("api", "tiny")
        part_figures: dict[str, Any] = figures[part]
        return part_figures

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(PARTS, pool.map(run, PARTS), strict=True))


@pytest.mark.slow
@pytest.mark.torch
def test_every_surface_has_its_cost_a_token_and_a_request_beside_the_raw_route(
    measured: dict[str, dict[str, Any]],
) -> None:
    surfaces = measured["surfaces"]["surfaces"]
    assert surfaces.keys() == SURFACES
    for figures in surfaces.values():
        assert figures["tokens_per_event"] >= 1
        assert figures["one_token_ms"]["samples"] == 2
    assert surfaces["inference"]["server_us_per_token_over_raw"] == 0
    assert surfaces["generate"]["tokens_per_event"] == 8


@pytest.mark.slow
@pytest.mark.torch
def test_masked_rows_are_set_beside_plain_ones_and_so_are_their_neighbours(measured: dict[str, dict[str, Any]]) -> None:
    forms = measured["forms"]["forms"]
    assert forms.keys() == {"1_rows", "2_rows"}
    for of in forms.values():
        assert of.keys() == {"plain", "json_schema", "regex", "choice"}
        assert all(figures["over_plain"] > 0 for name, figures in of.items() if name != "plain")
    assert measured["forms"]["neighbours"].keys() == {"1_beside_plain", "1_beside_json_schema", "ratio"}


@pytest.mark.slow
@pytest.mark.torch
def test_embeddings_are_those_of_the_baseline_and_are_set_beside_it(measured: dict[str, dict[str, Any]]) -> None:
    embeddings = measured["embeddings"]
    assert embeddings["cosine"]["min"] > 0.99
    assert embeddings["modes"].keys() == {"single_1_user", "single_2_users", "batches_of_2"}
    assert embeddings["modes"]["batches_of_2"]["ours"]["over_transformers"] > 0
    assert embeddings["modes"]["single_2_users"].keys() == {"ours"}


@pytest.mark.slow
@pytest.mark.torch
def test_a_window_is_set_beside_none_for_embeddings_and_for_raw_bodies(measured: dict[str, dict[str, Any]]) -> None:
    what = measured["window"]["what"]
    assert what.keys() == {f"{name}_{users}" for name in ("embeddings", "raw_body") for users in ("1_user", "2_users")}
    assert all(of["on_over_off"]["rate"] > 0 for of in what.values())


@pytest.mark.slow
@pytest.mark.torch
def test_without_load_tools_the_load_says_so_and_starts_no_server(measured: dict[str, dict[str, Any]]) -> None:
    assert measured["load"]["not_measured"].keys() == {"guidellm", "locust"}
    assert all("not installed" in reason for reason in measured["load"]["not_measured"].values())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("frontend", "--part", "forms"), "--part belongs to the bench `api`"),
        (("http", "--peers", "x"), "--peers belongs to the benches `peers` and `api`"),
        (("api", "--part", "nonsense"), "surfaces"),
    ],
)
def test_an_option_of_another_bench_and_an_unknown_part_are_one_line(arguments: tuple[str, ...], told: str) -> None:
    ran = run_bench(*arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert told in line


def test_the_command_line_knows_all_parts() -> None:
    assert module("__main__").API_PARTS == module("api").PARTS


def answer_of(*bodies: bytes) -> Any:
    return module("streams").Answer(
        0.0, float(len(bodies)), {}, [(float(at), data) for at, data in enumerate(bodies, 1)]
    )


def surface(name: str) -> Any:
    return next(surface for surface in module("api_surface").SURFACES if surface.name == name)


def events(*values: object) -> list[bytes]:
    return [f"data: {json.dumps(value)}\n\n".encode() for value in values]


STREAMS = {
    "chat": events({"message": "5"}, {"message": "56"}, {"message": "Connection closed"}),
    "v1_completions": events({"choices": [{"text": "5"}]}, {"choices": [{"text": "6"}]}),
    "v1_chat": events(
        {"choices": [{"delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"delta": {"content": "5"}}]},
        {"choices": [{"delta": {"content": "6"}}]},
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
    ),
    "v1_responses": events(
        {"type": "response.created", "response": {"output": []}},
        {"type": "response.output_text.delta", "delta": "5"},
        {"type": "response.output_text.delta", "delta": "6"},
        {"type": "response.output_text.done", "text": "56"},
    ),
    "v1_messages": events(
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "5"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "6"}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}},
    ),
    "generate_stream": events({"token": {"text": "5"}}, {"token": {"text": "6"}, "generated_text": "56"}),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_streams_text_is_read_from_the_events_that_have_some(name: str) -> None:
    reading = surface(name).read(answer_of(*STREAMS[name]))
    reading.check_digits(2)
    assert (reading.text, len(reading.arrivals)) == ("56", 2)


def test_a_stream_without_text_is_an_error() -> None:
    with pytest.raises(module("service").BenchError, match="sent no text"):
        surface("v1_chat").read(answer_of(*events({"choices": [{"delta": {}}]})))


@pytest.mark.parametrize("text", ["57", "5", "567", "", "ab"])
def test_digits_that_are_wrong_or_not_as_many_end_the_bench(text: str) -> None:
    with pytest.raises(module("service").BenchError, match="digits of 2"):
        module("api_surface").Reading(text, (1.0,)).check_digits(2)


def test_what_a_surface_adds_is_the_median_of_its_rounds_differences() -> None:
    costs = module("api_surfaces").Costs
    raw = costs([20.0, 40.0, 30.0], [1.0], [1.0], [2.0, 3.0, 4.0], [[0.001], [0.002], [0.003]])
    other = costs([25.0, 48.0, 34.0], [1.0], [1.0], [2.5, 3.1, 4.9], [[0.003], [0.003], [0.003]])
    figures = other.figures(raw)
    assert figures["server_us_per_token_over_raw"] == 5.0
    assert figures["server_ms_per_request_over_raw"] == 0.5
    assert figures["one_token_ms_over_raw"] == 1.0


@contextlib.contextmanager
def answering(*parts: bytes) -> Iterator[Any]:
    """Answer one connection with the given bytes, and end it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                for part in parts:
                    connection.sendall(part)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield module("service").Target(listener.getsockname()[1])
        finally:
            thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n"


def test_an_answer_that_says_its_length_is_whole_with_its_connections_end() -> None:
    streams = module("streams")
    with answering(HEAD, b'{"a"', b":1}") as target:
        (recording,) = streams.run_streams(target, [streams.make_request(target, "/", {})], 1)
    assert recording.parse().body == b'{"a":1}'


@pytest.mark.parametrize("parts", [(HEAD, b'{"a"'), (HEAD,), (b"HTTP/1.1 200 OK\r\n",), ()])
def test_an_answer_that_ends_before_its_length_broke_off(parts: Sequence[bytes]) -> None:
    streams = module("streams")
    with answering(*parts) as target, pytest.raises(module("service").BenchError, match="broke off"):
        streams.run_streams(target, [streams.make_request(target, "/", {})], 1)


def test_plain_text_goes_as_it_is() -> None:
    streams, target = module("streams"), module("service").Target(1)
    request = streams.make_request(target, "/", b"a text")
    assert b"\r\nContent-Type: text/plain\r\n" in request and request.endswith(b"\r\n\r\na text")


def test_a_forms_rate_is_told_over_that_of_its_own_plain_kind() -> None:
    figures = module("api_forms").form_figures(
        {"plain": [100.0, 200.0], "regex": [90.0, 160.0], "tool_told": [50.0, 50.0], "tool_forced": [40.0, 50.0]}
    )
    assert figures["regex"] == {"tokens_per_second": 125.0, "over_plain": 0.85}
    assert figures["tool_forced"]["over_plain"] == 0.9
    assert "over_plain" not in figures["plain"]


def test_an_answer_that_its_form_ended_early_ends_the_bench() -> None:
    forms, streams = module("api_forms"), module("streams")
    usage = events({"choices": [{"text": "a"}]}, {"choices": [], "usage": {"completion_tokens": 7}})
    body = b"".join(usage)
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    recording = streams.Recording(0.0, [(1.0, head + body)])
    assert forms._timeline(module("api_form").FORMS["regex"], recording, 7).num_tokens == 7
    with pytest.raises(module("service").BenchError, match="regex made 7 tokens of 8"):
        forms._timeline(module("api_form").FORMS["regex"], recording, 8)


def test_neighbours_are_all_answers_but_the_last() -> None:
    timeline = module("peer_contender").Timeline
    served = module("api_forms").Served([timeline(0.0, 2.0, (1.0,), 10), timeline(0.0, 8.0, (1.0,), 10)])
    assert (served.rate_of_all_but_the_last, served.rate) == (5.0, 2.5)


def test_a_windows_worth_is_the_median_of_its_rounds_ratios() -> None:
    window = module("api_window")
    off, on = window.Record(), window.Record()
    for rate, seconds in ((10.0, 0.1), (20.0, 0.1)):
        off.add(rate, [seconds] * 3)
        on.add(rate * 1.5, [seconds * 2] * 3)
    figures = window.window_figures({"off": off, "on": on})
    assert figures["on_over_off"] == {"rate": 1.5, "p50": 2.0}
    assert figures["on"] == {"requests_per_second": 22.5, "p50_ms": 200.0, "p95_ms": 200.0}
