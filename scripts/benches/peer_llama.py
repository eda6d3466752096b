"""Run llama.cpp's server as a contender of the `peers` bench, at its best flags, over HTTP.

A slot a row with a cache of its own, flash attention, a thread a core. Prompts go as ids, and nothing of a prompt is
reused. Knows the server's options and its JSON; not what it is compared with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from benches.peer_contender import PeerJob, Timeline, read_events
from benches.peer_environments import LLAMA, find_program, make_environment
from benches.peer_process import peer_environ, running_tree, wait_until_ready
from benches.peer_weights import quantized_gguf
from benches.service import BenchError, Target, free_port
from benches.streams import make_request, run_streams

START_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class LlamaServer:
    """A running llama-server."""

    pid: int
    target: Target

    def serve(self, jobs: Sequence[PeerJob], num_users: int) -> list[Timeline]:
        """See Contender."""
        requests = [make_request(self.target, "/completion", _body(job)) for job in jobs]
        recordings = sorted(run_streams(self.target, requests, num_users), key=lambda recording: recording.sent_at)
        timelines = []
        for recording in recordings:
            answer = recording.parse()
            arrivals, events = read_events(answer, lambda event: bool(event.get("tokens")))
            num_tokens = events[-1].get("tokens_predicted")
            if not arrivals or not isinstance(num_tokens, int):
                raise BenchError(f"an answer without tokens: {answer.body[-200:]!r}")
            timelines.append(Timeline(answer.sent_at, answer.ended_at, tuple(arrivals), num_tokens))
        return timelines


@contextlib.contextmanager
def running_llama(
    quantization: str, folder: Path, *, num_rows: int, context_tokens: int, install: bool
) -> Iterator[LlamaServer]:
    """Install, quantize and run the server until the block ends. Raises BenchError if it does not come up."""
    environment = make_environment(LLAMA, folder, install=install)
    server, quantize = (find_program(environment, name) for name in ("llama-server", "llama-quantize"))
    if server is None or quantize is None:
        raise BenchError("llama-quantize is not in the environment")
    model = quantized_gguf(folder, quantize, quantization)
    port, threads = free_port(), str(len(os.sched_getaffinity(0)))
    command = [str(server), "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    command += ["--parallel", str(num_rows), "--ctx-size", str(num_rows * context_tokens), "--no-kv-unified"]
    command += ["--flash-attn", "on", "--threads", threads, "--threads-batch", threads]
    log = folder / f"llama-{quantization}.log"
    with running_tree(command, log, peer_environ({})) as process:
        wait_until_ready(process, port, log, START_SECONDS)
        yield LlamaServer(process.pid, Target(port))


def _body(job: PeerJob) -> dict[str, object]:
    return {
        "prompt": job.prompt_ids,
        "n_predict": job.num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
