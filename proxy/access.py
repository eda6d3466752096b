"""Own who gets in now: the keys, the policy and the revocation list in force, and their change while calls run.

Runs in the proxy's worker. A change makes a new immutable `Authenticator` that replaces the old one by reference, so
that a request sees one whole set of rules. Files are read and URLs fetched by greenlets of their own (`watched`), never
by a request. It does not know how a bearer is verified or how a call is cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxy.auth import Authenticator, AuthError, Claims
from proxy.jwks import load_key_set
from proxy.keys import KeySet, load_keys
from proxy.located_json import FileFault, LocatedJson, MemberFault, parse_located
from proxy.open_calls import OpenCalls
from proxy.policy import KeyPlace, PolicyFault, StrictPolicy, read_policy
from proxy.published_keys import PublishedKeys, fetch_published
from proxy.revocation import parse_revocations
from proxy.watched_file import Refreshed, WatchedFile, read_bounded

# Room for the largest set of keys; reading more would only hold up the requests.
_MAX_FILE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class AccessFiles:
    """Say where the rules lie; without a policy file the shared secret decides."""

    secret: bytes
    policy_file: Path | None
    revocation_file: Path | None


@dataclass(frozen=True, slots=True)
class _Rules:
    """One policy with the place of its keys; exactly one of the three has them."""

    policy: StrictPolicy
    own_keys: KeySet
    key_file: WatchedFile[KeySet] | None = None
    published: PublishedKeys | None = None

    @property
    def keys(self) -> KeySet:
        if self.key_file is not None:
            return self.key_file.value
        return self.own_keys if self.published is None else self.published.keys


class Access:
    """Authenticate with what is in force; `watched` is what must be refreshed every few seconds."""

    def __init__(
        self,
        files: AccessFiles,
        now: Callable[[], float],
        fetch: Callable[[KeyPlace], bytes] = fetch_published,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the files and fetch a published key set (blocking); `now` gives Unix seconds.

        Raises FileFault, naming file and line, or KeyFault for the shared secret. A set that cannot be fetched, or that
        is wrong, is only logged: bearers are refused until there is one.
        """
        self.open_calls = OpenCalls()
        self._now = now
        self._fetch = fetch
        self._monotonic = monotonic
        self._revocations = (
            None
            if files.revocation_file is None
            else _watch(files.revocation_file, parse_revocations, self._cut, is_pure=True)
        )
        self._rules: _Rules | None = None
        # A policy came before the key file that it names, which nobody watches yet.
        self._awaits_key_file = False
        if files.policy_file is None:
            self._authenticator = Authenticator.from_shared_secret(files.secret, now)
            return
        self._policy = _watch(files.policy_file, self._read_rules, self._adopt)
        self._adopt(self._policy.value)

    def authenticate(self, authorization_header: str) -> Claims:
        """Return the claims of the header's bearer; raise AuthError with a fixed text and a stable code."""
        return self._check(self._authenticator.authenticate, authorization_header)

    def authenticate_api_key(self, api_key_header: str) -> Claims:
        """Do the same for an X-Api-Key header."""
        return self._check(self._authenticator.authenticate_api_key, api_key_header)

    @property
    def watched(self) -> Sequence[Sequence[Refreshed]]:
        """List what to refresh, a greenlet for each group: a slow issuer must not hold up the files.

        Nor the revocations: a policy that names another issuer is in force once that has answered.
        """
        groups: list[Sequence[Refreshed]] = []
        if self._revocations is not None:
            groups.append([self._revocations])
        if self._rules is not None:
            groups += [RefreshedBy(self._refresh_rules)], [RefreshedBy(self._refresh_published)]
        return groups

    @property
    def published_fault(self) -> FileFault | None:
        """Say what is wrong with the published set that was fetched last, if anything."""
        published = None if self._rules is None else self._rules.published
        return None if published is None else published.fault

    @property
    def has_keys(self) -> bool:
        """Say whether any bearer can be verified: not before a published set was fetched once."""
        return self._rules is None or self._rules.published is None or self._rules.published.fetched

    def _check(self, authenticate: Callable[[str], Claims], header: str) -> Claims:
        try:
            claims = authenticate(header)
        except AuthError as fault:
            if fault.code == "jwt_key" and self._rules is not None and self._rules.published is not None:
                self._rules.published.ask_for_unknown()
            raise
        if self._revocations is not None and claims.token_id in self._revocations.value:
            raise AuthError("jwt_revoked", "JWT has been revoked.")
        return claims

    def _refresh_rules(self) -> bool:
        if self._rules is None:
            return False
        if self._awaits_key_file:
            self._policy.look_again()
        self._policy.refresh()
        if self._rules.key_file is not None and self._rules.key_file.refresh():
            self._adopt(self._rules)
        return True

    def _refresh_published(self) -> bool:
        rules = self._rules
        if rules is None or rules.published is None or not rules.published.refresh():
            return False
        # The policy may have changed while this greenlet waited for the issuer: the rules in force are taken anew.
        if self._rules is not None:
            self._adopt(self._rules)
        return True

    def _adopt(self, rules: _Rules) -> None:
        self._rules = rules
        self._authenticator = Authenticator(rules.keys, rules.policy, self._now)

    def _cut(self, revoked: frozenset[str]) -> None:
        self.open_calls.cut(revoked)

    def _read_rules(self, raw: bytes, file: Path) -> _Rules:
        policy, own_keys, located = read_policy_file(raw, file)
        self._awaits_key_file = False
        place = policy.key_place
        if place is None:
            return _Rules(policy, own_keys)
        if place.file:
            try:
                key_file = _watch(file.parent / place.file, read_key_file, is_pure=True)
                return _Rules(policy, own_keys, key_file=key_file)
            except FileFault as fault:
                self._awaits_key_file = True
                raise located.fault(str(file), PolicyFault(str(fault), _place_of(located))) from None
        if place.ca_file:
            place = replace(place, ca_file=str(file.parent / place.ca_file))
            _check_readable(place.ca_file, str(file), located)
        in_force = None if self._rules is None else self._rules.published
        if in_force is not None and in_force.place == place:
            return _Rules(policy, own_keys, published=in_force)
        published = PublishedKeys(place, self._fetch, self._monotonic)
        published.refresh()
        if self._rules is not None and not published.fetched:
            what = "no good key set could be fetched; write the policy anew to try again"
            raise located.fault(str(file), PolicyFault(what, ("jwks_url",)))
        return _Rules(policy, own_keys, published=published)


