"""Count the requests whose ids depend on anything but themselves: on the real weights, with everything switched on.

Random requests of two tenants come and go at a scheduler and the `fused` engine: greedy and sampled, with shared
beginnings, aborts, a tight bound on the KV cache, random chunks, prefix reuse and drafts. Then each is computed alone,
by another load of the engine, in one row, with nothing to share; the ids must be equal. So it is with the model's
first layers, many times, and with the whole model. A last run has an engine that is broken on purpose, and must show.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benches.real_model import prepare_image
from inference_api.backend.admission import Admission
from inference_api.backend.decode_loop import DecodeLoop, Inbox
from inference_api.backend.engines import fused
from inference_api.backend.engines.base import Engine, PrefillBudget, StepPlan, StepResult
from inference_api.backend.scheduler import Scheduler
from inference_api.backend.step_planning import SchedulerOptions, TokenRules
from inference_api.config import Settings
from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from inference_api.messages import Abort, Message, Query, QueryKind, Snapshot, StepOutput, Submit
from inference_api.model_image import ModelImage
from inference_api.model_variant import ModelVariant
from inference_api.prepare import prepare
from inference_api.sampling_params import SamplingParams

WORKER = "worker-1"
NUM_ROWS = 32
CONTEXT_TOKENS = 256
LAYERS = 2
HISTORY_REQUESTS = 100
SHORT_SHARE = 0.8
"""Of short answers; the long ones outgrow the room that the scheduler keeps for them, so that rows are taken back."""

MIROSTAT_SHARE = 0.15
"""Of sampled requests: their draws depend on a state beside the ids, which a row that is taken back must not lose."""

SECONDS = 3600.0
SIZES = {"full": (5000, 300), "quick": (400, 40), "tiny": (30, 30)}
"""Requests at the first layers, and at the whole model."""

NO_OPTIONS = SchedulerOptions()


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A request, and the steps before which it comes and may be aborted."""

    submit: Submit
    comes_at: int
    aborted_at: int | None


class Rig:
    """A scheduler and an engine in one thread, and what came out of them."""

    def __init__(self, engine: Engine, budget: PrefillBudget, options: SchedulerOptions) -> None:
        self.ids: dict[str, list[int]] = {}
        self.metrics: dict[str, float] = {}
        self._running: set[str] = set()
        self._admission = Admission(engine.info.num_rows, HISTORY_REQUESTS, 1 << 30)
        vocab_size = engine.info.vocab_size
        rules = TokenRules([bytes([token_id % 256]) for token_id in range(vocab_size)], frozenset({0}))
        self._inbox = Inbox()
        scheduler = Scheduler(engine.info, rules, self._admission, budget, options)
        self._loop = DecodeLoop(scheduler, engine, self._inbox, self, now=lambda: 0.0)

    def send(self, worker: str, message: Message) -> None:  # noqa: ARG002 - the loop's protocol
        """Take what a step made."""
        if isinstance(message, StepOutput):
            for output in message.outputs:
                self.ids[output.session_id] += output.token_ids
                if output.finished is not None:
                    self._running.discard(output.session_id)
        elif isinstance(message, Snapshot):
            self.metrics = message.metrics

    def submit(self, submit: Submit) -> None:
        """Queue a request."""
        self.ids[submit.session_id] = []
        self._running.add(submit.session_id)
        self._admission.take(len(submit.token_ids))
        self._inbox.put(WORKER, submit)

    def play(self, requests: list[Request]) -> None:
        """Let every request come, be aborted, and run to its end; then read the figures."""
        step = 0
        last = max(max(request.comes_at, request.aborted_at or 0) for request in requests)
        while self._running or step <= last:
            for request in requests:
                if request.comes_at == step:
                    self.submit(request.submit)
                if request.aborted_at == step:
                    self._inbox.put(WORKER, Abort(request.submit.request_id, request.submit.tenant))
            self._inbox.wake()
            self._loop.step()
            step += 1
        self._inbox.put(WORKER, Query(1, QueryKind.METRICS))
        self._loop.step()


