"""Time what the proxy does to let one request in: the pure core, step by step, for each kind of signature.

In this process, with nothing else running: no socket, no upstream. Every measured call is one that passes. Knows the
core's own interfaces and nothing of HTTP.
"""

from __future__ import annotations

import base64
import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from proxy.admission import Admitter, RequestHead
from proxy.auth import Authenticator, Claims, mint_assertion
from proxy.headers import upstream_headers
from proxy.limits import CallLimits
from proxy.routes import RouteTable
from proxy.tenants import Allowance, TenantRules, Tenants, Window
from proxy.trace_context import continue_trace

BATCHES = 20
_PATH, _TEMPLATE = "/inference/falcon40b", "/inference/<model>"
_ISSUER, _KEY_ID = "https://issuer.test", "key-1"
_ENDLESS_WINDOW = Window(1_000_000_000, 60)
_SECRET = secrets.token_bytes(32)


def run(num_calls: int) -> dict[str, float]:
    """Return microseconds a call, medians of batches: admission by kind of signature, then what every call costs."""
    micros = {f"admit_{name}": _median_micros(num_calls, admit) for name, admit in _admissions().items()}
    claims = Claims("bench", "bench-1", frozenset({"inference"}), time.time() + 3600, {})
    limits = CallLimits(lambda: Tenants(TenantRules(Allowance((_ENDLESS_WINDOW,), 1_000_000))))
    trace = continue_trace(None, 0.0)

    def take_and_leave() -> None:
        limits.enter(claims, _TEMPLATE).leave()

    def make_headers() -> None:
        request_id = "req_" + secrets.token_hex(16)
        assertion = mint_assertion(_SECRET, claims, method="POST", path=_PATH, request_id=request_id, now=time.time())
        upstream_headers({"content-type": "application/json"}, request_id=request_id, assertion=assertion, trace=trace)

    micros["limits"] = _median_micros(num_calls, take_and_leave)
    micros["assertion_and_headers"] = _median_micros(num_calls, make_headers)
    return micros


def _admissions() -> dict[str, Callable[[], object]]:
    now = int(time.time())
    shared = {"team_id": "bench", "token_id": "bench-1", "iat": now, "exp": now + 3600}
    secret = _bearer(shared, _SECRET, "HS256", {"typ": "JWT"})
    admissions = {"shared_secret_HS256": _admission(Authenticator.from_shared_secret(_SECRET, time.time), secret)}
    claims = {**shared, "iss": _ISSUER, "aud": "inference_api", "sub": "caller", "jti": "bench-1", "nbf": now}
    for algorithm, (key, entry) in _signers().items():
        strict = Authenticator.from_policy(_policy({"alg": algorithm, **entry}), time.time)
        bearer = _bearer(claims, key, algorithm, {"typ": "at+jwt", "kid": _KEY_ID})
        admissions[f"strict_{algorithm}"] = _admission(strict, bearer)
    return admissions


def _signers() -> dict[str, tuple[Any, dict[str, str]]]:
    """Return a new key of each kind, with what a policy has of it."""
    encoded = base64.urlsafe_b64encode(_SECRET).rstrip(b"=").decode()
    private: dict[str, Any] = {
        "RS256": rsa.generate_private_key(65537, 2048),
        "ES256": ec.generate_private_key(ec.SECP256R1()),
        "EdDSA": ed25519.Ed25519PrivateKey.generate(),
    }
    signers: dict[str, tuple[Any, dict[str, str]]] = {"HS256": (_SECRET, {"k_b64url": encoded})}
    for algorithm, key in private.items():
        pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
        signers[algorithm] = (key, {"public_pem": pem})
    return signers


def _policy(key: dict[str, str]) -> dict[str, Any]:
    return {
        "leeway_s": 60,
        "max_lifetime_s": 86400,
        "max_token_bytes": 8192,
        "max_header_bytes": 512,
        "allowed_header_members": ["alg", "typ", "kid"],
        "typ": "at+jwt",
        "iss": _ISSUER,
        "aud": "inference_api",
        "required": ["iss", "aud", "sub", "team_id", "jti", "iat", "nbf", "exp"],
        "keys": {_KEY_ID: key},
    }


def _bearer(claims: Mapping[str, object], key: Any, algorithm: str, header: dict[str, str]) -> str:
    signed: str = jwt.encode(dict(claims), key, algorithm=algorithm, headers=header)
    return signed


def _admission(authenticator: Authenticator, bearer: str) -> Callable[[], object]:
    admitter = Admitter(RouteTable(), authenticator, trusted_hosts=frozenset(), max_body_bytes=1 << 18)
    headers = {"host": "x", "authorization": f"Bearer {bearer}", "content-type": "application/json"}
    head = RequestHead("POST", _PATH, (1, 1), {**headers, "content-length": "32"})
    return lambda: admitter.admit(head)


def _median_micros(num_calls: int, call: Callable[[], object]) -> float:
    """Return the median over batches of the mean microseconds that a call takes."""
    size = max(1, num_calls // BATCHES)
    means = []
    for _ in range(BATCHES):
        began = time.perf_counter()
        for _ in range(size):
            call()
        means.append((time.perf_counter() - began) / size)
    return round(1e6 * statistics.median(means), 1)
