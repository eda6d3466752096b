"""Own the settings in force in the server, the backend and the supervisor: one frozen dataclass.

The only reader of os.environ in this package; settings_table.py declares what there is to read. A wrong value stops the
start and says its name. Knows nothing of how a setting is used.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from inference_api.errors import SettingError
from inference_api.setting import is_true, parse
from inference_api.settings_table import SettingsTable

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})

_MODEL_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""What the proxy's routes take as a model's name."""

SWITCHES = (
    ("MOCK_MODEL", "engine", "mock"),
    ("FALCON_40B_2LAYER", "layers", 2),
    ("FALCON_40B_LOG_LEVEL_DEBUG", "log_level", "debug"),
)
"""The original's switches: a name, and the field that it sets to a value where no setting of that field is given."""

_OTLP_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
"""The module of the extra `otel` that a collector needs."""

_FLASK_SECRET_NAMES = ("INFERENCE_API_FLASK_SECRET", "FLASK_SECRET")


def url_host(address: str) -> str:
    """Return an address as it stands in a URL: IPv6 in brackets (RFC 3986 section 3.2.2)."""
    return f"[{address}]" if ":" in address else address


@dataclasses.dataclass(frozen=True, slots=True)
class Settings(SettingsTable):
    """The settings in force. Build them with `from_environ`; derived values are properties."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None, **options: str) -> Settings:
        """Read settings from the environment (os.environ by default); raise SettingError on a wrong one.

        `options`, by environment name, come from a command line and win.
        """
        source = {**(os.environ if environ is None else environ), **options}
        known = {name for field in dataclasses.fields(cls) for name in field.metadata["names"]}
        unknown = sorted(name for name in source if name.startswith("INFERENCE_API_") and name not in known)
        if unknown:
            raise SettingError(f"{unknown[0]} is not a setting; docs/settings.md lists them")
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            for name in field.metadata["names"]:
                if name in source:
                    values[field.name] = parse(name, source[name], field)
                    break
        for name, field_name, value in SWITCHES:
            if is_true(name, source.get(name, "")):
                values.setdefault(field_name, value)
        if source.get("HF_HOME"):
            values.setdefault("hf_cache", f"{source['HF_HOME']}/hub")
        return cls(**values).checked()

    def checked(self) -> Settings:
        """Return these settings if they fit together; raise SettingError otherwise."""
        if self.threads and self.threads < self.min_threads:
            raise SettingError(
                f"INFERENCE_API_THREADS={self.threads} is below rows + queue + 32 = {self.min_threads}: streams would "
                f"wait for a thread. Raise it, or lower INFERENCE_API_ROWS or INFERENCE_API_QUEUE_REQUESTS."
            )
        if self.engine == "fused" and self.dtype == "fp32":
            raise SettingError(
                "INFERENCE_API_DTYPE=fp32 is not what INFERENCE_API_ENGINE=fused computes in: take one of them away."
            )
        if 0 < self.kv_tokens < self.context_tokens:
            raise SettingError(
                f"INFERENCE_API_KV_TOKENS={self.kv_tokens} is below INFERENCE_API_CONTEXT_TOKENS={self.context_tokens}"
                ": a request that fills its context would have no room. Raise it, or lower the context."
            )
        if self.insecure_dev and self.bind not in LOOPBACK_HOSTS:
            raise SettingError(f"INSECURE_DEV works on a loopback address only, and INFERENCE_API_BIND is {self.bind}.")
        for name in self.served_model_names:
            if not _MODEL_NAME.fullmatch(name):
                raise SettingError(
                    f"INFERENCE_API_SERVED_MODEL_NAMES: {name!r} cannot stand in a path; use A-Z a-z 0-9 . _ : -"
                )
        if self.internal_auth_key and len(self.internal_auth_key.encode()) < 32:
            raise SettingError("INTERNAL_AUTH_KEY is shorter than 32 bytes.")
        _check_collector(self.otlp_endpoint)
        if len(os.fsencode(self.socket_path)) > 100:
            raise SettingError(f"INFERENCE_API_RUN_DIR is too long for a socket's path: {self.run_path}")
        return self

    def to_environ(self) -> dict[str, str]:
        """Return the environment that makes a child process read these very settings."""
        environ = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            text = ",".join(value) if isinstance(value, tuple) else str(int(value) if value is True else value)
            environ[field.metadata["names"][0]] = "" if value is False else text
        return environ

    @property
    def min_threads(self) -> int:
        """Threads that every row, every waiting request and 32 short calls need."""
        return self.rows + self.queue_requests + 32

    @property
    def host(self) -> str:
        """The bound address as it stands in a URL."""
        return url_host(self.bind)

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://{self.host}:{self.port}"

    @property
    def run_path(self) -> Path:
        """Folder of this service's sockets, locks and the link to its model image; every path here is absolute."""
        default = f"{tempfile.gettempdir()}/inference_api-{os.getuid()}-{self.port}"
        return Path(self.run_dir or default).absolute()

    @property
    def socket_path(self) -> Path:
        """AF_UNIX address of the backend."""
        return self.run_path / "backend.sock"

    @property
    def image_link(self) -> Path:
        """Symbolic link to the model image in use, made once `prepare` is done."""
        return self.run_path / "model_image"

    @property
    def state_path(self) -> Path:
        """File in which the supervisor keeps the number of failed restarts."""
        return self.run_path / "failed_restarts"

    @property
    def key_path(self) -> Path:
        """File of the internal key."""
        return Path(self.internal_auth_key_file or self.run_path / "internal_auth_key").absolute()

    @property
    def cache_path(self) -> Path:
        """Cache root: model images and downloads."""
        return Path(self.cache_dir or "~/.cache/inference_api").expanduser().absolute()

    @property
    def hf_cache_path(self) -> Path:
        """Folder of hub downloads."""
        return Path(self.hf_cache or self.cache_path / "hf_cache").expanduser().absolute()

    @property
    def saved_images_path(self) -> Path:
        """Folder of saved model images."""
        return self.cache_path / "tti_cache"

    @property
    def debug_logs_path(self) -> Path:
        """Folder of the debug modes' files."""
        return self.cache_path / "debug_logs"


