"""Every route of the gateway, who may use it, and nothing else: what is not in the table does not exist.

What only an administrator or shoal's own processes may use does not belong on this listener, so it has no class.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from shoal.gateway.api import Api
from shoal.gateway.batches.api import BatchApi


class Access(StrEnum):
    PUBLIC = "public"  # needs no key
    USER = "user"  # needs an API key, where the gateway has any


@dataclass(frozen=True, slots=True)
class Row:
    method: str  # GET includes HEAD
    path: str
    access: Access
    handler: Callable[[Any, Request], Awaitable[Response]]
    of: type = Api  # whose method it is
    makes_text: bool = False  # takes part in the accounting of requests
    logged: bool = True  # polled by machines where not


TABLE = (
    Row("POST", "/v1/chat/completions", Access.USER, Api.chat, makes_text=True),
    Row("POST", "/v1/completions", Access.USER, Api.complete, makes_text=True),
    Row("GET", "/v1/models", Access.USER, Api.models),
    Row("GET", "/v1/models/{id:path}", Access.USER, Api.model_by_id),
    Row("POST", "/v1/files", Access.USER, BatchApi.upload, of=BatchApi),
    Row("GET", "/v1/files", Access.USER, BatchApi.files, of=BatchApi),
    Row("GET", "/v1/files/{id}", Access.USER, BatchApi.file, of=BatchApi),
    Row("DELETE", "/v1/files/{id}", Access.USER, BatchApi.delete_file, of=BatchApi),
    Row("GET", "/v1/files/{id}/content", Access.USER, BatchApi.content, of=BatchApi),
    Row("POST", "/v1/batches", Access.USER, BatchApi.create, of=BatchApi),
    Row("GET", "/v1/batches", Access.USER, BatchApi.batches, of=BatchApi),
    Row("GET", "/v1/batches/{id}", Access.USER, BatchApi.batch, of=BatchApi),
    Row("POST", "/v1/batches/{id}/cancel", Access.USER, BatchApi.cancel, of=BatchApi),
    Row("POST", "/tokenize", Access.USER, Api.tokenize),
    Row("POST", "/detokenize", Access.USER, Api.detokenize),
    Row("GET", "/metrics", Access.USER, Api.show_metrics, logged=False),
    Row("GET", "/health", Access.PUBLIC, Api.health, logged=False),
    Row("GET", "/ready", Access.PUBLIC, Api.ready, logged=False),
)

PUBLIC_PATHS = frozenset(row.path for row in TABLE if row.access is Access.PUBLIC)
UNLOGGED_PATHS = frozenset(row.path for row in TABLE if not row.logged)
TEXT_PATHS = frozenset(row.path for row in TABLE if row.makes_text)


def router(api: Api, batches: BatchApi) -> Router:
    """Paths match as they are: no slash is added or removed, so the key check and the router see the same string."""
    parts = {Api: api, BatchApi: batches}
    routes = [Route(row.path, _bind(row.handler, parts[row.of]), methods=[row.method]) for row in TABLE]
    return Router(routes, redirect_slashes=False)


def _bind(
    handler: Callable[[Any, Request], Awaitable[Response]], part: Any
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(part, request)

    return endpoint
