"""Pin the wire: the bytes of every message in both directions, and what is refused.

tests/data/frames.json holds one frame a message type, as hexadecimal; a change of it is a change of WIRE_VERSION.
"""

from __future__ import annotations

import json
import typing
from pathlib import Path

import msgspec
import pytest

from inference_api import messages
from inference_api.messages import (
    Abort,
    Accepted,
    AnyMessage,
    BackendMessage,
    Drain,
    Drained,
    Dropped,
    ErrorInfo,
    Failed,
    Fatal,
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    Heartbeat,
    Hello,
    HistogramView,
    IdempotencyKey,
    Loading,
    Message,
    Ping,
    Pong,
    Query,
    QueryKind,
    Ready,
    RefusalReason,
    Refused,
    RequestView,
    RowView,
    SequenceOutput,
    Snapshot,
    StatusMessage,
    StepOutput,
    Stop,
    Submit,
    SupervisorMessage,
    Timing,
    WorkerMessage,
)
from inference_api.queues import FrameParser, encode_frame
from inference_api.sampling_params import SamplingParams, TokenLogprobs

FRAMES: dict[str, str] = json.loads((Path(__file__).parent / "data" / "frames.json").read_text())

_ERROR = ErrorInfo("generation_failed", "The model's logits are not finite.")
_TIMING = Timing(0.25, 0.5, 1.5, 32, 130)
_FINISHED = Finished(FinishReason.STOP, 3, _TIMING, stop=b"\n\xff", error=None, num_cached_tokens=130)

EXAMPLES: tuple[Message, ...] = (
    Hello("pid-7", 3),
    Submit(
        session_id="5e55",
        request_id="req_1",
        tenant="alpha",
        token_ids=[1, 128, 49151],
        num_prompt_tokens=2,
        max_tokens=128,
        sampling=SamplingParams(
            1.0,
            40,
            0.9,
            2**63 - 1,
            min_p=0.05,
            typical_p=0.95,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=0.5,
            logit_bias={49151: -1.5},
            allowed_ids=(1, 128),
            banned_ids=(7,),
            logprobs=0,
            bad_sequences=((5, 6), (5, 49151, 7)),
            dry_multiplier=0.8,
            dry_base=1.5,
            dry_allowed_length=3,
            dry_penalty_last_n=256,
            dry_sequence_breakers=(b"\n", b"\xf0\x9f"),
            top_n_sigma=1.5,
            xtc_probability=0.5,
            xtc_threshold=0.2,
            mirostat=2,
            mirostat_tau=4.0,
            mirostat_eta=0.2,
        ),
        stop_sequences=[b"\n\n", b"\xf0\x9f"],
        queue_seconds=60.0,
        first_token_seconds=120.0,
        total_seconds=600.0,
        choice=1,
        attempt=2,
        stop_ids=(2, 49150),
        min_tokens=3,
        ignore_eos=True,
        grammar=Grammar(GrammarKind.REGEX, "[a-z]+", "guided_regex"),
        priority=-3,
        idempotency=IdempotencyKey("a-key", b"\x00\xff", 1),
        created=1_700_000_000,
        call_id="req_2",
        mu=9.5,
    ),
    Abort("req_1", "alpha", "req_2"),
    Ping(1),
    Dropped(2, 1),
    Query(2, QueryKind.REQUEST, "alpha", "req_1"),
    Ready("incarnation", "digest", "mock", "mock", "none", 32, 2048, True),
    Accepted("5e55", 3, 1.5, 1_700_000_000),
    Refused("5e55", RefusalReason.BAD_GRAMMAR, 2.0, "is no JSON schema."),
    StepOutput(
        [
            SequenceOutput("5e55", 31, 9, 0, [5, 6, 7], _FINISHED),
            SequenceOutput("5e56", -1, 0, 4, [], Finished(FinishReason.ERROR, 4, _TIMING, error=_ERROR)),
            SequenceOutput("5e57", 2, 1, 4, [5], None, [TokenLogprobs(-0.5, [(5, -0.5), (6, -1.5)])], mu=7.5),
        ]
    ),
    Failed(_ERROR),
    Snapshot(
        2,
        1,
        2,
        1,
        [RowView(0, "decoding", "alpha", "req_1", 2, 3, 1.5), RowView(1, "other")],
        RequestView("req_1", "finished", 2, 3, None, 0, FinishReason.STOP, _TIMING, None, 1),
        {"steps": 12.0},
        0.25,
        {"queue": HistogramView([0.5, 1.0], [2, 0, 1], 9.5)},
    ),
    Pong(1, 0.25, True, 2, 32),
    Drain(),
    Stop(),
    Loading("load", 1.5),
    Heartbeat(),
    Drained(),
    Fatal(_ERROR),
)


def _tag(message: Message) -> str:
    tag = type(message).__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def _body(frame: bytes) -> bytes:
    (body,) = FrameParser().feed(frame)
    return body


def test_every_message_type_has_an_example_and_a_golden_frame() -> None:
    types = {value for value in vars(messages).values() if isinstance(value, type) and issubclass(value, Message)} - {
        Message
    }
    assert {type(example) for example in EXAMPLES} == types == set(typing.get_args(AnyMessage))
    assert FRAMES.keys() == {_tag(example) for example in EXAMPLES}


@pytest.mark.parametrize("message", EXAMPLES, ids=_tag)
def test_a_message_has_the_golden_bytes_and_reads_back_as_itself(message: Message) -> None:
    frame = bytes.fromhex(FRAMES[_tag(message)])
    assert encode_frame(message) == frame
    assert msgspec.msgpack.decode(_body(frame), type=AnyMessage) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=_tag)
def test_a_field_that_is_not_known_is_refused(message: Message) -> None:
    fields = msgspec.msgpack.decode(_body(encode_frame(message)))
    body = msgspec.msgpack.encode({**fields, "surprise": 1})
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        msgspec.msgpack.decode(body, type=AnyMessage)


@pytest.mark.parametrize("message", EXAMPLES, ids=_tag)
def test_a_message_crosses_in_its_own_direction_only(message: Message) -> None:
    body = _body(encode_frame(message))
    for direction in (WorkerMessage, BackendMessage, SupervisorMessage, StatusMessage):
        if type(message) in typing.get_args(direction):
            assert msgspec.msgpack.decode(body, type=direction) == message
        else:
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.decode(body, type=direction)


def test_an_unknown_type_and_a_missing_field_are_refused() -> None:
    for fields in ({"type": "surprise"}, {"type": "ping"}, {"ping_id": 1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=AnyMessage)


def test_one_step_of_a_full_batch_is_a_small_message() -> None:
    outputs = [SequenceOutput(f"{row:032x}", row, 1000, 1000, [49151]) for row in range(32)]
    assert len(encode_frame(StepOutput(outputs))) < 32 * 60


def test_a_submit_carries_no_option_that_is_off() -> None:
    (submit,) = [example for example in EXAMPLES if isinstance(example, Submit)]
    defaults = submit.__struct_defaults__
    optional = dict(zip(submit.__struct_fields__[-len(defaults) :], defaults, strict=True))
    plain = msgspec.structs.replace(submit, sampling=SamplingParams(1.0, 40, 0.9, 7), **optional)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(plain))
    assert fields.keys() == {"type", *submit.__struct_fields__} - optional.keys()
    assert fields["sampling"] == {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "seed": 7}


def test_a_message_cannot_be_changed_once_made() -> None:
    with pytest.raises(AttributeError):
        Ping(1).ping_id = 2  # type: ignore[misc]
