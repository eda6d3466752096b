"""Check grammars: what each kind allows id by id, that a whole answer can only end, and what is refused."""

from __future__ import annotations

import json
import time

import pytest

from inference_api.backend import grammars
from inference_api.backend.engines.base import MaskError
from inference_api.backend.grammar_masks import GrammarMask
from inference_api.backend.grammars import MAX_COMPILED, MAX_GRAMMAR_BYTES, GrammarCompiler, GrammarError
from inference_api.messages import Grammar, GrammarKind
from tests.backend.factories import make_image

PROMPT = b"say:"
ENDS = {256, 258}
IMAGE = make_image()
COMPILER = GrammarCompiler(IMAGE)
JSON_OBJECT = Grammar(GrammarKind.JSON_OBJECT)
SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type": "object", "properties": {"a": {"type": "integer", "minimum": 10, "maximum": 19}}, "required": ["a"],'
    ' "additionalProperties": false}',
)
REGEX = Grammar(GrammarKind.REGEX, "[ab]{2}c?")
CHOICE = Grammar(GrammarKind.CHOICE, json.dumps(["ja", "jaja", 'quo"te', "日"]))
LARK = Grammar(GrammarKind.LARK, 'start: "(" start ")" | "x"')


def make_mask(grammar: Grammar) -> GrammarMask:
    return COMPILER.compile(grammar, len(PROMPT))


