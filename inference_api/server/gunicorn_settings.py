"""Give gunicorn its settings, whether the supervisor runs it or a person does (gunicorn.conf.py adds to this).

Read once by PROCESS 1's arbiter. One thread a stream: there are threads for every row, every waiting request and
short calls. Only the proxy and loopback reach this server, so no forwarded header is believed.
"""

from __future__ import annotations

from inference_api.config import Settings

_settings = Settings.from_environ()

bind = f"{_settings.host}:{_settings.port}"
wsgi_app = "inference_api.inference_api_server:create_server()"
worker_class = "inference_api.server.worker.StreamWorker"
workers = _settings.workers
threads = _settings.threads or _settings.min_threads
worker_connections = 4 * threads
keepalive = 75
timeout = 15  # of the worker's main thread, which serves no request: a stopped worker is replaced after so long
graceful_timeout = int(_settings.grace_seconds) + 2
forwarded_allow_ips = ""
forwarder_headers = ""
header_map = "refuse"
secure_scheme_headers: dict[str, str] = {}
limit_request_fields = 50
control_socket_disable = True
logger_class = "inference_api.server.gunicorn_log.GunicornLog"
# gunicorn tells of its workers' lives at `info`, and of clients' bytes at `debug`: one level up.
loglevel = {"info": "warning", "debug": "info"}.get(_settings.log_level, _settings.log_level)
