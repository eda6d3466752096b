"""Configure a plain `gunicorn --config gunicorn.conf.py`: the server's settings, and a backend beside it.

`gunicorn --config gunicorn.conf.py '_mock_inference_api_server:create_test_server()'` runs the mock. The service that
scripts/serve starts needs no file: its supervisor is the outermost process and gives gunicorn the same settings.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from inference_api.errors import SettingError  # noqa: E402
from inference_api.fronts import refuse_taken_ports  # noqa: E402
from inference_api.server.backend_only import BackendOnly  # noqa: E402
from inference_api.server.gunicorn_settings import *  # noqa: E402, F403

pythonpath = f"{ROOT},{ROOT / 'inference_api'}"
wsgi_app = "inference_api_server:create_server()"


def on_starting(server: Any) -> None:
    """Start the backend before the first worker; a taken port, which gunicorn would try for seconds, is told first."""
    try:
        refuse_taken_ports(server.cfg.address, reuse_port=server.cfg.reuse_port)
    except SettingError as error:
        sys.exit(f"ERROR: {error}")
    server.backend_only = BackendOnly(mock="_mock_" in server.app.app_uri)


def on_exit(server: Any) -> None:
    """End the backend after the last worker; fail if the backend had failed."""
    backend_only: BackendOnly = server.backend_only
    backend_only.stop()
    if backend_only.failed:
        sys.exit(1)