class Broken:
    """An engine that mistakes an id where other rows run beside."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.info = engine.info
        self.release = engine.release
        self.scrub = engine.scrub

    def execute(self, plan: StepPlan) -> StepResult:
        """Change an id of every fourth row now and then, but only in company."""
        rows = tuple(
            dataclasses.replace(row, token_ids=(*row.token_ids[:-1], (row.token_ids[-1] + 1) % self.info.vocab_size))
            if row.row % 4 == 3 and row.start % 7 == 6 and len(plan.rows) > 1
            else row
            for row in plan.rows
        )
        return self._engine.execute(StepPlan(rows))


def run(size_name: str) -> dict[str, object]:
    """Count at the first layers, at the whole model, and with the broken engine."""
    num_cut, num_whole = SIZES[size_name]
    settings = Settings.from_environ()
    whole = ModelImage.open(prepare_image())
    variant = ModelVariant(layers=LAYERS)
    cut = prepare(settings.model or None, settings.cache_path, print_line, variant=variant)
    figures: dict[str, object] = {"layers": LAYERS, "rows": NUM_ROWS}
    figures["first_layers"] = _count(settings, cut, num_cut, lambda engine: engine)
    figures["whole_model"] = _count(settings, whole, num_whole, lambda engine: engine)
    figures["broken_on_purpose"] = _count(settings, cut, min(num_cut, HISTORY_REQUESTS), Broken)
    return figures


def print_line(line: str) -> None:
    """Tell how far the preparation is."""
    print(line, file=sys.stderr)


def _count(
    settings: Settings, image: ModelImage, num_requests: int, change: Callable[[Engine], Engine]
) -> dict[str, float]:
    """Play histories of requests; return how many there were, and how many got other ids than alone."""
    together, apart = (_load(settings, image, num_rows) for num_rows in (NUM_ROWS, 1))
    totals: Counter[str] = Counter()
    for seed in range(0, num_requests, HISTORY_REQUESTS):
        chance = random.Random(seed)
        requests = _requests(chance, min(HISTORY_REQUESTS, num_requests - seed), image.vocab_size)
        chunk = chance.randint(5, 90)
        options = SchedulerOptions(chance.choice([0, 500, 900]), prefix_reuse=True, draft_tokens=4)
        rig = Rig(change(together), PrefillBudget(chunk, 2 * chunk), options)
        rig.play(requests)
        for request in requests:
            totals["requests"] += 1
            totals["differing"] += not _is_as_alone(apart, request, rig.ids[request.submit.session_id], chance)
        for name in ("completion_tokens", "prefix_hits", "preemptions", "accepted_draft_tokens"):
            totals[name] += int(rig.metrics.get(name, 0))
        print(f"{image.name} {image.variant}: {dict(totals)}", file=sys.stderr)
    return dict(totals)


def _load(settings: Settings, image: ModelImage, num_rows: int) -> Engine:
    folder: Path = settings.cache_path / ARTEFACTS_FOLDER
    context_tokens = min(CONTEXT_TOKENS, image.context_tokens)
    threads = settings.torch_threads
    return fused.load(image, num_rows=num_rows, context_tokens=context_tokens, build_folder=folder, num_threads=threads)


def _is_as_alone(engine: Engine, request: Request, found: list[int], chance: random.Random) -> bool:
    chunk = chance.randint(5, 200)
    rig = Rig(engine, PrefillBudget(chunk, chunk), NO_OPTIONS)
    rig.play([dataclasses.replace(request, comes_at=0, aborted_at=None)])
    alone = rig.ids[request.submit.session_id]
    return found == (alone if request.aborted_at is None else alone[: len(found)])


def _requests(chance: random.Random, count: int, vocab_size: int) -> list[Request]:
    """Draw requests that share much of their beginnings, as the turns of a few conversations do."""
    stems = [[chance.randrange(1, vocab_size) for _ in range(60)] for _ in range(4)]
    requests = []
    for number in range(count):
        own = [chance.randrange(1, vocab_size) for _ in range(chance.randint(1, 30))]
        prompt = chance.choice(stems)[: chance.randint(0, 60)] + own
        comes_at = chance.randint(0, 60)
        aborted_at = comes_at + chance.randint(1, 60) if chance.random() < 0.1 else None
        requests.append(Request(_submit(chance, str(number), prompt), comes_at, aborted_at))
    return requests


def _submit(chance: random.Random, name: str, prompt: list[int]) -> Submit:
    greedy = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    sampled = SamplingParams(
        temperature=chance.choice([0.5, 1.0, 1.5]),
        top_k=chance.choice([0, 5, 40]),
        top_p=chance.choice([0.7, 0.95, 1.0]),
        seed=chance.randrange(1 << 62),
        repetition_penalty=chance.choice([1.0, 1.0, 1.2]),
        min_p=chance.choice([0.0, 0.0, 0.05]),
        dry_multiplier=chance.choice([0.0, 0.0, 0.8]),
        dry_sequence_breakers=chance.choice([(), (b"\n", b".")]),
        xtc_probability=chance.choice([0.0, 0.0, 0.5]),
        top_n_sigma=chance.choice([0.0, 0.0, 1.5]),
    )
    if chance.random() < MIROSTAT_SHARE:
        sampled = SamplingParams(1.0, 0, 1.0, chance.randrange(1 << 62), mirostat=chance.choice([1, 2]))
    return Submit(
        name,
        name,
        chance.choice(["alpha", "alpha", "beta"]),
        prompt,
        len(prompt),
        chance.randint(1, 40) if chance.random() < SHORT_SHARE else chance.randint(80, 150),
        greedy if chance.random() < 0.5 else sampled,
        [],
        SECONDS,
        SECONDS,
        SECONDS,
    )
