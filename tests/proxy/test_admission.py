"""Check the decision about a request head, and that no path but the table's is ever let through."""

from __future__ import annotations

import re
import string

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.admission import Admission, Admitter, RequestHead
from proxy.answers import Refusal
from proxy.auth import Authenticator
from proxy.routes import ROUTES, Route, RouteFault, RouteTable, Scope

SECRET = b"0123456789abcdef0123456789abcdef"
HTTP_1_1 = (1, 1)
ASCII = [chr(code) for code in range(128)]


def bearer(**claims: object) -> str:
    return "Bearer " + jwt.encode({"team_id": "t", **claims}, SECRET, algorithm="HS256")


def make_admitter(trusted_hosts: frozenset[str] = frozenset()) -> Admitter:
    authenticator = Authenticator.from_shared_secret(SECRET, lambda: 0.0)
    return Admitter(RouteTable(), authenticator, trusted_hosts=trusted_hosts, max_body_bytes=100)


ADMITTER = make_admitter()


def admit(method: str, target: str, **headers: str) -> Admission:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ADMITTER.admit(RequestHead(method, target, HTTP_1_1, {"host": "x", "authorization": bearer(), **named}))


def refusal(method: str, target: str, **headers: str) -> tuple[int, str]:
    with pytest.raises(Refusal) as caught:
        admit(method, target, **headers)
    return caught.value.status, caught.value.code


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.template}")
def test_every_route_asks_for_its_scope_and_nothing_less(route: Route) -> None:
    assert route.scope is not None
    path = route.template.replace("<model>", "falcon40b").replace("<id>", "req_1")
    scopes = {scope.value: bearer(scope=scope.value) for scope in Scope}
    for name, authorization in scopes.items():
        head = RequestHead(route.method, path, HTTP_1_1, {"host": "x", "authorization": authorization})
        if route.scope is Scope.PUBLIC:
            assert ADMITTER.admit(head).claims is None
        elif name == route.scope.value:
            assert ADMITTER.admit(head).path == path
        else:
            with pytest.raises(Refusal) as caught:
                ADMITTER.admit(head)
            assert caught.value.status == 403
    head = RequestHead(route.method, path, HTTP_1_1, {"host": "x"})
    if route.scope is not Scope.PUBLIC:
        with pytest.raises(Refusal) as caught:
            ADMITTER.admit(head)
        assert caught.value.status == 401


@pytest.mark.parametrize(
    "routes",
    [
        [Route("GET", "/x", None)],
        [Route("GET", "/x", Scope.PUBLIC), Route("GET", "/x", Scope.METRICS)],
        [Route("GET", "/<surprise>", Scope.PUBLIC)],
    ],
    ids=["no scope", "twice", "segment"],
)
def test_a_route_table_that_is_not_decided_stops_the_start(routes: list[Route]) -> None:
    with pytest.raises(RouteFault):
        RouteTable(routes)


ADMITTED_PATH = re.compile(
    r"/(?:health(?:/live|/ready)?|rows|info|metrics|(?:inference|predictions|chat)/[A-Za-z0-9._:-]+|v1/requests/[A-Za-z0-9_-]+)?"
)
NEARLY_A_PATH = st.from_regex(
    r"/?(inference|health|v1|rows|chat|\.|\.\.|%2e|)(/|%2f|//|\\|;|)(m|live|requests|\.\.|\.|)(/|\?|#|)[a-z.%]{0,3}",
    fullmatch=True,
)


@given(st.sampled_from(["GET", "POST", "DELETE", "HEAD"]), st.text().map(lambda text: "/" + text) | NEARLY_A_PATH)
def test_no_path_outside_the_table_is_admitted(method: str, target: str) -> None:
    try:
        admission = admit(method, target)
    except Refusal as fault:
        refused_with = fault.status
    else:
        refused_with = None
    if refused_with is not None:
        assert refused_with in (400, 403, 404, 405)
        return
    assert ADMITTED_PATH.fullmatch(admission.path)
    assert not {".", ".."} & set(admission.path.split("/"))


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/inference/..", 404),
        ("POST", "/inference/.", 404),
        ("POST", "/inference/a%2fb", 404),
        ("POST", "/inference/" + "a" * 129, 404),
        ("POST", "/health", 405),
        ("HEAD", "/rows", 405),
        ("TRACE", "/nowhere", 405),
        ("CONNECT", "x:443", 405),
        ("GET", "*", 400),
        ("GET", "/rows#a", 400),
        ("GET", "/rows?a=\x00", 400),
        ("GET", "/rows?a=%zz", 400),
        ("GET", "/rows?" + "&".join("a=1" for _ in range(65)), 400),
        ("GET", "http://y/rows", 400),
        ("GET", "https://x/rows", 400),
    ],
)
def test_a_target_is_refused_with_its_status(method: str, target: str, status: int) -> None:
    assert refusal(method, target)[0] == status


