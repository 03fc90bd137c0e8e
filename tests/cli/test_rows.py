"""What `shoal generate` makes of a file of prompts."""

from __future__ import annotations

import io
from dataclasses import fields

import pytest

from shoal.cli.rows import MAX_LINE_BYTES, PARAMS, Row, read_rows
from shoal.offline import SamplingParams


def rows(content: bytes, json: bool | None = None) -> list[Row]:
    return list(read_rows(io.BytesIO(content), json))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n \n\n", []),
        (b"a", [Row(1, "a")]),
        (b"a\nb\n", [Row(1, "a"), Row(2, "b")]),
        (b"a\r\n\r\nb\r\n", [Row(1, "a"), Row(3, "b")]),
        (b"\xef\xbb\xbfa\n", [Row(1, "a")]),
        ("  好 😀\n".encode(), [Row(1, "  好 😀")]),
        (b'a\n{"prompt": "b"}\n', [Row(1, "a"), Row(2, '{"prompt": "b"}')]),
        (b'{"prompt": "a"}\n\n{"prompt": ""}\n', [Row(1, "a"), Row(3, "")]),
        (b'{"prompt": "a", "max_tokens": 3, "stop": "."}', [Row(1, "a", {"max_tokens": 3, "stop": "."})]),
        (b'{"messages": [{"role": "user", "content": "x"}]}', [Row(1, [{"role": "user", "content": "x"}])]),
    ],
)
def test_each_line_is_a_prompt(content, expected):
    assert rows(content) == expected


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"ok\nbad \xff\nok", "line 2: not UTF-8: byte 5: invalid start byte"),
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2: Input data was truncated"),
        (b'{"prompt": "a"}\n{"prompt": 3}', "line 2: prompt: expected text"),
        (b'{"prompt": "a"}\n{"promt": "a"}', 'line 2: expected either "prompt" or "messages"'),
        (b'{"prompt": "a"}\n{"prompt": "a", "n": 2}', "line 2: unknown field 'n'"),
        (b'{"prompt": "a"}\n{"messages": ["a"]}', "line 2: messages: expected a list of objects"),
        (b'{"prompt": "a"}\n{}', 'line 2: expected either "prompt" or "messages"'),
        (b'{"prompt": "a"}\n{"prompt": "a", "messages": []}', 'line 2: expected either "prompt" or "messages"'),
        (b'{"prompt": "a"}\n[1]', "line 2: Expected `object`, got `array`"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}', "line 2: not UTF-8: byte 13: invalid start byte"),
        (b'{"prompt": "a"}\n{"messages": [{"x":' + b"[" * 100_000 + b"\n", "line 2: "),
        (b"x\n" + b"y" * (MAX_LINE_BYTES + 1) + b"\nz\n", "line 2: longer than 4194304 bytes"),
    ],
)
def test_a_bad_line_is_named_and_does_not_end_the_run(content, error):
    found = rows(content + b"\n" + content.split(b"\n")[0])
    assert [row.error[: len(error)] for row in found if row.error] == [error]
    assert not found[0].error
    assert not found[-1].error


def test_a_row_may_set_every_parameter_that_changes_one_text():
    assert {field.name for field in fields(SamplingParams)} - {"n", "logprobs"} == PARAMS


def test_the_format_can_be_told():
    assert rows(b'{"prompt": "a"}', json=False) == [Row(1, '{"prompt": "a"}')]
    assert rows(b"plain", json=True)[0].error.startswith("line 1: ")


def test_a_very_long_line_is_not_kept():
    class Counting(io.BytesIO):
        largest = 0

        def readline(self, size: int | None = -1) -> bytes:
            assert size is not None and 0 < size <= MAX_LINE_BYTES + 2
            return super().readline(size)

    found = list(read_rows(Counting(b"y" * (3 * MAX_LINE_BYTES) + b"\nz\n")))
    assert [(row.line, row.prompt) for row in found] == [(1, None), (2, "z")]
