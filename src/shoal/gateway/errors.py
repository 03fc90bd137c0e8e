"""Every way in which a request can fail, and what the client is told: one table, one shape.

An error that comes after the first byte of a stream is sent as one event, `data: {"error": {…}}`, and the stream
closes without `[DONE]`: whoever sees `[DONE]` has the whole answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from shoal.core.request import Refusal


class Reason(StrEnum):
    """Reasons found in the gateway. Those found in a replica are `core.request.Refusal`."""

    INVALID_REQUEST = "invalid_request"
    NOT_SUPPORTED = "not_supported"
    INVALID_JSON = "invalid_json"
    BODY_TOO_LARGE = "body_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    BAD_HTTP = "bad_http"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    BODY_TIMEOUT = "body_timeout"
    NO_KEY = "no_api_key"
    WRONG_KEY = "invalid_api_key"
    TOO_MANY_KEYS = "too_many_failed_keys"
    CLASS_NOT_GRANTED = "class_not_granted"
    TENANT_REQUESTS = "tenant_requests_exceeded"
    TENANT_QUEUE = "tenant_queue_exceeded"
    TENANT_TOKENS = "tenant_tokens_exceeded"
    TOO_MANY_BATCHES = "too_many_batches"
    NOT_FOUND = "not_found"
    METHOD = "method_not_allowed"
    CONFLICT = "conflict"  # not in the state that the thing is in
    MODEL_NOT_FOUND = "model_not_found"
    STORAGE = "insufficient_storage"
    NO_REPLICA = "no_replica"
    SHUTTING_DOWN = "shutting_down"  # nothing begins any more
    SHUT_DOWN = "shut_down"  # the answer was not complete when the gateway had to end
    REPLICA_LOST = "replica_lost"
    ENGINE_ABORTED = "engine_aborted"
    ENGINE_ERROR = "engine_error"
    SEAM_BROKEN = "seam_broken"
    TIMEOUT = "request_timeout"
    INTERNAL = "internal_error"


class Shape(NamedTuple):
    status: int
    type: str
    headers: tuple[tuple[str, str], ...] = ()


_SOON = (("retry-after", "1"),)
_CLOSE = (("connection", "close"),)
_FINAL = (("x-should-retry", "false"),)  # OpenAI's clients would send it twice more, each as long and as vain

TABLE: Mapping[str, Shape] = {
    # the client's doing
    Reason.INVALID_REQUEST: Shape(400, "invalid_request_error"),
    Reason.NOT_SUPPORTED: Shape(400, "invalid_request_error"),
    Reason.INVALID_JSON: Shape(400, "invalid_request_error"),
    Refusal.EMPTY_PROMPT: Shape(400, "invalid_request_error"),
    Refusal.TOKEN_OUT_OF_RANGE: Shape(400, "invalid_request_error"),
    Refusal.CONTEXT_LENGTH: Shape(400, "invalid_request_error"),
    Refusal.KV_POOL: Shape(400, "invalid_request_error"),
    Refusal.UNKNOWN_CLASS: Shape(400, "invalid_request_error"),
    Reason.NO_KEY: Shape(401, "authentication_error", (("www-authenticate", "Bearer"),)),
    Reason.WRONG_KEY: Shape(401, "authentication_error", (("www-authenticate", "Bearer"),)),
    Reason.CLASS_NOT_GRANTED: Shape(403, "permission_error"),
    Reason.NOT_FOUND: Shape(404, "invalid_request_error"),
    Reason.MODEL_NOT_FOUND: Shape(404, "invalid_request_error"),
    Reason.METHOD: Shape(405, "invalid_request_error"),
    Reason.CONFLICT: Shape(409, "invalid_request_error", _FINAL),
    Reason.BODY_TIMEOUT: Shape(408, "invalid_request_error", _CLOSE),
    Reason.BODY_TOO_LARGE: Shape(413, "invalid_request_error"),
    Reason.HEADERS_TOO_LARGE: Shape(431, "invalid_request_error", _CLOSE),
    Reason.BAD_HTTP: Shape(400, "invalid_request_error", _CLOSE),
    Reason.TOO_MANY_KEYS: Shape(429, "rate_limit_error", _SOON),
    # load
    Reason.TENANT_REQUESTS: Shape(429, "rate_limit_error", _SOON),
    Reason.TENANT_QUEUE: Shape(429, "rate_limit_error", _SOON),
    Reason.TENANT_TOKENS: Shape(429, "rate_limit_error", _SOON),
    Reason.TOO_MANY_BATCHES: Shape(429, "rate_limit_error", (("retry-after", "60"), *_FINAL)),
    Refusal.QUEUE_FULL: Shape(429, "rate_limit_error", _SOON),
    Refusal.WAITING_BOUND: Shape(429, "rate_limit_error", _SOON),
    Reason.TOO_MANY_CONNECTIONS: Shape(503, "server_error", (*_SOON, *_CLOSE)),
    Reason.NO_REPLICA: Shape(503, "server_error", _SOON),
    Reason.SHUTTING_DOWN: Shape(503, "server_error", _SOON),
    Refusal.DRAINING: Shape(503, "server_error", _SOON),
    Reason.SHUT_DOWN: Shape(503, "server_error", _SOON),
    # ours
    Reason.REPLICA_LOST: Shape(502, "server_error", _SOON),
    Reason.ENGINE_ABORTED: Shape(502, "server_error"),
    Reason.ENGINE_ERROR: Shape(502, "server_error"),
    Reason.SEAM_BROKEN: Shape(502, "server_error"),
    Reason.TIMEOUT: Shape(504, "server_error", _FINAL),
    Reason.STORAGE: Shape(507, "server_error", _FINAL),
    Refusal.DUPLICATE_ID: Shape(500, "server_error"),
    Refusal.UNKNOWN_LEADER: Shape(500, "server_error"),
    Reason.INTERNAL: Shape(500, "server_error"),
}


_TURNED_AWAY = (Reason.TOO_MANY_CONNECTIONS, Reason.NO_REPLICA, Reason.SHUTTING_DOWN, Refusal.DRAINING)


class ApiError(Exception):
    """A request that ends in an error, with the reason from the table above.

    `retry_after_s`: when it is worth to come back, where that is known better than the table's.
    """

    def __init__(
        self, reason: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def shape(self) -> Shape:
        return TABLE[self.reason]

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        if self.retry_after_s is None:
            return self.shape.headers
        others = (header for header in self.shape.headers if header[0] != "retry-after")
        return (*others, ("retry-after", str(max(1, math.ceil(self.retry_after_s)))))

    @property
    def before_work(self) -> bool:
        """The request was turned away; otherwise it was taken on and failed."""
        return self.shape.status < 500 or self.reason in _TURNED_AWAY

    def body(self) -> bytes:
        """The error object as OpenAI shapes it; `code` is the reason."""
        error = {"message": self.message, "type": self.shape.type, "param": self.param, "code": str(self.reason)}
        return msgspec.json.encode({"error": error})


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError(Reason.INVALID_REQUEST, message, param=param)


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(Reason.NOT_SUPPORTED, message, param=param)


def internal() -> ApiError:
    """A fault of ours. The client is told no more; the log has the traceback."""
    return ApiError(Reason.INTERNAL, "the gateway failed on this request")
