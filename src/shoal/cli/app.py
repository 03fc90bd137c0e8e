"""Which commands there are, and how each of them fails."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from shoal.cli import batch, chat, explain, generate, key, plan, processes, pull, role, serve, status

app = typer.Typer(
    name="shoal",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("pull")(pull.pull)
app.command("chat")(chat.chat)
app.command("generate")(generate.generate)
app.command("batch")(batch.batch)
app.command("status")(status.status)
app.command("role")(role.role)
app.command("config")(explain.config)
app.command("plan")(plan.plan)
app.command("key")(key.key)
app.command("gateway")(processes.gateway)
app.command("engine")(processes.engine)
app.command("controller")(processes.controller)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"shoal {version('shoal')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="show the traceback of a failure; SHOAL_DEBUG=1 does the same")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="show the version and exit")
    ] = False,
) -> None:
    """Serve large language models on one machine or many."""
    if debug:
        os.environ["SHOAL_DEBUG"] = "1"  # so that the processes that are started show theirs, too


def main() -> None:
    """Run the command line. A bad value exits with 2; another failure with 1 and one line that says what failed."""
    try:
        app(prog_name="shoal")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on; nothing to say at exit
        sys.exit(1)
    except Exception as error:
        if os.environ.get("SHOAL_DEBUG"):
            raise
        typer.echo(f"shoal: {_one_line(error)}", err=True)
        sys.exit(1)


def _one_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:  # without its number
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(text.split()) or type(error).__name__
