"""Write docs/reference/ from the code. `--check` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from shoal import config
from shoal.cli.app import app
from shoal.cli.options import flag, plain
from shoal.core.classes import DEFAULT_CLASSES

HERE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by `make docs` from the code. -->\n"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def configuration() -> str:
    text = (
        f"{NOTE}# Configuration\n\nOne YAML file, a section per component; `shoal config` prints it with your values.\n"
    )
    for section in config.SECTIONS:
        rows = [
            [
                f"`{row.key}`",
                f"`{flag(row.name)}`" if row.name != "model.name" else "the argument `MODEL`",
                f"`{plain(row.default)}`",
                row.unit,
                row.bounds,
                row.description,
            ]
            for row in config.rows()
            if row.section == section
        ]
        text += f"\n## {section}\n\n" + table(["field", "option", "default", "unit", "allowed", "meaning"], rows)
    return text + classes()


def classes() -> str:
    """The built-in classes side by side."""
    found = {
        name: [row for row in config.rows() if row.name.startswith(f"classes.{name}.")] for name in DEFAULT_CLASSES
    }
    rows = [
        [
            f"`{same[0].key.rpartition('.')[2]}`",
            *(f"`{plain(row.default)}`" for row in same),
            same[0].unit,
            same[0].bounds,
            same[0].description,
        ]
        for same in zip(*found.values(), strict=True)
    ]
    return (
        "\n## classes\n\nA mapping by name: values of these, and classes of your own, which must give their rank "
        "([what they mean](../classes.md)).\n\n"
        + table(["field", *(f"`{name}`" for name in found), "unit", "allowed", "meaning"], rows)
    )


def commands() -> str:
    text = f"{NOTE}# Commands\n\n"
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="shoal", terminal_width=110, max_content_width=110)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        child = typer.Context(command, info_name=name, parent=context, terminal_width=110, max_content_width=110)
        text += f"## shoal {name}\n\n```\n{command.get_help(child).strip()}\n```\n\n"
    return text.rstrip() + "\n"


PAGES = {"configuration.md": configuration, "commands.md": commands}


def main() -> int:
    stale = []
    for name, page in PAGES.items():
        path, text = HERE / name, page()
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            HERE.mkdir(exist_ok=True)
            path.write_text(text)
    print("up to date" if not stale else f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale)}")
    return bool(stale and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
