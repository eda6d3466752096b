"""Point guidellm and locust at the service behind its proxy, at llama.cpp's server and at `transformers serve`.

The same model, lengths and number of users for all; greedy, and no answer ends before its length. Every server is
loaded once and held still but in its own turns. One that cannot be installed, does not come up or cannot be measured is
a line with its reason. Knows the order of turns; what a tool and a server are stands elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from benches import peer_process
from benches.api_guidellm import run_guidellm
from benches.api_locust import run_locust
from benches.api_run import ToolRun, pooled_figures
from benches.api_served import Served, starters
from benches.api_tool import Load, Tool
from benches.figures import median, table
from benches.peer_contender import OURS
from benches.peer_environments import GUIDELLM, LOCUST, PeerPackage
from benches.peer_weights import checkpoint_folder
from benches.peer_workloads import Workload
from benches.peers import MAX_OTHERS_SHARE
from benches.real_model import load_tokenizer, prepare_image
from benches.service import BenchError, cpu_seconds
from benches.streams import make_request, run_streams
from inference_api.config import Settings
from inference_api.errors import InferenceApiError
from inference_api.model_image import ModelImage
from inference_api.server.tokenizer import Tokenizer

TOOLS: Mapping[str, PeerPackage] = {"guidellm": GUIDELLM, "locust": LOCUST}
WARM_PROMPT = "count"
FIGURES = (
    "tokens_per_second",
    *("first_token_ms_p50", "first_token_ms_p95", "inter_token_ms_p50", "inter_token_ms_p95"),
    *("latency_ms_p50", "latency_ms_p95", "requests", "errors"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much a run measures; `install` says whether pip may run, `context_tokens` holds the longest request."""

    load: Load
    rounds: int
    context_tokens: int
    install: bool = True


SIZES = {
    "full": Size(Load(num_requests=32, num_users=8, prompt_tokens=128, answer_tokens=64), 3, 512),
    "quick": Size(Load(num_requests=8, num_users=4, prompt_tokens=64, answer_tokens=16), 1, 512),
    "tiny": Size(Load(num_requests=2, num_users=2, prompt_tokens=8, answer_tokens=4), 1, 96, install=False),
}


def run(size_name: str, peers_folder: Path | None = None) -> dict[str, object]:
    """Load all servers, let each tool at them in turns; return the figures and print a table."""
    size, image = SIZES[size_name], ModelImage.open(prepare_image())
    folder = (peers_folder or Settings.from_environ().cache_path / "peers").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lengths = {"context_tokens": size.context_tokens, "answer_tokens": size.load.answer_tokens}
    with contextlib.ExitStack() as stack:
        field = LoadField(stack, size.load, checkpoint_folder(folder / "checkpoints", image))
        for name, package in TOOLS.items():
            field.add_tool(name, package, folder, install=size.install)
        servers = starters(folder, image, install=size.install, **lengths) if field.tools else {}
        for name, start in servers.items():
            field.add_server(name, start)
        tokenizer = load_tokenizer(image.path)
        for round_number in range(size.rounds):
            field.take_turns(round_number, tokenizer)
        figures = field.figures()
    print(load_table(figures))
    return {
        "load": dataclasses.asdict(size.load),
        "rounds": size.rounds,
        "versions": {package.name: package.version for package in TOOLS.values()},
        "tools": figures,
        "disturbed_turns": field.disturbed,
        "not_measured": field.reasons,
    }


