"""SEC-04: deny by default. The matrix below is the checked-in answer for every route, method and kind of key."""

from __future__ import annotations

import asyncio
import http.client
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.gateway.routes import TABLE, Access
from shoal.wire.connection import ConnectionClosed, dial
from shoal.wire.messages import Role
from tests.support.gateways import Service, service
from tests.support.processes import running
from tests.support.scripted import Script

pytestmark = pytest.mark.processes
KEY = "the-right-key"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")

# path of the table -> (path to call, methods that are served: status with the right key and an empty body)
SERVED = {
    "/v1/chat/completions": ("/v1/chat/completions", {"POST": 400}),
    "/v1/completions": ("/v1/completions", {"POST": 400}),
    "/v1/models": ("/v1/models", {"GET": 200, "HEAD": 200}),
    "/v1/models/{id:path}": ("/v1/models/tiny", {"GET": 200, "HEAD": 200}),
    "/v1/files": ("/v1/files", {"GET": 200, "HEAD": 200, "POST": 400}),
    "/v1/files/{id}": ("/v1/files/file-0", {"GET": 404, "HEAD": 404, "DELETE": 404}),
    "/v1/files/{id}/content": ("/v1/files/file-0/content", {"GET": 404, "HEAD": 404}),
    "/v1/batches": ("/v1/batches", {"GET": 200, "HEAD": 200, "POST": 400}),
    "/v1/batches/{id}": ("/v1/batches/batch_0", {"GET": 404, "HEAD": 404}),
    "/v1/batches/{id}/cancel": ("/v1/batches/batch_0/cancel", {"POST": 404}),
    "/tokenize": ("/tokenize", {"POST": 400}),
    "/detokenize": ("/detokenize", {"POST": 400}),
    "/metrics": ("/metrics", {"GET": 200, "HEAD": 200}),
    "/health": ("/health", {"GET": 200, "HEAD": 200}),
    "/ready": ("/ready", {"GET": 200, "HEAD": 200}),
}
OPEN = {"/health", "/ready"}
WITHOUT_RIGHT_KEY = {
    "no header": {},
    "wrong key": {"authorization": "Bearer wrong"},
    "empty Bearer": {"authorization": "Bearer "},
    "lower-case scheme, wrong key": {"authorization": "bearer wrong"},
    "bare key": {"authorization": KEY},
    "Basic": {"authorization": f"Basic {KEY}"},
    "another header": {"x-api-key": KEY},
}
RIGHT = {"Bearer": {"authorization": f"Bearer {KEY}"}, "lower-case scheme": {"authorization": f"bearer {KEY}"}}


@pytest.fixture(scope="module")
def locked(model_dir: Path) -> Iterator[Service]:
    with service(model_dir, Script(), env={"SHOAL_API_KEY": KEY}) as made:
        yield made
        assert KEY not in made.gateway.text


def ask(s: Service, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    """The path goes out as it is; nothing is tidied up on the way."""
    connection = http.client.HTTPConnection("127.0.0.1", s.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"host": "x", "content-length": "0", **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_sec_04_the_matrix_has_every_route() -> None:
    assert set(SERVED) == {row.path for row in TABLE}
    assert {row.path for row in TABLE if row.access is Access.PUBLIC} == OPEN
    assert {row.access for row in TABLE} == {Access.PUBLIC, Access.USER}, "admin routes have a listener of their own"
    for row in TABLE:
        methods = {other.method for other in TABLE if other.path == row.path}
        assert set(SERVED[row.path][1]) - {"HEAD"} == methods


@pytest.mark.parametrize("path", SERVED)
def test_sec_04_every_route_method_and_key(locked: Service, path: str) -> None:
    called, served = SERVED[path]
    for method in METHODS:
        expected = served.get(method, 405)
        for name, headers in RIGHT.items():
            assert ask(locked, method, called, headers)[0] == expected, (method, name)
        for name, headers in WITHOUT_RIGHT_KEY.items():
            status, body = ask(locked, method, called, headers)
            allowed = (expected,) if path in OPEN else (401, 429)
            assert status in allowed, (method, name)
            assert KEY.encode() not in body
        assert ask(locked, method, f"{called}?api_key={KEY}", {})[0] == (expected if path in OPEN else 401), method


TRICKS = [
    "//v1/models",
    "/v1//models",
    "/v1/../admin/drain",
    "/health/../v1/models",
    "/health/..%2fv1/models",
    "/V1/models",
    "/v1/models/",
    "/%2e%2e/admin",
    "/%76%31/models",
    "/admin/drain;x=1",
    "/health;/v1/models",
    "/health/",
    "/HEALTH",
    "/health%0a",
    "/health%00",
    "/ready%2f",
    "/metrics;x",
    "/docs",
    "/openapi.json",
    "/",
    "*",
]


@pytest.mark.parametrize("path", TRICKS)
def test_sec_04_tricks_with_paths(locked: Service, path: str) -> None:
    assert ask(locked, "GET", path, {})[0] in (400, 401)
    status = ask(locked, "GET", path, RIGHT["Bearer"])[0]
    assert status == (200 if path == "/%76%31/models" else 404) or (status == 400 and path == "*")


def test_sec_04_tricks_with_headers(locked: Service) -> None:
    for headers in (
        {"x-forwarded-prefix": "/health", "x-original-url": "/health", "x-rewrite-url": "/health"},
        {"x-http-method-override": "GET"},
        {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "eA==", "sec-websocket-version": "13"},
        {"connection": "upgrade, http2-settings", "upgrade": "h2c", "http2-settings": "AA"},
        {"origin": "http://elsewhere", "access-control-request-method": "POST"},
    ):
        for method in ("GET", "POST", "OPTIONS"):
            assert ask(locked, method, "/v1/models", headers)[0] == 401, headers


def test_sec_04_no_cross_origin_leave_is_given(locked: Service) -> None:
    headers = {"origin": "http://elsewhere", "access-control-request-method": "POST"}
    reply = locked.call("/health", headers=headers)
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_sec_04_the_error_has_openai_s_shape(locked: Service) -> None:
    reply = locked.call("/v1/models")
    assert reply.status == 401 and reply.error["code"] == "no_api_key" and reply.headers["www-authenticate"] == "Bearer"


def test_sec_04_engines_serve_only_who_holds_the_secret(locked: Service) -> None:
    address = locked.engines[0].wait_line(r"engine\.serving address=(\S+)")[1]

    async def knock() -> None:
        await dial(address, role=Role.GATEWAY, name="stranger", incarnation="x", session=1, secret=b"not the secret")

    with pytest.raises(ConnectionClosed, match="secret"):
        asyncio.run(knock())


def test_sec_04_a_bind_that_others_can_reach_needs_a_key(model_dir: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "shoal.cli",
        "gateway",
        "--model",
        str(model_dir),
        "--host",
        "0.0.0.0",
        "--port",
        "0",
    ]
    with running(command) as process:
        assert process.wait(20) != 0
        assert "SHOAL_API_KEY" in process.text and "gateway.serving" not in process.text
