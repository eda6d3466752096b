"""Own the Anthropic routes: parse, tokenize, and answer whole, as events, or with the prompt's length alone.

Runs in PROCESS 1. What is counted is what would be submitted: both routes make the prompt in one way.
"""

from __future__ import annotations

from typing import TypeVar

from flask import Blueprint, Response, request

from inference_api.errors import InvalidRequestError
from inference_api.server.anthropic.answers import MessageEventWriter, MessageHead, whole_message
from inference_api.server.anthropic.bodies import ConversationBody, MessagesBody
from inference_api.server.anthropic.calling import Calling, calling_of
from inference_api.server.anthropic.conversation import turns
from inference_api.server.anthropic.requests import make_request
from inference_api.server.bodies import parse_body
from inference_api.server.context import ServerContext, check_model, current_call, start_choices
from inference_api.server.event_stream import event_response
from inference_api.server.responses import json_response

AnthropicBody = TypeVar("AnthropicBody", bound=ConversationBody)


def make_anthropic_blueprint(context: ServerContext) -> Blueprint:
    """Return the routes."""
    blueprint = Blueprint("anthropic", __name__, url_prefix="/v1/messages")
    routes = AnthropicRoutes(context)
    blueprint.add_url_rule("", "messages", routes.messages, methods=["POST"])
    blueprint.add_url_rule("/count_tokens", "count_tokens", routes.count_tokens, methods=["POST"])
    return blueprint


class AnthropicRoutes:
    """The view functions over one ServerContext."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def messages(self) -> Response:
        """Answer a conversation."""
        body = self._parse(MessagesBody)
        calling = calling_of(body)
        seed = current_call().draw_seed()
        plain = make_request(body, self._encode(body, calling), self._context.limits, seed=seed)
        generation, reader = calling.applied_to(plain, self._context.call_formats)
        choices = start_choices([generation], self._context)
        head = MessageHead(current_call().request_id, body.model, len(generation.token_ids))
        if body.stream:
            return event_response(choices, MessageEventWriter(head, reader), self._context.settings)
        try:
            (answer,) = choices.answers()
        finally:
            choices.close()
        return json_response(200, whole_message(head, reader, answer))

    def count_tokens(self) -> Response:
        """Tell how long a conversation's prompt is, even if it is longer than the context: all inputs of a `usage`."""
        body = self._parse(ConversationBody)
        return json_response(200, {"input_tokens": len(self._encode(body, calling_of(body)))})

    def _parse(self, model: type[AnthropicBody]) -> AnthropicBody:
        body = parse_body(model, request.get_data(cache=False), request.headers.get("Content-Type"))
        check_model(body.model, self._context)
        return body

    def _encode(self, body: ConversationBody, calling: Calling) -> list[int]:
        template = self._context.chat_template
        if template is None:
            raise InvalidRequestError("messages: this model has no chat template; use /v1/completions.", "messages")
        return template.encode(turns(body, calling.instructions))
