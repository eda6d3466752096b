"""Send bodies that are no UTF-8 or no JSON to every route that takes one: the part `malformed`.

Each is made of a body that the route answers, and is broken for certain: bytes that no UTF-8 has, cut short, another
encoding, halves of surrogates, doubled members, depth, junk behind. Each is refused in JSON with the route's own 400;
now and then the body that is not broken goes along and must be answered. Then characters of several bytes are echoed
in streams: no piece holds half of one. Through the proxy, on the mock.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from campaigns.faults_streams import SURFACES
from campaigns.part import Context
from proxy.routes import ROUTES
from tests.integration.raw_http import RawStream
from tests.integration.service import Service, bearer, running_service

NUM_CLIENTS = 4
TIMEOUT_SECONDS = 30.0
SOUND_EVERY = 20
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MODEL = "mock"

_MESSAGES = [{"role": "user", "content": "hello"}]
SOUND: Mapping[str, Mapping[str, Any]] = {
    "/inference/<model>": {"text": "hello", "max_tokens": 3},
    "/predictions/<model>": {"text": "hello", "max_tokens": 3},
    "/chat/<model>": {"text": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"model": MODEL, "messages": _MESSAGES, "max_tokens": 3},
    "/v1/completions": {"model": MODEL, "prompt": "hello", "max_tokens": 3},
    "/v1/embeddings": {"model": MODEL, "input": "hello"},
    "/v1/responses": {"model": MODEL, "input": "hello", "max_output_tokens": 16},
    "/v1/messages": {"model": MODEL, "messages": _MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": _MESSAGES},
    "/": {"inputs": "hello", "parameters": {"max_new_tokens": 3}},
    "/generate": {"inputs": "hello", "parameters": {"max_new_tokens": 3}},
    "/generate_stream": {"inputs": "hello", "parameters": {"max_new_tokens": 3}},
    "/tokenize": {"content": "hello"},
    "/detokenize": {"tokens": [104, 105]},
    "/apply-template": {"messages": _MESSAGES},
}
"""By the proxy's template of a path, a body that is answered."""

BODILESS = frozenset({"/v1/responses/<id>/cancel"})
"""Routes of POST that read no body."""

IN_TGIS_WORDS = frozenset({"/", "/generate", "/generate_stream"})
"""Where a body that does not fit is a 422, as text-generation-inference has it."""

_NO_UTF8 = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xe2\x82", b"\xf8\x88\x80\x80\x80")
_NO_JSON = (b"}", b"]", b",", b"null", b"{}", b"//", b"\x00", b"'", b"\xef\xbb\xbf")

Breaker = Callable[[random.Random, bytes], bytes]


def _insert_bytes(rng: random.Random, body: bytes) -> bytes:
    place = rng.randrange(len(body) + 1)
    return body[:place] + rng.choice(_NO_UTF8) + body[place:]


def _cut(rng: random.Random, body: bytes) -> bytes:
    return body[: rng.randrange(1, len(body))]


def _append(rng: random.Random, body: bytes) -> bytes:
    return body + rng.choice(_NO_JSON)


def _prepend(rng: random.Random, body: bytes) -> bytes:
    return rng.choice(_NO_JSON) + body


def _encode_otherwise(rng: random.Random, body: bytes) -> bytes:
    return body.decode().encode(rng.choice(("utf-16", "utf-16-be", "utf-32", "utf-32-le", "utf-8-sig")))


def _half_surrogate(rng: random.Random, body: bytes) -> bytes:
    half = rng.choice((b"\\ud800", b"\\udfff", b"\\udc00\\ud800", b"\\ud83d"))
    return body.replace(b"hello", b"he" + half + b"llo") if b"hello" in body else _append(rng, body)


def _double_member(rng: random.Random, body: bytes) -> bytes:
    name, value = rng.choice(list(json.loads(body).items()))
    return body[:-1] + b", " + json.dumps(name).encode() + b": " + json.dumps(value).encode() + b"}"


def _deepen(rng: random.Random, body: bytes) -> bytes:
    depth = rng.choice((2_000, 60_000))
    return body[:-1] + b', "deep": ' + b"[" * depth + b"]" * rng.choice((0, depth)) + b"}"


def _break_text(rng: random.Random, body: bytes) -> bytes:
    return body.replace(b'"', rng.choice((b'"\n', b'"\x01', b'"\\x', b'"\\u12', b"'")), 1)


def _no_object(rng: random.Random, body: bytes) -> bytes:
    return rng.choice((b"", b" ", b"[]", b"null", b"1", b'"text"', b"[" + body + b"]", b"NaN", b"-", b"tru", b"1e999"))


