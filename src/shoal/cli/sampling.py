"""How to continue a prompt, as options of the commands that ask for it."""

from __future__ import annotations

import re
from typing import Annotated

import typer


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def as_option(problem: str) -> str:
    """A message that begins with a parameter's name, with the option's name instead."""
    return re.sub(r"^'?(\w+)'?", lambda found: "--" + found[1].replace("_", "-"), problem)


MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="TOKENS", parser=whole, help="longest answer")]
Temperature = Annotated[
    float, typer.Option("--temperature", metavar="X", parser=number, help="0: always the likeliest token; 0 to 2")
]
TopP = Annotated[
    float, typer.Option("--top-p", metavar="X", parser=number, help="share of the probability to choose from; 0 to 1")
]
TopK = Annotated[
    int, typer.Option("--top-k", metavar="N", parser=whole, help="likeliest tokens to choose from; 0: all")
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p", metavar="X", parser=number, help="least share of the likeliest token's probability; 0 to 1"
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="N", parser=whole, help="the same seed gives the same answer; none: another each time"
    ),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="end the answer before this text; may be repeated")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="go on to the longest answer, also where the model would end")
]
