"""What the controller and its launcher can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    host: Annotated[str, Meta(description="address of the status page; loopback only")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the status page; 0: any free port")] = 8001


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    replicas: Annotated[int, Meta(ge=1, le=64, description="engines, one model copy each")] = 1
