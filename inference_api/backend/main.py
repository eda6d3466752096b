"""Start PROCESS 2: load the engine, warm it up, serve until told to stop.

The main thread is the decode thread. The supervisor passes two descriptors: the listening socket that the workers
connect to, and its own end of the control channel. Death of the supervisor ends this process. A model that cannot be
loaded is told to the supervisor as Fatal, because a restart would not help.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from inference_api.backend.admission import Admission
from inference_api.backend.decode_loop import DecodeLoop, Inbox, check_engine
from inference_api.backend.engine_choice import EngineChoice, build_obstacle, choose_engine
from inference_api.backend.engines.base import Engine
from inference_api.backend.grammar_queue import GrammarQueue
from inference_api.backend.grammars import GrammarCompiler
from inference_api.backend.idempotency import IdempotencyRecords
from inference_api.backend.inbox_messages import MaskReady
from inference_api.backend.intake import Intake
from inference_api.backend.mask_lanes import MaskLanes
from inference_api.backend.memory import check_memory, free_bytes, one_line_shortage
from inference_api.backend.scheduler import Scheduler
from inference_api.backend.session_trace import TracedInbox, TracedOutbox
from inference_api.backend.step_planning import SchedulerOptions, TokenRules
from inference_api.backend.warmup import warm_up
from inference_api.config import Settings
from inference_api.debug_log import DebugLog, StackTrace
from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from inference_api.errors import InferenceApiError, SettingError
from inference_api.logs import set_up_logging
from inference_api.messages import Drained, ErrorInfo, Failed, Fatal, Heartbeat, Loading, Ready
from inference_api.model_image import ModelImage

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
"""The supervisor hears from the decode thread no more often than this."""

HUNG_SHARE = 0.8
"""Share of the watchdog's time after which the debug mode writes down where a hung backend is: before its SIGKILL."""


def main() -> int:
    """Run the backend; return its exit status."""
    arguments = _parse_arguments()
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = Settings.from_environ()
    # No text of a request ever comes here, so that an error may be quoted.
    set_up_logging(settings, "backend", quote_errors=True)
    backend = Backend(settings, socket.socket(fileno=arguments.listen_fd), socket.socket(fileno=arguments.control_fd))
    return backend.run()


class Backend:
    """Wire intake, scheduler, engine and loop together, and run them."""

    def __init__(self, settings: Settings, listener: socket.socket, control: socket.socket) -> None:
        self._settings = settings
        self._stop = threading.Event()
        self._admission = Admission(settings.rows, settings.queue_requests, settings.queue_tokens)
        self._debug_log: DebugLog | None = None
        self._stack_trace: StackTrace | None = None
        self._inbox = Inbox()
        if settings.backend_debug:
            self._debug_log = DebugLog(settings.debug_logs_path, f"backend-{settings.port}")
            self._stack_trace = StackTrace(settings.debug_logs_path, settings.port)
            self._inbox = TracedInbox(self._debug_log)
        self._heartbeat_at = time.monotonic()
        self._reported_at = 0.0
        self._drained = False
        self._exit_status = 0
        self._intake = Intake(
            listener,
            control,
            self._admission,
            self._inbox,
            lambda: time.monotonic() - self._heartbeat_at,
            self._on_stop,
        )

    def run(self) -> int:
        """Load, warm up, serve; return the exit status: 0 when told to stop, 1 after a failure."""
        self._intake.start()
        try:
            return self._load_and_serve()
        except Exception as error:
            logger.exception("the engine failed; this backend ends")
            if self._stack_trace is not None:
                self._stack_trace.write(error)
            self._intake.broadcast(Failed(ErrorInfo("backend_lost", "The decode backend failed.")))
            return 1
        finally:
            self._intake.close()
            if self._stack_trace is not None:
                self._stack_trace.close()

    def _load_and_serve(self) -> int:
        try:
            loop = self._load()
        except InferenceApiError as error:
            self._intake.report(Fatal(ErrorInfo(error.code, str(error))))
            return 1
        self._expect_step()
        while not self._stop.is_set():
            loop.step()
            loop.check_idle_engine(self._settings.idle_check_seconds)
            self._report(loop)
        return self._exit_status

    def _load(self) -> DecodeLoop:
        settings = self._settings
        began = time.monotonic()
        image = ModelImage.open(settings.image_link.resolve())
        context_tokens = min(settings.context_tokens, image.context_tokens)
        choice = choose_engine(settings, image, build_obstacle)
        _log_choice(choice)
        needed_bytes = choice.needed_bytes(image, settings.rows, context_tokens)
        check_memory(needed_bytes, free_bytes(), settings.rows, context_tokens)
        self._report_stage("loading the weights", began)
        with one_line_shortage(settings.rows, context_tokens):
            engine = load_engine(settings, image, context_tokens, choice)
        self._report_stage("warming up", began)
        with _reason_beside(choice):
            budget = warm_up(engine, settings.prefill_chunk_tokens, settings.watchdog_seconds)
        check_engine(engine)
        logger.info("prefill budget: %d to %d tokens a step", budget.beside_tokens, budget.alone_tokens)
        # Special ids have no text: the server skips them, so a stop sequence cannot match in them either.
        text_bytes = [b"" if token_id in image.special_ids else text for token_id, text in enumerate(image.token_bytes)]
        rules = TokenRules(text_bytes, image.stop_ids)
        options = SchedulerOptions(
            settings.kv_tokens,
            settings.prefix_reuse,
            settings.draft_tokens,
            settings.batch_window_seconds,
            settings.batch_max_requests,
        )
        scheduler = Scheduler(engine.info, rules, self._admission, budget, options)
        outbox = self._intake if self._debug_log is None else TracedOutbox(self._intake, self._debug_log)
        loop = DecodeLoop(scheduler, engine, self._inbox, outbox, scrubs=settings.scrub_rows)
        self._heartbeat_at = loop.heartbeat_at
        compiler = GrammarCompiler(image, takes_lark=settings.lark_grammars)
        lanes = MaskLanes(lambda: self._inbox.put("", MaskReady()))
        grammars = GrammarQueue(
            lambda *grammar: lanes.ahead(compiler.compile(*grammar)), settings.grammar_seconds, self._intake.wake
        )
        keys = IdempotencyRecords(settings.idempotency_seconds)
        self._intake.start_serving(ready_message(engine, image.variant, choice.reason), grammars, keys)
        return loop

    def _report(self, loop: DecodeLoop) -> None:
        """Tell the supervisor that a step is done, and that nothing is left after a drain."""
        self._heartbeat_at = loop.heartbeat_at
        if loop.heartbeat_at - self._reported_at >= HEARTBEAT_SECONDS:
            self._reported_at = loop.heartbeat_at
            self._intake.report(Heartbeat())
            self._expect_step()
        if self._admission.draining and not self._drained and self._admission.num_requests == 0:
            self._drained = True
            self._intake.report(Drained())

    def _expect_step(self) -> None:
        """In the debug mode, have it written down where a backend hangs, shortly before the watchdog kills it."""
        if self._stack_trace is not None:
            self._stack_trace.expect_step(HUNG_SHARE * self._settings.watchdog_seconds)

    def _report_stage(self, stage: str, began: float) -> None:
        """Tell the supervisor what begins now."""
        self._intake.report(Loading(stage, round(time.monotonic() - began, 3)))

    def _on_stop(self, exit_status: int) -> None:
        self._exit_status = exit_status
        self._stop.set()
        self._inbox.wake()


