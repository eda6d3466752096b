"""Own the settings of the server, the backend and the supervisor: one frozen dataclass, one table.

The only reader of os.environ in this package. Each field carries its environment names in order of precedence: the
`INFERENCE_API_*` name first, then the names of the original service. A wrong value stops the start and says its name.
Knows nothing of how a setting is used.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inference_api.errors import SettingError
from inference_api.setting import is_true, parse, setting

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})

_MODEL_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""What the proxy's routes take as a model's name."""

SWITCHES = (
    ("MOCK_MODEL", "engine", "mock"),
    ("FALCON_40B_2LAYER", "layers", 2),
    ("FALCON_40B_LOG_LEVEL_DEBUG", "log_level", "debug"),
)
"""The original's switches: a name, and the field that it sets to a value where no setting of that field is given."""

_FLASK_SECRET_NAMES = ("INFERENCE_API_FLASK_SECRET", "FLASK_SECRET")


def url_host(address: str) -> str:
    """Return an address as it stands in a URL: IPv6 in brackets (RFC 3986 section 3.2.2)."""
    return f"[{address}]" if ":" in address else address


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Every setting with its default. Build it with `from_environ`; derived values are properties."""

    bind: str = setting("127.0.0.1", "INFERENCE_API_BIND", "SERVICE_BIND", doc="Address the server listens on.")
    port: int = setting(
        7000, "INFERENCE_API_PORT", "SERVICE_PORT", doc="Port the server listens on.", low=1, high=65535
    )
    workers: int = setting(1, "INFERENCE_API_WORKERS", doc="Number of gunicorn workers.", low=1, high=64)
    threads: int = setting(
        0, "INFERENCE_API_THREADS", doc="Threads a worker; 0: rows + queue + 32, and no fewer.", low=0, high=8192
    )
    engine: str = setting(
        "auto",
        "INFERENCE_API_ENGINE",
        doc="Engine of the backend; auto: `fused` where it applies, else `transformers`.",
        choices="auto fused transformers mock",
    )
    dtype: str = setting(
        "auto",
        "INFERENCE_API_DTYPE",
        doc="What the model computes in; auto: the engine's own; fp32: exactly, on `transformers`.",
        choices="auto fp32",
    )
    model: str = setting(
        "", "INFERENCE_API_MODEL", doc="Folder, GGUF file or hub id of the model; empty: SmolLM2-135M-Instruct."
    )
    served_model_names: tuple[str, ...] = setting(
        (),
        "INFERENCE_API_SERVED_MODEL_NAMES",
        "SERVED_MODEL_NAMES",
        doc="Names clients may use, comma-separated, the first canonical; empty: the model image's own name.",
    )
    cache_dir: str = setting(
        "", "INFERENCE_API_CACHE_DIR", "CACHE_ROOT", "MODEL_WEKA_DIR", doc="Cache root; empty: the user's cache folder."
    )
    hf_cache: str = setting(
        "", "INFERENCE_API_HF_CACHE", "HF_CACHE", "HF_HUB_CACHE", doc="Hub downloads; empty: HF_HOME/hub or `hf_cache`."
    )
    layers: int = setting(
        0, "INFERENCE_API_LAYERS", doc="Keep the model's first layers only, for development; 0: all.", low=0, high=1024
    )
    no_weights: bool = setting(
        False,
        "INFERENCE_API_NO_WEIGHTS",
        "FALCON_40B_PYTORCH_NO_WEIGHTS",
        doc="Seeded random weights in place of the model's, for development.",
    )
    save_image: bool = setting(
        False,
        "INFERENCE_API_SAVE_IMAGE",
        "FALCON_40B_SAVE",
        doc="Save the prepared model image under `tti_cache` in the cache root.",
    )
    load_image: bool = setting(
        False, "INFERENCE_API_LOAD_IMAGE", "FALCON_40B_LOAD", doc="Start from the saved image; the model is not needed."
    )
    image_suffix: str = setting(
        "v0", "INFERENCE_API_IMAGE_SUFFIX", "FALCON_40B_TTI_SUFFIX", doc="End of a saved image's name."
    )
    run_dir: str = setting(
        "", "INFERENCE_API_RUN_DIR", doc="Folder of sockets and locks (0700); empty: one a user and port, in the tmp."
    )
    rows: int = setting(32, "INFERENCE_API_ROWS", doc="User rows of the decode batch.", low=1, high=1024)
    context_tokens: int = setting(
        2048, "INFERENCE_API_CONTEXT_TOKENS", doc="Context a row, at most the model's.", low=16, high=1 << 20
    )
    kv_tokens: int = setting(
        0,
        "INFERENCE_API_KV_TOKENS",
        doc="KV slots that all rows may hold together; over it the latest row makes room. 0: all.",
        low=0,
    )
    prefix_reuse: bool = setting(
        True, "INFERENCE_API_PREFIX_REUSE", doc="Begin a prompt with what a row of the same tenant still holds of it."
    )
    draft_tokens: int = setting(
        4,
        "INFERENCE_API_DRAFT_TOKENS",
        doc="Ids that a row guesses ahead out of its own text while few rows run; the answers stay the same. 0: none.",
        low=0,
        high=16,
    )
    queue_requests: int = setting(
        96, "INFERENCE_API_QUEUE_REQUESTS", doc="Requests that may wait for a row.", low=0, high=65536
    )
    queue_tokens: int = setting(
        65536, "INFERENCE_API_QUEUE_TOKENS", doc="Prompt tokens that may wait for a row.", low=1, high=1 << 31
    )
    grammar_seconds: float = setting(
        5.0,
        "INFERENCE_API_GRAMMAR_SECONDS",
        doc="Longest wait for the compilation of an answer's grammar; it may wait as long to begin.",
        low=0.05,
        high=7.0,
    )
    lark_grammars: bool = setting(
        False, "INFERENCE_API_LARK_GRAMMARS", doc="Take grammars in Lark's syntax, which can cost seconds a step."
    )
    queue_seconds: float = setting(60.0, "INFERENCE_API_QUEUE_SECONDS", doc="Longest wait for a row.", low=0.001)
    first_token_seconds: float = setting(
        120.0, "INFERENCE_API_FIRST_TOKEN_SECONDS", doc="Longest time to the first token.", low=0.001
    )
    total_seconds: float = setting(600.0, "INFERENCE_API_TOTAL_SECONDS", doc="Longest request.", low=0.001)
    body_bytes: int = setting(262144, "INFERENCE_API_BODY_BYTES", doc="Largest request body.", low=1024, high=1 << 30)
    prefill_chunk_tokens: int = setting(
        0, "INFERENCE_API_PREFILL_CHUNK_TOKENS", doc="Prompt tokens a step beside decoding rows; 0: tuned.", low=0
    )
    watchdog_seconds: float = setting(
        5.0,
        "INFERENCE_API_WATCHDOG_SECONDS",
        doc="A serving backend without a step for so long is killed; an idle one makes a step a second, so at least 2.",
        low=2.0,
    )
    grace_seconds: float = setting(
        30.0, "INFERENCE_API_GRACE_SECONDS", doc="Time that running requests get at SIGTERM.", low=0.0
    )
    idle_check_seconds: float = setting(
        120.0, "INFERENCE_API_IDLE_CHECK_SECONDS", doc="An idle engine checks itself so often.", low=0.05
    )
    sse_ping_seconds: float = setting(
        15.0, "INFERENCE_API_SSE_PING_SECONDS", doc="Interval of comment lines on a silent SSE stream.", low=0.05
    )
    sse_hold_seconds: float = setting(
        5.0, "INFERENCE_API_SSE_HOLD_SECONDS", doc="How long an SSE route holds its headers for a status.", low=0.0
    )
    legacy_eos: bool = setting(
        False, "INFERENCE_API_LEGACY_EOS", doc="Send <|endoftext|> as last chunk of raw routes, as the original did."
    )
    log_level: str = setting(
        "warning",
        "INFERENCE_API_LOG_LEVEL",
        doc="What is logged on stderr; `info` adds one line a request.",
        choices="debug info warning error",
    )
    log_format: str = setting(
        "text", "INFERENCE_API_LOG_FORMAT", "LOG_FORMAT", doc="How a log line is written.", choices="text json"
    )
    frontend_debug: bool = setting(
        False,
        "INFERENCE_API_FRONTEND_DEBUG",
        "FRONTEND_DEBUG_MODE",
        doc="Write what happens to each session in the server into the cache root's `debug_logs`; never a text.",
    )
    backend_debug: bool = setting(
        False,
        "INFERENCE_API_BACKEND_DEBUG",
        "BACKEND_DEBUG_MODE",
        doc="The same for the backend, and its stack trace when it dies.",
    )
    flask_secret: str = setting(
        "",
        "INFERENCE_API_FLASK_SECRET",
        "FLASK_SECRET",
        doc="Flask's secret key; empty: no cookie can be signed, and none is.",
        secret=True,
    )
    insecure_dev: bool = setting(
        False,
        "INFERENCE_API_INSECURE_DEV",
        "INSECURE_DEV",
        doc="On a loopback bind, serve callers without the proxy's assertion as the tenant 'local'.",
    )
    internal_auth_key: str = setting(
        "",
        "INTERNAL_AUTH_KEY",
        doc="Key of the proxy's assertions, at least 32 bytes; empty: the key file's.",
        secret=True,
    )
    internal_auth_key_file: str = setting(
        "", "INTERNAL_AUTH_KEY_FILE", doc="File (0600) with that key; empty: made in the run folder."
    )
    mock_tokens_per_second: float = setting(
        3000.0, "INFERENCE_API_MOCK_TOKENS_PER_SECOND", doc="Rate of the mock engine, all rows; 0: unthrottled.", low=0
    )
    mock_mode: str = setting(
        "digits", "INFERENCE_API_MOCK_MODE", doc="What the mock engine answers.", choices="digits echo noise"
    )
    mock_faults: str = setting(
        "",
        "INFERENCE_API_MOCK_FAULTS",
        doc="Scripted faults KIND:TEXT, comma-separated: a prompt with TEXT sets off nan, error, crash or hang.",
    )
    torch_threads: int = setting(
        0, "INFERENCE_API_TORCH_THREADS", doc="Threads of the engine; 0: as many as torch chooses.", low=0
    )

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


def child_environ(settings: Settings, *, secret: bool = True) -> dict[str, str]:
    """Return this process's environment with `settings` in it, for a child process.

    The proxy's secret is left out, and without `secret` the server's too: the internal key and Flask's secret.
    """
    hidden = ("JWT_SECRET",) if secret else ("JWT_SECRET", "INTERNAL_AUTH_KEY", *_FLASK_SECRET_NAMES)
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
    }
    extra = {name: os.environ.get(name, text) for name, text in limits.items()}
    extra["JWT_SECRET"] = jwt_secret() or ""
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
