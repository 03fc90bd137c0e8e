"""The `shoal` command: as a process of its own, or, for what needs none, in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from tempfile import TemporaryFile
from unittest import mock

from shoal.cli.app import main


def shoal(*arguments: str, stdin: str = "", timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "COLUMNS": "100", **env},
    )


def shoal_here(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """The same without the second that a process takes to start. The streams are files, as a shell would give them."""
    with ExitStack() as stack:
        source, out, err = (stack.enter_context(TemporaryFile("w+", encoding="utf-8", newline="")) for _ in range(3))
        source.write(stdin)
        source.seek(0)
        stack.enter_context(mock.patch.dict(os.environ, {"COLUMNS": "100", **env}))
        stack.enter_context(mock.patch.multiple(sys, argv=["shoal", *arguments], stdin=source))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def flat(text: str) -> str:
    return " ".join(text.split())
