"""Make bearers that must be refused out of good ones, and good ones in other spellings: for the part `jwt`.

A mutation changes the text, a segment, the signature, the header or the claims; the last two are signed again with the
right key, so that nothing but the rule they break can refuse them. Everything is drawn from the generator that is
given. Knows the policy that the bearers are for; does not know the verifier.
"""

from __future__ import annotations

import base64
import hmac
import json
import random
from collections.abc import Callable
from typing import Any

from tests.proxy.signing import ALGORITHMS, KEY_IDS, NOW, claims, encode_part, header, public_pem, sign, signing_key

# Order of the group of P-256 (SEC 2, version 2, section 2.4.2).
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
STRANGE_CHARACTERS = [*"=+/ \t\r\n\0.,;:%\"'", "é", "\u200b", "\ud800", "\U0001f511"]
ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig")

Draw = random.Random


def change_text(rng: Draw, good: str, _algorithm: str) -> str:
    """Insert, delete, replace, double or cut characters."""
    at = rng.randrange(len(good))
    character = rng.choice([*ALPHABET, *STRANGE_CHARACTERS])
    forms = [
        good[:at] + character + good[at:],
        good[:at] + good[at + 1 :],
        good[:at] + character + good[at + 1 :],
        good[:at],
        good[at:],
        good + rng.choice([*STRANGE_CHARACTERS, good, "." + good, "A" * rng.randrange(1, 9000)]),
        rng.choice([*STRANGE_CHARACTERS, "Bearer "]) + good,
        good.swapcase(),
    ]
    return str(rng.choice(forms))


def change_segments(rng: Draw, good: str, algorithm: str) -> str:
    """Leave out, double, swap or exchange the three parts, or spell one in another base64."""
    parts = good.split(".")
    other = sign(claims(jti="j-2"), by=rng.choice([name for name in ALGORITHMS if name != algorithm])).split(".")
    index = rng.randrange(3)
    change = rng.randrange(7)
    if change == 0:
        parts[index] = other[index]
    elif change == 1:
        parts.insert(index, rng.choice([*parts, *other, ""]))
    elif change == 2:
        del parts[index]
    elif change == 3:
        parts[index] = ""
    elif change == 4:
        parts = rng.choice([parts[::-1], parts[1:] + parts[:1], parts[2:] + parts[:2]])
    elif change == 5:
        parts[index] += "=" * rng.randrange(1, 4)
    else:
        parts[index] = rng.choice([base64.b32encode, base64.b16encode])(parts[index].encode()).decode()
    return ".".join(parts)


def change_bytes(rng: Draw, good: str, _algorithm: str) -> str:
    """Flip bits of what a segment decodes to, or the bits at its end that stand for nothing."""
    parts = good.split(".")
    index = rng.randrange(3)
    # What does not fill a whole byte at the end of a segment.
    spare_bits = -len(parts[index]) % 4 * 2
    if spare_bits and rng.random() < 0.3:
        last = ALPHABET.index(parts[index][-1]) ^ rng.randrange(1, 1 << spare_bits)
        parts[index] = parts[index][:-1] + ALPHABET[last]
        return ".".join(parts)
    decoded = bytearray(base64.urlsafe_b64decode(parts[index] + "=="))
    for _ in range(rng.randrange(1, 4)):
        decoded[rng.randrange(len(decoded))] ^= 1 << rng.randrange(8)
    parts[index] = encode_part(bytes(decoded))
    return ".".join(parts)


def change_signature(rng: Draw, good: str, algorithm: str) -> str:
    """Put another signature in: of zeros, of another length, form, key or text."""
    signed, _, encoded = good.rpartition(".")
    signature = base64.urlsafe_b64decode(encoded + "==")
    half = len(signature) // 2
    forms = [
        b"\0" * len(signature),
        b"\xff" * len(signature),
        signature[: rng.randrange(1, len(signature))],
        signature + bytes([rng.randrange(256)]),
        b"\0" + signature,
        signature[half:] + signature[:half] if signature[half:] != signature[:half] else b"\0",
        rng.randbytes(len(signature)),
        rng.randbytes(rng.randrange(1, 600)),
    ]
    if algorithm == "ES256":
        forms += [_der(signature), b"\0" * 32 + signature[32:], P256_ORDER.to_bytes(32) + signature[32:]]
    if algorithm == "RS256":
        modulus = signing_key("RS256").public_key().public_numbers().n
        number = int.from_bytes(signature)
        forms += [(number + modulus).to_bytes(len(signature) + 1), (modulus - number).to_bytes(len(signature))]
    return f"{signed}.{encode_part(rng.choice(forms))}"


