"""One log line per record: `time level process event key=value ...`, on stderr.

The message is the event's name, its fields are a mapping: `log.info("engine.ready", {"blocks": 1000})`, or `extra`.
Prompts, outputs and keys are never fields. Control characters are escaped, so no value can forge a line. A reader that
stops reading (a pager, a stopped terminal) loses lines and is told how many; it never holds up the process.
"""

from __future__ import annotations

import logging
import re
import select
import sys
import time
from collections.abc import Mapping
from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
_MAX_VALUE_CHARS = 500
_PIECE_CHARS = 1024  # at most 4096 bytes: what a pipe that takes anything takes whole
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLAIN = re.compile(r"[\w.:/@%+,\-\[\]()]+")


class LineFormatter(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = record.args if isinstance(record.args, Mapping) else {}
        event = escape(str(record.msg) if fields else record.getMessage())
        fields = {**fields, **{key: value for key, value in vars(record).items() if key not in _STANDARD}}
        parts = [f"{stamp}.{int(record.msecs):03d}Z", record.levelname.lower(), self._name, event]
        parts += [f"{key}={_quote(value)}" for key, value in fields.items()]
        line = " ".join(parts)
        if record.exc_info:
            line += "".join("\n  | " + escape(text) for text in self.formatException(record.exc_info).splitlines())
        return line


class _Handler(logging.Handler):
    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._num_lost:
                lost = {**vars(record), "msg": "log.lines_lost", "args": {"lines": self._num_lost}, "exc_info": None}
                if write_line(self._stream, self.format(logging.makeLogRecord(lost))):
                    self._num_lost = 0
            if not write_line(self._stream, self.format(record)):
                self._num_lost += 1
        except OSError:
            self._num_lost += 1  # the reader is gone, or the disk is full


def write_line(stream: TextIO, line: str) -> bool:
    """False: nobody reads, so the line, or the rest of it, is lost. Does not wait. Raises OSError."""
    line += "\n"
    for start in range(0, len(line), _PIECE_CHARS):
        if not _takes_more(stream):
            return False
        stream.write(line[start : start + _PIECE_CHARS])
        stream.flush()
    return True


def _takes_more(stream: TextIO) -> bool:
    try:
        return bool(select.select([], [stream], [], 0)[1])
    except ValueError:  # no file behind it, as in tests
        return True


def escape(text: str) -> str:
    """Control characters and line separators become visible escapes."""
    return _UNSAFE.sub(lambda found: repr(found.group())[1:-1], text)


def _quote(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if len(text) > _MAX_VALUE_CHARS:
        text = text[:_MAX_VALUE_CHARS] + "…"
    if _PLAIN.fullmatch(text):
        return text
    return '"' + escape(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def setup(name: str) -> None:
    """Once per process, by its main. `name` is the process's: engine-0, engine-1, controller."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(LineFormatter(name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for noisy in ("asyncio", "httpcore", "urllib3", "uvicorn", "uvicorn.error", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
