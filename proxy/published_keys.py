"""Own the keys that an issuer publishes under a URL: when they are fetched, and how long the last good set is kept.

Runs in the proxy's worker, in a greenlet of its own; a request only reads `keys` and never waits for a fetch. Time and
the fetch are arguments. It does not know policies or bearers. A fetch is a child process (jwks_fetch.py says why).
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from proxy.jwks import load_key_set
from proxy.keys import KeySet
from proxy.located_json import FileFault, MemberFault, parse_located
from proxy.policy import KeyPlace

# What is published is in force within 60 s of it: this, the greenlet's step of 2 s and the fetch's 2 s.
REFRESH_SECONDS = 55.0
# Bearers with unknown key ids, which anybody can send, cause no more fetches than this; nor does a silent issuer.
RETRY_SECONDS = 30.0
# While there is no set at all, every bearer is refused: the issuer is asked so often.
URGENT_RETRY_SECONDS = 5.0
KEEP_SECONDS = 3600.0
NAME = "jwks_url"

_PROGRAM = Path(__file__).with_name("jwks_fetch.py")
# The child ends itself after 2 s; this is for one that cannot even start.
_CHILD_SECONDS = 10.0


class FetchFault(Exception):
    """Tell that nothing was fetched; the message says why."""


def fetch_published(place: KeyPlace) -> bytes:
    """Fetch the document in a child process and return it; waits for it, raises FetchFault."""
    # Isolated: neither this folder nor the environment decides what the child imports, and it inherits no secret.
    command = [sys.executable, "-I", str(_PROGRAM), place.url, *filter(None, [place.ca_file])]
    try:
        done = subprocess.run(  # noqa: S603 - the program is ours, the URL an argument of the policy's
            command, env={}, capture_output=True, timeout=_CHILD_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise FetchFault(f"the fetch could not be run ({type(fault).__name__})") from None
    if done.returncode == -signal.SIGALRM:
        raise FetchFault("it did not answer in time")
    if done.returncode != 0:
        told = done.stderr.decode("ascii", "replace").strip().splitlines()
        raise FetchFault(told[-1][:200] if told else f"the fetch ended with {done.returncode}")
    return done.stdout


def read_published(raw: bytes) -> KeySet:
    """Read a fetched document; raise FileFault with the line and the member of what is wrong."""
    located = parse_located(raw, NAME)
    try:
        return load_key_set(located.value, published=True)
    except MemberFault as fault:
        raise located.fault(NAME, fault) from None


class PublishedKeys:
    """Hold the last good key set of one URL; `refresh` is called every few seconds and never raises."""

    def __init__(self, place: KeyPlace, fetch: Callable[[KeyPlace], bytes], now: Callable[[], float]) -> None:
        """Begin with no keys; `now` gives monotonic seconds. Nothing is fetched before the first `refresh`."""
        self.place = place
        self.keys: KeySet = {}
        self._fetch = fetch
        self._now = now
        self._due_at = self._tried_at = now()
        self._good_at: float | None = None
        self._unknown_asked = False
        self._told: str | None = None
        self.fault: FileFault | None = None
        """What is wrong with the document that was fetched last."""

    @property
    def fetched(self) -> bool:
        """Say whether a good set is held."""
        return self._good_at is not None

    def ask_for_unknown(self) -> None:
        """Note that a bearer named a key that is not here: the set is fetched early, at most once in 30 s."""
        self._unknown_asked = True

    def refresh(self) -> bool:
        """Fetch if it is time to (blocks for seconds); return whether `keys` has become another set."""
        before = self.keys
        now = self._now()
        if now >= self._due_at or (self._unknown_asked and self._may_retry(now)):
            self._unknown_asked = False
            self._tried_at = now
            self._take()
        if self._good_at is not None and self._now() - self._good_at > KEEP_SECONDS:
            self._good_at = None
            self.keys = {}
            _logger().warning("%s: no good key set for an hour; every bearer is refused until there is one", NAME)
        return self.keys is not before

    def _may_retry(self, now: float) -> bool:
        return now - self._tried_at >= RETRY_SECONDS

    def _take(self) -> None:
        try:
            fetched = read_published(self._fetch(self.place))
        except FetchFault as fault:
            self._tell(f"{NAME}: {fault}")
        except FileFault as fault:
            self.fault = fault
            self._tell(str(fault))
        else:
            if self._told is not None:
                _logger().warning("%s: a good key set is there again", NAME)
            self._told = self.fault = None
            self.keys = fetched
            self._good_at = self._now()
            self._due_at = self._good_at + REFRESH_SECONDS
            return
        self._due_at = self._now() + (RETRY_SECONDS if self.fetched else URGENT_RETRY_SECONDS)

    def _tell(self, fault: str) -> None:
        if fault != self._told:
            self._told = fault
            what = (
                "the last good key set stays in force" if self.fetched else "every bearer is refused until it is there"
            )
            _logger().warning("%s; %s", fault, what)


def _logger() -> logging.Logger:
    return logging.getLogger("proxy")
