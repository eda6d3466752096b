"""Weigh the process that holds an engine: idle, and with all rows filled to some positions.

Each engine is loaded in a process of its own, with the service's default rows and context, and measured from outside
while it waits. Beside what is measured stands what the KV cache comes to by calculation. Knows what /proc tells, not
how rows are filled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from benches.figures import table
from benches.peer_process import last_lines, running_tree
from benches.real_model import prepare_image
from benches.service import BenchError, service_environ

SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "full": {"fused": (256, 2048), "transformers": (256,)},
    "quick": {"fused": (256, 2048), "transformers": (32,)},
    "tiny": {"fused": (8, 96), "transformers": (8,)},
}
"""Positions a row that each engine is filled to, ascending; no more than its context."""

COLUMNS = ("engine", "state", "resident MiB", "private", "shared", "of files", "over idle", "KV by calculation")


@dataclasses.dataclass(frozen=True, slots=True)
class Resident:
    """What a process has in memory, in MiB.

    `private` pages are mapped by this process alone, `shared` ones by others too; together they are `resident`.
    `of_files` of them belong to files, such as code and mapped weights, and can be dropped and read again.
    """

    resident: float
    private: float
    shared: float
    of_files: float

    @classmethod
    def read(cls, pid: int, proc: Path = Path("/proc")) -> Resident:
        """Read a process's figures (proc_pid_smaps(5) for smaps_rollup, proc_pid_status(5) for RssFile)."""
        rollup = _kib(proc / str(pid) / "smaps_rollup")
        parts = {
            "resident": rollup["Rss"],
            "private": rollup["Private_Clean"] + rollup["Private_Dirty"],
            "shared": rollup["Shared_Clean"] + rollup["Shared_Dirty"],
            "of_files": _kib(proc / str(pid) / "status")["RssFile"],
        }
        return cls(**{name: round(kib / 1024, 1) for name, kib in parts.items()})


def _kib(path: Path) -> dict[str, int]:
    """Return the lines `Name: 12 kB` of a file of /proc."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].removesuffix(":"): int(words[1]) for words in lines if words[-1:] == ["kB"] and len(words) == 3}


@dataclasses.dataclass(frozen=True, slots=True)
class HeldEngine:
    """The child process of `memory_engine`, by its two pipes, and what it said of itself."""

    pid: int
    requests: IO[str]
    answers: IO[str]
    log: Path
    facts: Mapping[str, Any]

    def hold(self, num_positions: int) -> None:
        """Have every row filled; blocks. Raises BenchError if the child ends."""
        self.requests.write(f"{num_positions}\n")
        self.requests.flush()
        if not self.answers.readline():
            raise BenchError(f"the engine ended: {last_lines(self.log)}")


@contextlib.contextmanager
def holding(engine: str, image: Path) -> Iterator[HeldEngine]:
    """Run an engine in a process of its own until the block ends; blocks until it is warm."""
    environ = service_environ({"INFERENCE_API_ENGINE": engine})
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "benches.memory_engine", str(image)]
        with running_tree(command, log, environ, piped=True) as process:
            if process.stdin is None or process.stdout is None or not (line := process.stdout.readline()):
                raise BenchError(f"the engine {engine} did not start: {last_lines(log)}")
            yield HeldEngine(process.pid, process.stdin, process.stdout, log, json.loads(line))


def run(size_name: str) -> dict[str, object]:
    """Weigh each engine, print the table, and return what stands in it, in MiB."""
    image = prepare_image()
    engines: dict[str, object] = {}
    lines: list[tuple[object, ...]] = []
    for engine, fillings in SIZES[size_name].items():
        print(f"loading {engine}", file=sys.stderr)
        with holding(engine, image) as held:
            states = _weigh(held, fillings)
        engines[engine] = {**held.facts, "states": states}
        lines += [(engine, state, *weight.values()) for state, weight in states.items()]
    print(table(COLUMNS, lines))
    return {"unit": "MiB", "engines": engines}


def _weigh(held: HeldEngine, fillings: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return what is in memory in each state: idle, then filled further and further."""
    num_rows, context_tokens, kv_bytes = (held.facts[name] for name in ("rows", "context_tokens", "kv_bytes"))
    idle = Resident.read(held.pid)
    states = {"idle": {**dataclasses.asdict(idle), "over_idle": 0.0, "kv_by_calculation": 0.0}}
    for filling in fillings:
        num_positions = min(filling, context_tokens)
        print(f"filling {num_rows} rows to {num_positions} positions", file=sys.stderr)
        held.hold(num_positions)
        found = Resident.read(held.pid)
        states[f"{num_rows}_rows_of_{num_positions}"] = {
            **dataclasses.asdict(found),
            "over_idle": round(found.resident - idle.resident, 1),
            "kv_by_calculation": round(kv_bytes * num_positions / context_tokens / 2**20, 1),
        }
    return states
