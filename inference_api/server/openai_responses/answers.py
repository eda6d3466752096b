"""Write the `response` object of OpenAI's Responses API: at its begin, at its end, and when it is asked for later.

Runs in PROCESS 1. Later only a response's state is known: what it was asked and what it answered is not stored. Pure;
knows no streams and no routes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inference_api.messages import ErrorInfo, Finished, FinishReason, RequestView
from inference_api.server.openai_responses.bodies import ChosenFunction, FunctionTool, ResponsesBody, TextFormat
from inference_api.server.openai_responses.items import Output

_REQUEST_PREFIX, _RESPONSE_PREFIX = "req_", "resp_"

_STATUSES = {
    None: "in_progress",
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.QUOTA: "incomplete",
    FinishReason.ABORT: "cancelled",
    FinishReason.ERROR: "failed",
}
"""By the reason of the end; None: it runs, or waits for a row."""


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """How far a response is: the reason of its end, if it has ended, and the error if that was one."""

    reason: FinishReason | None = None
    error: ErrorInfo | None = None

    @property
    def status(self) -> str:
        """The API's word."""
        return _STATUSES[self.reason]

    def as_dict(self) -> dict[str, object]:
        """Return the members of a response that tell it."""
        incomplete = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        return {"status": self.status, "error": self._error(), "incomplete_details": incomplete}

    def _error(self) -> dict[str, object] | None:
        if self.error is None:
            return None
        # openai-python 3.54 lets a response fail with a code of its own list only; `type` holds the original one.
        return {"code": "server_error", "message": self.error.message, "param": None, "type": self.error.code}


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseHead:
    """What a response is from its begin to its end; `asked` repeats the request's members."""

    request_id: str
    created_at: int
    num_prompt_tokens: int
    asked: dict[str, object]

    def as_dict(
        self, state: State, output: Sequence[object] = (), usage: dict[str, object] | None = None, ended_at: int = 0
    ) -> dict[str, object]:
        """Return the response in that state."""
        return {
            "id": response_id(self.request_id),
            "object": "response",
            "created_at": self.created_at,
            "completed_at": ended_at if state.status == "completed" else None,
            **state.as_dict(),
            **self.asked,
            "output": list(output),
            "usage": usage,
        }


def ended_response(head: ResponseHead, finished: Finished, output: Output) -> dict[str, object]:
    """Return a response that has ended well, or at its longest; its output has taken the end."""
    usage = usage_members(head.num_prompt_tokens, finished.num_completion_tokens, finished.num_cached_tokens)
    return head.as_dict(State(finished.reason), output.as_list(), usage, ended_at(head, finished))


def ended_at(head: ResponseHead, finished: Finished) -> int:
    """Return when a response has ended, by what it took: a repetition of its call is told the same."""
    timing = finished.timing
    return head.created_at + int(timing.queue_seconds + timing.prefill_seconds + timing.decode_seconds)


def response_id(request_id: str) -> str:
    """Return the id of the response that a request makes."""
    return request_id.replace(_REQUEST_PREFIX, _RESPONSE_PREFIX, 1)


def request_id_of(response_id: str) -> str | None:
    """Return the id of the request that makes a response; None for what is no response's id."""
    if not response_id.startswith(_RESPONSE_PREFIX):
        return None
    return response_id.replace(_RESPONSE_PREFIX, _REQUEST_PREFIX, 1)


def asked_members(body: ResponsesBody) -> dict[str, object]:
    """Return the members in which a response repeats its request; an absent one with what it meant."""
    return {
        **_constant_members(body.model),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": _choice(body.tool_choice),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": _format(body.text.format if body.text is not None else None)},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


def _choice(choice: str | ChosenFunction | None) -> object:
    return {"type": "function", "name": choice.name} if isinstance(choice, ChosenFunction) else choice or "auto"


def _tool(tool: FunctionTool) -> dict[str, object]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _format(given: TextFormat | None) -> dict[str, object]:
    if given is None or given.type != "json_schema":
        return {"type": given.type if given is not None else "text"}
    return {
        "type": given.type,
        "name": given.name,
        "description": given.description,
        "schema": given.schema_,
        "strict": given.strict,
    }


def usage_members(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> dict[str, object]:
    """Return a `usage`."""
    return {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def stored_response(view: RequestView, model: str) -> dict[str, object]:
    """Return what is still known of a response: its state and, once it has ended, its usage.

    `created_at` is 0 and `output` empty, because neither is stored; what the request asked for is left out.
    """
    usage = None
    if view.finish_reason is not None:
        usage = usage_members(view.num_prompt_tokens, view.num_completion_tokens, view.num_cached_tokens)
    asked = {**_constant_members(model), "parallel_tool_calls": True, "tool_choice": "auto"}
    body = ResponseHead(view.request_id, 0, view.num_prompt_tokens, asked).as_dict(
        State(view.finish_reason, view.error), usage=usage
    )
    del body["completed_at"]
    return body


def _constant_members(model: str) -> dict[str, object]:
    """Return what holds for every response of this service."""
    return {
        "model": model,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "tools": [],
        "truncation": "disabled",
    }