class LoadField:
    """The tools and the servers that take part, what each turn came to, and why some are missing."""

    def __init__(self, stack: contextlib.ExitStack, load: Load, checkpoint: Path) -> None:
        self._stack = stack
        self._load = load
        self._checkpoint = checkpoint
        self._servers: dict[str, Served] = {}
        self._runs: dict[tuple[str, str], list[ToolRun]] = {}
        self.tools: dict[str, Tool] = {}
        self.reasons: dict[str, str] = {}
        self.disturbed = 0

    def add_tool(self, name: str, package: PeerPackage, folder: Path, *, install: bool) -> None:
        """Install a tool, if it is not there; blocks for pip."""
        with self._excused(name):
            self.tools[name] = Tool.install(package, folder, install=install)

    def add_server(self, name: str, start: AbstractContextManager[Served]) -> None:
        """Load a server, let it answer a first time, and hold it still; blocks."""
        print(f"starting {name}", file=sys.stderr)
        with self._excused(name):
            served = self._stack.enter_context(start)
            try:
                self._warm_up(served)
            finally:
                self._hold_still(served)
            self._servers[name] = served

    def take_turns(self, round_number: int, tokenizer: Tokenizer) -> None:
        """Let each tool at everyone, one after the other; every other round the other way round."""
        lengths = (self._load.prompt_tokens,) * 2
        workload = Workload("load", self._load.num_requests, self._load.num_users, lengths, lengths)
        prompts = [job.text for job in workload.make_jobs(tokenizer, round_number)]
        runs: dict[str, Callable[[Served], ToolRun]] = {
            "guidellm": lambda at: run_guidellm(self.tools["guidellm"], at, self._load, self._checkpoint, round_number),
            "locust": lambda at: run_locust(self.tools["locust"], at, self._load, prompts),
        }
        names = list(self._servers)
        for tool in self.tools:
            for name in names if round_number % 2 == 0 else reversed(names):
                with self._excused(f"{name} by {tool}"):
                    self._take_turn(tool, self._servers[name], runs[tool])

    def figures(self) -> dict[str, dict[str, dict[str, object]]]:
        """Return by tool and server the figures of all rounds together, and our rate over each peer's."""
        figures: dict[str, dict[str, dict[str, object]]] = {tool: {} for tool in self.tools}
        for (tool, name), runs in self._runs.items():
            figures[tool][name] = dict(pooled_figures(runs))
            ours = self._runs.get((tool, OURS))
            if name != OURS and ours is not None and len(ours) == len(runs):
                rates = [_rate(a) / _rate(b) for a, b in zip(ours, runs, strict=True) if _rate(b)]
                figures[tool][name]["ours_over_it_tokens_per_second"] = median(rates, 3) if rates else None
        return figures

    def _warm_up(self, served: Served) -> None:
        body = {"model": served.model, "prompt": WARM_PROMPT, "max_tokens": self._load.answer_tokens, "stream": True}
        request = make_request(served.target, "/v1/completions", {**body, **served.members})
        for recording in run_streams(served.target, [request] * self._load.num_users, self._load.num_users):
            recording.parse()

    def _take_turn(self, tool: str, served: Served, run_tool: Callable[[Served], ToolRun]) -> None:
        peer_process.let_go_on(served.pid)
        try:
            began, used, busy = time.monotonic(), _used_seconds(served.pid), peer_process.busy_seconds()
            run = run_tool(served)
            used, busy = _used_seconds(served.pid) - used, peer_process.busy_seconds() - busy
        finally:
            self._hold_still(served)
        others = max(0.0, busy - used) / ((time.monotonic() - began) * len(os.sched_getaffinity(0)))
        self.disturbed += others > MAX_OTHERS_SHARE
        self._runs.setdefault((tool, served.name), []).append(run)
        told = f"{_rate(run):.1f} tokens/s, {len(run.latency_ms)} answers, {run.num_errors} errors"
        print(f"{tool}, {served.name}: {told}; others {others:.0%}", file=sys.stderr)

    def _hold_still(self, served: Served) -> None:
        if served.name != OURS:  # idle it takes no time, and its watchdog would take a stop for a hang
            peer_process.hold_still(served.pid)

    @contextlib.contextmanager
    def _excused(self, name: str) -> Iterator[None]:
        """Turn the fault of a peer or a tool into a line of the result; one of our own service ends the bench."""
        try:
            yield
        except (BenchError, InferenceApiError, OSError, ValueError, subprocess.SubprocessError) as error:
            if name == OURS:
                raise
            self.reasons[name] = str(error)
            print(f"{name} is out: {error}", file=sys.stderr)


def load_table(figures: Mapping[str, Mapping[str, Mapping[str, object]]]) -> str:
    """Return a line for each tool and server."""
    lines = [
        (tool, name, *(of.get(figure, "-") for figure in FIGURES))
        for tool, servers in figures.items()
        for name, of in servers.items()
    ]
    heads = tuple(figure.replace("_ms_", " ").replace("_per_", "/").replace("_", " ") for figure in FIGURES)
    return table(("tool", "server", *heads), lines) if lines else "no load was measured"


def _rate(run: ToolRun) -> float:
    return run.num_tokens / run.seconds if run.seconds else 0.0


def _used_seconds(pid: int) -> float:
    """Return what a server's tree, this process and the tools that have ended took so far."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return peer_process.tree_seconds(pid) + cpu_seconds(os.getpid()) + ended.ru_utime + ended.ru_stime
