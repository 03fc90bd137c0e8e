"""What files and batches are: their states, what clients may send, what they get back (OpenAI's shapes)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

WINDOW_S = 24 * 3600  # of the one completion window that there is
MAX_LINES = 50_000
MAX_ERRORS = 100  # that a batch which cannot begin reports
MAX_CUSTOM_ID = 512

Purpose = Literal["batch", "batch_output"]


class Status(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"  # its file is none of requests; no line was run
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # every line has a result, the files are being written
    COMPLETED = "completed"
    EXPIRED = "expired"  # lines without a result are errors
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"  # likewise


NEXT: dict[Status, frozenset[Status]] = {
    Status.VALIDATING: frozenset({Status.FAILED, Status.IN_PROGRESS, Status.CANCELLING, Status.EXPIRED}),
    Status.IN_PROGRESS: frozenset({Status.FINALIZING, Status.CANCELLING, Status.EXPIRED}),
    Status.FINALIZING: frozenset({Status.COMPLETED}),
    Status.CANCELLING: frozenset({Status.CANCELLED}),
    Status.FAILED: frozenset(),
    Status.COMPLETED: frozenset(),
    Status.EXPIRED: frozenset(),
    Status.CANCELLED: frozenset(),
}
OPEN = tuple(status for status, following in NEXT.items() if following)  # somebody has to work on these


def before(status: Status) -> tuple[Status, ...]:
    """From where it is reached."""
    return tuple(earlier for earlier, following in NEXT.items() if status in following)


# -- what is kept ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    id: str
    tenant: str
    purpose: Purpose
    filename: str  # the uploader's name for it; never a path of ours
    bytes: int
    created_at: int  # s of the wall clock, like all times here
    expires_at: int

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    id: str
    tenant: str
    model: str  # served by the gateway that took it; only its like work on it
    endpoint: str
    input_file_id: str
    metadata: str  # JSON
    created_at: int
    expires_at: int
    status: Status = Status.VALIDATING
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: str | None = None  # JSON: a list of objects
    total: int = 0
    completed: int = 0
    failed: int = 0

    def shown(self) -> dict[str, Any]:
        errors = None if self.errors is None else {"object": "list", "data": Raw(self.errors.encode())}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": Raw(self.metadata.encode()),
        }


@dataclass(frozen=True, slots=True)
class Place:
    """Where a line is in its file."""

    number: int  # from 1
    start: int  # of its first byte
    length: int  # bytes, without its end
    custom_id: str


# -- what clients send -------------------------------------------------------------------------------------------------


class NewBatch(Struct, forbid_unknown_fields=True, kw_only=True):
    input_file_id: Annotated[str, Meta(max_length=64)]
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None


class Line(Struct, forbid_unknown_fields=True, kw_only=True):
    """A line of an input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_CUSTOM_ID)]
    method: str
    url: str
    body: Raw


# -- lines of output and error files -----------------------------------------------------------------------------------


def answered(custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    """The line of a request that got an answer, a refusal included. `body` is JSON."""
    response = {"status_code": status, "request_id": request_id, "body": Raw(body)}
    return _line(request_id, custom_id, response, None)


UNANSWERED = {  # ends that leave lines without an answer: (code, message) of each
    Status.EXPIRED: ("batch_expired", "this request was not done before the completion window ended"),
    Status.CANCELLED: ("batch_cancelled", "the batch was cancelled before this request was done"),
}


def unanswered(custom_id: str, request_id: str, code: str, message: str) -> bytes:
    """The line of a request that was not run."""
    return _line(request_id, custom_id, None, {"code": code, "message": message})


def _line(id: str, custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    line = {"id": f"batch_req_{id}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"
