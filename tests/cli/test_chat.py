"""The conversation that `shoal chat` has, over a pipe and in a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

from tests.cli.fake_service import fake_service
from tests.support.command import shoal_here


def test_a_pipe_gets_one_answer_per_line_and_the_conversation_grows():
    with fake_service(["Hel", "lo"]) as service:
        done = shoal_here("chat", "--url", service.url, "--max-tokens", "5", stdin="one\n\ntwo\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello\nHello\n", "")
    first, second = service.bodies
    assert first == {
        "model": "fake",
        "messages": [{"role": "user", "content": "one"}],
        "stream": True,
        "max_tokens": 5,
    }
    assert [message["content"] for message in second["messages"]] == ["one", "Hello", "two"]


def test_the_system_message_comes_first_and_the_key_comes_from_the_environment():
    with fake_service(["x"]) as service:
        done = shoal_here(
            "chat", "--url", service.url + "/v1/", "--system", "Be short.", stdin="hi\n", SHOAL_API_KEY="k1"
        )
    assert done.returncode == 0
    assert service.bodies[0]["messages"][0] == {"role": "system", "content": "Be short."}
    assert service.keys == ["Bearer k1"]


def test_characters_that_steer_a_terminal_are_left_out_of_what_is_shown():
    with fake_service(["a\x1b[2Jb\x07", "\nc\td é 好"]) as service:
        done = shoal_here("chat", "--url", service.url, stdin="hi\n")
    assert done.stdout == "a[2Jb\nc\td é 好\n"


def test_an_error_inside_the_stream_ends_a_piped_chat_with_1():
    with fake_service(["half", "broken"]) as service:
        done = shoal_here("chat", "--url", service.url, stdin="hi\nagain\n")
    assert (done.returncode, done.stdout, done.stderr) == (1, "half\n", "shoal: broken\n")
    assert len(service.bodies) == 1


def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves():
    with fake_service(["Once upon"], hang=True) as service, Terminal("chat", "--url", service.url) as terminal:
        terminal.wait_for("Ctrl-C stops an answer")
        terminal.wait_for("> ")
        terminal.type("tell me\n")
        terminal.wait_for("Once upon")
        terminal.type("\x03")
        terminal.wait_for("[stopped]")
        terminal.wait_for("> ")
        terminal.type("go on\n")
        terminal.wait_for("Once upon")
        terminal.type("\x03")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.ends() == 0
    assert [message["content"] for message in service.bodies[1]["messages"]] == ["tell me", "Once upon", "go on"]


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._fd, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.cli", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self._seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._fd)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str, limit_s: float = 60) -> None:
        """Reads on until `text` has come; what comes up to it is used up."""
        end = time.monotonic() + limit_s
        while text not in self._seen:
            assert select.select([self._fd], [], [], max(0, end - time.monotonic()))[0], (
                f"{text!r} not in {self._seen!r}"
            )
            self._seen += os.read(self._fd, 4096).decode()
        self._seen = self._seen.split(text, 1)[1]

    def ends(self, limit_s: float = 60) -> int:
        return self._process.wait(limit_s)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches it as a signal
