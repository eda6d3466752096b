"""Rotate the keys of bearers under load: the part `faults_keys`.

A policy with a file of two keys, the newest and the one before. Each rotation writes a new key into it: within five
seconds it is good on every call and the oldest is not, no call with the key between them fails, and a stream that had
begun with the oldest comes whole. Nothing is restarted. Through the proxy, on the mock.
"""

from __future__ import annotations

import base64
import json
import random
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import jwt
import requests

from campaigns.faults_drain import Callers
from campaigns.faults_run import Run, checked
from campaigns.faults_streams import ECHO, Outcome, join_all, open_witnesses
from campaigns.part import CampaignError, Context
from tests.integration.service import running_service, wait_for

AUDIENCE, ISSUER = "inference_api", "https://issuer.test"
ROTATION_SECONDS = 5.0
NUM_STREAMS = 7
NUM_LETTERS = 80
TOKENS_PER_SECOND = "700"
"""Of the mock: seventy a second for each of the streams and of the callers."""

OPEN_SECONDS = 10.0
TIMEOUT_SECONDS = 10.0


class Issuer:
    """Own the keys, the policy that names their file, and the file: its two newest are in it."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        """Write the policy and the first two keys; `environ` is what the proxy is started with."""
        self._rng = rng
        self._file = folder / "keys.json"
        self._secrets: dict[str, bytes] = {}
        self.kids: list[str] = []
        self.rotate()
        self.rotate()
        policy = folder / "policy.json"
        required = ["iss", "aud", "sub", "team_id", "jti", "iat", "exp"]
        rules = {"iss": ISSUER, "aud": AUDIENCE, "typ": "at+jwt", "required": required, "key_file": self._file.name}
        policy.write_text(json.dumps({**rules, "allowed_header_members": ["alg", "typ", "kid"]}))
        key = folder / "internal"
        key.touch(mode=0o600)
        key.write_text(secrets.token_hex(32))
        self.environ = {"JWT_POLICY_FILE": str(policy), "INTERNAL_AUTH_KEY_FILE": str(key)}

    def rotate(self) -> None:
        """Make a key; the file has it and the one before from now on."""
        kid = f"key-{len(self.kids)}"
        self._secrets[kid] = self._rng.randbytes(32)
        self.kids.append(kid)
        keys = {
            kid: {"alg": "HS256", "k_b64url": base64.urlsafe_b64encode(self._secrets[kid]).decode().rstrip("=")}
            for kid in self.kids[-2:]
        }
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps({"keys": keys}))
        partial.replace(self._file)

    def bearer(self, kid: str) -> dict[str, str]:
        """Return the header of a bearer that a key has signed."""
        now = int(time.time())
        claims = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": "a",
            "team_id": "alpha",
            "jti": kid,
            "iat": now,
            "exp": now + 600,
        }
        text = jwt.encode(claims, self._secrets[kid], "HS256", headers={"kid": kid, "typ": "at+jwt"})
        return {"Authorization": f"Bearer {text}"}


def run(context: Context) -> dict[str, int]:
    """Rotate as often as the counts say; return how many calls ran meanwhile, and the slowest rotation."""
    totals = {"rotations": 0, "calls": 0, "streams": 0, "slowest_ms": 0}
    with tempfile.TemporaryDirectory(prefix="keys-") as folder:
        issuer = Issuer(Path(folder), random.Random(f"{context.seed} keys"))
        settings: dict[str, Any] = {**ECHO, **issuer.environ, "INFERENCE_API_MOCK_TOKENS_PER_SECOND": TOKENS_PER_SECOND}
        with running_service(proxy=True, **settings) as service:
            this = Run(context, service, totals)
            for number in range(context.counts["rotations"]):
                _rotate(this, issuer, f"rotation {number}")
    return totals


def _rotate(run: Run, issuer: Issuer, name: str) -> None:
    """Write a new key while clients call with the newest one so far."""
    oldest, steady = issuer.kids[-2:]
    rng = run.random(name)
    callers = Callers(run.port, rng, until_refused=False, headers=lambda: issuer.bearer(steady))
    try:
        witnesses = open_witnesses(run.port, rng, NUM_STREAMS, NUM_LETTERS, issuer.bearer(oldest))
        if not all(witness.wait_open(OPEN_SECONDS) for witness in witnesses):
            raise CampaignError(f"{name}: not every stream began within {OPEN_SECONDS:g} s")
        issuer.rotate()
        with checked(run.context, f"{name}: in force"):
            seconds = wait_for(lambda: _is_in_force(run, issuer, oldest), ROTATION_SECONDS, "the new key")
            run.totals["slowest_ms"] = max(run.totals["slowest_ms"], round(seconds * 1000))
        join_all(witnesses)
    finally:
        callers.stop()
    wrong = [call.fault() or call.outcome.value for call in callers.calls if call.outcome is not Outcome.WHOLE]
    run.context.count(f"{name}: {len(callers.calls)} calls", f"{len(wrong)} failed: {wrong[0]}" if wrong else None)
    for witness in witnesses:
        fault = witness.fault() or (None if witness.outcome is Outcome.WHOLE else witness.outcome.value)
        run.context.count(f"{name}: stream", fault)
    run.totals["rotations"] += 1
    run.totals["calls"] += len(callers.calls)
    run.totals["streams"] += len(witnesses)
    run.context.log(f"{name}: {len(callers.calls)} calls")


def _is_in_force(run: Run, issuer: Issuer, oldest: str) -> bool:
    """Tell whether the newest key is good and the oldest is not."""

    def status(kid: str) -> int:
        url = f"{run.service.proxy_url}/info"
        return requests.get(url, headers=issuer.bearer(kid), timeout=TIMEOUT_SECONDS).status_code

    return (status(issuer.kids[-1]), status(oldest)) == (200, 401)