def _check_collector(endpoint: str) -> None:
    """Raise SettingError for a collector that cannot be one, or that this environment cannot send to."""
    if not endpoint:
        return
    parts = urlsplit(endpoint)
    has_more = "@" in parts.netloc or parts.query or parts.fragment  # a password may come without a name
    if parts.scheme not in ("http", "https") or not parts.hostname or has_more:
        raise SettingError(
            "INFERENCE_API_OTLP_ENDPOINT (OTEL_EXPORTER_OTLP_ENDPOINT) must be a collector as http://host:4318, "
            "without a name, a password or a query: headers of the collector's go into OTEL_EXPORTER_OTLP_HEADERS."
        )
    try:
        found = importlib.util.find_spec(_OTLP_EXPORTER)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise SettingError(
            "INFERENCE_API_OTLP_ENDPOINT (OTEL_EXPORTER_OTLP_ENDPOINT) needs the package "
            "opentelemetry-exporter-otlp-proto-http: install the extra 'otel', or take the setting away."
        )


def child_environ(settings: Settings, *, secret: bool = True) -> dict[str, str]:
    """Return this process's environment with `settings` in it, for a child process.

    The proxy's secrets are left out, and without `secret` the server's too: the internal key and Flask's secret.
    """
    hidden = ("JWT_SECRET", "REDIS_URL", *(() if secret else ("INTERNAL_AUTH_KEY", *_FLASK_SECRET_NAMES)))
    environ = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1", **settings.to_environ()}
    return {name: value for name, value in environ.items() if name not in hidden}


def proxy_environ(settings: Settings) -> dict[str, str]:
    """Return the proxy's environment: its secrets, and the server's limits unless it has ones of its own."""
    limits = {
        "PROXY_MAX_BODY_BYTES": str(settings.body_bytes),
        # The server ends a request itself; the proxy only waits a little longer.
        "PROXY_UPSTREAM_TIMEOUT_SECONDS": str(settings.total_seconds + 10),
        "PROXY_DRAIN_GRACE_SECONDS": str(settings.grace_seconds + 2),
        "LOG_FORMAT": settings.log_format,
        # The server records what the proxy marks; without a collector nobody does.
        "PROXY_TRACE_SAMPLE_RATIO": str(settings.trace_sample_ratio if settings.otlp_endpoint else 0.0),
    }
    extra = {name: os.environ.get(name, text) for name, text in limits.items()}
    extra["JWT_SECRET"] = jwt_secret() or ""
    extra["REDIS_URL"] = os.environ.get("REDIS_URL", "")
    if not settings.internal_auth_key:
        extra["INTERNAL_AUTH_KEY_FILE"] = str(settings.key_path)
    shared = {name: value for name, value in child_environ(settings).items() if name not in _FLASK_SECRET_NAMES}
    return {**shared, **extra}


def proxy_bind() -> str:
    """Return the address that the proxy listens on unless an option says so."""
    return os.environ.get("PROXY_BIND") or "127.0.0.1"


def inherits_listeners() -> bool:
    """Tell whether gunicorn was started with sockets: by its own upgrade (USR2), or by systemd (sd_listen_fds(3))."""
    return "GUNICORN_FD" in os.environ or os.environ.get("LISTEN_PID") == str(os.getpid())


def jwt_secret() -> str | None:
    """Return the proxy's secret, which the supervisor hands on; the server and the backend never need it."""
    return os.environ.get("JWT_SECRET")


def colour_wish() -> bool | None:
    """Return what NO_COLOR (no-color.org) and FORCE_COLOR (force-color.org) ask for; None: neither is set."""
    return False if os.environ.get("NO_COLOR") else True if os.environ.get("FORCE_COLOR") else None
