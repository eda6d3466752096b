#!/usr/bin/env python3
"""Make and read the HS256 bearers of this API: `jwt_util.py encode|decode PAYLOAD [options]`.

Runs by hand or in a script, with nothing but PyJWT. Standard output carries the result alone, everything else goes to
standard error. It knows the shared secret; it does not know policies, scopes' meaning or the running service.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from typing import Any, NoReturn

import jwt

DEFAULT_LIFETIME_SECONDS = 24 * 60 * 60
# RFC 7518 section 3.2: an HS256 key is at least as long as the hash output.
MIN_SECRET_BYTES = 32


class UsageError(Exception):
    """End the run with one line on standard error."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Turn argparse's fault into ours: one line, exit status 1."""
        raise UsageError(message)


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line, options before or after the mode; raise UsageError."""
    parser = _Parser(prog="jwt_util.py", description="Make or read an HS256 bearer.")
    parser.add_argument("mode", nargs="?", default="", help="encode or decode")
    parser.add_argument("payload", nargs="?", help="claims as JSON to encode, or a JWT to decode")
    parser.add_argument("--secret", help="shared secret; wins over JWT_SECRET")
    parser.add_argument("--exp", type=int, metavar="SECONDS", help="lifetime, 0 for none (default: 24 hours)")
    parser.add_argument("--tenant", help="set the claim team_id")
    parser.add_argument("--token-id", help="set the claim jti, the id that revocation uses")
    parser.add_argument("--scope", help="set the claim scope, words separated by spaces")
    parser.add_argument("--quota", action="append", default=[], metavar="NAME=VALUE", help="add to the quota claim q")
    options = parser.parse_intermixed_args(arguments)
    if options.mode not in ("encode", "decode"):
        raise UsageError("Expected mode to be 'encode' or 'decode'")
    if options.payload is None:
        raise UsageError("Expected payload to be a valid JSON string" if options.mode == "encode" else "Expected a JWT")
    if options.exp is not None and options.exp < 0:
        raise UsageError("Expected --exp to be 0 or more seconds")
    return options


def choose_secret(flag: str | None, from_environment: str | None) -> str:
    """Return the secret, the flag first; say on standard error when it overrides and when it is short."""
    if flag and from_environment and flag != from_environment:
        print("WARNING: --secret is used, JWT_SECRET is ignored", file=sys.stderr)
    secret = flag or from_environment
    if not secret:
        raise UsageError("Expected --secret or the JWT_SECRET environment variable to be provided")
    num_bytes = len(secret.encode("utf-8"))
    if num_bytes < MIN_SECRET_BYTES:
        print(f"WARNING: the secret has {num_bytes} bytes, HS256 needs {MIN_SECRET_BYTES}", file=sys.stderr)
    return secret


def encode(options: argparse.Namespace, secret: str, now: int) -> str:
    """Sign the payload with the claims of the options, `iat` and `exp` added; raise UsageError."""
    try:
        claims = json.loads(options.payload)
    except (ValueError, RecursionError):
        raise UsageError("Expected payload to be a valid JSON string") from None
    if not isinstance(claims, dict):
        raise UsageError("Expected payload to be a JSON object")
    named = {"team_id": options.tenant, "jti": options.token_id, "scope": options.scope}
    claims |= {name: value for name, value in named.items() if value is not None}
    if options.quota:
        claims["q"] = {**claims.get("q", {}), **dict(_parse_quota(pair) for pair in options.quota)}
    claims.setdefault("iat", now)
    # An --exp on the command line is meant; the default only fills a gap.
    if options.exp:
        claims["exp"] = now + options.exp
    elif options.exp is None:
        claims.setdefault("exp", now + DEFAULT_LIFETIME_SECONDS)
    try:
        compact: str = jwt.encode(claims, secret, algorithm="HS256")
    except (jwt.PyJWTError, TypeError) as fault:
        raise UsageError(f"Cannot sign: {fault}") from None
    return compact


def decode(compact: str, secret: str) -> str:
    """Verify a JWT and return its claims as JSON; raise UsageError when it does not verify or is over."""
    try:
        # The audience is shown, not judged: this tool speaks for no service.
        claims: dict[str, Any] = jwt.decode(compact, secret, algorithms=["HS256"], options={"verify_aud": False})
    except (jwt.PyJWTError, ValueError, TypeError) as fault:
        raise UsageError(f"Cannot decode the JWT: {' '.join(str(fault).split())}") from None
    return json.dumps(claims)


def _parse_quota(pair: str) -> tuple[str, object]:
    name, equals, text = pair.partition("=")
    if not name or not equals:
        raise UsageError("Expected --quota to be NAME=VALUE")
    try:
        return name, int(text)
    except ValueError:
        return name, text


def main(arguments: list[str] | None = None) -> int:
    """Run once; return 0, or 1 after one line `ERROR: …`."""
    # PyJWT warns of short keys in its own words; ours has been said by then.
    warnings.filterwarnings("ignore", category=jwt.InsecureKeyLengthWarning)
    try:
        options = parse_options(sys.argv[1:] if arguments is None else arguments)
        secret = choose_secret(options.secret, os.environ.get("JWT_SECRET"))
        result = (
            encode(options, secret, int(time.time())) if options.mode == "encode" else decode(options.payload, secret)
        )
    except UsageError as fault:
        print(f"ERROR: {fault}", file=sys.stderr)
        return 1
    print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