BREAKERS: tuple[Breaker, ...] = (
    _insert_bytes,
    _cut,
    _append,
    _prepend,
    _encode_otherwise,
    _half_surrogate,
    _double_member,
    _deepen,
    _break_text,
    _no_object,
)


def run(context: Context) -> dict[str, int]:
    """Send as many broken bodies as the counts say, and echo as many texts; return how many of each."""
    rng = context.random
    templates = templates_of_bodies()
    for template in sorted(templates - SOUND.keys()):
        context.count(f"POST {template}", "no body is known for it")
    settings: dict[str, Any] = {"INFERENCE_API_MOCK_MODE": "echo", "INFERENCE_API_MOCK_TOKENS_PER_SECOND": "0"}
    cases = list(make_cases(rng, sorted(templates & SOUND.keys()), context.counts["bodies"]))
    with running_service(proxy=True, **settings) as service:
        with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as clients:
            shares = [cases[number::NUM_CLIENTS] for number in range(NUM_CLIENTS)]
            for faults in clients.map(lambda share: _send(service, share), shares):
                for name, fault in faults:
                    context.count(name, fault)
        texts = [_draw_text(rng) for _ in range(context.counts["texts"])]
        for number, text in enumerate(texts):
            context.count(f"text {number}", _fault_of_echo(service, text))
        status = service.get("/health/ready").status_code
        context.count("the service is ready", None if status == 200 else f"status {status}")
    return {"bodies": len(cases), "texts": len(texts), "routes": len(templates & SOUND.keys())}


def templates_of_bodies() -> set[str]:
    """Return the paths of every route of the proxy that takes a body."""
    return {route.template for route in ROUTES if route.method == "POST"} - BODILESS


def make_cases(rng: random.Random, templates: list[str], count: int) -> Iterator[tuple[str, bytes, bool]]:
    """Yield a path's template, a body and whether it is sound, over all paths and ways of breaking in turn."""
    for number in range(count):
        template = templates[number % len(templates)]
        sound = json.dumps(SOUND[template]).encode()
        if number % SOUND_EVERY == SOUND_EVERY - 1:
            yield template, sound, True
        else:
            yield template, BREAKERS[rng.randrange(len(BREAKERS))](rng, sound), False


def _send(service: Service, cases: list[tuple[str, bytes, bool]]) -> list[tuple[str, str | None]]:
    """Send bodies one after another; return the name of each and what is wrong with its answer."""
    found = []
    for template, body, is_sound in cases:
        connection = http.client.HTTPConnection("127.0.0.1", service.proxy_port, timeout=TIMEOUT_SECONDS)
        headers = {"Content-Type": "application/json", **bearer()}
        try:
            connection.request("POST", template.replace("<model>", MODEL), body, headers)
            answer = connection.getresponse()
            fault = fault_of_answer(template, answer.status, answer.read(), is_sound=is_sound)
        except OSError as error:
            fault = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        found.append((f"POST {template}", f"{fault} for {body[:120]!r}" if fault else None))
    return found


def fault_of_answer(template: str, status: int, body: bytes, *, is_sound: bool) -> str | None:
    """Return what is wrong with an answer: a broken body's is a refusal in a JSON object."""
    if is_sound:
        return None if status == 200 else f"status {status} for a sound body"
    if status != 400 and not (status == 422 and template in IN_TGIS_WORDS):
        return f"status {status}"
    try:
        is_object = isinstance(json.loads(body), dict)
    except ValueError:
        is_object = False
    return None if is_object else f"a refusal that says {body[:80]!r}"


def _draw_text(rng: random.Random) -> str:
    """Return a text of characters of one to four bytes, joined ones among them."""
    pools = ("abc ", "äßéñ", "漢字かな한", "😀🎉👩‍🚀🇨🇭", "\u0301\u200d")
    return "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(5, 60)))


def _fault_of_echo(service: Service, text: str) -> str | None:
    """Have a text echoed id by id, which are its bytes; return what a client who reads piece by piece sees wrongly."""
    body = SURFACES["raw"].body(text, len(text.encode()))
    with RawStream(service.proxy_port or 0, SURFACES["raw"].path, body, bearer()) as stream:
        whole = stream.read_all()
        try:
            pieces = [chunk.data.decode() for chunk in stream.chunks]
        except UnicodeDecodeError:
            return f"a chunk ends inside a character of {text!r}"
    if any(REPLACEMENT in piece for piece in pieces):
        return f"{REPLACEMENT} in place of a character of {text!r}"
    return None if whole.decode() == text else f"{whole.decode()!r} in place of {text!r}"
