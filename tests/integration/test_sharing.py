"""Check on the running service that rows which make room, reuse prefixes or guess ahead answer as if they did not."""

from __future__ import annotations

import pytest

from tests.integration.raw_http import RawStream
from tests.integration.service import in_parallel, new_request_id, running_service, wait_for


def test_a_stream_whose_row_is_taken_back_pauses_and_ends_whole() -> None:
    with running_service(
        INFERENCE_API_ROWS="4",
        INFERENCE_API_CONTEXT_TOKENS="256",
        INFERENCE_API_KV_TOKENS="256",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="400",
    ) as service:
        body = {"text": "hello", "max_tokens": 120}
        last_id = new_request_id()
        with (
            RawStream(service.port, "/inference/mock", body) as first,
            RawStream(service.port, "/inference/mock", body) as second,
        ):
            assert first.read_chunk() and second.read_chunk()
            with RawStream(service.port, "/inference/mock", body, {"Request-Id": last_id}) as last:
                assert last.read_chunk()

                def is_paused() -> bool:
                    view = service.view(last_id)
                    return view["state"] == "waiting" and view["num_completion_tokens"] > 0 and view["row"] is None

                wait_for(is_paused, 5.0, "a row that is taken back")
                texts = in_parallel([stream.read_all for stream in (first, second, last)])
        assert texts == [bytes(ord("0") + position % 10 for position in range(5, 125))] * 3
        view = service.view(last_id)
        assert (view["state"], view["finish_reason"], view["num_completion_tokens"]) == ("finished", "length", 120)
        assert service.metric("inference_api_foreign_tokens_total") == 0


@pytest.mark.parametrize("draft_tokens", ["0", "4"])
def test_drafts_take_fewer_steps_and_reused_prompts_fewer_tokens_for_the_same_text(draft_tokens: str) -> None:
    with running_service(
        INFERENCE_API_MOCK_MODE="echo",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="0",
        INFERENCE_API_DRAFT_TOKENS=draft_tokens,
    ) as service:
        text = "a text that says it again: " * 5
        steps = service.metric("inference_api_steps_total")
        tokens = []
        for _ in range(2):
            before = service.metric("inference_api_scheduled_tokens_total")
            assert service.ask("/inference/mock", {"text": text, "max_tokens": 500}) == text
            tokens.append(service.metric("inference_api_scheduled_tokens_total") - before)
        assert tokens[1] <= tokens[0] - len(text) + 1
        num_steps = service.metric("inference_api_steps_total") - steps
        assert (num_steps < len(text)) == (draft_tokens == "4")
