"""Check the calls and results of a conversation so far against each other; PROCESS 1, pure.

Knows no API's words: a fault names the member that its caller says.
"""

from __future__ import annotations

from inference_api.errors import InvalidRequestError
from inference_api.server.tools.call_parser import is_object


class CallHistory:
    """The calls seen so far, in the order of the conversation, and which of them have a result."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._answered: set[str] = set()

    def called(self, call_id: str, member: str) -> None:
        """Take a call, whose id stands in `member`; raises InvalidRequestError for an id that an earlier one has."""
        if call_id in self._open or call_id in self._answered:
            raise InvalidRequestError(f"{member}: a call before it has this id.", member)
        self._open.add(call_id)

    def answered(self, call_id: str, member: str, call: str = "call") -> None:
        """Take a result, whose call's id stands in `member`; `call` is what its API says for one.

        Raises InvalidRequestError for a result that answers no call before it, or one that has a result.
        """
        if call_id in self._answered:
            raise InvalidRequestError(f"{member}: a result before it answers the {call} with this id.", member)
        if call_id not in self._open:
            raise InvalidRequestError(f"{member}: no {call} before it has this id.", member)
        self._open.remove(call_id)
        self._answered.add(call_id)


def check_arguments(arguments: str, member: str) -> None:
    """Raise InvalidRequestError, naming `member`, for an earlier call's arguments that are no JSON object."""
    if not is_object(arguments):
        raise InvalidRequestError(f"{member}: should be a JSON object, as text.", member)
