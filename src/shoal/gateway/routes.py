"""Every route of the gateway, who may use it, and nothing else: what is not in the table does not exist.

What only an administrator or shoal's own processes may use does not belong on this listener, so it has no class.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from shoal.gateway.api import Api


class Access(StrEnum):
    PUBLIC = "public"  # needs no key
    USER = "user"  # needs an API key, where the gateway has any


@dataclass(frozen=True, slots=True)
class Row:
    method: str  # GET includes HEAD
    path: str
    access: Access
    handler: Callable[[Api, Request], Awaitable[Response]]
    makes_text: bool = False  # takes part in the accounting of requests
    logged: bool = True  # polled by machines where not


TABLE = (
    Row("POST", "/v1/chat/completions", Access.USER, Api.chat, makes_text=True),
    Row("POST", "/v1/completions", Access.USER, Api.complete, makes_text=True),
    Row("GET", "/v1/models", Access.USER, Api.models),
    Row("GET", "/v1/models/{id:path}", Access.USER, Api.model_by_id),
    Row("POST", "/tokenize", Access.USER, Api.tokenize),
    Row("POST", "/detokenize", Access.USER, Api.detokenize),
    Row("GET", "/metrics", Access.USER, Api.show_metrics, logged=False),
    Row("GET", "/health", Access.PUBLIC, Api.health, logged=False),
    Row("GET", "/ready", Access.PUBLIC, Api.ready, logged=False),
)

PUBLIC_PATHS = frozenset(row.path for row in TABLE if row.access is Access.PUBLIC)
UNLOGGED_PATHS = frozenset(row.path for row in TABLE if not row.logged)
TEXT_PATHS = frozenset(row.path for row in TABLE if row.makes_text)


def router(api: Api) -> Router:
    """Paths match as they are: no slash is added or removed, so the key check and the router see the same string."""
    routes = [Route(row.path, _bind(row.handler, api), methods=[row.method]) for row in TABLE]
    return Router(routes, redirect_slashes=False)


def _bind(handler: Callable[[Api, Request], Awaitable[Response]], api: Api) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(api, request)

    return endpoint