def load_engine(
    settings: Settings, image: ModelImage, context_tokens: int, choice: EngineChoice | None = None
) -> Engine:
    """Load the engine that was chosen, or is chosen now; the import is here so that the mock needs no torch."""
    choice = choice or choose_engine(settings, image, build_obstacle)
    if choice.engine == "mock":
        from inference_api.backend.engines import mock

        script = mock.MockScript.parse(settings.mock_mode, settings.mock_tokens_per_second, settings.mock_faults)
        return mock.load(image, num_rows=settings.rows, context_tokens=context_tokens, script=script)
    if choice.engine == "fused":
        return _load_fused(settings, image, context_tokens, choice.native)
    from inference_api.backend.engines.transformers import load

    return load(image, num_rows=settings.rows, context_tokens=context_tokens, num_threads=settings.torch_threads)


def _load_fused(settings: Settings, image: ModelImage, context_tokens: int, native: bool) -> Engine:
    from inference_api.backend.engines import fused

    engine = fused.load(
        image,
        num_rows=settings.rows,
        context_tokens=context_tokens,
        build_folder=settings.cache_path / ARTEFACTS_FOLDER,
        num_threads=settings.torch_threads,
        native=native,
    )
    if native:
        fused.leave_processors_to_the_library()
    return engine


def _log_choice(choice: EngineChoice) -> None:
    """Log which engine starts; what slows it down unasked is a warning, for nothing before the card tells."""
    reason = f", because {choice.reason}" if choice.reason else ""
    if _is_fallback(choice):
        logger.warning("engine %s in torch, some thirty times slower%s", choice.engine, reason)
    else:
        logger.info("engine %s%s", choice.engine, reason)


def _is_fallback(choice: EngineChoice) -> bool:
    return choice.engine == "fused" and not choice.native


@contextlib.contextmanager
def _reason_beside(choice: EngineChoice) -> Iterator[None]:
    """Let the refusal of a slow engine say why that one was taken: this is what its reader can mend."""
    try:
        yield
    except SettingError as error:
        if not _is_fallback(choice):
            raise
        raise SettingError(f"{error}; the engine computes in torch, because {choice.reason}") from error


def ready_message(engine: Engine, variant: str, reason: str = "") -> Ready:
    """Describe a warm engine and its model's variant to the workers and the supervisor, under a fresh incarnation.

    `reason` says why the engine or its path is not the fastest.
    """
    info = engine.info
    return Ready(
        incarnation=secrets.token_hex(8),
        digest=info.digest,
        model=info.model,
        engine=info.engine,
        device=f"{info.device}, because {reason}" if reason else info.device,
        num_rows=info.num_rows,
        context_tokens=info.context_tokens,
        row_independent=info.row_independent,
        embedding_size=info.embedding_size,
        variant=variant,
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The decode backend; started by the supervisor.")
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
