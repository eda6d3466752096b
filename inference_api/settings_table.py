"""Declare every setting of the server, the backend and the supervisor: one table, a field a setting.

Each field carries its environment names in order of precedence: the `INFERENCE_API_*` name first, then the names of the
original service; its bounds, and the line that docs/settings.md says of it. Reads no environment: config.py does.
"""

from __future__ import annotations

import dataclasses

from inference_api.setting import setting


@dataclasses.dataclass(frozen=True, slots=True)
class SettingsTable:
    """Every setting with its default."""

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
    scrub_rows: bool = setting(
        True,
        "INFERENCE_API_SCRUB_ROWS",
        doc="Zero what a row holds of a tenant before another's request begins in it, or when nobody may reuse it.",
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
    batch_window_seconds: float = setting(
        0.0,
        "INFERENCE_API_BATCH_WINDOW_SECONDS",
        "BATCH_WINDOW_SECONDS",
        doc="Embeddings and raw bodies wait so long, counted from the first, and start together. 0: not at all.",
        low=0.0,
        high=10.0,
    )
    batch_max_requests: int = setting(
        32,
        "INFERENCE_API_BATCH_MAX_REQUESTS",
        "BATCH_MAX_REQUESTS",
        doc="So many of them start before that.",
        low=1,
        high=65536,
    )
    grammar_seconds: float = setting(
        5.0,
        "INFERENCE_API_GRAMMAR_SECONDS",
        doc="Longest wait for the compilation of an answer's grammar; it may wait as long to begin.",
        low=0.05,
        high=7.0,
    )
    lark_grammars: bool = setting(
        True, "INFERENCE_API_LARK_GRAMMARS", doc="Take grammars in Lark's syntax; a slow one slows its own answer."
    )
    queue_seconds: float = setting(60.0, "INFERENCE_API_QUEUE_SECONDS", doc="Longest wait for a row.", low=0.001)
    first_token_seconds: float = setting(
        120.0, "INFERENCE_API_FIRST_TOKEN_SECONDS", doc="Longest time to the first token.", low=0.001
    )
    total_seconds: float = setting(600.0, "INFERENCE_API_TOTAL_SECONDS", doc="Longest request.", low=0.001)
    idempotency_seconds: float = setting(
        600.0,
        "INFERENCE_API_IDEMPOTENCY_SECONDS",
        doc="How long an answer to a call with an `Idempotency-Key` is kept for repetitions; 0: the header is refused.",
        low=0.0,
        high=86400.0,
    )
    prompt_validator: str = setting(
        "off",
        "INFERENCE_API_PROMPT_VALIDATOR",
        doc="What becomes of prompts with other than plain characters, unless the proxy says it of the tenant.",
        choices="off reject strip",
    )
    prompt_characters: str = setting(
        "a-zA-Z0-9 ?',.-",
        "INFERENCE_API_PROMPT_CHARACTERS",
        doc="Those characters, as in a regular expression's class.",
    )
    prompt_min_characters: int = setting(
        1, "INFERENCE_API_PROMPT_MIN_CHARACTERS", doc="Shortest such text.", low=0, high=1 << 20
    )
    prompt_max_characters: int = setting(
        200, "INFERENCE_API_PROMPT_MAX_CHARACTERS", doc="Longest such text.", low=1, high=1 << 20
    )
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
    otlp_endpoint: str = setting(
        "",
        "INFERENCE_API_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        doc="OpenTelemetry collector that gets a span a call, as http://host:4318; empty: none is recorded.",
    )
    trace_sample_ratio: float = setting(
        1.0,
        "INFERENCE_API_TRACE_SAMPLE_RATIO",
        doc="Share of the traces that begin here of which spans are recorded.",
        low=0.0,
        high=1.0,
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
        doc="Scripted faults KIND:TEXT, comma-separated: a prompt with TEXT sets off nan, memory, error, crash, hang.",
    )
    torch_threads: int = setting(
        0, "INFERENCE_API_TORCH_THREADS", doc="Threads of the engine; 0: as many as torch chooses.", low=0
    )
