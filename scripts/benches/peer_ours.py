"""Run this service as a contender of the `peers` bench, over HTTP, and its engine alone beside it.

The service has the engine `fused` and otherwise its own defaults. Its streams carry text, so that the number of tokens
of an answer is the backend's own count. The server is asked directly, as the peers' servers are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benches.peer_contender import PeerJob, Timeline
from benches.peer_piped import PipedContender, running_piped
from benches.real_model import running_model
from benches.service import BenchError, Target, service_environ
from benches.streams import make_request, run_streams
from inference_api.model_image import ModelImage


@dataclasses.dataclass(frozen=True, slots=True)
class OurService:
    """The running service."""

    pid: int
    target: Target

    def serve(self, jobs: Sequence[PeerJob], num_users: int) -> list[Timeline]:
        """See Contender."""
        requests = [make_request(self.target, "/inference/falcon40b", _body(job)) for job in jobs]
        recordings = sorted(run_streams(self.target, requests, num_users), key=lambda recording: recording.sent_at)
        timelines = []
        for job, recording in zip(jobs, recordings, strict=True):
            answer = recording.parse()
            facts = self.target.get_json(f"/v1/requests/{answer.headers['request-id']}")
            num_prompt, num_tokens = facts["num_prompt_tokens"], facts["num_completion_tokens"]
            if num_prompt != len(job.prompt_ids) or not isinstance(num_tokens, int):
                raise BenchError(f"{len(job.prompt_ids)} prompt tokens became {num_prompt}, the answer {num_tokens}")
            arrivals = tuple(at for at, _ in answer.chunks)
            timelines.append(Timeline(answer.sent_at, answer.ended_at, arrivals, num_tokens))
        return timelines


@contextlib.contextmanager
def running_ours(*, context_tokens: int) -> Iterator[OurService]:
    """Run the service until the block ends. Raises BenchError if it does not come up."""
    settings = {"INFERENCE_API_ENGINE": "fused", "INFERENCE_API_CONTEXT_TOKENS": str(context_tokens)}
    with running_model(settings) as service:
        yield OurService(parent_of(service.pids["backend"]), service.direct)


@contextlib.contextmanager
def running_engine(image: ModelImage, log: Path, *, context_tokens: int) -> Iterator[PipedContender]:
    """Run the engine alone until the block ends."""
    command = [sys.executable, "-m", "benches.peer_engine", str(image.path), str(context_tokens)]
    with running_piped(command, log, service_environ({})) as contender:
        yield contender


def parent_of(pid: int) -> int:
    """Return a process's parent (proc_pid_stat(5), field 4)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _body(job: PeerJob) -> dict[str, object]:
    return {"text": job.text, "max_tokens": job.num_tokens, "top_k": 1, "seed": 0, "ignore_eos": True}
