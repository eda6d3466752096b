"""Own the OpenAI routes: authenticate is done, so parse, tokenize, submit, and answer whole or in chunks.

Runs in PROCESS 1. Chat and text completions differ in how a prompt is made and in the words of a choice; everything
between is one path.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from flask import Blueprint, Response, request

from inference_api.errors import InvalidRequestError
from inference_api.server.bodies import parse_body
from inference_api.server.choices import count_cached_tokens, likeliest
from inference_api.server.context import ServerContext, check_model, current_call, start_choices
from inference_api.server.event_stream import event_response
from inference_api.server.generation_request import MAX_CHOICES, GenerationRequest, fit_max_tokens
from inference_api.server.openai.answers import ChatWords, ChunkWriter, Head, Words, usage_object, whole_answer
from inference_api.server.openai.beams import search_beams
from inference_api.server.openai.bodies import ChatBody, CompletionBody, SamplingBody, StreamOptions
from inference_api.server.openai.completion_words import CompletionWords, Told
from inference_api.server.openai.conversation import turns
from inference_api.server.openai.prompts import ids_of_each
from inference_api.server.openai.requests import check_form, make_request
from inference_api.server.openai.sampler_members import without_bad_words
from inference_api.server.openai.tokens import prompt_logprobs
from inference_api.server.openai.tool_words import ToolWords
from inference_api.server.prompt_tokens import prompt_tokens
from inference_api.server.responses import json_response, large_json_response
from inference_api.server.tools.calling import made_to_call
from inference_api.server.tools.definitions import FunctionDefinition, functions_of, instructions

OpenAIBody = TypeVar("OpenAIBody", bound=SamplingBody)

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for text completions; chat goes on to the end of the context."""


def make_openai_blueprint(context: ServerContext) -> Blueprint:
    """Return the routes."""
    blueprint = Blueprint("openai", __name__, url_prefix="/v1")
    routes = OpenAIRoutes(context)
    blueprint.add_url_rule("/chat/completions", "chat", routes.chat, methods=["POST"])
    blueprint.add_url_rule("/completions", "completions", routes.completions, methods=["POST"])
    blueprint.add_url_rule("/models", "models", routes.models, methods=["GET"])
    blueprint.add_url_rule("/models/<model>", "model", routes.model, methods=["GET"])
    return blueprint


