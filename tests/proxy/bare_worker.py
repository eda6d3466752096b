"""A ProxyWorker around an application of the test's own, without gunicorn's arbiter and without signals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from gunicorn.config import Config

from proxy.connection import Deadlines
from proxy.pace import PaceRule
from proxy.places import Places
from proxy.worker import ProxyWorker

DEADLINES = Deadlines(PaceRule(10.0), PaceRule(10.0), 10.0)
App = Callable[[dict[str, Any], Callable[..., object]], Iterable[bytes]]


def bare_worker(app: App) -> ProxyWorker:
    """Return a worker that serves whatever connection it is handed."""
    worker: ProxyWorker = object.__new__(ProxyWorker)
    worker.cfg, worker.wsgi, worker.alive = Config(), app, True
    worker.log = SimpleNamespace(debug=lambda *_words: None, exception=lambda *_words: None)
    worker._deadlines, worker._open, worker._places, worker._draining = DEADLINES, set(), Places(8), False
    return worker
