"""Check the bearer tool as it is used: as a process, with its output, its warnings and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jwt
import pytest

from proxy.auth import Authenticator

SCRIPT = Path(__file__).parents[2] / "scripts" / "jwt_util.py"
SECRET = "0123456789abcdef0123456789abcdef"
CLAIMS = '{"team_id": "team-a", "token_id": "id-1"}'


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def encoded(*arguments: str) -> dict[str, object]:
    ended = run("encode", *arguments, JWT_SECRET=SECRET)
    assert (ended.returncode, ended.stderr) == (0, "")
    return jwt.decode(ended.stdout.strip(), SECRET, algorithms=["HS256"])


def test_an_encoded_bearer_is_accepted_by_the_proxy() -> None:
    ended = run("encode", CLAIMS, "--scope", "inference metrics", "--quota", "rows=3", JWT_SECRET=SECRET)
    authenticator = Authenticator.from_shared_secret(SECRET.encode(), time.time)
    claims = authenticator.authenticate(f"Bearer {ended.stdout.strip()}")
    assert (claims.tenant, claims.token_id, claims.scopes) == ("team-a", "id-1", {"inference", "metrics"})
    assert claims.quotas == {"rows": 3}


def test_iat_and_a_day_of_exp_are_added_unless_told_otherwise() -> None:
    now = time.time()
    claims = encoded(CLAIMS)
    assert now - 1 <= float(str(claims["iat"])) <= now + 20
    assert int(str(claims["exp"])) - int(str(claims["iat"])) == 24 * 3600
    assert int(str(encoded(CLAIMS, "--exp", "60")["exp"])) < now + 100
    assert "exp" not in encoded(CLAIMS, "--exp", "0")
    assert encoded('{"exp": 4000000000}')["exp"] == 4000000000
    assert encoded("{}", "--tenant", "b")["team_id"] == "b"


def test_options_may_stand_before_or_after_the_mode() -> None:
    for arguments in (
        ["--secret", SECRET, "encode", CLAIMS],
        ["encode", "--secret", SECRET, CLAIMS],
        ["encode", CLAIMS, "--secret", SECRET],
    ):
        ended = run(*arguments)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout.count(".") == 2 and ended.stdout.count("\n") == 1


def test_the_flag_wins_over_the_environment_with_one_line() -> None:
    ended = run("encode", CLAIMS, "--secret", SECRET, JWT_SECRET=SECRET[::-1])
    assert ended.stderr == "WARNING: --secret is used, JWT_SECRET is ignored\n"
    jwt.decode(ended.stdout.strip(), SECRET, algorithms=["HS256"])


def test_a_short_secret_is_a_warning_and_never_a_failure() -> None:
    ended = run("encode", CLAIMS, "--secret", "abc")
    assert (ended.returncode, ended.stderr) == (0, "WARNING: the secret has 3 bytes, HS256 needs 32\n")
    again = run("decode", ended.stdout.strip(), "--secret", "abc")
    assert again.returncode == 0 and json.loads(again.stdout)["team_id"] == "team-a"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["sign", CLAIMS], "ERROR: Expected mode to be 'encode' or 'decode'"),
        ([], "ERROR: Expected mode to be 'encode' or 'decode'"),
        (["encode", "{"], "ERROR: Expected payload to be a valid JSON string"),
        (["encode"], "ERROR: Expected payload to be a valid JSON string"),
        (["encode", "[]"], "ERROR: Expected payload to be a JSON object"),
        (["encode", CLAIMS, "--exp", "-1"], "ERROR: Expected --exp to be 0 or more seconds"),
        (["encode", CLAIMS, "--quota", "rows"], "ERROR: Expected --quota to be NAME=VALUE"),
        (["decode", "a.b.c"], "ERROR: Cannot decode the JWT: "),
        (["decode", "é"], "ERROR: Cannot decode the JWT: "),
    ],
)
def test_a_fault_is_one_line_and_exit_1(arguments: list[str], text: str) -> None:
    ended = run(*arguments, JWT_SECRET=SECRET)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(text) and ended.stderr.count("\n") == 1


def test_no_secret_at_all_and_a_foreign_or_expired_bearer_are_one_line_too() -> None:
    assert run("encode", CLAIMS).stderr == (
        "ERROR: Expected --secret or the JWT_SECRET environment variable to be provided\n"
    )
    for foreign in (
        jwt.encode({}, SECRET[::-1], algorithm="HS256"),
        jwt.encode({"exp": 1}, SECRET, algorithm="HS256"),
    ):
        ended = run("decode", foreign, JWT_SECRET=SECRET)
        assert ended.returncode == 1 and ended.stderr.startswith("ERROR: Cannot decode the JWT: ")


def test_the_script_is_executable() -> None:
    assert os.access(SCRIPT, os.X_OK)
    assert SCRIPT.read_text().startswith("#!/usr/bin/env python3\n")