class OpenAIRoutes:
    """The view functions over one ServerContext."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._created = int(time.time())

    def chat(self) -> Response:
        """Answer a conversation."""
        body = self._parse(ChatBody)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequestError("top_logprobs: needs logprobs to be true.", "top_logprobs")
        template = self._context.chat_template
        if template is None:
            raise InvalidRequestError("This model has no chat template: use /v1/completions.", "messages")
        functions, is_forced = functions_of(body.tools, body.tool_choice), _must_call(body)
        told = instructions(functions, is_forced=is_forced) if functions else ""
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        generation = make_request(
            body,
            template.encode(turns(body.messages, told)),
            self._context.limits,
            max_tokens=asked,
            num_choices=body.n or 1,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ).scoring_prompt(body.prompt_logprobs)
        if functions:
            return self._answer_with_tools(body, functions, generation)
        words = ChatWords(self._context.tokenizer, logprobs=bool(body.logprobs))
        return self._answer(body, "chatcmpl", words, [generation])

    def completions(self) -> Response:
        """Continue one or several prompts."""
        body = self._parse(CompletionBody)
        num_choices, num_made = body.n or 1, body.best_of or body.n or 1
        tokenizer, limits = self._context.tokenizer, self._context.limits
        prompts = ids_of_each("prompt", body.prompt, tokenizer, limits)
        _check_choices(body, len(prompts))
        wants_best = num_made > num_choices
        told = Told(bool(body.echo), body.logprobs, body.prompt_logprobs)
        # Where nothing is generated, the backend has the prompt to score; an echo alone would leave it nothing to do.
        num_prompt_top = told.num_prompt_top if body.max_tokens != 0 else told.num_prompt_top or 0
        generations = [
            make_request(
                body,
                token_ids,
                limits,
                max_tokens=fit_max_tokens(body.max_tokens, DEFAULT_COMPLETION_TOKENS, len(token_ids), limits),
                num_choices=num_made,
                logprobs=0 if wants_best and body.logprobs is None else body.logprobs,
            ).scoring_prompt(num_prompt_top)
            for token_ids in prompts
        ]
        words = CompletionWords(tokenizer, [ids for ids in prompts for _ in range(num_choices)], told)
        return self._answer(body, "cmpl", words, generations, num_kept=num_choices)

    def models(self) -> Response:
        """List the served names."""
        data = [self._model(name) for name in self._context.model_names]
        return json_response(200, {"object": "list", "data": data})

    def model(self, model: str) -> Response:
        """Describe one of them."""
        check_model(model, self._context)
        return json_response(200, self._model(model))

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "inference_api",
            "root": self._context.model_names[0],
            "max_model_len": self._context.limits.context_tokens,
        }

    def _parse(self, model: type[OpenAIBody]) -> OpenAIBody:
        body = parse_body(model, request.get_data(cache=False), request.headers.get("Content-Type"))
        check_model(body.model, self._context)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequestError("stream_options: is allowed only when stream is true.", "stream_options")
        if body.prompt_logprobs is not None and body.stream:
            raise InvalidRequestError("prompt_logprobs: is allowed only when stream is not true.", "prompt_logprobs")
        # Drawn here if it was not sent: one seed for all prompts, so that the one in the header repeats the whole call.
        return body.model_copy(update={"seed": current_call().draw_seed(body.seed)})

    def _answer(
        self,
        body: SamplingBody,
        prefix: str,
        words: Words,
        generations: Sequence[GenerationRequest],
        num_kept: int | None = None,
    ) -> Response:
        """Draw or search, as the body asks; of each prompt's answers the `num_kept` best, if that is fewer."""
        if body.bad_words:
            tokenizer, limits = self._context.tokenizer, self._context.limits
            generations = without_bad_words(generations, body.bad_words, tokenizer, limits)
        answer = self._search if body.use_beam_search else self._draw
        return answer(body, prefix, words, generations, num_kept)

    def _draw(
        self,
        body: SamplingBody,
        prefix: str,
        words: Words,
        generations: Sequence[GenerationRequest],
        num_kept: int | None,
    ) -> Response:
        """Submit, and answer whole or in chunks."""
        choices = start_choices(generations, self._context)
        num_prompt_tokens = sum(len(generation.token_ids) for generation in generations)
        if body.stream:
            options = body.stream_options or StreamOptions()
            writer = ChunkWriter(
                self._head(prefix, body.model),
                words,
                options,
                num_choices=choices.num_choices,
                num_prompt_tokens=num_prompt_tokens,
                num_prompts=len(generations),
            )
            return event_response(choices, writer, self._context.settings)
        try:
            answers = choices.answers()
        finally:
            choices.close()
        ends = [answer.finished for answer in answers]
        num_tokens = sum(end.num_completion_tokens for end in ends)
        usage = usage_object(num_prompt_tokens, num_tokens, count_cached_tokens(ends, len(generations)))
        num_made = generations[0].num_choices
        if num_kept is not None and num_kept < num_made:
            answers = likeliest(answers, num_made, num_kept)
        answer = whole_answer(self._head(prefix, body.model), words, answers, usage)
        if isinstance(body, ChatBody) and body.prompt_logprobs is not None:
            # A chat has one prompt: vLLM tells it once, beside the choices.
            tokens = prompt_tokens(generations[0].token_ids, answers[0].prompt_logprobs, self._context.tokenizer)
            answer["prompt_logprobs"] = prompt_logprobs(tokens, self._context.tokenizer, body.prompt_logprobs)
        tells_logprobs = generations[0].sampling.logprobs is not None or generations[0].prompt_logprobs is not None
        return (large_json_response if tells_logprobs else json_response)(200, answer)

    def _search(
        self,
        body: SamplingBody,
        prefix: str,
        words: Words,
        generations: Sequence[GenerationRequest],
        num_kept: int | None,
    ) -> Response:
        """Answer with the `num_kept` best of each prompt's beams; the usage counts every id that the search drew."""
        answers, rounds = search_beams(body, generations, num_kept, self._context)
        usage = usage_object(rounds.num_prompt_tokens, rounds.num_delivered_tokens, rounds.num_cached_tokens)
        return json_response(200, whole_answer(self._head(prefix, body.model), words, answers, usage))

    def _answer_with_tools(
        self, body: ChatBody, functions: Sequence[FunctionDefinition], generation: GenerationRequest
    ) -> Response:
        if body.logprobs:
            raise InvalidRequestError("logprobs: cannot go with tools: a call is no text of its tokens.", "logprobs")
        generation, formats = made_to_call(
            generation,
            functions,
            self._context.call_formats,
            must_call=_must_call(body),
            one_call=body.parallel_tool_calls is False,
        )
        check_form(generation.grammar, body)
        words = ToolWords(self._context.tokenizer, formats, generation.num_choices, current_call().request_id)
        return self._answer(body, "chatcmpl", words, [generation])

    def _head(self, prefix: str, model: str) -> Head:
        ready = self._context.client.ready
        digest = ready.digest if ready is not None else ""
        answer_id = f"{prefix}-{current_call().request_id.removeprefix('req_')}"
        return Head(answer_id, current_call().created, model, f"fp_{digest[:12]}")


def _must_call(body: ChatBody) -> bool:
    return body.tool_choice not in (None, "none", "auto")


def _check_choices(body: CompletionBody, num_prompts: int) -> None:
    """Raise InvalidRequestError for answers that cannot be made, or not be told as the body asks."""
    num_choices, num_made = body.n or 1, body.best_of or body.n or 1
    if num_made < num_choices:
        raise InvalidRequestError(f"best_of: {num_made} is less than n, which is {num_choices}.", "best_of")
    if num_made > num_choices and body.stream:
        raise InvalidRequestError("best_of: cannot be streamed when it is over n.", "best_of")
    if num_prompts * num_made > MAX_CHOICES:
        raise InvalidRequestError(
            f"prompt: {num_prompts} prompts of {num_made} answers each are {num_prompts * num_made} answers,"
            f" at most {MAX_CHOICES} are made in one call.",
            "prompt",
        )
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InvalidRequestError(
            "max_tokens: is 0, so that nothing is answered; it may be with echo or prompt_logprobs.", "max_tokens"
        )
