"""Enter PROCESS 1 with the mock engine behind it: `create_test_server()`; as a program it starts service and mock."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, this folder comes first on sys.path and would shadow the package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from flask import Flask

from inference_api.config import Settings
from inference_api.server.app import create_server_app


def create_test_server() -> Flask:
    """Return the application of one gunicorn worker; the mock is in the backend, all code here is the real one."""
    return create_server_app(Settings.from_environ())


if __name__ == "__main__":
    from inference_api.supervisor import main

    sys.exit(main(["--mock", *sys.argv[1:]]))
