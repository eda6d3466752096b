"""Own the exception tree of the server and the backend; every process imports it.

    InferenceApiError                 code, status
    ├── SettingError                  a wrong setting; stops the start
    ├── ModelError                    a model that cannot be loaded; stops the start
    │   └── MemoryShortError          weights and KV cache do not fit
    ├── RequestError                  the caller's fault: 4xx
    │   ├── InvalidRequestError       400 malformed or out-of-bounds field
    │   ├── PromptTooLongError        400 prompt over the context
    │   ├── UnauthenticatedError      401 no valid identity
    │   ├── ForbiddenError            403 identity without the scope
    │   ├── NotFoundError             404 unknown, or another tenant's
    │   │   └── UnknownModelError     404 a model that is not served
    │   ├── AbortedError              409 ended by DELETE
    │   │   └── ClientLeftError       nobody is there to read an answer
    │   ├── ReaderBehindError         408 left too much of its stream unread
    │   ├── KeyReusedError            409 an idempotency key stands for another call
    │   ├── BodyTooLargeError         413
    │   └── RefusedCallError          4xx that HTTP itself asks for, such as 405
    └── UnavailableError              not the caller's fault, worth a retry
        ├── OverloadedError           503 the input queue is full
        ├── DrainingError             503 the service is stopping
        ├── WarmingError              503 the backend is not ready yet
        ├── BackendLostError          503 the backend died while the request ran
        ├── DeadlineError             504 queue, first token or total time over
        └── GenerationError           500 the engine failed on this row

A code is stable: clients may match on it. The edge turns an error into HTTP once, in one handler a surface.
"""

from __future__ import annotations

from http import HTTPStatus


class InferenceApiError(Exception):
    """Base of every error that this package raises on purpose."""

    code = "internal_error"
    status = 500


class SettingError(InferenceApiError):
    """Say that a setting is wrong; the text names the setting, its value and what is allowed."""

    code = "setting_error"


class ModelError(InferenceApiError):
    """Say why a model cannot be loaded; trying again cannot help."""

    code = "model_error"


class MemoryShortError(ModelError):
    """Say how many bytes are needed, how many there are, and which settings lower the need."""

    code = "memory_short"


class RequestError(InferenceApiError):
    """Base of the caller's faults."""

    code = "invalid_request"
    status = 400


class InvalidRequestError(RequestError):
    """Name the field, its value and the bound; `param` is the field's path where an API tells it apart."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(RequestError):
    """Name the prompt's length and the context's, in tokens."""

    code = "context_length_exceeded"


class UnauthenticatedError(RequestError):
    """Refuse a call without a valid identity."""

    code = "unauthenticated"
    status = 401


class ForbiddenError(RequestError):
    """Refuse an identity that lacks the route's scope."""

    code = "forbidden"
    status = 403


class NotFoundError(RequestError):
    """Answer for what does not exist, or belongs to another tenant."""

    code = "not_found"
    status = 404


class UnknownModelError(NotFoundError):
    """Answer for a model that is not served; the text names those that are."""

    code = "model_not_found"


class AbortedError(RequestError):
    """Answer for a request that its tenant aborted before it had said anything."""

    code = "aborted"
    status = 409


class ClientLeftError(AbortedError):
    """End a request whose client has sent FIN: nothing is written to it any more."""

    code = "client_left"


class ReaderBehindError(RequestError):
    """Cut a stream whose reader leaves more logprobs unread than may wait; its head has told another status by then."""

    code = "reader_behind"
    status = 408


class KeyReusedError(RequestError):
    """Refuse a call whose idempotency key stands for another one: with it nothing is made twice."""

    code = "idempotency_key_reused"
    status = 409


class BodyTooLargeError(RequestError):
    """Refuse a body over the limit."""

    code = "body_too_large"
    status = 413


class RefusedCallError(RequestError):
    """Refuse a call that no route takes, with a status of HTTP's own."""

    code = "refused"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        self.code = HTTPStatus(status).name.lower()


class UnavailableError(InferenceApiError):
    """Base of the service's own faults; `retry_after_seconds` goes into the Retry-After header when set."""

    code = "unavailable"
    status = 503

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class OverloadedError(UnavailableError):
    """Refuse a request because the input queue is full."""

    code = "overloaded"


class DrainingError(UnavailableError):
    """Refuse a request because the service is stopping."""

    code = "draining"


class WarmingError(UnavailableError):
    """Refuse a request because the backend is not ready."""

    code = "warming"


class BackendLostError(UnavailableError):
    """End a request whose backend died or was restarted."""

    code = "backend_lost"


class DeadlineError(UnavailableError):
    """End a request whose time is over."""

    code = "deadline_exceeded"
    status = 504


class GenerationError(UnavailableError):
    """End a request on which the engine failed."""

    code = "generation_failed"
    status = 500
