"""The `shoal` command."""


def main() -> None:
    raise SystemExit("shoal: no command yet")
