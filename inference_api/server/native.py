"""Own the native generation routes: `/inference`, `/predictions` and `/chat`, with the original's names and texts.

Runs in PROCESS 1. Each route differs in the prompt it builds and in how it writes the answer; everything between is
one path: authenticate, validate, tokenize, submit, stream. Raw routes hold their headers until the first text or the
end, so that a refusal keeps its status; event routes hold them a few seconds only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from flask import Blueprint, Response, request

from inference_api.errors import InferenceApiError, UnknownModelError
from inference_api.server.chat_template import ChatMessage
from inference_api.server.chunk_sender import ChunkSender
from inference_api.server.context import ServerContext, current_call
from inference_api.server.generation import Generation, Piece, is_retryable, raise_if_failed
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.responses import PING, event, stream_response
from inference_api.server.validation import DEFAULT_STOP_TEXT, NativeRequest, distinct, parse_native

LEGACY_MODEL_NAME = "falcon40b"


def make_native_blueprint(context: ServerContext) -> Blueprint:
    """Return the three routes."""
    blueprint = Blueprint("native", __name__)
    native = NativeRoutes(context)
    blueprint.add_url_rule("/inference/<model>", "inference", native.inference, methods=["POST"])
    blueprint.add_url_rule("/predictions/<model>", "predictions", native.predictions, methods=["POST"])
    blueprint.add_url_rule("/chat/<model>", "chat", native.chat, methods=["POST"])
    return blueprint


class NativeRoutes:
    """The view functions over one ServerContext."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def inference(self, model: str) -> Response:
        """Stream the continuation of the raw text."""
        native = self._parse(model, allow_rag_context=False)
        return self._raw(native, native.text, self._context.tokenizer.encode(native.text))

    def predictions(self, model: str) -> Response:
        """Stream the answer to a user's text."""
        native = self._parse(model, allow_rag_context=True)
        return self._raw(native, *self._user_prompt(native))

    def chat(self, model: str) -> Response:
        """Send `answer` events with the whole message so far, then `close`."""
        native = self._parse(model, allow_rag_context=True)
        prompt, token_ids = self._user_prompt(native)
        generation = self._start(native, token_ids)
        try:
            buffered = request.environ["SERVER_PROTOCOL"] == "HTTP/1.0"
            hold_seconds = None if buffered else self._context.settings.sse_hold_seconds
            first = generation.next_piece(hold_seconds)
            if first is not None and first.finished is not None:
                raise_if_failed(first.finished)
        except BaseException:
            generation.close()
            raise
        message = prompt if native.return_prompt else ""
        chunks = self._chat_events(generation, first, message, buffered=buffered)
        return self._respond(native, chunks, generation)

    def _parse(self, model: str, *, allow_rag_context: bool) -> NativeRequest:
        names = self._context.model_names
        if model not in names and model != LEGACY_MODEL_NAME:
            raise UnknownModelError(f"Unknown model '{model}'. Known: {', '.join((*names, LEGACY_MODEL_NAME))}.")
        body = request.get_data(cache=False)
        return parse_native(
            body, request.headers.get("Content-Type"), self._context.limits, allow_rag_context=allow_rag_context
        )

    def _user_prompt(self, native: NativeRequest) -> tuple[str, list[int]]:
        """Return a user's text as a prompt; a context goes before it, as a system message if there is a template."""
        tokenizer, template = self._context.tokenizer, self._context.chat_template
        if native.rag_context and template is not None:
            messages = [
                ChatMessage(role="system", content=native.rag_context),
                ChatMessage(role="user", content=native.text),
            ]
            return f"{native.rag_context}\n{native.text}", template.encode(messages)
        prompt = f"User: {native.text}\nAI: "
        if native.rag_context:
            prompt = f"Context: {native.rag_context}\n{prompt}"
        return prompt, tokenizer.encode(prompt)

    def _start(self, native: NativeRequest, token_ids: list[int]) -> Generation:
        context, call = self._context, current_call()
        max_tokens = context.limits.fit_max_tokens(native.max_tokens, len(token_ids), native.min_tokens)
        seed = call.draw_seed(native.seed)
        call.response_headers["X-Inference-Seed"] = str(seed)
        wanted = GenerationRequest(
            token_ids,
            native.sampling(seed),
            max_tokens,
            stop_sequences=(native.stop_sequence,) if native.stop_sequence else (),
            stop_ids=distinct(native.stop_token_ids),
            min_tokens=native.min_tokens,
            ignore_eos=native.ignore_eos,
        )
        [submit] = call.named(wanted.submits(call.request_id, call.claims.tenant, context.settings))
        call.generation = generation = context.make_generation(token_ids, wanted.stop_sequences)
        generation.start(submit, request.environ.get("gunicorn.socket"))
        call.note_repetition(generation.repeated_created)
        return generation

    def _raw(self, native: NativeRequest, prompt: str, token_ids: list[int]) -> Response:
        generation = self._start(native, token_ids)
        pieces = generation.pieces()
        try:
            first = next(pieces)
        except BaseException:
            generation.close()
            raise
        sender = ChunkSender.of(request.environ)
        pieces = itertools.chain([first], _relayed(generation, pieces, sender) if sender is not None else pieces)
        chunks = self._raw_chunks(pieces, prompt if native.return_prompt else "")
        return self._respond(native, chunks, generation)

    def _raw_chunks(self, pieces: Iterator[Piece], prompt: str) -> Iterator[bytes]:
        if prompt:
            yield prompt.encode()
        for piece in pieces:
            if piece.text:
                yield piece.text.encode()
        if self._context.settings.legacy_eos:
            yield DEFAULT_STOP_TEXT.encode()

    def _chat_events(
        self, generation: Generation, first: Piece | None, message: str, *, buffered: bool
    ) -> Iterator[bytes]:
        piece = first
        try:
            while True:
                if piece is None:
                    yield PING
                else:
                    message += piece.text
                    if piece.text:
                        yield event("answer", {"message": message})
                    if piece.finished is not None:
                        raise_if_failed(piece.finished)
                        break
                piece = generation.next_piece(self._context.settings.sse_ping_seconds)
        except InferenceApiError as error:
            if buffered:
                raise
            yield event("error", error_event(error, generation.num_delivered_tokens))
            return
        yield event("close", {"message": "Connection closed"})

    def _respond(self, native: NativeRequest, chunks: Iterator[bytes], generation: Generation) -> Response:
        buffered = request.environ["SERVER_PROTOCOL"] == "HTTP/1.0"
        response = stream_response(chunks, generation.close, buffered=buffered)
        if native.session_id is not None:
            response.headers["X-Client-Session-Id"] = native.session_id
        return response


def _relayed(generation: Generation, pieces: Iterator[Piece], sender: ChunkSender) -> Iterator[Piece]:
    """Yield the pieces that are this thread's to send; asked for once the response's head and first text are sent."""
    generation.relay(sender)
    for piece in pieces:
        yield piece
        generation.relay(sender)


def error_event(error: InferenceApiError, num_delivered_tokens: int) -> dict[str, object]:
    """Return the data of an error event after the 200."""
    return {
        "status_code": error.status,
        "code": error.code,
        "message": str(error),
        "retryable": is_retryable(error),
        "num_delivered_tokens": num_delivered_tokens,
    }