def next_ids(mask: GrammarMask, completion: bytes | list[int] = b"") -> set[int]:
    """Return the ids that are allowed after the prompt and a completion."""
    bits = mask.allowed([*PROMPT, *completion])
    assert len(bits) == (IMAGE.vocab_size + 7) // 8
    return {token_id for token_id in range(8 * len(bits)) if bits[token_id // 8] >> token_id % 8 & 1}


def texts_of(grammar: Grammar, limit: int = 64) -> set[bytes]:
    """Return every whole text of a small grammar."""
    found: set[bytes] = set()
    begun = [b""]
    while begun:
        text = begun.pop()
        ids = next_ids(make_mask(grammar), text)
        assert ids, text
        if ids & ENDS:
            found.add(text)
        begun += [text + bytes([token_id]) for token_id in ids - ENDS]
        assert len(begun) < limit
    return found


def test_a_regular_expression_bounds_the_whole_answer() -> None:
    pairs = {b"aa", b"ab", b"ba", b"bb"}
    assert texts_of(REGEX) == pairs | {pair + b"c" for pair in pairs}


def test_a_choice_allows_its_texts_and_no_other() -> None:
    assert texts_of(CHOICE) == {text.encode() for text in ("ja", "jaja", 'quo"te', "日")}


def test_a_schema_allows_what_is_valid_and_little_room_between_its_parts() -> None:
    mask = make_mask(SCHEMA)
    assert next_ids(mask) == {ord("{")}
    assert next_ids(mask, b'{"a": ') == {ord("1")}
    assert next_ids(mask, b'{"a": 1') == set(b"0123456789")
    assert next_ids(make_mask(SCHEMA), b'{"a":\n' + b" " * 16) == {ord("1")}


def test_a_lark_grammar_may_be_recursive() -> None:
    mask = make_mask(LARK)
    assert next_ids(mask, b"((x") == {ord(")")}
    assert next_ids(mask, b"((x))") == ENDS


@pytest.mark.parametrize(
    ("grammar", "text"),
    [(SCHEMA, b'{"a":12}'), (REGEX, b"abc"), (CHOICE, "日".encode()), (LARK, b"x"), (JSON_OBJECT, b'{"b": [1, {}]}')],
    ids=lambda value: value.kind.value if isinstance(value, Grammar) else "",
)
def test_a_whole_answer_can_only_end_and_by_each_of_the_models_ends(grammar: Grammar, text: bytes) -> None:
    mask = make_mask(grammar)
    for end in range(len(text)):
        assert text[end] in next_ids(mask, text[:end])
    assert next_ids(mask, text) == ENDS


def test_a_special_id_is_never_part_of_a_text() -> None:
    assert next_ids(make_mask(Grammar(GrammarKind.REGEX, "(?s:.)*"))).isdisjoint({257})
    assert next_ids(make_mask(JSON_OBJECT), b'{"').isdisjoint({256, 257, 258})


def test_an_answer_is_cut_inside_no_character() -> None:
    mask = make_mask(Grammar(GrammarKind.REGEX, "日?"))
    begin = "日".encode()[:2]
    assert next_ids(mask, begin) == {"日".encode()[2]}


def test_a_mask_catches_up_with_ids_that_an_earlier_attempt_made() -> None:
    stepwise = make_mask(SCHEMA)
    for end in range(8):
        next_ids(stepwise, b'{"a": 12'[:end])
    assert next_ids(make_mask(SCHEMA), b'{"a": 12') == next_ids(stepwise, b'{"a": 12')


def test_masks_of_one_compiler_do_not_share_what_they_have_seen() -> None:
    first, second = make_mask(REGEX), make_mask(REGEX)
    next_ids(first, b"aa")
    assert next_ids(second) == set(b"ab")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Grammar]:
    """Return the list of the grammars that are built from here on."""
    built: list[Grammar] = []
    source = grammars._source

    def counted(grammar: Grammar) -> str:
        built.append(grammar)
        return source(grammar)

    monkeypatch.setattr(grammars, "_source", counted)
    return built


def test_a_grammar_that_was_asked_for_lately_is_built_once(builds: list[Grammar]) -> None:
    compiler = GrammarCompiler(IMAGE)
    again = Grammar(REGEX.kind, REGEX.text, "another member")
    masks = [compiler.compile(grammar, len(PROMPT)) for grammar in (REGEX, again, REGEX)]
    assert builds == [REGEX]
    next_ids(masks[0], b"aac")
    with pytest.raises(MaskError):
        masks[1].allowed([*PROMPT, *b"x"])
    assert next_ids(masks[2]) == set(b"ab")


def test_the_grammar_that_was_not_asked_for_the_longest_is_built_again(builds: list[Grammar]) -> None:
    compiler = GrammarCompiler(IMAGE)
    forms = [Grammar(GrammarKind.REGEX, "a" * length) for length in range(1, MAX_COMPILED + 2)]
    for form in [*forms[:-1], forms[0], forms[-1], forms[0]]:
        compiler.compile(form, 0)
    assert builds == forms
    compiler.compile(forms[1], 0)
    assert builds == [*forms, forms[1]]


def test_no_tenant_finds_what_another_one_had_compiled(builds: list[Grammar]) -> None:
    compiler = GrammarCompiler(IMAGE)
    for tenant in ("alpha", "beta", "alpha", "beta"):
        compiler.compile(REGEX, 0, tenant)
    assert builds == [REGEX, REGEX]


def test_one_text_of_two_kinds_is_two_grammars(builds: list[Grammar]) -> None:
    compiler = GrammarCompiler(IMAGE)
    forms = [Grammar(kind, '["ja"]') for kind in (GrammarKind.CHOICE, GrammarKind.REGEX)]
    assert [next_ids(compiler.compile(form, len(PROMPT))) for form in forms] == [{ord("j")}, set(b'"ja')]
    assert builds == forms


def test_a_bad_grammar_is_refused_every_time() -> None:
    compiler = GrammarCompiler(IMAGE)
    for _ in range(2):
        with pytest.raises(GrammarError, match="regular expression"):
            compiler.compile(Grammar(GrammarKind.REGEX, "(a"), 0)


def test_an_answer_that_has_left_its_form_is_told() -> None:
    with pytest.raises(MaskError, match="cannot go on in its form"):
        make_mask(REGEX).allowed([*PROMPT, *b"x"])


BAD = {
    "a schema that is no JSON": (GrammarKind.JSON_SCHEMA, "{", "is no JSON schema"),
    "a type that is none": (GrammarKind.JSON_SCHEMA, '{"type": "hiccup"}', "hiccup"),
    "a keyword that is not kept to": (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    "a schema that asks to be kept to in part": (
        GrammarKind.JSON_SCHEMA,
        '{"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}',
        "uniqueItems",
    ),
    "a schema that is a number": (GrammarKind.JSON_SCHEMA, "5", "object"),
    "a number that is counted one by one": (
        GrammarKind.JSON_SCHEMA,
        '{"properties": {"a": {"multipleOf": 99999989}}}',
        "multipleOf 99999989",
    ),
    "a look ahead": (GrammarKind.REGEX, "(?=a)a", "look-ahead"),
    "a choice of numbers": (GrammarKind.CHOICE, "[1]", "list of texts"),
    "a choice that is a number": (GrammarKind.CHOICE, "1", "is no list of texts"),
    "a reference that leads nowhere": (GrammarKind.JSON_SCHEMA, '{"$ref": "#/$defs/x"}', "x"),
    "a reference to the network": (GrammarKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:1/x"}', "127"),
    "a schema without a value": (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 2, "maximum": 1}', ""),
    "an open bracket": (GrammarKind.REGEX, "(a", "regular expression"),
    "a regular expression without a text": (GrammarKind.REGEX, r"[^\s\S]", ""),
    "a rule that is missing": (GrammarKind.LARK, "start: other", "other"),
    "no rule": (GrammarKind.LARK, "hello", "Lark"),
    "a choice that is no list": (GrammarKind.CHOICE, "{", "is no list of texts"),
    "too much text": (GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1), "65537 bytes long, of at most 65536"),
    "brackets in brackets": (GrammarKind.REGEX, "(" * 30_000 + "a" + ")" * 30_000, ""),
    "brackets in a Lark grammar": (GrammarKind.LARK, "start: " + "(" * 30_000 + '"a"' + ")" * 30_000, ""),
    "schemas in schemas": (GrammarKind.JSON_SCHEMA, '{"items":' * 7_000 + "{}" + "}" * 7_000, ""),
}


def test_a_grammar_in_larks_syntax_is_taken_only_where_the_setting_says_so() -> None:
    with pytest.raises(GrammarError, match="INFERENCE_API_LARK_GRAMMARS=1"):
        GrammarCompiler(IMAGE, takes_lark=False).compile(LARK, len(PROMPT))
    assert next_ids(make_mask(LARK)) == set(b"(x")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_grammar_is_refused_with_its_cause_and_soon(name: str) -> None:
    kind, text, cause = BAD[name]
    began = time.monotonic()
    with pytest.raises(GrammarError) as refusal:
        make_mask(Grammar(kind, text))
    assert cause in str(refusal.value)
    assert len(str(refusal.value)) < 500 and "\n" not in str(refusal.value)
    assert time.monotonic() - began < 5