def test_a_wrong_method_names_the_right_ones_before_any_credential_is_read() -> None:
    with pytest.raises(Refusal) as caught:
        admit("PUT", "/v1/requests/a", authorization="nonsense")
    assert (caught.value.status, caught.value.headers) == (405, {"Allow": "DELETE, GET"})


def test_a_query_is_rebuilt_from_its_pairs() -> None:
    assert admit("GET", "/rows?b=%41+c&a=&a=/").query == "b=A+c&a=&a=%2F"
    assert admit("GET", "http://X/rows", host="x").path == admit("GET", "http://x/rows", host="X").path == "/rows"


def admit_alone(method: str, target: str, version: tuple[int, int] = HTTP_1_1, **headers: str) -> Admission | str:
    """Admit a head that has these headers only; return the refusal's status, code and text if there is one."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        return ADMITTER.admit(RequestHead(method, target, version, named))
    except Refusal as fault:
        return f"{fault.status} {fault.code}: {fault.message}"


@pytest.mark.parametrize(
    ("method", "target", "headers", "told"),
    [
        ("GET", "/health", {}, "400 host_missing: Host header is required."),
        ("GET", "/health", {"host": "x y"}, "400 host_invalid: Host header is not valid."),
        ("GET", "http://y/", {"host": "x"}, "400 target_invalid: Request target names another host."),
        ("GET", "health", {"host": "x"}, "400 target_invalid: Request target is not valid."),
        ("GET", "/health#a", {"host": "x"}, "400 target_invalid: Request target is not valid."),
        ("GET", "/health?a=%ff", {"host": "x"}, "400 query_invalid: Query is not valid UTF-8 or has too many fields."),
        (
            "POST",
            "/inference/m",
            {"host": "x", "authorization": "a", "x_api_key": "b"},
            "400 two_credentials: Send either Authorization or X-Api-Key, not both.",
        ),
        (
            "POST",
            "/inference/m",
            {"host": "x", "authorization": bearer(scope="metrics")},
            "403 scope_missing: JWT scope must include 'inference'.",
        ),
        (
            "GET",
            "/health",
            {"host": "x", "transfer_encoding": "gzip"},
            "501 coding_unsupported: Transfer-Encoding must be chunked.",
        ),
        ("GET", "/health", {"host": "x", "content_length": "1"}, "400 body_unexpected: GET takes no body."),
        (
            "POST",
            "/inference/m",
            {"host": "x", "authorization": bearer(), "content_length": "101"},
            "413 body_too_large: Request body is larger than 100 bytes.",
        ),
        (
            "POST",
            "/inference/m",
            {"host": "x", "authorization": bearer(), "content_length": "1", "content_encoding": "br"},
            "415 content_encoding: Content-Encoding must be identity.",
        ),
    ],
)
def test_a_refusal_has_its_fixed_text(method: str, target: str, headers: dict[str, str], told: str) -> None:
    assert admit_alone(method, target, **headers) == told


def test_a_client_of_http_1_0_need_not_name_the_host() -> None:
    assert isinstance(admit_alone("GET", "/health", (1, 0)), Admission)
    told = admit_alone("GET", "http://x/health", (1, 0))
    assert told == "400 target_invalid: Request target names another host."


def test_an_absolute_target_is_read_whatever_its_case() -> None:
    for target, path in (("HTTP://x/health", "/health"), ("http://x", "/"), ("http://x/health?a=http://y/", "/health")):
        admission = admit("GET", target)
        assert admission.path == path


def test_a_host_is_a_name_or_a_bracketed_address_and_a_port() -> None:
    def taken(form: str) -> set[str]:
        told = {character: admit_alone("GET", "/health", host=form.format(character)) for character in ASCII}
        return {character for character in ASCII if isinstance(told[character], Admission)}

    words = set(string.ascii_letters + string.digits)
    assert taken("{}") == words
    assert taken("a{}a") == words | set("._-")
    assert taken("a:8{}") == set(string.digits)
    assert taken("[:{}]") == set(string.hexdigits + ":.")


@pytest.mark.parametrize(
    ("longest", "longer"),
    [
        ("a" * 254, "a" * 255),
        ("a:12345", "a:123456"),
        ("[::]", "[:]"),
        ("[" + "0" * 45 + "]:1", "[" + "0" * 46 + "]:1"),
        ("a:1", "a:"),
    ],
)
def test_a_host_is_bounded(longest: str, longer: str) -> None:
    assert isinstance(admit_alone("GET", "/health", host=longest), Admission)
    assert admit_alone("GET", "/health", host=longer) == "400 host_invalid: Host header is not valid."


def test_a_query_is_made_of_these_characters_and_no_others() -> None:
    def taken(form: str) -> set[str]:
        told = {character: admit_alone("GET", "/health?" + form.format(character), host="x") for character in ASCII}
        return {character for character in ASCII if not str(told[character]).startswith("400 target_invalid")}

    assert taken("a{}") == set(string.ascii_letters + string.digits + "._~!$&'()*+,;=:@/?-")
    assert taken("%{}1") == taken("%4{}") == set(string.hexdigits)
    assert admit("GET", "/rows?" + "&".join(["a=1"] * 64)).query.count("a=1") == 64


def test_a_length_is_read_up_to_the_largest_body() -> None:
    assert admit("POST", "/inference/m", content_length="100").has_body is True
    assert admit("POST", "/inference/m", content_length="100".zfill(18)).has_body is True
    assert refusal("POST", "/inference/m", content_length="100".zfill(19)) == (413, "body_too_large")
    assert admit("POST", "/inference/m").has_body is False
    assert admit("GET", "/rows", content_encoding="gzip").has_body is False
    assert admit("GET", "/rows?").query == ""
    assert admit("POST", "/inference/m", content_length="1", content_encoding="Identity").has_body is True
    assert admit("POST", "/inference/m", transfer_encoding=" chunked ").has_body is True


def test_an_admission_names_the_route_and_the_methods_of_a_path_are_listed() -> None:
    admission = admit("POST", "/inference/m")
    assert (admission.method, admission.template) == ("POST", "/inference/<model>")
    head = RequestHead("OPTIONS", "/inference/m", HTTP_1_1, {"host": "x"})
    assert ADMITTER.methods(head) == ["POST"]
    with pytest.raises(Refusal, match=r"^OPTIONS takes no body\.$"):
        ADMITTER.methods(RequestHead("OPTIONS", "/inference/m", HTTP_1_1, {"host": "x", "content-length": "1"}))


@pytest.mark.parametrize("host", ["", "x, y", "x/v1?", "x y", "x@y", "x:port", "[::1", "x\x00"])
def test_an_invalid_host_is_refused(host: str) -> None:
    assert refusal("GET", "/health", host=host) == (400, "host_invalid")


def test_only_trusted_hosts_pass_when_they_are_named() -> None:
    admitter = make_admitter(frozenset({"api.test"}))
    assert admitter.admit(RequestHead("GET", "/health", HTTP_1_1, {"host": "API.test:80"})).path == "/health"
    with pytest.raises(Refusal, match=r"^Host header is not one of this service's names\.$") as caught:
        admitter.admit(RequestHead("GET", "/health", HTTP_1_1, {"host": "other.test"}))
    assert (caught.value.status, caught.value.code) == (400, "host_untrusted")


def admit_with(**headers: str) -> Admission:
    """Admit a call that has these headers only."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ADMITTER.admit(RequestHead("POST", "/v1/messages", HTTP_1_1, {"host": "x", **named}))


