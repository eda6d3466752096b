"""Encode errors about one response by its id: as all of OpenAI's, but what is not found there is no model.

Runs in PROCESS 1. Pure.
"""

from __future__ import annotations

import json

from flask import Response

from inference_api.errors import InferenceApiError, NotFoundError
from inference_api.server.openai.errors import openai_error_response


def response_error_response(error: InferenceApiError) -> Response:
    """Return an error's response; a 404 has the code `not_found`, where other routes say `model_not_found`."""
    response = openai_error_response(error)
    if isinstance(error, NotFoundError):
        members = {"message": str(error), "type": "not_found_error", "param": None, "code": error.code}
        response.set_data(json.dumps({"error": members}))
    return response
