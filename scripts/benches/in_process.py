"""Run the engine alone: the backend's own scheduler, decode loop and engine in one process, with no socket and no HTTP.

Runs as a child of the `http` bench, in the environment of the service beside it, so that rows, context and threads are
the same. Each line on stdin is a JSON list of jobs as [token_ids, max_tokens]; the answer is
a line [tokens, seconds] on stdout. 32 users submit in turns as they do over HTTP: who has an end submits the next job.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benches.real_model import NUM_USERS
from benches.workload import SEED
from inference_api.backend.admission import Admission
from inference_api.backend.decode_loop import DecodeLoop, Inbox
from inference_api.backend.main import load_engine
from inference_api.backend.scheduler import Scheduler
from inference_api.backend.step_planning import TokenRules
from inference_api.backend.warmup import warm_up
from inference_api.config import Settings
from inference_api.messages import Message, StepOutput, Submit
from inference_api.model_image import ModelImage
from inference_api.sampling_params import SamplingParams

WORKER = "worker-1"

PREFILL_CHUNK_TOKENS = 128
"""Set, not tuned: two processes that measure it would not always agree, and it must be the same for both."""

SETTINGS = {"INFERENCE_API_PREFILL_CHUNK_TOKENS": str(PREFILL_CHUNK_TOKENS)}


class Users:
    """Stand where the workers' connections are: take what the loop sends, submit the next job at each end."""

    def __init__(self, inbox: Inbox, admission: Admission) -> None:
        self._inbox = inbox
        self._admission = admission
        self._jobs: list[tuple[list[int], int]] = []
        self._next = 0
        self.num_tokens = 0
        self.num_ended = 0

    def begin(self, jobs: Sequence[tuple[list[int], int]]) -> None:
        """Forget the last run and submit one job a user."""
        self._jobs, self._next, self.num_tokens, self.num_ended = list(jobs), 0, 0, 0
        for _ in range(NUM_USERS):
            self._submit_next()

    def send(self, worker: str, message: Message) -> None:  # noqa: ARG002 - the loop's protocol
        """Count a step's ids."""
        if not isinstance(message, StepOutput):
            return
        for output in message.outputs:
            self.num_tokens += len(output.token_ids)
            if output.finished is not None:
                self.num_ended += 1
                self._submit_next()

    def _submit_next(self) -> None:
        if self._next == len(self._jobs):
            return
        name = str(self._next)
        token_ids, max_tokens = self._jobs[self._next]
        self._next += 1
        self._admission.take(len(token_ids))
        sampling = SamplingParams(temperature=1.0, top_k=1, top_p=0.9, seed=SEED)
        submit = Submit(name, name, "bench", token_ids, len(token_ids), max_tokens, sampling, [], 600.0, 600.0, 600.0)
        self._inbox.put(WORKER, submit)


def main() -> int:
    """Load the engine, say so with an empty line, then answer each line of stdin until it ends."""
    settings = Settings.from_environ()
    image = ModelImage.open(Path(sys.argv[1]))
    context_tokens = min(settings.context_tokens, image.context_tokens)
    engine = load_engine(settings, image, context_tokens)
    budget = warm_up(engine, settings.prefill_chunk_tokens)
    admission = Admission(settings.rows, settings.queue_requests, settings.queue_tokens)
    inbox = Inbox()
    users = Users(inbox, admission)
    scheduler = Scheduler(engine.info, TokenRules(image.token_bytes, image.stop_ids), admission, budget)
    loop = DecodeLoop(scheduler, engine, inbox, users)
    print(flush=True)
    for line in sys.stdin:
        jobs = json.loads(line)
        began = time.monotonic()
        users.begin(jobs)
        while users.num_ended < len(jobs):
            loop.step()
        print(json.dumps([users.num_tokens, time.monotonic() - began]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
