"""Enter PROCESS 1: `create_server()` for gunicorn; run as a program it starts the whole service without the proxy."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, this folder comes first on sys.path and would shadow the package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from flask import Flask

from inference_api.config import Settings
from inference_api.server.app import create_server_app


def create_server() -> Flask:
    """Return the application of one gunicorn worker; called after the fork."""
    return create_server_app(Settings.from_environ())


if __name__ == "__main__":
    from inference_api.supervisor import main

    sys.exit(main())
