"""Own the TGI routes: `/generate`, `/generate_stream`, and what `POST /` does with a body of TGI's.

Runs in PROCESS 1. Authentication is done: parse, tokenize, submit, answer whole or token by token.
"""

from __future__ import annotations

from flask import Blueprint, Response, request

from inference_api.errors import InvalidRequestError
from inference_api.server.bodies import parse_body
from inference_api.server.choices import likeliest
from inference_api.server.context import ServerContext, current_call, start_choices
from inference_api.server.event_stream import event_response
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.responses import json_response
from inference_api.server.tgi.answers import Report, TokenEvents, whole_answer
from inference_api.server.tgi.bodies import GenerateBody, GenerateParameters
from inference_api.server.tgi.requests import check_together, make_request


def make_tgi_blueprint(context: ServerContext) -> Blueprint:
    """Return the routes."""
    blueprint = Blueprint("tgi", __name__)
    routes = TgiRoutes(context)
    blueprint.add_url_rule("/generate", "generate", routes.generate, methods=["POST"])
    blueprint.add_url_rule("/generate_stream", "generate_stream", routes.generate_stream, methods=["POST"])
    return blueprint


class TgiRoutes:
    """The view functions over one ServerContext."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def generate(self) -> Response:
        """Continue a text; answer once it is whole."""
        body = _parse()
        _check_stream(body, streams=False)
        return json_response(200, self._whole(body))

    def generate_stream(self) -> Response:
        """Continue a text, an event a token."""
        body = _parse()
        _check_stream(body, streams=True)
        return self._stream(body)

    def root(self) -> Response:
        """Continue a text as `stream` says; a whole answer is a list of one, as the hub's API has it."""
        body = _parse()
        return self._stream(body) if body.stream else json_response(200, [self._whole(body)])

    def _whole(self, body: GenerateBody) -> dict[str, object]:
        parameters = body.given
        check_together(parameters, streams=False)
        shows_prompt_tokens = bool(parameters.decoder_input_details)
        details = bool(parameters.details) or shows_prompt_tokens
        generation = self._request(body.inputs, parameters, reports_tokens=details)
        generation = generation.scoring_prompt(0 if shows_prompt_tokens else None)
        choices = start_choices([generation], self._context)
        try:
            answers = choices.answers()
        finally:
            choices.close()
        report = _report(body.inputs, parameters, generation, details=details, shows_prompt_tokens=shows_prompt_tokens)
        return whole_answer(likeliest(answers, len(answers), len(answers)), report, self._context.tokenizer)

    def _stream(self, body: GenerateBody) -> Response:
        parameters = body.given
        check_together(parameters, streams=True)
        generation = self._request(body.inputs, parameters, reports_tokens=True)
        report = _report(body.inputs, parameters, generation, details=bool(parameters.details))
        writer = TokenEvents(report, self._context.tokenizer)
        return event_response(start_choices([generation], self._context), writer, self._context.settings)

    def _request(self, inputs: str, parameters: GenerateParameters, *, reports_tokens: bool) -> GenerationRequest:
        token_ids = self._context.tokenizer.encode(inputs, field="inputs")
        parameters = parameters.model_copy(update={"seed": current_call().draw_seed(parameters.seed)})
        return make_request(parameters, token_ids, self._context.limits, reports_tokens=reports_tokens)


def _parse() -> GenerateBody:
    return parse_body(GenerateBody, request.get_data(), request.headers.get("Content-Type"))


def _check_stream(body: GenerateBody, *, streams: bool) -> None:
    if body.stream is not None and body.stream != streams:
        other, does = ("/generate", "streams") if streams else ("/generate_stream", "does not stream")
        raise InvalidRequestError(
            f"stream: is {str(body.stream).lower()}, but this route {does}; use {other}.", "stream"
        )


def _report(
    inputs: str,
    parameters: GenerateParameters,
    generation: GenerationRequest,
    *,
    details: bool,
    shows_prompt_tokens: bool = False,
) -> Report:
    return Report(
        prompt=inputs if parameters.return_full_text else "",
        details=details,
        num_top_tokens=parameters.top_n_tokens or 0,
        prompt_ids=generation.token_ids,
        seed=generation.sampling.seed if parameters.draws else None,
        shows_prompt_tokens=shows_prompt_tokens,
    )
