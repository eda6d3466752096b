"""Make the Flask application of one gunicorn worker: its parts, its routes, one error handler.

Runs in PROCESS 1. Every endpoint declares the scope it needs in SCOPES; one that does not stops the start. Identity is
checked once, before any view runs. Knows no torch, no weights, no rows.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import traceback

from flask import Flask, Response, g, request
from gunicorn.http.errors import ParseException
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge

from inference_api.checkpoint import read_json
from inference_api.config import Settings
from inference_api.debug_log import DebugLog
from inference_api.errors import (
    BodyTooLargeError,
    ClientLeftError,
    ForbiddenError,
    InferenceApiError,
    InvalidRequestError,
    NotFoundError,
    RefusedCallError,
    SettingError,
)
from inference_api.model_image import ModelImage
from inference_api.server.answer_headers import REQUEST_ID_HEADER, AnswerHeaders
from inference_api.server.anthropic.routes import make_anthropic_blueprint
from inference_api.server.api_docs.described import DESCRIBED
from inference_api.server.api_docs.document import refuse_undescribed
from inference_api.server.api_docs.routes import make_api_docs_blueprint
from inference_api.server.backend_client import BackendClient
from inference_api.server.chat_template import ChatTemplate
from inference_api.server.context import Call, ServerContext
from inference_api.server.disconnects import DisconnectWatcher
from inference_api.server.embeddings import make_embeddings_blueprint
from inference_api.server.health import make_health_blueprint
from inference_api.server.idempotency import KEY_HEADER, CallKey, call_digest, check_key
from inference_api.server.identity import (
    ASSERTION_HEADER,
    Identity,
    choose_request_id,
    is_loopback_socket,
    read_internal_key,
)
from inference_api.server.inspection import make_inspection_blueprint
from inference_api.server.llama_cpp import make_llama_cpp_blueprint
from inference_api.server.native import make_native_blueprint
from inference_api.server.openai.routes import make_openai_blueprint
from inference_api.server.openai_responses.routes import make_openai_responses_blueprint
from inference_api.server.output_router import OutputRouter
from inference_api.server.prompt_validator import PromptValidator, refuse_unlisted_prompts
from inference_api.server.request_log import RequestLog
from inference_api.server.responses import unwritten_response
from inference_api.server.root import make_root_blueprint
from inference_api.server.surfaces import encode_error
from inference_api.server.tgi.routes import make_tgi_blueprint
from inference_api.server.tokenization import make_tokenization_blueprint
from inference_api.server.tokenizer import Tokenizer
from inference_api.server.tools.formats import formats_of
from inference_api.server.tracing import Tracing, make_tracing
from inference_api.server.validation import NativeLimits
from inference_api.server.worker import AT_WORKER_END

logger = logging.getLogger(__name__)

SCOPES: dict[str, str | None] = {
    "health.root": None,
    "health.health": None,
    "health.live": None,
    "health.ready": None,
    "native.inference": "inference",
    "native.predictions": "inference",
    "native.chat": "inference",
    "openai.chat": "inference",
    "openai.completions": "inference",
    "openai.models": "inference",
    "openai.model": "inference",
    "openai_responses.create": "inference",
    "openai_responses.retrieve": "inference",
    "openai_responses.cancel": "inference",
    "anthropic.messages": "inference",
    "anthropic.count_tokens": "inference",
    "tgi.generate": "inference",
    "tgi.generate_stream": "inference",
    "root.answer": "inference",
    "embeddings.embed": "inference",
    "tokenization.tokenize": "inference",
    "tokenization.detokenize": "inference",
    "tokenization.apply_template": "inference",
    "llama_cpp.slots": "inference",
    "llama_cpp.props": "inference",
    "inspection.rows": "inference",
    "inspection.info": "inference",
    "inspection.get_request": "inference",
    "inspection.delete_request": "inference",
    "inspection.metrics": "metrics",
    "api_docs.document": None,
    "api_docs.page": None,
    "api_docs.asset": None,
}
"""Scope an endpoint needs; None: open to everybody. No entry, no start."""

FIRST_READY_SECONDS = 2.0

KNOWN_SCOPES = frozenset({None, "inference", "metrics"})
"""What may stand there: a misspelt one is no decision."""


def make_context(settings: Settings) -> ServerContext:
    """Read the model image and build this worker's parts; start their threads. Call it after the fork."""
    image = ModelImage.open(settings.image_link.resolve())
    tokenizer = Tokenizer.load(image.tokenizer_path)
    template = None
    if image.chat_template is not None:
        template = ChatTemplate(image.chat_template, tokenizer, bos_text=image.bos_text, eos_text=image.eos_text)
    router = OutputRouter()
    context = ServerContext(
        settings=settings,
        client=BackendClient(settings.socket_path, router, on_death=end_worker),
        router=router,
        watcher=DisconnectWatcher(on_death=end_worker),
        tokenizer=tokenizer,
        chat_template=template,
        limits=NativeLimits(
            context_tokens=min(settings.context_tokens, image.context_tokens),
            eos_text=image.eos_text,
            vocab_size=image.vocab_size,
            stop_ids=image.stop_ids,
        ),
        model_names=settings.served_model_names or (image.name,),
        call_formats=formats_of(_model_type(image)),
        debug_log=DebugLog(settings.debug_logs_path, f"frontend-{settings.port}") if settings.frontend_debug else None,
    )
    context.watcher.start()
    context.client.start()
    return context