def test_a_jwt_in_x_api_key_admits_as_it_does_in_authorization() -> None:
    authorization = bearer(jti="id-1")
    by_key = admit_with(x_api_key=authorization.removeprefix("Bearer "))
    assert by_key == admit_with(authorization=authorization)
    assert by_key.claims is not None and by_key.claims.tenant == "t"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, (401, "authorization_missing")),
        ({"x_api_key": ""}, (401, "jwt_malformed")),
        ({"x_api_key": bearer()}, (401, "jwt_malformed")),
        ({"x_api_key": bearer(scope="metrics").removeprefix("Bearer ")}, (403, "scope_missing")),
        ({"x_api_key": "a.b.c,a.b.c"}, (400, "two_credentials")),
        ({"x_api_key": "", "authorization": bearer()}, (400, "two_credentials")),
        ({"x_api_key": bearer().removeprefix("Bearer "), "authorization": ""}, (400, "two_credentials")),
    ],
    ids=["neither", "empty", "with a scheme", "scope", "two keys", "empty and bearer", "key and empty"],
)
def test_one_credential_and_a_good_one_is_needed(headers: dict[str, str], expected: tuple[int, str]) -> None:
    with pytest.raises(Refusal) as caught:
        admit_with(**headers)
    assert (caught.value.status, caught.value.code) == expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"content_length": "101"}, (413, "body_too_large")),
        ({"content_length": "9" * 25}, (413, "body_too_large")),
        ({"transfer_encoding": "gzip, chunked"}, (501, "coding_unsupported")),
        ({"content_length": "1", "content_encoding": "gzip"}, (415, "content_encoding")),
        ({"x_api_key": "a"}, (400, "two_credentials")),
    ],
)
def test_framing_and_credentials_are_decided_on_the_head(headers: dict[str, str], expected: tuple[int, str]) -> None:
    assert refusal("POST", "/inference/m", **headers) == expected


def test_a_get_with_a_body_is_refused() -> None:
    assert refusal("GET", "/rows", content_length="1") == (400, "body_unexpected")
    assert admit("DELETE", "/v1/requests/a", content_length="0").has_body is False
    assert admit("POST", "/inference/m", transfer_encoding="Chunked").has_body is True
