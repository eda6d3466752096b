"""Run vLLM's server as a contender of the `peers` bench: fp32, the only type that this kind of processor is fast in.

Prompts go as ids to its OpenAI route; nothing of a prompt is reused. The module is started, not the `vllm` program:
that one asks for the package's version under a name which the CPU package does not have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from benches.peer_contender import PeerJob, Timeline, read_events
from benches.peer_environments import VLLM, make_environment, python_of
from benches.peer_process import peer_environ, running_tree, wait_until_ready
from benches.peer_weights import checkpoint_folder
from benches.service import BenchError, Target, free_port
from benches.streams import make_request, run_streams
from inference_api.model_image import ModelImage

START_SECONDS = 600.0
"""It compiles the model at its first start."""

MODEL_NAME = "model"
KV_CACHE_GIB = 2


@dataclasses.dataclass(frozen=True, slots=True)
class VllmServer:
    """A running vLLM server."""

    pid: int
    target: Target

    def serve(self, jobs: Sequence[PeerJob], num_users: int) -> list[Timeline]:
        """See Contender."""
        requests = [make_request(self.target, "/v1/completions", _body(job)) for job in jobs]
        recordings = sorted(run_streams(self.target, requests, num_users), key=lambda recording: recording.sent_at)
        timelines = []
        for recording in recordings:
            answer = recording.parse()
            arrivals, events = read_events(answer, lambda event: bool(event.get("choices")))
            usage = events[-1].get("usage")
            if not arrivals or not isinstance(usage, dict):
                raise BenchError(f"an answer without tokens: {answer.body[-200:]!r}")
            timelines.append(Timeline(answer.sent_at, answer.ended_at, tuple(arrivals), usage["completion_tokens"]))
        return timelines


@contextlib.contextmanager
def running_vllm(
    folder: Path, image: ModelImage, *, num_rows: int, context_tokens: int, install: bool
) -> Iterator[VllmServer]:
    """Install and run the server until the block ends. Raises BenchError if it does not come up."""
    environment = make_environment(VLLM, folder, install=install)
    model, port = checkpoint_folder(folder / "checkpoints", image), free_port()
    command = [python_of(environment), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-num-seqs", str(num_rows), "--max-model-len", str(context_tokens)]
    command += ["--no-enable-prefix-caching", "--disable-log-stats"]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = folder / "vllm.log"
    with running_tree(command, log, peer_environ(settings)) as process:
        wait_until_ready(process, port, log, START_SECONDS)
        yield VllmServer(process.pid, Target(port))


def _body(job: PeerJob) -> dict[str, object]:
    return {
        "model": MODEL_NAME,
        "prompt": job.prompt_ids,
        "max_tokens": job.num_tokens,
        "min_tokens": job.num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
