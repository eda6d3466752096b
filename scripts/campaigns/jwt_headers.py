"""Send the sample vectors through a running proxy in every form of header: the half of the part `jwt` over HTTP.

An echo upstream counts what came through: a vector that the policy accepts gets in by three forms, everything else by
none, and what did not get in never reached the upstream.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from campaigns.part import Context
from tests.integration.echo_upstream import EchoUpstream
from tests.integration.proxy_process import ProxyProcess, RawClient

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "tests" / "data" / "jwt_policy_vectors_sample.json"
# Name -> (target, header lines with `{}` for the JWT, the status for a good one).
FORMS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "bearer": ("/rows", ("Authorization: Bearer {}",), 200),
    "any case": ("/rows", ("aUTHORIZATION: bEARER {}",), 200),
    "key": ("/rows", ("X-Api-Key: {}",), 200),
    "two spaces": ("/rows", ("Authorization: Bearer  {}",), 401),
    "no scheme": ("/rows", ("Authorization: {}",), 401),
    "twice": ("/rows", ("Authorization: Bearer {}", "Authorization: Bearer {}"), 400),
    "both": ("/rows", ("Authorization: Bearer {}", "X-Api-Key: {}"), 400),
    "elsewhere": (
        "/rows?access_token={}&authorization=Bearer+{}",
        ("Cookie: access_token={}; Authorization=Bearer {}", "Proxy-Authorization: Bearer {}"),
        401,
    ),
}


def try_header_forms(context: Context) -> int:
    """Send every vector in every form; return how many requests that were."""
    document = json.loads(VECTORS.read_text("utf-8"))
    good = frozenset(vector["token"] for vector in document["vectors"] if vector["expected"] == "accept")
    num_requests = 0
    with tempfile.TemporaryDirectory() as folder, EchoUpstream() as upstream:
        rules = Path(folder) / "policy.json"
        rules.write_text(json.dumps(document["policy"]), "utf-8")
        script, moment = str(Path(__file__).with_name("proxy_at.py")), str(document["policy"]["clock_now"])
        with ProxyProcess(upstream.port, moment, script=script, JWT_SECRET="", JWT_POLICY_FILE=str(rules)) as proxy:
            for vector in document["vectors"]:
                for form in FORMS:
                    num_before = len(upstream.seen)
                    status = _send(proxy.port, form, vector["token"])
                    wanted = _wanted(form, vector["token"], good)
                    fault = _fault(status, wanted, len(upstream.seen) - num_before)
                    context.count(f"{vector['category']} {vector['name']} as {form}", fault)
                    num_requests += 1
    return num_requests


def _send(port: int, form: str, text: str) -> int:
    target, lines, _status = FORMS[form]
    head = [f"GET {target} HTTP/1.1", "Host: proxy.test", *lines, "", ""]
    with RawClient(port) as client:
        # Bytes beyond latin-1 cannot be in a field's text otherwise.
        client.send("\r\n".join(head).replace("{}", text).encode("utf-8", "surrogatepass"))
        return client.read_answer()[0]


def _wanted(form: str, text: str, good: frozenset[str]) -> set[int]:
    """Return the statuses that are right, read off the header lines themselves."""
    _target, lines, status = FORMS[form]
    name, _, value = lines[0].replace("{}", text).partition(":")
    # RFC 9110 section 5.5: blanks around a field's value are not part of it.
    value = value.strip(" \t")
    if name.lower() == "authorization":
        scheme, _, value = value.partition(" ")
        value = value if scheme.lower() == "bearer" else ""
    if len(lines) == 1 and value in good:
        return {200}
    # What breaks the head's own grammar or size is refused before anybody looks for a bearer.
    return {status} if text in good else {400, 401, 414, 431}


def _fault(status: int, wanted: set[int], num_reached: int) -> str | None:
    if status not in wanted:
        return f"status {status}, not {wanted}"
    if num_reached != (status == 200):
        return f"status {status}, but {num_reached} requests reached the upstream"
    return None
