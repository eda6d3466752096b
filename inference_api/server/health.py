"""Own `/`, `/health`, `/health/live` and `/health/ready`: whether this service answers, told without a row.

Runs in PROCESS 1. Ready means that the backend's intake answers a Ping now and that its decode thread finished a step
within two seconds; a process that merely exists is not ready. A full disk stops no request; `/health/ready` tells of
it. Answers are plain text, as the original's were.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from flask import Blueprint, Response

from inference_api.config import Settings
from inference_api.logs import log_fault
from inference_api.server.backend_client import BackendClient
from inference_api.server.context import ServerContext

UNHEALTHY_TEXT = "Keep alive prompts failed five times. Service unhealthy."
MAX_FAILED_RESTARTS = 5
MAX_HEARTBEAT_SECONDS = 2.0
PING_SECONDS = 1.0
MIN_FREE_BYTES = 65536
"""A disk with less room for us is full: the next lines of a log will not fit."""


def make_health_blueprint(context: ServerContext) -> Blueprint:
    """Return the four routes."""
    blueprint = Blueprint("health", __name__)
    settings, client = context.settings, context.client

    def health() -> Response:
        """Tell whether the service is healthy; 500 once the backend could not be restarted five times."""
        fault = find_fault(client)
        if fault is not None and read_failed_restarts(settings) >= MAX_FAILED_RESTARTS:
            return _text(500, UNHEALTHY_TEXT)
        return _text(503, fault) if fault is not None else _text(200, "OK\n")

    def ready() -> Response:
        """Tell whether requests are served now, and below it what an operator should mend all the same."""
        fault = find_fault(client)
        return _text(503, fault) if fault is not None else _text(200, f"OK\n{find_warnings(settings.run_path)}")

    def live() -> Response:
        """Tell that this process answers."""
        return _text(200, "OK\n")

    blueprint.add_url_rule("/", "root", health)
    blueprint.add_url_rule("/health", "health", health)
    blueprint.add_url_rule("/health/ready", "ready", ready)
    blueprint.add_url_rule("/health/live", "live", live)
    return blueprint


def find_fault(client: BackendClient) -> str | None:
    """Return why requests cannot be served now, or None."""
    if client.ready is None:
        return "The model is not ready yet, try again later.\n"
    pong = client.ping(PING_SECONDS)
    if pong is None:
        return "The decode backend does not answer.\n"
    if pong.draining:
        return "The service is stopping.\n"
    if pong.heartbeat_seconds > MAX_HEARTBEAT_SECONDS:
        return f"The decode loop has made no step for {pong.heartbeat_seconds:.1f} seconds.\n"
    return None


def find_warnings(run_path: Path) -> str:
    """Return a line for each thing that stops no request and should be mended; empty if there is none."""
    warnings = []
    if fault := log_fault():
        warnings.append(f"Warning: the log cannot be written: {fault}.\n")
    elif _is_full(_log_file()):
        warnings.append("Warning: the disk of the log is full.\n")
    if _is_full(run_path):
        warnings.append("Warning: the disk of the run folder is full.\n")
    return "".join(warnings)


def _log_file() -> int | None:
    """Return the descriptor of stderr if that is a file."""
    try:
        descriptor = sys.stderr.fileno()
        return descriptor if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    except (OSError, ValueError):
        return None


def _is_full(place: Path | int | None) -> bool:
    if place is None:
        return False
    try:
        disk = os.statvfs(place)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < MIN_FREE_BYTES


def read_failed_restarts(settings: Settings) -> int:
    """Return how often in a row the supervisor could not restart the backend; 0 where there is no supervisor."""
    try:
        return int(settings.state_path.read_text())
    except (OSError, ValueError):
        return 0


def _text(status: int, text: str) -> Response:
    return Response(text, status, content_type="text/plain; charset=utf-8", headers={"Cache-Control": "no-store"})
