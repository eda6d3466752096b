"""Run a load tool's program to its end, and say what it is told to send: what guidellm and locust have in common.

A tool has an environment of its own; its output goes to a log beside the peers' logs. Knows no tool and no server.
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from benches.peer_environments import PeerPackage, find_program, make_environment
from benches.peer_process import last_lines, running_tree
from benches.service import BenchError, service_environ

TIMEOUT_SECONDS = 900.0


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What a tool sends: requests, how many at once, and the length of every prompt and answer in tokens."""

    num_requests: int
    num_users: int
    prompt_tokens: int
    answer_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """An installed program, and where its output goes."""

    program: Path
    log: Path

    @classmethod
    def install(cls, package: PeerPackage, folder: Path, *, install: bool) -> Tool:
        """Return the tool, installed first (blocking) if it is not there; raise BenchError if it cannot be."""
        program = find_program(make_environment(package, folder, install=install), package.name)
        if program is None:
            raise BenchError(f"the program `{package.name}` is not in its environment")
        return cls(program, folder / f"{package.name}.log")

    def run(self, arguments: Sequence[str], environ: Mapping[str, str], report: Path) -> str:
        """Run the program to its end and return its report; blocks. Raises BenchError if it leaves none."""
        with running_tree([str(self.program), *arguments], self.log, service_environ(environ)) as process:
            try:
                process.wait(TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                raise BenchError(f"{self.program.name} took longer than {TIMEOUT_SECONDS:g} s") from None
        if not report.exists():
            raise BenchError(f"{self.program.name} left no report: {last_lines(self.log)}")
        return report.read_text()
