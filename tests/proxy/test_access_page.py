"""Run what docs/access.md shows: bearers, policy, keys and revocation list are good as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proxy.access import Access, AccessFiles, read_key_file
from proxy.auth import AuthError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "access.md").read_text("utf-8")


def snippets(name: str) -> list[str]:
    return re.findall(rf"<!-- run: {name} -->\n```[a-z]*\n(.*?)```", PAGE, re.DOTALL)


def test_the_bearer_of_a_shared_secret_gets_in(tmp_path: Path) -> None:
    (script,) = snippets("secret")
    script = f'python3() {{ "{sys.executable}" "$@"; }}\n' + script.replace(
        "scripts/jwt_util.py", f'"{sys.executable}" "{ROOT}/scripts/jwt_util.py"'
    )
    done = subprocess.run(
        ["bash", "-ec", f'{script}\necho "$JWT_SECRET"'], cwd=tmp_path, capture_output=True, check=True, text=True
    )
    shown, secret = done.stdout.splitlines()
    claims = Access(AccessFiles(secret.encode(), None, None), time.time).authenticate(
        f"Bearer {(tmp_path / 'bearer').read_text().strip()}"
    )
    assert (claims.tenant, claims.token_id) == ("team-a", "team-a-1") and '"team_id": "team-a"' in shown


@pytest.mark.parametrize("text", snippets("keys"))
def test_the_key_files_are_taken(text: str) -> None:
    assert read_key_file(text.encode(), Path("keys.json"))["ed-1"].algorithm == "EdDSA"


def test_the_policy_the_pair_and_the_list_go_together(tmp_path: Path) -> None:
    (policy,), (pair,), (revoked,) = snippets("policy"), snippets("pair"), snippets("revoked")
    done = subprocess.run([sys.executable, "-c", pair], cwd=tmp_path, capture_output=True, check=True, text=True)
    (tmp_path / "policy.json").write_text(policy)
    access = Access(AccessFiles(b"", tmp_path / "policy.json", None), time.time)
    assert access.authenticate(f"Bearer {done.stdout.strip()}").tenant == "team-a"
    (tmp_path / "revoked").write_text(revoked)
    access = Access(AccessFiles(b"", tmp_path / "policy.json", tmp_path / "revoked"), time.time)
    with pytest.raises(AuthError, match=r"JWT has been revoked\."):
        access.authenticate(f"Bearer {done.stdout.strip()}")
