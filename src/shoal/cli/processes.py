"""`shoal engine`, `gateway`, `controller`: one process each. The launchers start their children with these."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shoal.cli.options import ConfigFile, Model, resolve, with_settings

Name = Annotated[
    str, typer.Option("--name", metavar="TEXT", help="name in logs and on the status page; unique in the fleet")
]
Listen = Annotated[
    str,
    typer.Option(
        "--listen",
        metavar="ADDRESS",
        help="unix:/path, tcp:host:port or tcp:[IPv6]:port, as others dial it; where other hosts do, SHOAL_SECRET has "
        "32 bytes at least",
    ),
]
Controller = Annotated[
    str, typer.Option("--controller", metavar="ADDRESS", help="where the controller listens; empty: do without one")
]
Engines = Annotated[
    list[str] | None,
    typer.Option("--engine", metavar="ADDRESS", help="an engine of a fixed list; may be repeated"),
]


@with_settings("model", "engine")
def engine(
    *,
    model: Model = None,
    config: ConfigFile = None,
    name: Name = "engine-0",
    listen: Listen = "tcp:127.0.0.1:8010",
    controller: Controller = "",
    settings: dict[str, Any],
) -> None:
    """Start one engine: tokens in, tokens out.

    The processes of one service share a secret, in the environment variable SHOAL_SECRET.
    """
    values = resolve(config, settings, model)
    from shoal import models
    from shoal.engine import main

    main.run(
        values.engine,
        classes=values.classes,
        model_dir=models.resolve(values.model.name),
        served_name=values.model.public_name,
        name=name,
        listen=listen,
        controller=controller,
    )


@with_settings("model", "gateway")
def gateway(
    *,
    model: Model = None,
    config: ConfigFile = None,
    name: Name = "gateway-0",
    controller: Controller = "",
    engine: Engines = None,
    settings: dict[str, Any],
) -> None:
    """Start one gateway: the OpenAI-compatible API.

    The processes of one service share a secret, in the environment variable SHOAL_SECRET. Keys that clients must show
    are in SHOAL_API_KEY, with commas between them, or as digests in the file of --key-file.
    """
    values = resolve(config, settings, model)
    from shoal import models
    from shoal.gateway import main

    main.run(
        values.gateway,
        classes=values.classes,
        model_dir=models.resolve(values.model.name),
        served_name=values.model.public_name,
        name=name,
        controller=controller,
        engines=tuple(engine or ()),
    )


@with_settings("controller")
def controller(
    *,
    config: ConfigFile = None,
    name: Name = "controller",
    listen: Listen = "tcp:127.0.0.1:8002",
    settings: dict[str, Any],
) -> None:
    """Start the controller: who is there, who can take work.

    The processes of one service share a secret, in the environment variable SHOAL_SECRET.
    """
    values = resolve(config, settings)
    from shoal.controller import main

    main.run(values.controller, name=name, listen=listen)
