"""Tell tests/test_architecture.py what was drawn: the top level, who must not import whom, and who is pure."""

from __future__ import annotations

TOP_LEVEL = {
    "pyproject.toml",
    "README.md",
    "gunicorn.conf.py",
    "Dockerfile",
    "Dockerfile-local",
    "docker-compose.yml",
    "inference_api",
    "proxy",
    "scripts",
    "tests",
    "docs",
    "noxfile.py",
    "LICENSE",
}

NETWORK_CLIENTS = ("requests", "urllib3", "urllib.request", "http.client", "httpx", "aiohttp", "ftplib")
"""What fetches from an address. Nothing that a caller names is ever fetched: who imports these knows whom it asks."""

LAYERS = (
    # (files under, modules that they must not import, files that may nevertheless)
    ("inference_api/server", ("inference_api.backend", "inference_api.supervisor", "torch", "transformers"), ()),
    ("inference_api/backend", ("inference_api.server", "inference_api.supervisor", "flask", "gunicorn", "proxy"), ()),
    ("inference_api", ("proxy",), ("inference_api/server",)),
    ("proxy", ("inference_api", "torch", "transformers"), ()),
    ("inference_api", ("torch",), ("inference_api/backend/engines",)),
    ("proxy", ("torch", "transformers"), ()),
    (
        "inference_api",
        ("transformers",),
        ("inference_api/prepare.py", "inference_api/backend/engines/transformers.py"),
    ),
    (
        "inference_api",
        ("llguidance",),
        ("inference_api/backend/grammars.py", "inference_api/backend/grammar_masks.py"),
    ),
    ("proxy", ("llguidance",), ()),
    ("inference_api", ("opentelemetry",), ("inference_api/server/span_export.py",)),
    ("proxy", ("opentelemetry",), ()),
    ("inference_api", ("redis", "sqlite3"), ()),
    ("inference_api", NETWORK_CLIENTS, ("inference_api/card.py",)),
    ("proxy", NETWORK_CLIENTS, ("proxy/forward.py", "proxy/jwks_fetch.py")),
    ("inference_api", ("multiprocessing", "pickle", "marshal", "shelve", "dill", "cloudpickle"), ()),
    ("proxy", ("multiprocessing", "pickle", "marshal", "shelve", "dill", "cloudpickle"), ()),
)

PURE = (
    "inference_api/backend/scheduler.py",
    "inference_api/backend/sequence.py",
    "inference_api/backend/figures.py",
    "inference_api/backend/inbox_messages.py",
    "inference_api/backend/kv_cache.py",
    "inference_api/backend/prompt_lookup.py",
    "inference_api/backend/request_records.py",
    "inference_api/backend/views.py",
    "inference_api/backend/engines/base.py",
    "inference_api/stop.py",
    "inference_api/messages.py",
    "inference_api/server/validation.py",
    "proxy/admission.py",
    "proxy/answers.py",
    "proxy/auth.py",
    "proxy/chunks.py",
    "proxy/claims.py",
    "proxy/cors.py",
    "proxy/error_bodies.py",
    "proxy/headers.py",
    "proxy/jwks.py",
    "proxy/jws.py",
    "proxy/keys.py",
    "proxy/located_json.py",
    "proxy/open_calls.py",
    "proxy/outage_shares.py",
    "proxy/pace.py",
    "proxy/places.py",
    "proxy/policy.py",
    "proxy/revocation.py",
    "proxy/routes.py",
    "proxy/shared_bodies.py",
    "proxy/tenants.py",
    "proxy/trace_context.py",
)
IMPURE_MODULES = (
    "socket",
    "selectors",
    "select",
    "subprocess",
    "threading",
    "time",
    "os",
    "requests",
    "flask",
    "gevent",
)

REQUEST_PATHS = ("inference_api/server", "inference_api/backend", "inference_api/queues.py", "proxy")
