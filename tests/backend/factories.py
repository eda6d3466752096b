"""Make submits and a small backend for the tests: scheduler, admission and mock engine, stepped by hand.

Time is a field that the test moves. Every step checks what must hold of any step: rows ascend, the engine's plan fits
what it holds, indices follow on each other, and no session says anything after its end.
"""

from __future__ import annotations

import collections
from pathlib import Path

import msgspec

from inference_api.backend.admission import Admission
from inference_api.backend.engines.base import EMPTY_RESULT, EngineInfo, PrefillBudget, StepPlan, StepResult
from inference_api.backend.engines.mock import MockEngine, MockScript
from inference_api.backend.inbox_messages import WorkerGone
from inference_api.backend.scheduler import Scheduler
from inference_api.backend.step_planning import SchedulerOptions, TokenRules
from inference_api.messages import (
    Abort,
    Finished,
    Query,
    QueryKind,
    RefusalReason,
    RequestView,
    Snapshot,
    StepOutput,
    Submit,
)
from inference_api.model_image import MOCK_SPECIALS, ModelImage
from inference_api.sampling_params import SamplingParams, TokenLogprobs

WORKER = "worker-1"
EOS_ID = 256
NOISE = MockScript("noise")
ECHO = MockScript("echo")
DIGITS = MockScript("digits")
START_SECONDS = 1000.0


def make_image(context_tokens: int = 2048) -> ModelImage:
    """Return the mock's byte-level image without a folder."""
    token_bytes = [bytes([byte]) for byte in range(256)] + [text.encode() for text in MOCK_SPECIALS]
    return ModelImage(
        path=Path(),
        name="mock",
        architecture="mock",
        context_tokens=context_tokens,
        vocab_size=len(token_bytes),
        token_bytes=token_bytes,
        stop_ids=frozenset({EOS_ID, 258}),
        special_ids=frozenset({256, 257, 258}),
        chat_template=None,
        bos_text="",
        eos_text=MOCK_SPECIALS[2],
        digest="0" * 64,
        weight_bytes=0,
        kv_bytes_per_token=0,
    )


def make_submit(session_id: str, prompt: bytes = b"hello", *, seed: int = 7, **changes: object) -> Submit:
    """Return a Submit of `prompt` with generous limits; `changes` replace fields."""
    submit = Submit(
        session_id=session_id,
        request_id=f"req-{session_id}",
        tenant="alpha",
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        max_tokens=4,
        sampling=SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=seed),
        stop_sequences=[],
        queue_seconds=60.0,
        first_token_seconds=120.0,
        total_seconds=600.0,
    )
    return msgspec.structs.replace(submit, **changes)


class ScriptedEngine:
    """Answer each sampling row from a script of StepResult makers, for what the mock never does."""

    def __init__(self, inner: MockEngine, answer: object) -> None:
        self._inner = inner
        self._answer = answer

    @property
    def info(self) -> EngineInfo:
        return self._inner.info

    def execute(self, plan: StepPlan) -> StepResult:
        self._inner.execute(plan)
        return self._answer(plan)

    def release(self, row: int) -> None:
        self._inner.release(row)


