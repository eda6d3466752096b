"""Own `/tokenize`, `/detokenize` and `/apply-template`: what a prompt is made of, without generating anything.

Runs in PROCESS 1. Three servers call a route `/tokenize`; the key that a body brings its text under says whose answer
is wanted: `prompt` or `messages` vLLM's, `content` llama.cpp's, `inputs` text-generation-inference's. A caller's text
never becomes a control id here either. Knows no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from flask import Blueprint, Response, request
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from inference_api.errors import InvalidRequestError
from inference_api.server.bodies import EXAMPLE_CONVERSATION, Body, StrictModel, TokenIds, parse_body
from inference_api.server.chat_template import ChatTemplate
from inference_api.server.context import ServerContext, check_model
from inference_api.server.json_body import DuplicateMemberError, parse_json
from inference_api.server.openai.bodies import MAX_MESSAGES, Message
from inference_api.server.openai.conversation import turns
from inference_api.server.openai.requests import known_ids
from inference_api.server.responses import json_response

Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, examples=EXAMPLE_CONVERSATION)]


class PromptBody(StrictModel):
    """A text in vLLM's shape."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = Field(None, description="What the model puts in front of a prompt; default true.")
    return_token_strs: bool | None = Field(None, description="Reports the tokens' texts, too.")


class MessagesBody(StrictModel):
    """A conversation in vLLM's shape."""

    model: str | None = None
    messages: Messages
    add_generation_prompt: bool | None = Field(None, description="Opens the answer's turn; default true.")
    add_special_tokens: bool | None = Field(None, description="Refused when true: the template alone decides.")
    return_token_strs: bool | None = Field(None, description="Reports the tokens' texts, too.")

    @field_validator("add_special_tokens")
    @classmethod
    def _leave_to_template(cls, value: bool | None) -> bool | None:
        if value:
            raise PydanticCustomError("unserved", "the chat template alone writes special tokens, leave it out")
        return value


class ContentBody(StrictModel):
    """A text in llama.cpp's shape."""

    content: str
    add_special: bool | None = Field(None, description="What the model puts in front of a prompt; default false.")
    parse_special: bool | None = Field(None, description="Refused when true: callers write no control tokens.")
    with_pieces: bool | None = Field(None, description="Reports what each token stands for, too.")

    @field_validator("parse_special")
    @classmethod
    def _never_parse(cls, value: bool | None) -> bool | None:
        if value:
            raise PydanticCustomError("unserved", "a caller's text never becomes a control token, leave it out")
        return value


class InputsBody(StrictModel):
    """A text in text-generation-inference's shape."""

    inputs: str
    add_special_tokens: bool | None = Field(None, description="What the model puts in front of a prompt; default true.")


class DetokenizeBody(StrictModel):
    """Ids, in vLLM's and llama.cpp's shape, which is the same."""

    model: str | None = None
    tokens: TokenIds


class TemplateBody(StrictModel):
    """A conversation to be written out, in llama.cpp's shape."""

    model: str | None = None
    messages: Messages
    add_generation_prompt: bool | None = Field(None, description="Opens the answer's turn; default true.")


def make_tokenization_blueprint(context: ServerContext) -> Blueprint:
    """Return the routes."""
    blueprint = Blueprint("tokenization", __name__)
    routes = TokenizationRoutes(context)
    blueprint.add_url_rule("/tokenize", "tokenize", routes.tokenize, methods=["POST"])
    blueprint.add_url_rule("/detokenize", "detokenize", routes.detokenize, methods=["POST"])
    blueprint.add_url_rule("/apply-template", "apply_template", routes.apply_template, methods=["POST"])
    return blueprint


