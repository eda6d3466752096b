"""Run a contender that has no HTTP: a program that reads jobs on stdin and writes the times of tokens on stdout.

A line in is `{"users": n, "jobs": [[prompt_ids, num_tokens], ...]}`, a line out `[[sent_at, [arrival, ...]], ...]` in
monotonic seconds, which all processes of a machine share; the program's first line says that it is ready. Knows nothing
of what runs behind the pipes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from benches.peer_contender import PeerJob, Timeline
from benches.peer_process import last_lines, running_tree
from benches.service import BenchError


@dataclasses.dataclass(frozen=True, slots=True)
class PipedContender:
    """A running program, by its two pipes."""

    pid: int
    requests: IO[str]
    answers: IO[str]
    log: Path

    def serve(self, jobs: Sequence[PeerJob], num_users: int) -> list[Timeline]:
        """See Contender."""
        request = {"users": num_users, "jobs": [(job.prompt_ids, job.num_tokens) for job in jobs]}
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        line = self.answers.readline()
        if not line:
            raise BenchError(f"ended: {last_lines(self.log)}")
        return [Timeline(sent_at, times[-1], tuple(times), len(times)) for sent_at, times in json.loads(line)]


@contextlib.contextmanager
def running_piped(command: Sequence[str], log: Path, environ: Mapping[str, str]) -> Iterator[PipedContender]:
    """Run the program until the block ends; blocks until it is ready. Raises BenchError if it ends before."""
    with running_tree(command, log, environ, piped=True) as process:
        if process.stdin is None or process.stdout is None:
            raise BenchError("no pipes")
        line = process.stdout.readline()
        if not line:
            raise BenchError(f"did not start: {last_lines(log)}")
        yield PipedContender(process.pid, process.stdin, process.stdout, log)
