"""Hold what every route of one worker shares, and what belongs to one call.

Runs in PROCESS 1. Made once by the application factory; nothing here is module state.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from flask import g, request

from inference_api.config import Settings
from inference_api.debug_log import DebugLog
from inference_api.errors import UnknownModelError
from inference_api.messages import Submit
from inference_api.server.backend_client import BackendClient
from inference_api.server.chat_template import ChatTemplate
from inference_api.server.choices import Choices
from inference_api.server.disconnects import DisconnectWatcher
from inference_api.server.generation import Generation
from inference_api.server.generation_request import GenerationRequest, check_logprobs, draw_seed
from inference_api.server.idempotency import REPLAYED_HEADER, CallKey
from inference_api.server.output_router import OutputRouter
from inference_api.server.paced_choices import PacedChoices
from inference_api.server.session_trace import TracedGeneration
from inference_api.server.tokenizer import IncrementalDecoder, Tokenizer
from inference_api.server.tools.formats import HERMES, CallFormat
from inference_api.server.validation import NativeLimits
from inference_api.stop import TextStop
from proxy.auth import Claims


@dataclasses.dataclass(frozen=True, slots=True)
class ServerContext:
    """The parts of one worker. `model_names` are those that clients may use, the canonical one first."""

    settings: Settings
    client: BackendClient
    router: OutputRouter
    watcher: DisconnectWatcher
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    limits: NativeLimits
    model_names: tuple[str, ...]
    debug_log: DebugLog | None = None
    call_formats: tuple[CallFormat, ...] = (HERMES,)
    """How the model writes calls of functions."""

    def make_generation(
        self, prompt_ids: Sequence[int], stop_sequences: Sequence[str], *, keeps_stop: bool = False
    ) -> Generation:
        """Return a generation that decodes after `prompt_ids` and ends at a stop sequence; not started yet.

        With `keeps_stop` the stop is part of its text.
        """
        decoder = IncrementalDecoder(self.tokenizer, prompt_ids)
        text_stop = TextStop(stop_sequences, keeps_stop=keeps_stop)
        if self.debug_log is not None:
            return TracedGeneration(self.client, self.watcher, decoder, text_stop, self.debug_log)
        return Generation(self.client, self.watcher, decoder, text_stop)


@dataclasses.dataclass(slots=True)
class Call:
    """One HTTP call: its public id, who makes it, headers for the response, and what it generates, if anything."""

    request_id: str
    claims: Claims
    response_headers: dict[str, str]
    generation: Generation | Choices | None = None
    model: str | None = None
    """The served model that it names, if it names one."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    """Its Unix time in seconds; of a repetition the first call's."""
    key: CallKey | None = None
    """Its name, if it has an idempotency key; `request_id` then follows from that."""

    def draw_seed(self, seed: int | None = None) -> int:
        """Return the seed of its draws: the caller's, or one that its repetitions have too, or a random one."""
        return draw_seed(self.key.seed if seed is None and self.key is not None else seed)

    def named(self, submits: Sequence[Submit]) -> Sequence[Submit]:
        """Return what it asks of the backend, with its key on it if it has one."""
        return submits if self.key is None else self.key.named(submits, self.created)

    def note_repetition(self, created: int) -> None:
        """Take over the time of the call that this one repeats, and tell the client; 0: it repeats none."""
        if created:
            self.created = created
            self.response_headers[REPLAYED_HEADER] = "true"


def current_call() -> Call:
    """Return the call that this thread answers."""
    call: Call = g.call
    return call


def start_choices(
    requests: Sequence[GenerationRequest], context: ServerContext, *, max_open: int | None = None
) -> Choices:
    """Submit all generations of the call that this thread answers, and tell its seed; raises what a submit raises.

    With `max_open` only so many of them at a time.
    """
    call = current_call()
    check_logprobs(requests)
    runs, submits = [], []
    for generation in requests:
        for submit in generation.submits(call.request_id, call.claims.tenant, context.settings):
            stops, keeps_stop = generation.stop_sequences, generation.keeps_stop
            runs.append(context.make_generation(generation.token_ids, stops, keeps_stop=keeps_stop))
            submits.append(submit)
    if requests[0].pooling is None:
        call.response_headers["X-Inference-Seed"] = str(requests[0].sampling.seed)
    call.generation = choices = Choices(runs) if max_open is None else PacedChoices(runs, max_open)
    choices.start(call.named(submits), request.environ.get("gunicorn.socket"))
    call.note_repetition(choices.repeated_created)
    return choices


def check_model(name: str, context: ServerContext) -> None:
    """Note the model that this thread's call names; raise UnknownModelError, which lists the served, for another."""
    if name not in context.model_names:
        raise UnknownModelError(f"The model '{name[:128]}' does not exist. Served: {', '.join(context.model_names)}.")
    current_call().model = name
