"""How long from the command `shoal serve` to the first token of a first request, through the whole chain.

Cold: nothing pulled; the download (past pip's cache), the conversion and the start. Warm: the model is there and read
once before, so the operating system may hold its file. With --quick the download is left out: the model that is
pulled already is served once with its file dropped from the page cache, as after a reboot, and once warm.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from common import Report, arguments
from shoal import models

START_LIMIT_S = 1800.0  # a download may be slow
STOP_LIMIT_S = 60.0
ANSWER_LIMIT_S = 60.0
WARM_TARGET_S = 10.0


def main() -> None:
    report = Report("first_token", arguments(__doc__ or "").parse_args())
    rows: list[tuple[str, float, float, float]] = []
    if report.quick:
        folder = models.pull(models.DEFAULT)
        drop_from_page_cache(folder)
        rows.append(("page cache cold, no download", *measure(models.shoal_home())))
        rows.append(("warm", *measure(models.shoal_home())))
    else:
        home = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
        try:
            rows.append(("cold: download, conversion, start", *measure(home)))
            rows += [(f"warm {number}", *measure(home)) for number in (1, 2, 3)]
        finally:
            shutil.rmtree(home)
    report.table("from the command to the first token", ("start", "ready s", "first token s", "request alone s"), rows)
    warm = [first_token_s for name, _, first_token_s, _ in rows if name.startswith("warm")]
    report.claim(
        "warm start to first token, slowest, s", max(warm), f"<= {WARM_TARGET_S:g}", max(warm) <= WARM_TARGET_S
    )
    report.finish()


def measure(home: Path) -> tuple[float, float, float]:
    """Seconds from the command to readiness, from the command to the first token, and of the request alone."""
    started = time.monotonic()
    with serving(home) as url:
        ready_s = time.monotonic() - started
        wait_for_first_token(url)
        first_token_s = time.monotonic() - started
    return ready_s, first_token_s, first_token_s - ready_s


@contextmanager
def serving(home: Path) -> Iterator[str]:
    """The URL of a `shoal serve` of its own, once it has said that it is ready; stopped at the end."""
    command = [sys.executable, "-m", "shoal.cli", "serve", models.DEFAULT, "--port", "0", "--controller-port", "0"]
    environment = os.environ | {"SHOAL_HOME": str(home), "PIP_NO_CACHE_DIR": "1"}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield url_when_ready(process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def url_when_ready(process: subprocess.Popen[str]) -> str:
    """What stands behind "API" in the block that `shoal serve` prints when a request can be answered."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:  # to the end, so that the pipe never fills
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    limit = time.monotonic() + START_LIMIT_S
    seen: list[str] = []
    while (line := lines.get(timeout=max(0.0, limit - time.monotonic()))) is not None:
        seen.append(line)
        words = line.split()
        if len(words) == 2 and words[0] == "API":
            return words[1].removesuffix("/v1")
    raise SystemExit("shoal serve ended before it was ready:\n" + "".join(seen[-20:]))


def wait_for_first_token(url: str) -> None:
    """Sends a streaming chat request and returns at the first event with text in it."""
    body = {
        "model": models.DEFAULT,
        "messages": [{"role": "user", "content": "What is a shoal of fish?"}],
        "stream": True,
        "max_tokens": 16,
    }
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("SHOAL_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_LIMIT_S)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{url} answered {response.status}: {response.read().decode(errors='replace')}")
    for line in response:
        if line.startswith(b"data: {"):
            choices = json.loads(line[len(b"data: ") :]).get("choices") or [{}]
            if choices[0].get("delta", {}).get("content"):
                connection.close()
                return
    raise SystemExit("the stream ended without a token")


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
