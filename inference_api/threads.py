"""Own threads that a process cannot live without: one that dies by surprise is told of, at once and loudly.

Used by the intake, the backend client and the disconnect watcher. A process whose reader thread is gone would look
alive and never answer; what to do about it is the owner's business.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


def vital_thread(name: str, run: Callable[[], None], on_death: Callable[[], None]) -> threading.Thread:
    """Return a daemon thread, not started, that runs `run` and calls `on_death` if it raises."""

    def guarded() -> None:
        try:
            run()
        except Exception:
            logger.exception("the thread %s died", name)
            on_death()

    return threading.Thread(target=guarded, name=name, daemon=True)
