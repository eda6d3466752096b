"""Own the routes that look at the service: `/rows`, `/info`, `/metrics`, and `GET`, `DELETE /v1/requests/<id>`.

Runs in PROCESS 1. Every answer comes from the backend, so that any worker answers alike. A tenant sees its own
requests; of the others it sees counts only, and a foreign request id is as unknown as one that never was.
"""

from __future__ import annotations

import msgspec
from flask import Blueprint, Response

from inference_api import __version__
from inference_api.errors import NotFoundError, WarmingError
from inference_api.messages import QueryKind, Ready, RequestView, Snapshot
from inference_api.server.bodies import MAX_STOPS
from inference_api.server.context import ServerContext, current_call
from inference_api.server.generation_request import MAX_CHOICES
from inference_api.server.metrics import render_metrics
from inference_api.server.openai.bodies import MAX_PROMPTS
from inference_api.server.responses import json_response

QUERY_SECONDS = 5.0


def make_inspection_blueprint(context: ServerContext) -> Blueprint:
    """Return the routes."""
    blueprint = Blueprint("inspection", __name__)
    routes = InspectionRoutes(context)
    blueprint.add_url_rule("/rows", "rows", routes.rows)
    blueprint.add_url_rule("/info", "info", routes.info)
    blueprint.add_url_rule("/metrics", "metrics", routes.metrics)
    blueprint.add_url_rule("/v1/requests/<request_id>", "get_request", routes.get_request, methods=["GET"])
    blueprint.add_url_rule("/v1/requests/<request_id>", "delete_request", routes.delete_request, methods=["DELETE"])
    return blueprint


class InspectionRoutes:
    """The view functions over one ServerContext."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def rows(self) -> Response:
        """Return the state of every row, and how many requests wait."""
        snapshot = ask_backend(self._context, QueryKind.ROWS)
        body = {
            "num_rows": snapshot.num_rows,
            "num_rows_in_use": snapshot.num_rows_in_use,
            "num_waiting": snapshot.num_waiting,
            "rows": msgspec.to_builtins(snapshot.rows),
        }
        return json_response(200, body)

    def info(self) -> Response:
        """Describe the model, the engine and its numeric path; beside that what TGI's clients look for."""
        ready = self._context.client.ready
        if ready is None:
            raise WarmingError("The model is not ready yet, try again later.", 1.0)
        body = {"version": __version__, "models": list(self._context.model_names), **msgspec.to_builtins(ready)}
        del body["type"]
        return json_response(200, {**tgi_members(self._context, ready), **body})

    def metrics(self) -> Response:
        """Return gauges, counters and histograms in Prometheus' text format."""
        snapshot = ask_backend(self._context, QueryKind.METRICS)
        text, content_type = render_metrics(snapshot, self._context.model_names[0])
        return Response(text, content_type=content_type)

    def get_request(self, request_id: str) -> Response:
        """Return a request's state, and its figures once it has them."""
        return json_response(200, request_body(self._find(request_id)))

    def delete_request(self, request_id: str) -> Response:
        """Abort a request; its row is free before the next step."""
        view = self._find(request_id)
        self._context.client.abort(request_id, current_call().claims.tenant)
        return json_response(202, {"request_id": view.request_id, "state": view.state})

    def _find(self, request_id: str) -> RequestView:
        view = ask_backend(self._context, QueryKind.REQUEST, request_id).request
        if view is None:
            raise NotFoundError(f"Unknown request '{request_id}'.")
        return view


def tgi_members(context: ServerContext, ready: Ready) -> dict[str, object]:
    """Return what `Info` of text-generation-inference 3 requires (docs/openapi.json), but `version`, which is ours."""
    return {
        "model_id": context.model_names[0],
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": ready.num_rows + context.settings.queue_requests,
        "max_best_of": MAX_CHOICES,
        "max_stop_sequences": MAX_STOPS,
        "max_input_tokens": context.limits.context_tokens - 1,
        "max_total_tokens": context.limits.context_tokens,
        "validation_workers": context.settings.workers,
        "max_client_batch_size": MAX_PROMPTS,
        "router": "inference_api",
        "sha": None,
        "docker_label": None,
    }


def ask_backend(context: ServerContext, kind: QueryKind, request_id: str = "") -> Snapshot:
    """Block for a Snapshot as the caller may see it; raises WarmingError if the backend does not answer."""
    snapshot = context.client.query(kind, current_call().claims.tenant, request_id, QUERY_SECONDS)
    if snapshot is None:
        raise WarmingError("The decode backend does not answer, try again later.", 1.0)
    return snapshot


def request_body(view: RequestView) -> dict[str, object]:
    """Return a request's view as JSON, with the original's figures once it has run."""
    body: dict[str, object] = msgspec.to_builtins(view)
    timing = view.timing
    if timing is None or view.row is None:
        return body
    ttft_seconds = timing.queue_seconds + timing.prefill_seconds
    body["stats"] = {
        "user_ttft_ms": round(timing.prefill_seconds * 1000, 3),
        "user_ttft_e2e_ms": round(ttft_seconds * 1000, 3),
        "user_tps": tokens_per_second(view.num_completion_tokens - 1, timing.decode_seconds),
        "prefill": {
            "tokens_prefilled": view.num_prompt_tokens,
            "tps": tokens_per_second(view.num_prompt_tokens, timing.prefill_seconds),
        },
        "decode": {
            "tokens_decoded": view.num_completion_tokens,
            "tps": tokens_per_second(view.num_completion_tokens - 1, timing.decode_seconds),
        },
        "batch_size": timing.batch_size,
        "context_length": timing.context_tokens,
    }
    return body


def tokens_per_second(num_tokens: int, seconds: float) -> float:
    """Return a rate, rounded; 0 where there is none."""
    return round(num_tokens / seconds, 3) if seconds > 0 and num_tokens > 0 else 0.0