class TokenizationRoutes:
    """The view functions over one ServerContext."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._tokenizer = context.tokenizer
        self._answer_by_key = {
            "prompt": self._tokenize_prompt,
            "messages": self._tokenize_messages,
            "content": self._tokenize_content,
            "inputs": self._tokenize_inputs,
        }

    def tokenize(self) -> Response:
        """Return a text's or a conversation's ids, in the shape of the server whose key it came by."""
        given = _members()
        answer = next((answer for key, answer in self._answer_by_key.items() if key in given), None)
        if answer is None:
            raise InvalidRequestError(f"Missing required parameter: one of {', '.join(self._answer_by_key)}.")
        return json_response(200, answer())

    def detokenize(self) -> Response:
        """Return the text of ids, control tokens under their names; `prompt` is vLLM's name, `content` llama.cpp's."""
        body = _parse(DetokenizeBody)
        self._check_model(body.model)
        token_ids = known_ids("tokens", body.tokens, self._context.limits)
        text = self._tokenizer.decode(token_ids, skip_special=False)
        return json_response(200, {"prompt": text, "content": text})

    def apply_template(self) -> Response:
        """Return a conversation as the model reads it. Sent back as a prompt, control texts in it are plain text."""
        body = _parse(TemplateBody)
        self._check_model(body.model)
        prompt = self._template().render(
            turns(body.messages), add_generation_prompt=body.add_generation_prompt is not False
        )
        return json_response(200, {"prompt": prompt})

    def _tokenize_prompt(self) -> object:
        body = _parse(PromptBody)
        self._check_model(body.model)
        spans = self._tokenizer.encode_spans(
            body.prompt, field="prompt", whole_prompt=body.add_special_tokens is not False
        )
        return self._counted([span.token_id for span in spans], with_texts=bool(body.return_token_strs))

    def _tokenize_messages(self) -> object:
        body = _parse(MessagesBody)
        self._check_model(body.model)
        token_ids = self._template().encode(
            turns(body.messages), add_generation_prompt=body.add_generation_prompt is not False
        )
        return self._counted(token_ids, with_texts=bool(body.return_token_strs))

    def _tokenize_content(self) -> object:
        body = _parse(ContentBody)
        spans = self._tokenizer.encode_spans(body.content, field="content", whole_prompt=bool(body.add_special))
        if not body.with_pieces:
            return {"tokens": [span.token_id for span in spans]}
        return {"tokens": [{"id": span.token_id, "piece": self._piece(span.token_id)} for span in spans]}

    def _tokenize_inputs(self) -> object:
        body = _parse(InputsBody)
        spans = self._tokenizer.encode_spans(
            body.inputs, field="inputs", whole_prompt=body.add_special_tokens is not False
        )
        return [
            {
                "id": span.token_id,
                "text": body.inputs[span.start : span.stop],
                "start": span.start,
                "stop": span.stop,
            }
            for span in spans
        ]

    def _counted(self, token_ids: Sequence[int], *, with_texts: bool) -> dict[str, object]:
        return {
            "count": len(token_ids),
            "max_model_len": self._context.limits.context_tokens,
            "tokens": token_ids,
            "token_strs": [self._tokenizer.piece_text(token_id) for token_id in token_ids] if with_texts else None,
        }

    def _piece(self, token_id: int) -> str | list[int]:
        """Return a token's text; its bytes where they are no whole characters, as llama.cpp does."""
        piece = self._tokenizer.piece_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return list(piece)

    def _template(self) -> ChatTemplate:
        template = self._context.chat_template
        if template is None:
            raise InvalidRequestError("This model has no chat template: send text.", "messages")
        return template

    def _check_model(self, name: str | None) -> None:
        if name is not None:
            check_model(name, self._context)


def _parse(model: type[Body]) -> Body:
    return parse_body(model, request.get_data(), request.headers.get("Content-Type"))


def _members() -> frozenset[str]:
    """Return the names of the body's members, as far as it can be read: what is wrong with it, parsing tells."""
    try:
        given = parse_json(request.get_data())
    except DuplicateMemberError as error:
        return frozenset([error.name])
    except ValueError:
        raise InvalidRequestError("The body is not valid JSON.") from None
    return frozenset(given) if isinstance(given, dict) else frozenset()
