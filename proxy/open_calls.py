"""Own which calls are open under which revocation id, so that a bearer that is revoked ends what it began.

Pure; runs in the proxy's worker. It does not know sockets: how a call is cut is a function that it was given. A call
without an id cannot be revoked and is not kept here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from proxy.answers import Refusal


class CallRevoked(Refusal):
    """End a call whose bearer has been revoked: a 401 if nothing was answered yet, else a broken answer."""

    def __init__(self) -> None:
        super().__init__(401, "jwt_revoked", "JWT has been revoked.")


class OpenCalls:
    """Hold the open calls of one worker by revocation id."""

    def __init__(self) -> None:
        """Begin with none."""
        self._cuts: dict[str, dict[object, Callable[[], None]]] = {}

    def __len__(self) -> int:
        """Count the calls."""
        return sum(map(len, self._cuts.values()))

    def open(self, token_id: str | None, cut: Callable[[], None]) -> Callable[[], None]:
        """Keep a call; return what must be called when it ends, however it ends."""
        if token_id is None:
            return lambda: None
        call = object()
        self._cuts.setdefault(token_id, {})[call] = cut

        def close() -> None:
            calls = self._cuts[token_id]
            del calls[call]
            if not calls:
                del self._cuts[token_id]

        return close

    def cut(self, revoked: AbstractSet[str]) -> int:
        """Cut every call under a revoked id; return how many. They stay counted until they have ended."""
        cuts = [cut for token_id, calls in self._cuts.items() if token_id in revoked for cut in calls.values()]
        for cut in cuts:
            cut()
        return len(cuts)
