"""Set this service beside other servers on the same machine with the same weights, in turns: A B A B.

Every contender is loaded once and held still but in its own turn; the figures are medians over rounds, from client
sockets wherever a peer has HTTP. A peer that cannot be installed, does not come up or breaks is a line with its reason,
and the others go on. Knows what is compared, not how a peer is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benches import peer_llama, peer_openvino, peer_ours, peer_process, peer_vllm
from benches.figures import ROOT
from benches.peer_bound import ModelSizes, bound_tokens_per_second
from benches.peer_comparison import comparison_table, ratios
from benches.peer_contender import ENGINE, OURS, Contender, PeerJob
from benches.peer_environments import LLAMA, OPENVINO, VLLM
from benches.peer_workloads import Admission, Turn, Workload, medians
from benches.real_model import load_tokenizer, prepare_image
from benches.service import BenchError, cpu_seconds, ending_with_this_process
from inference_api.config import Settings
from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from inference_api.errors import InferenceApiError
from inference_api.model_image import ModelImage
from inference_api.server.tokenizer import Tokenizer

NUM_ROWS = 32
MAX_OTHERS_SHARE = 0.1
"""Of the processors; a turn beside which others took more is counted as disturbed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much a run measures; `left_out` are peers that it does not start, `install` says whether pip may run."""

    rounds: int
    workloads: tuple[Workload, ...]
    admission: Admission
    warm_tokens: int
    context_tokens: int
    left_out: tuple[str, ...] = ()
    install: bool = True


SIZES = {
    "full": Size(
        rounds=3,
        workloads=(
            Workload.fixed(32, 128, 128),
            Workload("mixed", 64, 32, (16, 400), (32, 256)),
            Workload.fixed(1, 128, 128),
            Workload.fixed(8, 128, 128),
            Workload.one_prompt(1000),
        ),
        admission=Admission(31, 64, 400, 4, 1000),
        warm_tokens=16,
        context_tokens=1280,
    ),
    "quick": Size(
        rounds=1,
        workloads=(Workload.fixed(32, 128, 32), Workload.fixed(1, 128, 64), Workload.one_prompt(1000)),
        admission=Admission(31, 64, 160, 2, 1000),
        warm_tokens=4,
        context_tokens=1280,
        left_out=("vllm_fp32",),
    ),
    "tiny": Size(
        rounds=1,
        workloads=(Workload.fixed(2, 8, 4), Workload.one_prompt(40)),
        admission=Admission(2, 8, 40, 1, 40),
        warm_tokens=1,
        context_tokens=96,
        install=False,
    ),
}


def run(size_name: str, peers_folder: Path | None = None) -> dict[str, object]:
    """Load all contenders, let them take turns, and return the figures; `peers_folder` holds the environments."""
    size, image = SIZES[size_name], ModelImage.open(prepare_image())
    folder = (peers_folder or Settings.from_environ().cache_path / "peers").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(image.path)
    with contextlib.ExitStack() as stack:
        field = Field(stack, tokenizer, size)
        log, context_tokens = folder / "engine.log", size.context_tokens
        field.add(OURS, lambda: peer_ours.running_ours(context_tokens=context_tokens))
        field.add(ENGINE, lambda: peer_ours.running_engine(image, log, context_tokens=context_tokens))
        for name, start in _peers(folder, image, size).items():
            field.add(name, start)
        peaks = _play_rounds(field, size)
        admission = field.admit(size.admission)
        peaks.append(_measure_peaks())
        best = {name: max(measured[name] for measured in peaks) for name in peaks[0]}
        sizes = ModelSizes.read(image.config_path)
        workloads = {workload.name: field.summary(workload) for workload in size.workloads}
        efficiency = {workload.name: field.efficiency(workload, sizes, best) for workload in size.workloads}
        print(comparison_table(workloads, efficiency, admission, field.memory))
        return {
            "rounds": size.rounds,
            "versions": {package.name: package.version for package in (OPENVINO, LLAMA, VLLM)},
            "machine_peaks": {name: round(rate / 1e9, 1) for name, rate in best.items()},
            "workloads": workloads,
            "ratios": {name: ratios(summary) for name, summary in workloads.items()},
            "efficiency": efficiency,
            f"admission_of_{size.admission.prompt_tokens}_beside_{size.admission.num_rows}_rows": admission,
            "memory_mib": field.memory,
            "disturbed_turns": field.disturbed,
            "not_measured": field.reasons,
        }


def _play_rounds(field: Field, size: Size) -> list[dict[str, float]]:
    """Let everyone take their turns in all rounds; return the machine's peaks, measured before each."""
    peaks = []
    for round_number in range(size.rounds):
        peaks.append(_measure_peaks())
        for workload in size.workloads:
            field.take_turns(workload, round_number)
    return peaks


def _measure_peaks() -> dict[str, float]:
    build_folder, threads = Settings.from_environ().cache_path / ARTEFACTS_FOLDER, len(os.sched_getaffinity(0))
    command = ending_with_this_process(["-m", "benches.peer_peaks", str(build_folder), str(threads)])
    measured = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, process_group=0)
    if measured.returncode:
        raise BenchError("the machine's peaks could not be measured; the message stands above")
    rates: dict[str, float] = json.loads(measured.stdout)
    return rates


Start = Callable[[], AbstractContextManager[Contender]]


