"""`shoal serve`: a model behind an OpenAI-compatible API on this machine, with one command."""

from __future__ import annotations

import json
import os
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal import config as configuration
from shoal.cli.options import ConfigFile, resolve, with_settings
from shoal.cli.pull import fetch

if TYPE_CHECKING:
    from shoal.controller.launchers.local import Service

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="a known name, a model folder, or a Hugging Face hub id  [default: smollm2-135m]",
        show_default=False,
    ),
]


@with_settings("model", "engine", "gateway", "controller", "cluster")
def serve(model: Model = None, *, config: ConfigFile = None, settings: dict[str, Any]) -> None:
    """Serve a model: gateway, controller and engines on this machine, until Ctrl-C.

    Fetches the model if it is not here. Set SHOAL_API_KEY in the environment, or --key-file, to ask clients for a key.
    """
    values = resolve(config, settings, model)
    if values.engine.journal and values.cluster.replicas > 1:
        raise typer.BadParameter("--journal records one engine; allowed with --replicas 1 only")
    from shoal.controller.launchers import local
    from shoal.gateway import keyfile
    from shoal.gateway.auth import check_bind

    keys, _ = keyfile.load(values.gateway.key_file, values.classes)
    check_bind(values.gateway.host, keys)
    fetch(values.model.name)

    def on_ready(service: Service) -> None:
        shown = os.environ.get("SHOAL_API_KEY", "") or values.gateway.key_file
        typer.echo(invitation(values.model.public_name, service, shown))

    code = local.run(
        configuration.dump(values),
        api=(values.gateway.host, values.gateway.port),
        page=(values.controller.host, values.controller.port),
        num_replicas=values.cluster.replicas,
        on_ready=on_ready,
    )
    raise typer.Exit(code)


def invitation(model: str, service: Service, keys: str) -> str:
    """What to do with a service that is ready. `keys`: of the environment, or where they are; it shows none of them."""
    question = {
        "model": model,
        "messages": [{"role": "user", "content": "What is a shoal of fish?"}],
        "max_tokens": 100,
    }
    key = "${SHOAL_API_KEY%%,*}" if "," in keys else "$SHOAL_API_KEY"
    header = f'-H "Authorization: Bearer {key}" ' if keys else ""
    url = f"{service.url}/v1/chat/completions"
    return f"""
shoal serves {model}

  API          {service.url}/v1
  status page  {service.status_url}
  chat         shoal chat --url {service.url}

curl {url} -H 'Content-Type: application/json' {header}-d {shlex.quote(json.dumps(question, ensure_ascii=False))}
"""
