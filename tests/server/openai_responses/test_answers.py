"""Check the response object member by member: while it runs, at its end, and as it is known later."""

from __future__ import annotations

import pytest

from inference_api.messages import ErrorInfo, Finished, FinishReason, RequestView, Timing
from inference_api.server.choices import Answer
from inference_api.server.context import ServerContext
from inference_api.server.openai_responses.answers import (
    ResponseHead,
    State,
    asked_members,
    ended_response,
    request_id_of,
    response_id,
    stored_response,
)
from inference_api.server.openai_responses.bodies import ResponsesBody
from inference_api.server.openai_responses.items import Output

HEX = "ab" * 16
TIMING = Timing(1.5, 2.5, 5.25, 1, 10)
HEAD = ResponseHead(f"req_{HEX}", 1_700_000_000, 7, asked_members(ResponsesBody(model="mock", input="hi")))
ASKED = {
    "model": "mock",
    "background": False,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "tools": [],
    "truncation": "disabled",
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_logprobs": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "user": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
}


def test_a_response_that_runs_has_no_output_and_no_usage() -> None:
    assert HEAD.as_dict(State()) == {
        "id": f"resp_{HEX}",
        "object": "response",
        "created_at": 1_700_000_000,
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        **ASKED,
        "output": [],
        "usage": None,
    }


@pytest.mark.parametrize(
    ("reason", "status", "ended_at", "details"),
    [
        (FinishReason.STOP, "completed", 1_700_000_009, None),
        (FinishReason.LENGTH, "incomplete", None, {"reason": "max_output_tokens"}),
        (FinishReason.QUOTA, "incomplete", None, {"reason": "max_output_tokens"}),
    ],
)
def test_an_ended_response_holds_its_message_and_its_usage(
    context: ServerContext, reason: FinishReason, status: str, ended_at: int | None, details: object
) -> None:
    finished = Finished(reason, 3, TIMING, num_cached_tokens=5)
    output = Output(HEAD.request_id, context.tokenizer)
    output.take_whole(Answer("one", finished, ()), status)
    assert ended_response(HEAD, finished, output) == {
        "id": f"resp_{HEX}",
        "object": "response",
        "created_at": 1_700_000_000,
        "completed_at": ended_at,
        "status": status,
        "error": None,
        "incomplete_details": details,
        **ASKED,
        "output": [
            {
                "id": f"msg_{HEX}",
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": [{"type": "output_text", "text": "one", "annotations": [], "logprobs": []}],
            }
        ],
        "usage": {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 10,
        },
    }


def test_a_response_repeats_what_it_was_asked_and_says_that_nothing_is_stored() -> None:
    asked = asked_members(
        ResponsesBody(
            model="alias",
            input="hi",
            instructions="be brief",
            max_output_tokens=9,
            max_tool_calls=2,
            metadata={"k": "v"},
            parallel_tool_calls=False,
            tool_choice="none",
            temperature=0,
            top_p=0.5,
            top_logprobs=3,
            user="u",
            safety_identifier="s",
            prompt_cache_key="p",
            store=True,
            service_tier="flex",
        )
    )
    assert asked == {
        **ASKED,
        "model": "alias",
        "instructions": "be brief",
        "max_output_tokens": 9,
        "max_tool_calls": 2,
        "metadata": {"k": "v"},
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "temperature": 0,
        "top_p": 0.5,
        "top_logprobs": 3,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
    }


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (None, "in_progress"),
        (FinishReason.STOP, "completed"),
        (FinishReason.LENGTH, "incomplete"),
        (FinishReason.QUOTA, "incomplete"),
        (FinishReason.ABORT, "cancelled"),
        (FinishReason.ERROR, "failed"),
    ],
)
def test_later_only_the_state_is_known(reason: FinishReason | None, status: str) -> None:
    error = ErrorInfo("deadline_exceeded", "too late") if reason is FinishReason.ERROR else None
    view = RequestView(f"req_{HEX}", "any", 7, 3, finish_reason=reason, error=error, num_cached_tokens=4)
    usage = {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10,
    }
    told = {"code": "server_error", "message": "too late", "param": None, "type": "deadline_exceeded"}
    assert stored_response(view, "mock") == {
        "id": f"resp_{HEX}",
        "object": "response",
        "created_at": 0,
        "status": status,
        "error": told if error else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": "mock",
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "tools": [],
        "truncation": "disabled",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "output": [],
        "usage": usage if reason else None,
    }


def test_every_reason_of_an_end_has_a_status() -> None:
    assert len({State(reason).status for reason in (None, *FinishReason)}) == 5


@pytest.mark.parametrize("request_id", [f"req_{HEX}", "req_req_1"])
def test_a_response_and_its_request_name_each_other(request_id: str) -> None:
    assert request_id_of(response_id(request_id)) == request_id


@pytest.mark.parametrize("foreign", [f"req_{HEX}", HEX, "", "chatcmpl-1", "xresp_1"])
def test_what_is_no_responses_id_names_no_request(foreign: str) -> None:
    assert request_id_of(foreign) is None
