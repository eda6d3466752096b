"""Own the bodies of public answers while they are being sent: equal ones are held once, however many clients read them.

Pure; one object in the proxy's worker. Without it, strangers who ask for a large page and read slowly would each have a
copy of it in memory. It does not know what is in a body or who reads it.
"""

from __future__ import annotations

from collections.abc import Callable


class SharedBodies:
    """Hold each body once for all who hold an equal one."""

    def __init__(self) -> None:
        """Begin with none."""
        self._held: dict[bytes, list[bytes]] = {}

    def hold(self, body: bytes) -> tuple[bytes, Callable[[], None]]:
        """Return the body to send, equal to this one, and what must be called once when it has been sent."""
        holders = self._held.setdefault(body, [])
        # The first holder's object is the key as well; the list has it once for each that holds it.
        shared = holders[0] if holders else body
        holders.append(shared)

        def release() -> None:
            holders.pop()
            if not holders:
                del self._held[shared]

        return shared, release