class RefreshedBy:
    """Give a function the form of what is watched."""

    def __init__(self, refresh: Callable[[], bool]) -> None:
        """Take what is called every few seconds."""
        self.refresh = refresh


def read_policy_file(raw: bytes, file: Path) -> tuple[StrictPolicy, KeySet, LocatedJson]:
    """Read a policy and the keys that it lists itself; raise FileFault with the line and the member."""
    located = _parse_object(raw, file)
    try:
        policy = read_policy(located.value)
        keys = load_keys(located.value["keys"]) if policy.key_place is None else {}
    except MemberFault as fault:
        raise located.fault(str(file), fault) from None
    return policy, keys, located


def read_key_file(raw: bytes, file: Path) -> KeySet:
    """Read a key file, by id or as a JWKS; raise FileFault with the line and the member."""
    located = _parse_object(raw, file)
    try:
        return load_key_set(located.value, published=False)
    except MemberFault as fault:
        raise located.fault(str(file), fault) from None


def _parse_object(raw: bytes, file: Path) -> LocatedJson:
    if len(raw) > _MAX_FILE_BYTES:
        raise FileFault(f"{file}: is larger than {_MAX_FILE_BYTES} bytes")
    located = parse_located(raw, str(file))
    if not isinstance(located.value, dict):
        raise FileFault(f"{file}:{located.line_of(())}: must be one JSON object")
    return located


def _check_readable(ca_file: str, file: str, located: LocatedJson) -> None:
    try:
        read_bounded(Path(ca_file))
    except (OSError, FileFault) as fault:
        what = f"cannot be read ({fault.strerror})" if isinstance(fault, OSError) else str(fault)
        raise located.fault(file, PolicyFault(what, ("jwks_ca_file",))) from None


def _place_of(located: LocatedJson) -> tuple[str]:
    return ("key_file",) if "key_file" in located.value else ("jwks_url",)


def _watch(
    file: Path,
    read: Callable[[bytes, Any], Any],
    on_change: Callable[[Any], None] | None = None,
    *,
    is_pure: bool = False,
) -> Any:
    """Return the file, watched; raise FileFault also where it cannot be read at all."""
    try:
        return WatchedFile(file, lambda raw: read(raw, file), on_change, is_pure=is_pure)
    except OSError as fault:
        raise FileFault(f"{file}: cannot be read ({fault.strerror})") from None
