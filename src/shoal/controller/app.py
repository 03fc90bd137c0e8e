"""The controller's HTTP side, on loopback: the status page, the same as JSON, Prometheus' targets and metrics.

A request is served where a row of ROUTES or ACTIONS names its path and the row's class admits the caller; everything
else is 404.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib.resources import files
from typing import NamedTuple
from urllib.parse import urlsplit

import jinja2
import prometheus_client
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.controller import status
from shoal.controller.caller import uid_of
from shoal.controller.registry import SERVING, Registry
from shoal.controller.status import Document
from shoal.fleet.view import ReplicaRole
from shoal.wire.address import is_loopback
from shoal.wire.messages import Role

_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_PAGES = files("shoal.controller") / "pages"
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FunctionLoader(lambda name: (_PAGES / name).read_text("utf-8")), autoescape=True
)
_TEMPLATES.globals.update(kv_used=status.kv_used, span=status.span)

log = logging.getLogger("shoal.controller")


class Access(StrEnum):
    PUBLIC = "public"  # liveness
    INTERNAL = "internal"  # callers on this machine, by the name of this machine
    OWNER = "owner"  # those of them that run as the user who runs the service, or as root; no web page


class Pages:
    """What the routes answer. Pages take nothing from the request: there is nothing to inject into."""

    def __init__(self, registry: Registry, metrics: prometheus_client.CollectorRegistry, url: str) -> None:
        self.registry = registry
        self._metrics = metrics
        self._url = url

    def health(self) -> Response:
        return PlainTextResponse("ok\n")

    def page(self) -> Response:
        found = self._document()
        replicas = found["replicas"]
        html = _TEMPLATES.get_template("status.html").render(
            **found,
            serving=sum(r["state"] == SERVING and r["connected"] for r in replicas),
            models=sorted({r["model"] for r in replicas if r["model"]}),
        )
        return HTMLResponse(html)

    def style(self) -> Response:
        return Response((_PAGES / "style.css").read_text("utf-8"), media_type="text/css")

    def status(self) -> Response:
        return JSONResponse(self._document())

    def targets(self) -> Response:
        """https://prometheus.io/docs/prometheus/latest/http_sd/"""
        urls = [(str(e.role), e.name, e.registered.metrics) for e in self.registry.entries() if e.registered.metrics]
        urls.append(("controller", "controller", self._url + "/metrics"))
        return JSONResponse([_target(*row) for row in urls])

    def metrics(self) -> Response:
        return Response(
            prometheus_client.generate_latest(self._metrics),
            headers={"content-type": prometheus_client.CONTENT_TYPE_LATEST},
        )

    def set_role(self, query: Mapping[str, str]) -> Response:
        """`replica` and `role`."""
        name, wanted = query.get("replica", ""), query.get("role", "")
        try:
            role = ReplicaRole(wanted)
        except ValueError:
            return PlainTextResponse(f"role is {wanted[:64]!r}; allowed: {', '.join(ReplicaRole)}\n", 400)
        try:
            self.registry.set_role(name, role)
        except KeyError:
            listed = ", ".join(e.name for e in self.registry.entries() if e.role is Role.ENGINE) or "none"
            return PlainTextResponse(f"there is no replica {name[:64]!r}; listed: {listed}\n", 404)
        log.info("controller.role", {"replica": name, "role": role})
        return JSONResponse({"replica": name, "role": role})

    def _document(self) -> Document:
        return status.document(self.registry.entries(), time.monotonic_ns())


def _target(component: str, name: str, url: str) -> dict[str, object]:
    parts = urlsplit(url)
    labels = {"__metrics_path__": parts.path, "component": component, "name": name}
    return {"targets": [parts.netloc], "labels": labels}


class Route(NamedTuple):
    path: str
    access: Access
    answer: Callable[[Pages], Response]


ROUTES = (
    Route("/health", Access.PUBLIC, Pages.health),
    Route("/", Access.INTERNAL, Pages.page),
    Route("/style.css", Access.INTERNAL, Pages.style),
    Route("/status", Access.INTERNAL, Pages.status),
    Route("/targets", Access.INTERNAL, Pages.targets),
    Route("/metrics", Access.INTERNAL, Pages.metrics),
)


class Action(NamedTuple):
    """A POST that changes something, by its query alone."""

    path: str
    access: Access
    perform: Callable[[Pages, Mapping[str, str]], Response]


ACTIONS = (Action("/role", Access.OWNER, Pages.set_role),)


def make_app(pages: Pages) -> ASGIApp:
    table: dict[str, Route | Action] = {row.path: row for row in (*ROUTES, *ACTIONS)}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # uvicorn answers a websocket that is not accepted with 403
        response = _answer(Request(scope), table.get(scope["path"]), pages)
        response.headers.update(_HEADERS)
        await response(scope, receive, send)

    return app


def _answer(request: Request, route: Route | Action | None, pages: Pages) -> Response:
    if route is None:
        return PlainTextResponse("no such page\n", 404)
    if route.access is not Access.PUBLIC and not _is_local(request):
        return PlainTextResponse("only for callers on this machine\n", 403)
    if route.access is Access.OWNER and not _is_owner(request):
        return PlainTextResponse("only for the user who runs the service\n", 403)
    if isinstance(route, Action):
        if request.method != "POST":
            return PlainTextResponse("only POST\n", 405, headers={"allow": "POST"})
        return route.perform(pages, request.query_params)
    if request.method not in ("GET", "HEAD"):
        return PlainTextResponse("only GET\n", 405, headers={"allow": "GET, HEAD"})
    return route.answer(pages)


def _is_local(request: Request) -> bool:
    """The Host is checked, too: a page elsewhere may make a browser here resolve its own name to loopback."""
    caller = request.client.host if request.client is not None else ""
    try:
        near = ipaddress.ip_address(caller).is_loopback
        host = urlsplit("//" + request.headers.get("host", "")).hostname or ""
    except ValueError:
        return False
    return near and is_loopback(host)


def _is_owner(request: Request) -> bool:
    """A web page in a browser of the same user says where it comes from."""
    client, server = request.client, request.scope.get("server")
    if client is None or server is None or "origin" in request.headers:
        return False
    return uid_of((client.host, client.port), (server[0], server[1])) in (os.geteuid(), 0)
