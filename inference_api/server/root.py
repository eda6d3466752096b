"""Own `POST /`, whose one URL has one meaning for each kind of body: JSON with `inputs` is text-generation-inference's.

Runs in PROCESS 1. A body that is declared as text, as what `curl -d` sends, or not at all, is a prompt; everything else
is refused by what it is. Knows how kinds are told apart, and nothing of what is done with them.
"""

from __future__ import annotations

from http import HTTPStatus

from flask import Blueprint, Response, request

from inference_api.errors import RefusedCallError
from inference_api.server.context import ServerContext
from inference_api.server.json_body import DuplicateMemberError, parse_json
from inference_api.server.raw_body import RawBodyRoute
from inference_api.server.tgi.routes import TgiRoutes

JSON_TYPE = "application/json"
RAW_TYPES = ("", "text/plain", "application/x-www-form-urlencoded")
"""Media types of a raw prompt. The first: none is declared; the last is what `curl -d` declares, whatever it sends."""

_TAKEN = (
    'POST / takes a JSON object with "inputs", as text-generation-inference does, with Content-Type: application/json;'
    " or a prompt as it is, with Content-Type: text/plain."
)


def make_root_blueprint(context: ServerContext) -> Blueprint:
    """Return the route."""
    blueprint = Blueprint("root", __name__)
    route = RootRoute(context)
    blueprint.add_url_rule("/", "answer", route.answer, methods=["POST"])
    return blueprint


class RootRoute:
    """The view function over one ServerContext."""

    def __init__(self, context: ServerContext) -> None:
        self._tgi = TgiRoutes(context)
        self._raw_body = RawBodyRoute(context)

    def answer(self) -> Response:
        """Continue a text: `inputs` of a JSON body, or a body that is the text itself."""
        media_type = request.mimetype
        if media_type == JSON_TYPE:
            return self._answer_json()
        if media_type not in RAW_TYPES:
            raise _refused(_TAKEN)
        # Declared as text it is a text, whatever it reads like; else a client may have forgotten to declare JSON.
        if media_type != "text/plain" and _members() & {"inputs", "article"}:
            raise _refused("The body is JSON: send Content-Type: application/json.")
        return self._raw_body.answer()

    def _answer_json(self) -> Response:
        members = _members()
        if "inputs" in members:
            return self._tgi.root()
        if "article" in members:
            raise _refused('POST / takes no "article"; send "inputs".')
        raise _refused(_TAKEN)


def _members() -> frozenset[str]:
    """Return the names of the body's members, as far as it is a JSON object: what is wrong with it, parsing tells."""
    try:
        given = parse_json(request.get_data())
    except DuplicateMemberError as error:
        return frozenset([error.name])
    except ValueError:
        return frozenset()
    return frozenset(given) if isinstance(given, dict) else frozenset()


def _refused(text: str) -> RefusedCallError:
    return RefusedCallError(text, HTTPStatus.BAD_REQUEST)
