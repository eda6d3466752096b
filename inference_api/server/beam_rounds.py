"""Ask the backend for the rounds of beam searches: each live beam is a request for one id, of the call's own tenant.

Runs in PROCESS 1, in the request's own thread. A beam's ids but the last are those of a beam before it, so that with
prefix reuse each request computes one. The requests of a round run side by side, as many as find a row and a place; if
one fails, or the client leaves, the call ends as any other. Knows no surface and no rule of the search.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from inference_api.config import Settings
from inference_api.errors import ClientLeftError, DeadlineError, GenerationError
from inference_api.messages import NO_TIMING, Finished, Submit
from inference_api.sampling_params import SamplingParams
from inference_api.server.beam import BeamOptions, BeamSearch
from inference_api.server.choices import Answer, Choices
from inference_api.server.disconnects import has_left
from inference_api.server.generation import Generation
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.paced_choices import PacedChoices


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Whose call it is."""

    request_id: str
    tenant: str
    client_socket: socket.socket | None


class BeamRounds(Choices):
    """The rounds of one call's searches, one after another; for its log line all that they made together."""

    def __init__(
        self,
        prompts: Sequence[GenerationRequest],
        options: Sequence[BeamOptions],
        settings: Settings,
        make_generation: Callable[[Sequence[int]], Generation],
        max_open: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prompts` and the options of each; `make_generation` takes the ids before the one that is asked for.

        At most `max_open` requests wait or run at a time: more would fill the queue, which belongs to others too.
        """
        super().__init__(())
        self._prompts = prompts
        self._settings = settings
        self._options = options
        self._make_generation = make_generation
        self._max_open = max_open
        self._now = now
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._has_client_left = False

    def search(self, caller: Caller) -> list[BeamSearch]:
        """Block until all searches are done; return them in the order of their prompts.

        Raises what a submit raises, DeadlineError, GenerationError and ClientLeftError.
        """
        searches = [BeamSearch(options) for options in self._options]
        began_at = self._now()
        while any(not search.is_done for search in searches):
            self._take_round(searches, caller, self._now() - began_at)
        return searches

    def _take_round(self, searches: Sequence[BeamSearch], caller: Caller, seconds_gone: float) -> None:
        if caller.client_socket is not None and has_left(caller.client_socket.fileno()):
            # Between two rounds nobody watches it.
            self._has_client_left = True
            raise ClientLeftError("The client left.")
        submits = [
            submit
            for prompt, search, options in zip(self._prompts, searches, self._options, strict=True)
            if not search.is_done
            for submit in self._submits(prompt, search, options, caller, seconds_gone)
        ]
        answers = self._answers(submits, caller.client_socket)
        if self._num_tokens == 0:
            self._num_cached_tokens = sum(answer.finished.num_cached_tokens for answer in answers)
        self._num_tokens += len(answers)
        nexts = iter([_likeliest(answer) for answer in answers])
        for search in searches:
            if not search.is_done:
                search.take([next(nexts) for _ in search.live])

    def _submits(
        self,
        prompt: GenerationRequest,
        search: BeamSearch,
        options: BeamOptions,
        caller: Caller,
        seconds_gone: float,
    ) -> list[Submit]:
        limit = self._settings.total_seconds if prompt.deadline_seconds is None else prompt.deadline_seconds
        if seconds_gone >= limit:
            raise DeadlineError(f"The request took longer than {limit:g} seconds.", 1.0)
        sampling = SamplingParams(0.0, 0, 1.0, 0, logprobs=options.num_top)
        requests = [
            GenerationRequest(
                (*prompt.token_ids, *beam.token_ids),
                sampling,
                1,
                priority=prompt.priority,
                deadline_seconds=limit - seconds_gone,
            )
            for beam in search.live
        ]
        return [one.submits(caller.request_id, caller.tenant, self._settings)[0] for one in requests]

    def _answers(self, submits: Sequence[Submit], client_socket: socket.socket | None) -> list[Answer]:
        self._generations = [self._make_generation(submit.token_ids) for submit in submits]
        choices = PacedChoices(self._generations, self._max_open, self._now)
        choices.start(submits, client_socket)
        try:
            return choices.answers()
        finally:
            choices.close()

    @property
    def abandoned(self) -> bool:
        """Whether its client left."""
        return self._has_client_left or any(generation.client_left for generation in self._generations)

    @property
    def row(self) -> int | None:
        """None: a search has many."""
        return None

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts together."""
        return sum(len(prompt.token_ids) for prompt in self._prompts)

    @property
    def num_delivered_tokens(self) -> int:
        """Ids that were drawn for it, those of beams that were dropped too."""
        return self._num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Ids of the prompts that the first round did not compute."""
        return self._num_cached_tokens

    def wait_finished(self, timeout_seconds: float) -> Finished | None:
        """Block for the end of the last round; return it with the ids of all, None if it does not come in time."""
        finished = super().wait_finished(timeout_seconds)
        if finished is None:
            return None
        return msgspec.structs.replace(
            finished,
            num_completion_tokens=self._num_tokens,
            timing=NO_TIMING,
            num_cached_tokens=self._num_cached_tokens,
        )


def _likeliest(answer: Answer) -> list[tuple[int, float]]:
    """Return the likeliest ids that an answer of one id tells."""
    for token in (*answer.tokens, *answer.unsent):
        return token.logprobs.top
    raise GenerationError("The search cannot go on: a round of it has drawn nothing.", 1.0)
