"""Hold what every route of one worker shares, and what belongs to one call.

Runs in PROCESS 1. Made once by the application factory; nothing here is module state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flask import g, request

from inference_api.config import Settings
from inference_api.debug_log import DebugLog
from inference_api.errors import NotFoundError
from inference_api.server.backend_client import BackendClient
from inference_api.server.chat_template import ChatTemplate
from inference_api.server.choices import Choices
from inference_api.server.disconnects import DisconnectWatcher
from inference_api.server.generation import Generation
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.output_router import OutputRouter
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

    def make_generation(self, prompt_ids: Sequence[int], stop_sequences: Sequence[str]) -> Generation:
        """Return a generation that decodes after `prompt_ids` and ends at a stop sequence; not started yet."""
        decoder = IncrementalDecoder(self.tokenizer, prompt_ids)
        text_stop = TextStop(stop_sequences)
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


def current_call() -> Call:
    """Return the call that this thread answers."""
    call: Call = g.call
    return call


def start_choices(requests: Sequence[GenerationRequest], context: ServerContext) -> Choices:
    """Submit all generations of the call that this thread answers, and tell its seed; raises what a submit raises."""
    call = current_call()
    runs, submits = [], []
    for generation in requests:
        for submit in generation.submits(call.request_id, call.claims.tenant, context.settings):
            runs.append(context.make_generation(generation.token_ids, generation.stop_sequences))
            submits.append(submit)
    call.response_headers["X-Inference-Seed"] = str(requests[0].sampling.seed)
    call.generation = choices = Choices(runs)
    choices.start(submits, request.environ.get("gunicorn.socket"))
    return choices


def check_model(name: str, context: ServerContext) -> None:
    """Raise NotFoundError, which names those there are, for a model that is not served."""
    if name not in context.model_names:
        raise NotFoundError(f"The model '{name[:128]}' does not exist. Served: {', '.join(context.model_names)}.")
