"""`shoal key`: a new API key, and its entry for the key file, which never holds the key itself."""

from __future__ import annotations

from typing import Annotated

import typer


def key(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="whose key it is")],
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="NAME", help="a class that it may use, the default first; may be repeated"),
    ] = None,
    max_in_flight: Annotated[
        int | None, typer.Option("--max-in-flight", metavar="N", min=1, help="most requests of the tenant at once")
    ] = None,
    max_queued: Annotated[
        int | None,
        typer.Option("--max-queued", metavar="N", min=1, help="most of them that wait for their first slice"),
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option("--tokens-per-minute", metavar="TOKENS", min=1, help="prompts and max_tokens of what is let in"),
    ] = None,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="its holder is trusted to say for which tenant it asks (x-tenant-id)")
    ] = False,
) -> None:
    """Make an API key: shown once, on standard error; its entry for the key file goes to standard output.

    shoal key acme --class interactive --class batch >> keys.yaml
    """
    import msgspec
    import yaml

    from shoal.core.classes import STANDARD
    from shoal.gateway.keyfile import KeyFileError, new_key

    fields = {"max_in_flight": max_in_flight, "max_queued": max_queued, "tokens_per_minute": tokens_per_minute}
    try:
        made, entry = new_key(tenant, classes=classes or [STANDARD], proxy=proxy, **fields)
    except KeyFileError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(f"the key, shown this once: {made}", err=True)
    typer.echo(yaml.safe_dump([msgspec.to_builtins(entry)], sort_keys=False), nl=False)
