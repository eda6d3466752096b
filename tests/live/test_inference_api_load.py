"""Put a load on a running service: 99 prompts through a number of callers; tokens a second, overloaded, failed.

Runs under pytest, and as a program against any server: `test_inference_api_load.py --url URL --threads 32`. A 503
of a full service is counted as overloaded: it said no in time. Anything else that is not a whole 200 has failed.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.live.client import Client, Stream, spread, spread_text, start_threads
from tests.live.program import (
    FAILED_STATUS,
    ROOT,
    connected_client,
    make_parser,
    positive,
    print_result,
    run_program,
)

PROMPTS_FILE = ROOT / "tests" / "data" / "prompts.json"
NUM_PROMPTS = 99


@dataclass
class LoadResult:
    """What became of every prompt; times in seconds, at the client's socket."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_overloaded: int = 0
    answered: list[Stream] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def num_prompts(self) -> int:
        """Prompts of which it is known what became of them."""
        return len(self.answered) + self.num_overloaded + len(self.failures)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of whole answers over the time of the whole run."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def with_text(self) -> list[Stream]:
        """The answers that had a text: a model may end at its first token."""
        return [stream for stream in self.answered if stream.chunks]

    def figures(self) -> dict[str, object]:
        """Return the result as the JSON line has it."""
        return {
            "answered": len(self.answered),
            "overloaded": self.num_overloaded,
            "failed": len(self.failures),
            "tokens": self.num_tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "ttft_ms": spread([stream.ttft_seconds for stream in self.with_text]),
            "total_ms": spread([stream.chunks[-1].at - stream.sent_at for stream in self.with_text]),
        }


def read_prompts(path: Path) -> list[str]:
    """Read a JSON list of texts."""
    prompts: list[str] = json.loads(path.read_text("utf-8"))
    return prompts


def run_load(client: Client, prompts: Sequence[str], num_threads: int, max_tokens: int) -> LoadResult:
    """Send every prompt once, `num_threads` at a time, and wait for all; tokens are counted after the clock stopped."""
    result = LoadResult()
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)

    def call(_: int) -> None:
        while True:
            try:
                prompt = waiting.get_nowait()
            except queue.Empty:
                return
            _send(client, prompt, max_tokens, result)

    began = time.monotonic()
    for thread in start_threads(num_threads, call):
        thread.join()
    result.seconds = time.monotonic() - began
    result.num_tokens = sum(client.num_tokens(stream) for stream in result.answered)
    return result


def _send(client: Client, prompt: str, max_tokens: int, result: LoadResult) -> None:
    """Send one prompt, read its answer and count it under what became of it."""
    try:
        with client.generate(prompt, max_tokens=max_tokens) as stream:
            stream.read_all()
    except Exception as error:
        # Whatever it is, this prompt has failed, and the thread goes on with the next.
        result.failures.append(f"{type(error).__name__}: {error}")
        return
    if stream.status == 200 and stream.whole:
        result.answered.append(stream)
    elif stream.is_overloaded:
        result.num_overloaded += 1
    else:
        end = "whole" if stream.whole else "cut"
        result.failures.append(f"{stream.status}, {end} after {len(stream.body)} bytes: {stream.body[:200]!r}")


def print_table(result: LoadResult) -> None:
    """Print what a person reads."""
    figures = result.figures()
    print(f"answered    {figures['answered']:>6}")
    print(f"overloaded  {figures['overloaded']:>6}")
    print(f"failed      {figures['failed']:>6}")
    print(f"tokens      {figures['tokens']:>6} in {figures['seconds']} s: {figures['tokens_per_second']} a second")
    print(f"first text  {spread_text(spread([stream.ttft_seconds for stream in result.with_text]))} ms")
    for failure in result.failures[:10]:
        print(f"  {failure}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load that the options describe; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--threads", type=positive, default=32, help="callers at once (default: 32)")
    parser.add_argument("--max-tokens", type=positive, default=128, help="tokens an answer (default: 128)")
    parser.add_argument("--prompts", type=Path, default=PROMPTS_FILE, help="JSON list of texts (default: 99 of ours)")
    options: argparse.Namespace = parser.parse_args(arguments)
    try:
        prompts = read_prompts(options.prompts)
    except (OSError, ValueError) as error:
        parser.error(f"--prompts {options.prompts}: {error}")
    with connected_client(options) as client:
        result = run_load(client, prompts, options.threads, options.max_tokens)
        print_table(result)
        print_result("load", client, threads=options.threads, prompts=len(prompts), **result.figures())
    lost = len(prompts) - result.num_prompts
    if lost:
        print(f"ERROR: nobody knows what became of {lost} of {len(prompts)} prompts", file=sys.stderr)
    return FAILED_STATUS if result.failures or lost else 0


def test_every_prompt_of_the_load_is_answered_or_refused_and_none_fails(client: Client) -> None:
    prompts = read_prompts(PROMPTS_FILE)
    assert len(set(prompts)) == NUM_PROMPTS
    result = run_load(client, prompts, 32, 16)
    assert result.failures == []
    assert len(result.answered) + result.num_overloaded == NUM_PROMPTS
    if client.counts_digits:
        assert (len(result.answered), result.num_tokens) == (NUM_PROMPTS, NUM_PROMPTS * 16)


if __name__ == "__main__":
    sys.exit(run_program(main))
