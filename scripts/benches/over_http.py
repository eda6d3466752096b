"""Compare 32 users over HTTP with the engine alone in a process: what queues, sockets, tokenizer and clients cost.

The same jobs, 32 at a time, in turns: through the server (without the proxy) from client sockets, and through the
backend's scheduler and loop in one process (`in_process`). Both engines stay loaded; the one that waits costs nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from benches.figures import ROOT, median
from benches.in_process import PREFILL_CHUNK_TOKENS, SETTINGS
from benches.real_model import (
    NUM_USERS,
    Batch,
    load_tokenizer,
    prepare_image,
    run_jobs,
    running_model,
)
from benches.service import STOP_SECONDS, BenchError, ending_with_this_process, service_environ
from benches.workload import SIZES, Job, make_jobs
from inference_api.server.tokenizer import Tokenizer

ROUNDS = {"full": 3, "quick": 2, "tiny": 1}
"""How often both sides run, by size."""


def run(size_name: str) -> dict[str, object]:
    """Run both several times in turns; return the rates and the median of the rounds' ratios."""
    size, rounds = SIZES[size_name], ROUNDS[size_name]
    image = prepare_image()
    tokenizer = load_tokenizer(image)
    jobs = make_jobs(size.num_jobs, size.lengths, tokenizer)
    over_http: list[Batch] = []
    in_process: list[Batch] = []
    with running_model(SETTINGS) as service, _EngineAlone.started(image, tokenizer) as alone:
        for _ in range(rounds):
            over_http.append(run_jobs(service.direct, jobs, NUM_USERS))
            in_process.append(alone.run(jobs))
            rates = over_http[-1].tokens_per_second, in_process[-1].tokens_per_second
            print(f"over HTTP {rates[0]:.1f}, in process {rates[1]:.1f} tokens/s", file=sys.stderr)
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(over_http, in_process, strict=True)]
    return {
        "users": NUM_USERS,
        "prompt_tokens": size.lengths.prompt,
        "answer_tokens": size.lengths.answer,
        "requests_a_round": size.num_jobs,
        "rounds": rounds,
        "prefill_chunk_tokens": PREFILL_CHUNK_TOKENS,
        "http_tokens_per_second": median([batch.tokens_per_second for batch in over_http]),
        "in_process_tokens_per_second": median([batch.tokens_per_second for batch in in_process]),
        "tokens": {"http": over_http[0].num_tokens, "in_process": in_process[0].num_tokens},
        "ratio": median(ratios, 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _EngineAlone:
    """The child process of `in_process`, by its two pipes."""

    requests: IO[str]
    answers: IO[str]
    tokenizer: Tokenizer

    @classmethod
    @contextlib.contextmanager
    def started(cls, image: Path, tokenizer: Tokenizer) -> Iterator[_EngineAlone]:
        """Run the child until the block ends; blocks until its engine is warm."""
        command = ending_with_this_process(["-m", "benches.in_process", str(image)])
        pipe, environ = subprocess.PIPE, service_environ(SETTINGS)
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=pipe, stdout=pipe, text=True, process_group=0)
        try:
            if process.stdin is None or process.stdout is None or not process.stdout.readline():
                raise BenchError("the engine alone did not start; its message stands above")
            yield cls(process.stdin, process.stdout, tokenizer)
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=STOP_SECONDS)
            process.kill()
            process.wait()

    def run(self, jobs: Sequence[Job]) -> Batch:
        """Run the jobs; blocks to the end of the last one."""
        content = [(self.tokenizer.encode(job.text), job.max_tokens) for job in jobs]
        self.requests.write(json.dumps(content) + "\n")
        self.requests.flush()
        line = self.answers.readline()
        if not line:
            raise BenchError("the engine alone ended; its message stands above")
        num_tokens, seconds = json.loads(line)
        return Batch(num_tokens, seconds)
