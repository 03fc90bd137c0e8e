"""A running service, as the commands that talk to one see it: its address, its key, its errors in one line."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

CONNECT_S = 5.0
SILENCE_S = 60.0  # a stream says something at least every 10 s


class ServiceError(Exception):
    """What to tell the user; one line."""


@asynccontextmanager
async def request(method: str, url: str, path: str, body: Any = None) -> AsyncIterator[aiohttp.ClientResponse]:
    """One request to the service at `url`. Raises ServiceError for whatever goes wrong, also while the body is read."""
    base = root(url)
    timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=SILENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=authorization()) as session,
            session.request(method, base + path, json=body, allow_redirects=False) as response,
        ):
            if response.status >= 300:
                raise ServiceError(await explain(response))
            yield response
    except aiohttp.ClientConnectorError as error:
        raise ServiceError(
            f"cannot reach {base} ({os.strerror(error.os_error.errno or 0)}); is `shoal serve` running?"
        ) from None
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
        raise ServiceError(f"--url: {url!r} is not allowed; allowed: http://host:port") from None
    except TimeoutError:
        raise ServiceError(f"{base} does not answer") from None
    except aiohttp.ClientError as error:
        raise ServiceError(f"{base}: {error or type(error).__name__}") from None


def root(url: str) -> str:
    """A service's address without what clients of other libraries put behind it."""
    return url.rstrip("/").removesuffix("/v1")


def authorization() -> dict[str, str]:
    """The header with the key, where the environment has one."""
    key = os.environ.get("SHOAL_API_KEY", "").partition(",")[0]
    return {"Authorization": f"Bearer {key}"} if key else {}


async def explain(response: aiohttp.ClientResponse) -> str:
    """What the service said, in one line."""
    text = (await response.content.read(1 << 16)).decode(errors="replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = " ".join(text.split())[:200] or response.reason
    hint = "; set SHOAL_API_KEY" if response.status == 401 else ""
    return f"{response.url} answered {response.status}: {message}{hint}"


def printable(text: str) -> str:
    """A model's text without the characters that steer a terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")