def _model_type(image: ModelImage) -> str:
    """Return the model's family by its config.json; the mock's image has none."""
    config = read_json(image.config_path) if image.config_path.is_file() else {}
    return str(config.get("model_type", ""))


def end_worker() -> None:
    """End this gunicorn worker, which can serve no more; the arbiter starts another."""
    os.kill(os.getpid(), signal.SIGTERM)


def create_app(context: ServerContext, identity: Identity, tracing: Tracing | None = None) -> Flask:
    """Return the application; raise SettingError if an endpoint declares no scope."""
    app = Flask(__name__, static_folder=None)
    app.secret_key = context.settings.flask_secret or None  # nothing is signed with it, and no cookie is ever set
    app.config["MAX_CONTENT_LENGTH"] = context.settings.body_bytes
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.merge_slashes = False
    app.register_blueprint(make_health_blueprint(context))
    app.register_blueprint(make_native_blueprint(context))
    app.register_blueprint(make_openai_blueprint(context))
    app.register_blueprint(make_openai_responses_blueprint(context))
    app.register_blueprint(make_anthropic_blueprint(context))
    app.register_blueprint(make_embeddings_blueprint(context))
    app.register_blueprint(make_tgi_blueprint(context))
    app.register_blueprint(make_root_blueprint(context))
    app.register_blueprint(make_tokenization_blueprint(context))
    app.register_blueprint(make_llama_cpp_blueprint(context))
    app.register_blueprint(make_inspection_blueprint(context))
    app.register_blueprint(make_api_docs_blueprint())
    refuse_undeclared_scopes(app)
    refuse_undescribed(app, DESCRIBED)
    refuse_unlisted_prompts(app)
    request_log = RequestLog()
    app.before_request(request_log.begin)
    app.before_request(lambda: _identify(identity))
    app.before_request(PromptValidator(context.settings).check)
    app.before_request(lambda: _name_by_key(context.settings))
    app.after_request(AnswerHeaders().add)
    app.after_request(request_log.watch)
    if tracing is not None:
        app.after_request(tracing.watch)
        app.extensions[AT_WORKER_END] = [tracing.close]
    app.register_error_handler(InferenceApiError, lambda error: encode_error(request.path, error, request.mimetype))
    app.register_error_handler(ClientLeftError, unwritten_response)
    app.register_error_handler(HTTPException, lambda error: _http_error(error, context.settings))
    app.register_error_handler(ParseException, _body_error)
    app.register_error_handler(Exception, _unexpected_error)
    return app


