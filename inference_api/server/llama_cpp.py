"""Own `/slots` and `/props`: llama.cpp's views of the rows and of the model, for the tools that read them.

Runs in PROCESS 1. A slot is a row. What llama.cpp could show and this service keeps to the tenant (prompts, sampling
parameters, other tenants' counts) is not there; what it does not know is left out, never made up. Read only.
"""

from __future__ import annotations

from flask import Blueprint, Response

from inference_api import __version__
from inference_api.errors import WarmingError
from inference_api.messages import QueryKind, RowView
from inference_api.server.context import ServerContext
from inference_api.server.inspection import ask_backend
from inference_api.server.responses import json_response

UNKNOWN = -1
"""llama.cpp's number for "none" and "no limit"."""


def make_llama_cpp_blueprint(context: ServerContext) -> Blueprint:
    """Return the routes."""
    blueprint = Blueprint("llama_cpp", __name__)
    routes = LlamaCppRoutes(context)
    blueprint.add_url_rule("/slots", "slots", routes.slots, methods=["GET"])
    blueprint.add_url_rule("/props", "props", routes.props, methods=["GET"])
    return blueprint


class LlamaCppRoutes:
    """The view functions over one ServerContext."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def slots(self) -> Response:
        """Return every row; the counts are those of the caller's own tenant, 0 for others."""
        snapshot = ask_backend(self._context, QueryKind.ROWS)
        return json_response(200, [self._slot(row) for row in snapshot.rows])

    def props(self) -> Response:
        """Describe the model: its template, its end, the context; and how many requests run at once."""
        context, ready = self._context, self._context.client.ready
        if ready is None:
            raise WarmingError("The model is not ready yet, try again later.", 1.0)
        template = context.chat_template
        body = {
            "default_generation_settings": {"n_ctx": context.limits.context_tokens},
            "total_slots": ready.num_rows,
            "model_alias": context.model_names[0],
            "model_path": ready.model,
            "modalities": {"vision": False, "audio": False},
            "chat_template": template.source if template is not None else "",
            "eos_token": context.limits.eos_text or "",
            "build_info": f"inference_api {__version__}",
        }
        return json_response(200, body)

    def _slot(self, row: RowView) -> dict[str, object]:
        is_processing = row.state != "free"
        return {
            "id": row.row,
            "id_task": UNKNOWN,
            "n_ctx": self._context.limits.context_tokens,
            "is_processing": is_processing,
            "n_prompt_tokens": row.num_prompt_tokens,
            "next_token": [
                {"has_next_token": is_processing, "n_remain": UNKNOWN, "n_decoded": row.num_completion_tokens}
            ],
        }