def confuse_algorithms(rng: Draw, _good: str, algorithm: str) -> str:
    """Sign with a public key's text as a secret, or with one key under another's id or algorithm."""
    other = rng.choice([name for name in ALGORITHMS if name != algorithm])
    if rng.random() < 0.5:
        head = header(algorithm, **rng.choice([{"alg": other}, {"kid": KEY_IDS[other]}]))
        return sign(claims(), head, by=rng.choice([algorithm, other]))
    pem = public_pem(rng.choice(ALGORITHMS[1:]))
    body = "".join(pem.splitlines()[1:-1])
    texts = [pem, pem.strip(), body, f" {body}", pem.replace("\n", "\r\n"), f" {pem}", ""]
    secret = rng.choice([*(text.encode() for text in texts), base64.b64decode(body)])
    head = header(rng.choice(ALGORITHMS[1:]), alg=rng.choice(["HS256", "HS384", "HS512"]))
    signed = f"{encode_part(json.dumps(head).encode())}.{encode_part(json.dumps(claims()).encode())}"
    return f"{signed}.{encode_part(hmac.digest(secret, signed.encode(), 'sha256'))}"


WRONG_HEADERS: dict[str, list[Any]] = {
    "alg": ["none", "None", "nOnE", "", None, ["HS256"], 7, "hs256", "HS384", "RS512", "PS256", "ES384", "Ed25519"],
    "kid": ["", "HS-1", "hs-1 ", "hs-1\0", "../hs-1", "' OR 1=1 --", "unknown", 1, None, ["hs-1"], {"a": 1}, "a" * 480],
    "typ": ["JWT", "at+jwt ", "application/application/at+jwt", "text/at+jwt", "", None, 1, ["at+jwt"], "internal+jwt"],
    "crit": [[], ["b64"], ["exp"], "b64", None],
    "b64": [True, False, "false", 0, None],
    "zip": ["DEF", None],
    "cty": ["JWT", ""],
    "jku": ["http://127.0.0.1:9/keys", "file:///etc/passwd"],
    "x5u": ["http://127.0.0.1:9/cert"],
    "x5c": [["MIIB"], []],
    "jwk": [{"kty": "oct", "k": "AAAA"}, None],
    "x5t": ["AAAA"],
    "enc": ["A128GCM"],
    "Alg": ["HS256"],
}
"""Members of a header and values that no bearer may have; `alg` and `kid` are never the right ones of any key."""


def change_header(rng: Draw, _good: str, algorithm: str) -> str:
    """Give the header a wrong member, or leave out one that is needed; signed with the right key."""
    name = rng.choice([*WRONG_HEADERS, "alg", "kid", "typ"])
    head = header(algorithm)
    if name in head and rng.random() < 0.15:
        del head[name]
    else:
        head[name] = rng.choice(WRONG_HEADERS[name])
    return sign(claims(), head, by=algorithm)


def _later(rng: Draw) -> float:
    return NOW + 60 + rng.choice([0.001, 1, 3600, rng.random() * 1e9, 1e12])


NOT_NUMBERS = ["1800000300", " 1800000300", "1_800_000_300", "١٨٠٠٠٠٠٣٠٠", True, False, None, [NOW], {"n": NOW}, ""]
NOT_NAMES = ["", "A", "a b", "a\r\nX-Team: b", "a\0", "a,b", "а", "a" * 64, "-a", "_a", ["team-a"], None, 7, {"a": 1}]
WRONG_CLAIMS: dict[str, Callable[[Draw], Any]] = {
    "iss": lambda rng: rng.choice(
        ["https://issuer.test/", "https://issuer.tes", "https://Issuer.test", "", None, ["https://issuer.test"], 1]
    ),
    "aud": lambda rng: rng.choice(
        ["inference", "inference_api ", "Inference_api", "", None, [], ["inference_api", "x"], {"inference_api": 1}, 1]
    ),
    "sub": lambda rng: rng.choice(NOT_NAMES),
    "team_id": lambda rng: rng.choice(NOT_NAMES),
    "jti": lambda rng: rng.choice(["", "a b", "a,b", "a\n", "é", "a" * 129, 7, None, ["j-1"], True]),
    "token_id": lambda rng: rng.choice(["j-2", "", 1, None]),
    "exp": lambda rng: rng.choice([*NOT_NUMBERS, NOW - 60, NOW - 60 - rng.random() * 1e9, -1, 0, NOW + 86400, 1e300]),
    "nbf": lambda rng: rng.choice([*NOT_NUMBERS, _later(rng)]),
    "iat": lambda rng: rng.choice([*NOT_NUMBERS, _later(rng), NOW + 600 - 86400.5, 0, -1e18]),
    "scope": lambda rng: rng.choice(["a  b", " a", "a ", "a\tb", 'a"b', "a\\b", "é", ["inference"], None, 1, {}]),
    "q": lambda rng: rng.choice([[], "x", None, 1, {"a": {}}, {"a": []}, {"a": None}, {str(n): 1 for n in range(33)}]),
}
"""A value for each claim that the policy refuses."""


