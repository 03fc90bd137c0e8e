"""Compiles the scheduler when a wheel is built: its decisions then take less than half the time.

mypyc turns the typed Python of `shoal/core` into C. An editable install is left as it is, so what is edited runs. Where
there is no C compiler, or it fails, the wheel holds Python alone and says so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What others read and write by its annotations, which mypyc does not keep.
INTERPRETED = {"__init__.py", "classes.py", "limits.py", "news.py", "plan.py", "request.py"}

SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup
build, *modules = sys.argv[1:]
setup(
    name="shoal-core",
    packages=[],
    ext_modules=mypycify(
        ["--config-file=", f"--cache-dir={build}/cache", *modules],
        opt_level="2",
        debug_level="0",
        target_dir=f"{build}/c",
    ),
    script_args=["-q", "build_ext", f"--build-lib={build}/lib", f"--build-temp={build}/temp"],
)
"""


class CompiledCore(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        source = Path(self.root, "src")
        build = Path(tempfile.mkdtemp(prefix="shoal-core-"))
        self._build = build
        modules = sorted(
            str(path.relative_to(source)) for path in source.glob("shoal/core/**/*.py") if path.name not in INTERPRETED
        )
        done = subprocess.run(
            [sys.executable, "-c", SETUP, str(build), *modules], cwd=source, capture_output=True, text=True, check=False
        )
        if done.returncode:
            reason = (done.stderr or done.stdout).strip().rpartition("\n")[2][:300]
            self.app.display_warning(f"The scheduler is not compiled and will need twice the time. {reason}")
            return
        library = build / "lib"
        for path in library.rglob("*.so"):
            build_data["force_include"][str(path)] = str(path.relative_to(library))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self._build, ignore_errors=True)