class Rig:
    """A backend without threads. `ids` and `ends` hold what came out, by session."""

    def __init__(
        self,
        num_rows: int = 4,
        *,
        script: MockScript = NOISE,
        context_tokens: int = 256,
        queue: tuple[int, int] = (8, 65536),
        budget: tuple[int, int] = (64, 512),
        options: SchedulerOptions | None = None,
    ) -> None:
        image = make_image()
        self.now = START_SECONDS
        self.admission = Admission(num_rows, *queue)
        self.engine = MockEngine(image, num_rows, context_tokens, script)
        rules = TokenRules(image.token_bytes, image.stop_ids)
        self.scheduler = Scheduler(self.engine.info, rules, self.admission, PrefillBudget(*budget), options)
        self.ids: dict[str, list[int]] = collections.defaultdict(list)
        self.ends: dict[str, Finished] = {}
        self.scores: dict[str, list[TokenLogprobs]] = collections.defaultdict(list)
        self.rows: dict[str, set[tuple[int, int]]] = collections.defaultdict(set)
        self.steps: list[dict[str, StepOutput]] = []
        self.plans: list[StepPlan] = []
        self._known: dict[str, int] = {}

    def submit(self, session_id: str, prompt: bytes = b"hello", *, worker: str = WORKER, **changes: object) -> None:
        """Take a place and hand the Submit over."""
        assert self.offer(session_id, prompt, worker=worker, **changes)

    def offer(self, session_id: str, prompt: bytes, *, worker: str = WORKER, **changes: object) -> bool:
        """Hand the Submit over if there is a place for it; return False if not."""
        submit = make_submit(session_id, prompt, **changes)
        if isinstance(self.admission.take(len(submit.token_ids)), RefusalReason):
            return False
        self._known[session_id] = len(submit.token_ids) - submit.num_prompt_tokens
        self.apply(submit, worker)
        return True

    def apply(self, message: Submit | Abort | Query | WorkerGone, worker: str = WORKER) -> None:
        """Let the scheduler take in one message now."""
        self.scheduler.apply([(worker, message)], self.now)

    def abort(self, session_id: str, tenant: str = "alpha") -> None:
        """Abort the request of a session."""
        self.apply(Abort(f"req-{session_id}", tenant))

    def step(self, seconds: float = 0.0) -> StepPlan:
        """Let time pass, then take one step; return its plan."""
        self.now += seconds
        self.scheduler.apply([], self.now)
        self._release()
        plan = self.scheduler.schedule(self.now)
        row_indices = [row.row for row in plan.rows]
        assert row_indices == sorted(set(row_indices))
        result = self.engine.execute(plan) if plan.rows else EMPTY_RESULT
        if plan.rows:
            self.plans.append(plan)
        outputs = self.scheduler.update(plan, result, self.now)
        self._release()
        self._record(outputs)
        return plan

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if self.scheduler.is_empty:
                return
            self.step()
        raise AssertionError(f"not empty after {max_steps} steps")

    def query(self, kind: QueryKind = QueryKind.ROWS, tenant: str = "alpha", request_id: str = "") -> Snapshot:
        """Ask for a Snapshot and return it."""
        self.apply(Query(1, kind, tenant, request_id))
        ((_, snapshot),) = self.scheduler.take_snapshots()
        return snapshot

    def request(self, session_id: str, tenant: str = "alpha") -> RequestView | None:
        """Return a request's view."""
        return self.query(QueryKind.REQUEST, tenant, f"req-{session_id}").request

    def text(self, session_id: str) -> bytes:
        """Return what a session said, as bytes."""
        return bytes(self.ids[session_id])

    def _release(self) -> None:
        for row in self.scheduler.take_released():
            self.engine.release(row)

    def _record(self, outputs: dict[str, StepOutput]) -> None:
        self.steps.append(outputs)
        for message in outputs.values():
            for output in message.outputs:
                session_id = output.session_id
                assert session_id not in self.ends, "an output after the end"
                assert output.index == self._known.get(session_id, 0) + len(self.ids[session_id])
                self.ids[session_id] += output.token_ids
                self.scores[session_id] += output.prompt_logprobs or []
                if output.row >= 0:
                    self.rows[session_id].add((output.row, output.epoch))
                if output.finished is not None:
                    self.ends[session_id] = output.finished


def figure(rig: Rig, name: str) -> float:
    """Return one of the scheduler's counters."""
    return rig.query(QueryKind.METRICS).metrics.get(name, 0)


def ids_alone(prompt: bytes, script: MockScript = NOISE, **changes: object) -> list[int]:
    """Return what a prompt gets where nothing is shared."""
    rig = Rig(1, script=script)
    rig.submit("alone", prompt, **changes)
    rig.run()
    return rig.ids["alone"]