def _peers(folder: Path, image: ModelImage, size: Size) -> dict[str, Start]:
    install, context_tokens = size.install, size.context_tokens
    rows = {"num_rows": NUM_ROWS, "context_tokens": context_tokens}
    return {
        "openvino_q8_0": lambda: peer_openvino.running_openvino(folder, num_rows=NUM_ROWS, install=install),
        "llama_q4_0": lambda: peer_llama.running_llama("Q4_0", folder, install=install, **rows),
        "llama_q8_0": lambda: peer_llama.running_llama("Q8_0", folder, install=install, **rows),
        "vllm_fp32": lambda: peer_vllm.running_vllm(folder, image, install=install, **rows),
    }


class Field:
    """Everyone who takes part: what is loaded, what each has done so far, and why some are missing."""

    def __init__(self, stack: contextlib.ExitStack, tokenizer: Tokenizer, size: Size) -> None:
        self._stack = stack
        self._tokenizer = tokenizer
        self._size = size
        self._contenders: dict[str, Contender] = {}
        self._turns: dict[tuple[str, str], list[dict[str, float]]] = {}
        self.memory: dict[str, float] = {}
        self.reasons: dict[str, str] = {}
        self.disturbed = 0

    def add(self, name: str, start: Start) -> None:
        """Load a contender, let it take a first short turn that is not counted, and hold it still; blocks."""
        if name in self._size.left_out:
            self.reasons[name] = "left out of this size: its start alone takes minutes"
            return
        print(f"starting {name}", file=sys.stderr)
        workload = self._size.workloads[0]
        warming = dataclasses.replace(workload, name="warm", answer=(self._size.warm_tokens,) * 2)
        with self._excused(name):
            self._contenders[name] = self._stack.enter_context(start())
            self._serve(name, warming.make_jobs(self._tokenizer, 0), workload.num_users)
            self._hold_still(name)

    def take_turns(self, workload: Workload, round_number: int) -> None:
        """Let everyone serve the same jobs, one after the other; every other round the other way round."""
        jobs = workload.make_jobs(self._tokenizer, round_number)
        names = list(self._contenders)
        for name in names if round_number % 2 == 0 else reversed(names):
            with self._excused(name):
                figures = self._serve(name, jobs, workload.num_users).figures(workload)
                self.memory[name] = max(self.memory.get(name, 0.0), peer_process.memory_mib(self._contenders[name].pid))
                self._hold_still(name)
                self._turns.setdefault((workload.name, name), []).append(figures)
                self.disturbed += figures["others_share"] > MAX_OTHERS_SHARE
                print(f"{workload.name}, {name}: {_progress(workload, figures)}", file=sys.stderr)

    def admit(self, admission: Admission) -> dict[str, float]:
        """Let our service admit long prompts while its rows decode, and return their gaps."""
        turn = self._serve(OURS, admission.make_jobs(self._tokenizer), admission.num_rows + 1)
        return {name: round(figure, 2) for name, figure in admission.figures(turn.timelines).items()}

    def summary(self, workload: Workload) -> dict[str, dict[str, float]]:
        """Return everyone's medians in a workload."""
        return {name: medians(turns) for (served, name), turns in self._turns.items() if served == workload.name}

    def efficiency(self, workload: Workload, sizes: ModelSizes, peaks: Mapping[str, float]) -> dict[str, float]:
        """Return the service's rate over its engine's, and for fixed lengths the engine's over the machine's bound."""
        summary = self.summary(workload)
        engine, ours = (summary[name]["tokens_per_second"] for name in (ENGINE, OURS))
        shares = {"http_over_engine": round(ours / engine, 3)}
        if workload.is_fixed:
            bound = bound_tokens_per_second(workload, sizes, peaks)
            shares |= {"bound_tokens_per_second": round(bound, 1), "engine_over_bound": round(engine / bound, 3)}
        return shares

    def _serve(self, name: str, jobs: Sequence[PeerJob], num_users: int) -> Turn:
        contender = self._contenders[name]
        if _may_be_held(name):
            peer_process.let_go_on(contender.pid)
        began, used, busy = time.monotonic(), _used_seconds(contender.pid), peer_process.busy_seconds()
        timelines = contender.serve(jobs, num_users)
        used, busy = _used_seconds(contender.pid) - used, peer_process.busy_seconds() - busy
        available = (time.monotonic() - began) * len(os.sched_getaffinity(0))
        return Turn(timelines, round(min(1.0, max(0.0, busy - used) / available), 3))

    def _hold_still(self, name: str) -> None:
        if _may_be_held(name):
            peer_process.hold_still(self._contenders[name].pid)

    @contextlib.contextmanager
    def _excused(self, name: str) -> Iterator[None]:
        """Turn a peer's fault into a line of the result; a fault of our own ends the bench."""
        try:
            yield
        except (BenchError, InferenceApiError, OSError, ValueError, subprocess.SubprocessError) as error:
            if name in (OURS, ENGINE):
                raise
            self.reasons[name] = str(error)
            if self._contenders.get(name) is not None:
                peer_process.hold_still(self._contenders.pop(name).pid)
            print(f"{name} is out: {error}", file=sys.stderr)


def _may_be_held(name: str) -> bool:
    """Our own service is never stopped: idle it takes no time, and its watchdog would take a stop for a hang."""
    return name != OURS


def _used_seconds(pid: int) -> float:
    return peer_process.tree_seconds(pid) + cpu_seconds(os.getpid())


def _progress(workload: Workload, figures: Mapping[str, float]) -> str:
    """Say what a turn came to in a line: the rate of what the workload is there for, and who else was at work."""
    if workload.is_prompt_alone:
        rate = f"{figures['prefill_tokens_per_second']:.1f} prompt tokens/s"
    else:
        rate = f"{figures['tokens_per_second']:.1f} output tokens/s"
    return f"{rate}; others {figures['others_share']:.0%}"
