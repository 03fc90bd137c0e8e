"""What a gateway can be told.

API keys are secrets: they come from the environment (SHOAL_API_KEY, several with commas between), or stand as digests
in a file of their own; never here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    host: Annotated[str, Meta(description="address to bind; anything but loopback needs an API key")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0: any free port")] = 8000
    key_file: Annotated[
        str, Meta(description="YAML list of API keys as digests, each with tenant, classes and limits; empty: none")
    ] = ""
    max_body_bytes: Annotated[
        int, Meta(ge=1024, extra_json_schema={"unit": "bytes"}, description="larger request bodies are refused unread")
    ] = 4 << 20
    max_connections: Annotated[int, Meta(ge=1, description="open client connections")] = 4096
    max_connections_per_address: Annotated[
        int, Meta(ge=1, description="of them from one address (IPv6: one /64); raise it behind a proxy")
    ] = 2048
    request_timeout_s: Annotated[
        float,
        Meta(
            gt=0, extra_json_schema={"unit": "s"}, description="a request that is not done by then ends with an error"
        ),
    ] = 600.0
    request_log: Annotated[bool, Meta(description="one log line per request: sizes and times, never text")] = True
    batch_dir: Annotated[
        str,
        Meta(
            description="private folder of uploaded files and batches; gateways that share it share the work; "
            "empty: batches, in the cache folder"
        ),
    ] = ""
    max_file_bytes: Annotated[
        int, Meta(ge=1024, extra_json_schema={"unit": "bytes"}, description="larger uploads are refused")
    ] = 100 << 20
    tenant_file_bytes: Annotated[
        int, Meta(ge=1024, extra_json_schema={"unit": "bytes"}, description="what the files of one tenant may take")
    ] = 10 << 30
    file_retention_days: Annotated[
        int, Meta(ge=1, extra_json_schema={"unit": "days"}, description="files are deleted after so long, and batches")
    ] = 30
    batch_lines_in_flight: Annotated[int, Meta(ge=1, description="lines of batches that are run at once")] = 64
