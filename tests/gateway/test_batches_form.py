"""Uploads: the form is the same however it is cut, and a bad one is refused by name."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from shoal.gateway.batches.form import MAX_HEADER_BYTES, MAX_PARTS, MAX_VALUE_BYTES, Form
from shoal.gateway.errors import ApiError

KIND = "multipart/form-data; boundary=cut"


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--cut\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--cut--\r\n"


def taken(body: bytes, *cuts: int) -> tuple[Form, bytes]:
    made = Form(KIND)
    edges = (0, *cuts, len(body))
    content = b"".join(made.feed(body[start:end]) for start, end in pairwise(edges))
    return made, content


CONTENT = b'{"a": 1}\r\n--cu\r\n--\r\n\r\n-cut\n' + bytes(range(256))
WHOLE = form(part("purpose", b"batch"), part("file", CONTENT, '; filename="in.jsonl"'))


def test_the_file_and_the_fields_come_out_whole_wherever_the_body_is_cut() -> None:
    rng = random.Random(1)
    cuts = [(at,) for at in range(len(WHOLE))]
    cuts += [tuple(sorted(rng.sample(range(len(WHOLE)), rng.randrange(2, 40)))) for _ in range(200)]
    cuts.append(tuple(range(1, len(WHOLE))))
    for cut in cuts:
        made, content = taken(WHOLE, *cut)
        assert (content, made.fields, made.end()) == (CONTENT, {"purpose": "batch"}, "in.jsonl"), cut


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        ('; filename="../../etc/passwd"', "../../etc/passwd"),  # shown as it is, never a path of ours
        ('; filename="a\\"b"', 'a"b'),
        ('; filename="\x1b[31mred\x00"', "[31mred"),
        ('; filename="' + "n" * 999 + '"', "n" * 255),
        ('; filename="größe.jsonl"', "größe.jsonl"),
        ("", "upload"),
    ],
)
def test_a_file_s_name_is_only_shown(disposition: str, name: str) -> None:
    made, _ = taken(form(part("file", b"x", disposition)))
    assert made.end() == name


def refused(body: bytes, kind: str = KIND) -> ApiError:
    def take() -> None:
        made = Form(kind)
        made.feed(body)
        made.end()

    with pytest.raises(ApiError) as caught:
        take()
    assert caught.value.shape.status == 400
    return caught.value


@pytest.mark.parametrize(
    "kind",
    ["", "application/json", "multipart/mixed; boundary=cut", "multipart/form-data", "multipart/form-data; boundary="],
)
def test_what_is_no_form_is_refused(kind: str) -> None:
    assert "multipart/form-data" in refused(WHOLE, kind).message


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "ends in the middle"),
        (WHOLE[:-12], "ends in the middle"),
        (b"no boundary", "no valid form"),
        (form(part("purpose", b"batch")), "'file' is required"),
        (form(part("file", b"1"), part("file", b"2")), "'file' is there twice"),
        (form(part("purpose", b"1"), part("purpose", b"2")), "'purpose' is there twice"),
        (form(part("", b"1")), "no name"),
        (form(b"--cut\r\nContent-Type: text/plain\r\n\r\nx\r\n"), "no name"),
        (form(part("purpose", b"x" * (MAX_VALUE_BYTES + 1))), f"longer than {MAX_VALUE_BYTES}"),
        (form(*(part(f"f{number}", b"") for number in range(MAX_PARTS + 1))), f"more than {MAX_PARTS} fields"),
        (form(part("file", b"x", f'; filename="{"n" * MAX_HEADER_BYTES}"')), ""),
        (form(part("file", b"x", "\r\nBad Header: x")), "no valid form"),
    ],
)
def test_a_bad_form_is_refused_by_name(body: bytes, text: str) -> None:
    assert text in refused(body).message


def test_a_boundary_without_end_is_refused() -> None:
    refused(b"", f"multipart/form-data; boundary={'b' * 300}")
