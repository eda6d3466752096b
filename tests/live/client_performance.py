"""Measure a running service as its clients see it: one client, then several at once, each figure from a socket.

A program: `client_performance.py --url URL --clients 1,8,32`. Per number of clients: time to the first text, gaps
between chunks, and tokens a second of a stream and of all. Several tokens may share a chunk, so tokens are the
service's own count and gaps are between chunks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from tests.live.client import Client, Stream, TargetError, spread, spread_text, start_threads
from tests.live.program import FAILED_STATUS, connected_client, make_parser, positive, print_result, run_program
from tests.live.test_inference_api_load import PROMPTS_FILE, read_prompts


def numbers(text: str) -> list[int]:
    """Convert `1,8,32`; argparse turns the ValueError into its message."""
    return [positive(part) for part in text.split(",")]


def measure(client: Client, num_clients: int, num_requests: int, max_tokens: int) -> dict[str, Any]:
    """Let each client send `num_requests` one after another; return the figures of all. Raises TargetError if none."""
    prompts = read_prompts(PROMPTS_FILE)
    streams: list[Stream] = []
    faults: list[str] = []
    start = threading.Barrier(num_clients)

    def call(index: int) -> None:
        start.wait()
        for prompt in islice(cycle(prompts), index * num_requests, (index + 1) * num_requests):
            try:
                with client.generate(prompt, max_tokens=max_tokens) as stream:
                    stream.read_all()
            except Exception as error:  # the thread goes on: what is not counted would be lost
                faults.append(type(error).__name__)
                continue
            if stream.status == 200 and stream.whole:
                streams.append(stream)
            else:
                faults.append(str(stream.status))

    began = time.monotonic()
    for thread in start_threads(num_clients, call):
        thread.join()
    seconds = time.monotonic() - began
    if not streams:
        raise TargetError(f"no request of {num_clients} clients was answered: {', '.join(sorted(set(faults)))}")
    return figures(streams, [client.num_tokens(stream) for stream in streams], seconds, len(faults))


def figures(streams: Sequence[Stream], token_counts: Sequence[int], seconds: float, num_failed: int) -> dict[str, Any]:
    """Return the figures of whole answers; a stream's rate is that of the tokens after its first chunk."""
    # A model may end at its first token: such an answer has no text and no times.
    with_text = [(stream, num) for stream, num in zip(streams, token_counts, strict=True) if stream.chunks]
    streaming = [(num - 1, stream.chunks[-1].at - stream.chunks[0].at) for stream, num in with_text]
    rates = sorted(num / streaming_seconds for num, streaming_seconds in streaming if num and streaming_seconds)
    num_chunks = sum(len(stream.chunks) for stream in streams)
    return {
        "requests": len(streams),
        "failed": num_failed,
        "tokens": sum(token_counts),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(sum(token_counts) / seconds, 1),
        "tokens_per_second_per_stream": round(rates[len(rates) // 2], 1) if rates else None,
        "tokens_per_chunk": round(sum(token_counts) / num_chunks, 2) if num_chunks else None,
        "ttft_ms": spread([stream.ttft_seconds for stream, _ in with_text]),
        "gap_ms": spread([gap for stream, _ in with_text for gap in stream.gap_seconds]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the options describe, print a block for each number of clients; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=numbers, default=[1, 8, 32], help="clients at once (default: 1,8,32)")
    parser.add_argument("--requests", type=positive, default=4, help="requests a client (default: 4)")
    parser.add_argument("--max-tokens", type=positive, default=64, help="tokens an answer (default: 64)")
    options = parser.parse_args(arguments)
    runs: dict[str, dict[str, Any]] = {}
    with connected_client(options) as client:
        measure(client, 1, 1, options.max_tokens)  # the first call of all pays for connections and caches
        for num_clients in options.clients:
            run = measure(client, num_clients, options.requests, options.max_tokens)
            runs[str(num_clients)] = run
            print(f"{num_clients} client(s), {run['requests']} answers, {run['failed']} failed or refused")
            print(f"  first text      {spread_text(run['ttft_ms'])} ms")
            print(f"  between chunks  {spread_text(run['gap_ms'])} ms")
            print(
                f"  tokens a second {run['tokens_per_second_per_stream']} a stream, {run['tokens_per_second']} in all"
            )
        print_result("client_performance", client, max_tokens=options.max_tokens, clients=runs)
    return FAILED_STATUS if any(run["failed"] for run in runs.values()) else 0


if __name__ == "__main__":
    sys.exit(run_program(main))
