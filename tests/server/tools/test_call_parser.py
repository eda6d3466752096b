"""What is said and what is called in an answer, however its text comes in pieces; nothing is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_api.server.tools.call_parser import Argued, Called, CallParser, Said
from inference_api.server.tools.formats import FORCED, HERMES, CallFormat, formats_of

MISTRAL = formats_of("mistral")
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Aix \\"en\\" {Provence}", "days": [1, 2]}}'
    "\n</tool_call>"
)
BARE = '<tool_call>{"name": "%s", "arguments": {}}'
ARGUMENTS = '{"city": "Aix \\"en\\" {Provence}", "days": [1, 2]}'


def heard(text: str, formats: tuple[CallFormat, ...] = (HERMES,), size: int = 1) -> tuple[str, list[tuple[str, str]]]:
    """Return all that is said, and (name, arguments) of the calls, of a text fed in pieces of `size`."""
    parser = CallParser(formats)
    events = [event for first in range(0, len(text), size) for event in parser.feed(text[first : first + size])]
    events += parser.finish()
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, Called):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, Argued):
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    assert parser.num_calls == len(calls)
    return "".join(event.text for event in events if isinstance(event, Said)), calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "formats", "said", "calls"),
    [
        ("Hello <b>there</b>", (HERMES,), "Hello <b>there</b>", []),
        (CALL, (HERMES,), "", [("get_weather", ARGUMENTS)]),
        (f"Let me see. {CALL}\n", (HERMES,), "Let me see. ", [("get_weather", ARGUMENTS)]),
        (f"{CALL}\n{CALL}", (HERMES,), "", [("get_weather", ARGUMENTS)] * 2),
        (f"{CALL} Done.", (HERMES,), " Done.", [("get_weather", ARGUMENTS)]),
        (f"{CALL} and then {CALL} ", (HERMES,), " and then", [("get_weather", ARGUMENTS)] * 2),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', (HERMES,), "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', (HERMES,), "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', (HERMES,), "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', (HERMES,), "", [("f", "{}")]),
        ("<tool_call>no JSON</tool_call> x", (HERMES,), "<tool_call>no JSON</tool_call> x", []),
        ("a <tool_cal", (HERMES,), "a <tool_cal", []),
        ('<tool_call>{"name": "f', (HERMES,), '<tool_call>{"name": "f', []),
        ('<tool_call>{"name": "f", "arguments": {"a": "x', (HERMES,), "", [("f", '{"a": "x')]),
        ('{"name": "f", "arguments": {"a": {"b": []}}}', (FORCED,), "", [("f", '{"a": {"b": []}}')]),
        ('{"name": "f", "arguments": {}}\n', (FORCED,), "", [("f", "{}")]),
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
            MISTRAL,
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        (f"{BARE % 'f'} I think so. Bye", (HERMES,), " I think so. Bye", [("f", "{}")]),
        (f"{BARE % 'f'}\n{BARE % 'g'}</tool_call>", (HERMES,), "", [("f", "{}"), ("g", "{}")]),
        (f"{(BARE % 'f')[:-1]} so {BARE % 'g'}", (HERMES,), " so", [("f", "{}"), ("g", "{}")]),
        (f'<tool_call>{{"name": "f"}} so {BARE % "g"}', (HERMES,), " so", [("f", "{}"), ("g", "{}")]),
        (f"{BARE % 'f'} </tool_cal", (HERMES,), " </tool_cal", [("f", "{}")]),
        (f"<tool_call>no {BARE % 'g'}</tool_call>.", (HERMES,), "<tool_call>no .", [("g", "{}")]),
        (f"<tool_call>no {BARE % 'g'}", (HERMES,), "<tool_call>no ", [("g", "{}")]),
        (f"{BARE % 'f'} so\n<tool_call>no", (HERMES,), " so\n<tool_call>no", [("f", "{}")]),
        ('{"name": "f", "arguments": {}} so', (FORCED,), " so", [("f", "{}")]),
        ("none of them", (FORCED,), "none of them", []),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}} so', MISTRAL, " so", [("f", "{}")]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}, so', MISTRAL, ", so", [("f", "{}")]),
        (f"[TOOL_CALLS] [no {BARE % 'g'}", MISTRAL, "[TOOL_CALLS] [no ", [("g", "{}")]),
        ("[TOOL_CALLS] none", MISTRAL, "[TOOL_CALLS] none", []),
        (CALL, MISTRAL, "", [("get_weather", ARGUMENTS)]),
    ],
)
def test_said_and_called_are_told_apart(text, formats, said, calls, size: int) -> None:
    assert heard(text, formats, size) == (said, calls)


@pytest.mark.parametrize(
    "call",
    ['{"name": "f", "arguments": "no"}', '{"name": "f", "arguments": [1]}', "[" * 3000],
    ids=["text", "list", "deep"],
)
def test_what_has_no_object_of_arguments_is_no_call(call: str) -> None:
    assert heard(f"<tool_call>{call}</tool_call>") == (f"<tool_call>{call}</tool_call>", [])


def test_arguments_go_on_as_they_come() -> None:
    parser = CallParser((HERMES,))
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a"') == [Called(0, "f"), Argued(0, '{"a"')]
    assert parser.feed(": 1") == [Argued(0, ": 1")]
    assert parser.feed("}}</tool_call>") == [Argued(0, "}")]
    assert parser.finish() == []


def test_text_waits_only_while_it_may_be_the_beginning_of_a_call() -> None:
    parser = CallParser((HERMES,))
    assert parser.feed("so <") == [Said("so ")]
    assert parser.feed("b>") == [Said("<b>")]


NAMES = st.text("abc_", min_size=1, max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(st.tuples(NAMES, st.dictionaries(st.text(max_size=4), VALUES, max_size=3)), max_size=3), st.integers(1, 9)
)
def test_any_calls_come_back_whatever_their_arguments(calls: list[tuple[str, dict[str, object]]], size: int) -> None:
    text = "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>\n" for name, arguments in calls
    )
    _said, found = heard(text, size=size)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@given(st.text('<tool_ca>{}"n:, x', max_size=40), st.integers(1, 5))
def test_text_without_a_call_is_said_whole(text: str, size: int) -> None:
    said, calls = heard(text, size=size)
    assert calls or said == text


WORDS = st.sampled_from(["so", " and then ", "a < b", "{}", "}", "</tool_call>", "<tool_call> is a mark", "\n", "[x]"])
CALLS = st.builds(
    lambda name, arguments, brace, end: (
        f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}{brace}{end}',
        name,
    ),
    NAMES,
    st.dictionaries(st.text(max_size=3), VALUES, max_size=2),
    st.sampled_from(["}", " }\n", ""]),
    st.sampled_from(["</tool_call>", "\n</tool_call>", ""]),
)


@given(st.lists(WORDS | CALLS, max_size=6), st.integers(1, 9))
def test_no_text_and_no_call_is_lost_in_any_order_with_any_mark_missing(
    parts: list[str | tuple[str, str]], size: int
) -> None:
    said, found = heard("".join(part if isinstance(part, str) else part[0] for part in parts), size=size)
    assert [name for name, _ in found] == [part[1] for part in parts if not isinstance(part, str)]
    place = 0
    for word in (part.strip() for part in parts if isinstance(part, str)):
        # A brace or an end mark right behind a call is the call's own.
        if word not in ("}", "</tool_call>"):
            place = said.find(word, place)
            assert place >= 0, (word, said)
            place += len(word)


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", ",", "}", "{", '"', " ", "so", "<"]
BEGINNINGS = ['{"name": "f", "arguments": {"a": [1]}', '{"arguments": {}, "name": "g"}', '{"name": "h"}']


@pytest.mark.parametrize("formats", [(HERMES,), MISTRAL, (FORCED,)], ids=["hermes", "mistral", "forced"])
@given(st.lists(st.sampled_from(MARKS + BEGINNINGS), max_size=8).map("".join), st.integers(2, 30))
def test_how_a_text_is_cut_into_pieces_changes_nothing(formats, text: str, size: int) -> None:
    said, calls = heard(text, formats)
    assert heard(text, formats, size) == (said, calls)
    assert calls or said == text