def refuse_undeclared_scopes(app: Flask) -> None:
    """Raise SettingError if an endpoint of the application is not in SCOPES, with one of the scopes that there are."""
    endpoints = {rule.endpoint for rule in app.url_map.iter_rules()}
    undeclared = sorted(name for name in endpoints if SCOPES.get(name, "") not in KNOWN_SCOPES)
    if undeclared:
        raise SettingError(f"endpoints without a declared scope: {', '.join(undeclared)}")


def create_server_app(settings: Settings) -> Flask:
    """Build a worker's application from the settings: what gunicorn's entry calls."""
    identity = Identity(read_internal_key(settings), time.time, allow_anonymous=settings.insecure_dev)
    context = make_context(settings)
    app = create_app(context, identity, make_tracing(settings, context.model_names[0]))
    # At a reload the connections that nobody has accepted meanwhile are this worker's at once: it must not tell them
    # "warming" while a backend that serves is about to greet it. One that really warms up is not waited for.
    context.client.wait_for_ready(FIRST_READY_SECONDS)
    return app


def _identify(identity: Identity) -> None:
    """Find out who calls before any view runs; routes whose scope is None are open."""
    if request.endpoint is None:
        return  # no view will run: the router's own 404 or 405
    if request.endpoint not in SCOPES:
        raise ForbiddenError("This route declares no scope.")  # it came after the start, which would have refused it
    scope = SCOPES[request.endpoint]
    if scope is None:
        return
    request_id = choose_request_id(request.headers.get(REQUEST_ID_HEADER))
    claims = identity.authenticate(
        method=request.method,
        path=request.path,
        assertion=request.headers.get(ASSERTION_HEADER),
        request_id=request_id,
        scope=scope,
        on_loopback=is_loopback_socket(request.environ.get("gunicorn.socket")),
    )
    g.call = Call(request_id, claims, {})


def _name_by_key(settings: Settings) -> None:
    """Name a call by its idempotency key, if it has one and makes something."""
    value = request.headers.get(KEY_HEADER)
    call: Call | None = g.get("call")
    if value is None or call is None or request.method != "POST":
        return
    key = check_key(value, settings.idempotency_seconds)
    digest = call_digest(request.method, request.full_path, request.mimetype, request.get_data())
    call.key = CallKey(call.claims.tenant, key, digest, call.request_id)
    call.request_id = call.key.request_id


def _http_error(error: HTTPException, settings: Settings) -> Response:
    """Turn Werkzeug's own errors into an error of ours."""
    if isinstance(error, RequestEntityTooLarge):
        found: InferenceApiError = BodyTooLargeError(
            f"The request body is larger than the limit of {settings.body_bytes} bytes."
        )
    elif isinstance(error, NotFound):
        found = NotFoundError(f"Unknown route: {request.method} {request.path}")
    elif isinstance(error, MethodNotAllowed):
        allowed = ", ".join(sorted(error.valid_methods or ()))
        found = RefusedCallError(f"Method {request.method} is not allowed here. Allowed: {allowed}.", 405)
    else:
        found = RefusedCallError(error.description or "The request cannot be served.", error.code or 500)
    response = encode_error(request.path, found, request.mimetype)
    for name, value in error.get_headers():
        if name == "Allow":
            response.headers[name] = value
    return response


def _body_error(_error: ParseException) -> Response:
    """Refuse a body whose chunks or trailers are none, as reading it has shown.

    gunicorn closes its connection: nobody knows where it ends.
    """
    return encode_error(request.path, InvalidRequestError("The body is not framed correctly."), request.mimetype)


def _unexpected_error(error: Exception) -> Response:
    """Log where a defect of ours struck, and tell the caller nothing of it.

    The exception's own text is left out: it may quote the request.
    """
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("unexpected %s on %s %r\n%s", type(error).__name__, request.method, request.path, frames)
    return encode_error(request.path, InferenceApiError("Internal error."), request.mimetype)