def change_claims(rng: Draw, _good: str, algorithm: str) -> str:
    """Give a claim a value that breaks the policy, or leave out one that is required; signed with the right key."""
    changed = claims()
    name = rng.choice([*WRONG_CLAIMS])
    if name in changed and rng.random() < 0.2:
        del changed[name]
    else:
        changed[name] = WRONG_CLAIMS[name](rng)
    return sign(changed, by=algorithm)


def change_json(rng: Draw, _good: str, algorithm: str) -> str:
    """Write header or claims in a JSON that two readers could take for two things; signed with the right key."""
    is_header = rng.random() < 0.5
    members = header(algorithm) if is_header else claims()
    text = json.dumps(members)
    name, value = rng.choice(list(members.items()))
    escaped = "".join(f"\\u{ord(character):04x}" for character in name)
    wrong = rng.choice(["NaN", "Infinity", "-Infinity", "1e999", "9" * 21, '"\\ud800"', "[" * 40 + "]" * 39, "01"])
    forms: list[bytes] = [
        f'{text[:-1]}, "{name}": {json.dumps(value)}}}'.encode(),
        f'{text[:-1]}, "{escaped}": {json.dumps(value)}}}'.encode(),
        f'{{"{name}": "other", {text[1:]}'.encode(),
        text.encode(rng.choice(ENCODINGS)),
        text.encode() + rng.choice([b"x", b"{}", b"\0", b",", b"\xff"]),
        rng.choice([b"\xff", b"\xc0\x80", b"\x00"]) + text.encode(),
        f"[{text}]".encode(),
        json.dumps(text).encode(),
        text.replace('"', "'").encode(),
        text[: rng.randrange(1, len(text) - 1)].encode(),
        text.replace(json.dumps(value), wrong, 1).encode(),
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        rng.choice([b"null", b"1", b"true", b'""', b"[]", b"{}"]),
        text.replace(": ", ":" + " " * rng.choice([600, 9000]), 1).encode(),
    ]
    form = forms[rng.randrange(len(forms) - (0 if is_header else 1))]
    return sign(claims(), form, by=algorithm) if is_header else sign(form, by=algorithm)


MUTATIONS = (
    change_text,
    change_segments,
    change_bytes,
    change_signature,
    confuse_algorithms,
    change_header,
    change_claims,
    change_json,
)


def respell(rng: Draw, algorithm: str) -> str:
    """Make a good bearer in another spelling or with other values that the policy allows; signed with the right key."""
    body: dict[str, Any] = claims(
        jti=rng.choice(["j", "a" * 128, "a.b_c:d-e"]),
        aud=rng.choice(["inference_api", ["inference_api"]]),
        team_id=rng.choice(["team-a", "0", "a" * 63, "a_b-c"]),
        exp=rng.choice([NOW + 600, NOW - 59.5, NOW + 86000, NOW + 0.25]),
        nbf=rng.choice([NOW, NOW + 60, 0]),
        scope=rng.choice([None, "", "inference", "inference metrics"]),
        q=rng.choice([None, {}, {"requests": 1}]),
        other=rng.choice([None, {"a": [1, None]}, "é", "\U0001f511"]),
    )
    body["iat"] = min(body["exp"], NOW) - rng.choice([0, 10, 300])
    head = header(algorithm, typ=rng.choice(["at+jwt", "AT+JWT", "application/at+jwt", "Application/At+Jwt"]))
    texts = []
    for members in (head, body):
        names = list(members)
        rng.shuffle(names)
        indent = rng.choice([None, 1])
        plain = rng.random() < 0.5
        texts.append(json.dumps({name: members[name] for name in names}, indent=indent, ensure_ascii=plain).encode())
    return sign(texts[1], texts[0], by=algorithm)


def twin(good: str) -> str:
    """Return the other signature that verifies for an ES256 bearer: (r, n - s) for (r, s)."""
    signed, _, encoded = good.rpartition(".")
    signature = base64.urlsafe_b64decode(encoded + "==")
    other = P256_ORDER - int.from_bytes(signature[32:])
    return f"{signed}.{encode_part(signature[:32] + other.to_bytes(32))}"


def _der(signature: bytes) -> bytes:
    def integer(raw: bytes) -> bytes:
        stripped = raw.lstrip(b"\0") or b"\0"
        padded = b"\0" + stripped if stripped[0] & 0x80 else stripped
        return b"\x02" + bytes([len(padded)]) + padded

    content = integer(signature[:32]) + integer(signature[32:])
    return b"\x30" + bytes([len(content)]) + content
