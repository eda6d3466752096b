"""Own the routes of OpenAI's Responses API: create one, whole or as events; look at one that runs or ran; cancel it.

Runs in PROCESS 1. A response's id is its request's, so that any worker finds its state at the backend, which alone
knows it: no worker stores a response. A foreign one is as unknown as one that never was.
"""

from __future__ import annotations

from collections.abc import Sequence

from flask import Blueprint, Response, request

from inference_api.errors import InvalidRequestError, NotFoundError
from inference_api.messages import QueryKind, RequestView
from inference_api.server.bodies import parse_body
from inference_api.server.context import ServerContext, check_model, current_call, start_choices
from inference_api.server.event_stream import event_response
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.inspection import ask_backend
from inference_api.server.openai_responses.answers import (
    ResponseHead,
    State,
    asked_members,
    ended_response,
    request_id_of,
    stored_response,
)
from inference_api.server.openai_responses.bodies import LOGPROBS, ResponsesBody
from inference_api.server.openai_responses.conversation import turns
from inference_api.server.openai_responses.events import ResponseEventWriter
from inference_api.server.openai_responses.items import Output
from inference_api.server.openai_responses.requests import functions_of, make_request, must_call
from inference_api.server.responses import json_response
from inference_api.server.tools.calling import made_to_call
from inference_api.server.tools.definitions import instructions
from inference_api.server.tools.formats import CallFormat


def make_openai_responses_blueprint(context: ServerContext) -> Blueprint:
    """Return the routes."""
    blueprint = Blueprint("openai_responses", __name__, url_prefix="/v1/responses")
    routes = ResponsesRoutes(context)
    blueprint.add_url_rule("", "create", routes.create, methods=["POST"])
    blueprint.add_url_rule("/<response_id>", "retrieve", routes.retrieve, methods=["GET"])
    blueprint.add_url_rule("/<response_id>/cancel", "cancel", routes.cancel, methods=["POST"])
    return blueprint


class ResponsesRoutes:
    """The view functions over one ServerContext."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def create(self) -> Response:
        """Answer an input."""
        context, body = self._context, self._parse()
        generation, formats = self._generation(body)
        choices = start_choices([generation], context)
        call = current_call()
        request_id = call.request_id
        head = ResponseHead(request_id, call.created, len(generation.token_ids), asked_members(body))
        output = Output(request_id, context.tokenizer, formats)
        if body.stream:
            return event_response(choices, ResponseEventWriter(head, output, context.tokenizer), context.settings)
        try:
            (answer,) = choices.answers()
        finally:
            choices.close()
        output.take_whole(answer, State(answer.finished.reason).status)
        return json_response(200, ended_response(head, answer.finished, output))

    def retrieve(self, response_id: str) -> Response:
        """Return a response's state, and its usage once it has ended."""
        for name in ("stream", "starting_after"):
            if request.args.get(name, "false") != "false":
                raise InvalidRequestError(f"{name}: is not served, because no events are stored.", name)
        return self._stored(self._find(response_id))

    def cancel(self, response_id: str) -> Response:
        """Abort a response; its row is free before the next step. One that has ended stays as it is."""
        view = self._find(response_id)
        if view.finish_reason is None:
            self._context.client.abort(view.request_id, current_call().claims.tenant)
            # The backend takes messages in their order, so that this tells how it has ended.
            view = self._find(response_id)
        return self._stored(view)

    def _parse(self) -> ResponsesBody:
        body = parse_body(ResponsesBody, request.get_data(cache=False), request.headers.get("Content-Type"))
        check_model(body.model, self._context)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequestError("stream_options: is allowed only when stream is true.", "stream_options")
        if body.top_logprobs and not body.wants_logprobs:
            raise InvalidRequestError(f"top_logprobs: needs include to hold '{LOGPROBS}'.", "top_logprobs")
        return body

    def _generation(self, body: ResponsesBody) -> tuple[GenerationRequest, Sequence[CallFormat]]:
        """Return what is generated and the formats that calls are read in; none where there are no functions."""
        functions, is_forced = functions_of(body), must_call(body)
        told = instructions(functions, is_forced=is_forced) if functions else ""
        seed = current_call().draw_seed()
        generation = make_request(body, self._encode(body, told), self._context.limits, seed=seed)
        if not functions:
            return generation, ()
        one_call = body.parallel_tool_calls is False
        return made_to_call(generation, functions, self._context.call_formats, must_call=is_forced, one_call=one_call)

    def _encode(self, body: ResponsesBody, told: str) -> list[int]:
        template = self._context.chat_template
        if template is None:
            raise InvalidRequestError("input: this model has no chat template; use /v1/completions.", "input")
        conversation = turns(body, told)
        try:
            return template.encode(conversation)
        except InvalidRequestError as error:
            # The template counts the instructions among its messages.
            raise InvalidRequestError(f"input: {error}", "input") from None

    def _find(self, response_id: str) -> RequestView:
        request_id = request_id_of(response_id)
        view = ask_backend(self._context, QueryKind.REQUEST, request_id).request if request_id is not None else None
        if view is None:
            raise NotFoundError(f"Unknown response '{response_id}'.")
        return view

    def _stored(self, view: RequestView) -> Response:
        return json_response(200, stored_response(view, self._context.model_names[0]))
