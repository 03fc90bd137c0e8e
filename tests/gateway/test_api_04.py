"""API-04: logprobs of parts of characters, alternatives decoded each by itself, and infinities."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.core.plan import Logprobs
from shoal.core.request import Finish, RequestSpec
from shoal.gateway.text.tokenizer import BYTE_OF_CHARACTER
from shoal.wire.messages import Ending, Update
from tests.gateway.stub import StubEngine, stage

CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
PIECES = ["20f09f", "9880"]
ALTERNATIVES = [["20f09f", "2061", "e2"], ["9880", "80", "6f6b"]]
VALUES = [-0.1, -math.inf]


@pytest.fixture(scope="module")
def pieces(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The tiny model's folder with these byte strings as tokens, and their ids."""
    folder = tmp_path_factory.mktemp("pieces") / "model"
    shutil.copytree(model_dir, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab, ids = tokenizer["model"]["vocab"], {}
    for hexadecimal in {piece for row in ALTERNATIVES for piece in row}:
        spelled = "".join(CHARACTER_OF_BYTE[byte] for byte in bytes.fromhex(hexadecimal))
        ids[hexadecimal] = vocab.setdefault(spelled, max(vocab.values()) + 1)
    path.write_text(json.dumps(tokenizer))
    return folder, ids


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def engine_of(ids: dict[str, int]) -> StubEngine:
    def speak(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        for index, (piece, value) in enumerate(zip(PIECES, VALUES, strict=True)):
            top = tuple((ids[other], value - rank) for rank, other in enumerate(ALTERNATIVES[index]))
            ending = Ending(Finish.LENGTH, None, 0) if index else None
            engine.say([Update(specs[0].id, index, (ids[piece],), (Logprobs(value, top),), ending=ending)])

    return StubEngine(speak)


async def test_api_04_chat(pieces: tuple[Path, dict[str, int]], folder: Path) -> None:
    model_dir, ids = pieces
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "logprobs": True,
        "top_logprobs": 3,
    }
    async with stage(model_dir, folder, engine_of(ids)) as s:
        async with s.http.post(s.url + "/v1/chat/completions", json=body) as answer:
            whole = strict(await answer.text())
        async with s.http.post(s.url + "/v1/chat/completions", json=body | {"stream": True}) as answer:
            chunks = [strict(line[6:]) for line in (await answer.text()).split("\n\n")[:-2]]
    choice = whole["choices"][0]
    content = choice["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined.decode() == " \U0001f600" == choice["message"]["content"]
    assert content[0]["bytes"] == [32, 240, 159]
    assert [entry["logprob"] for entry in content] == [-0.1, -9999.0]
    for entry, alternatives in zip(content, ALTERNATIVES, strict=True):
        assert len(entry["top_logprobs"]) == 3
        assert [bytes(top["bytes"]).hex() for top in entry["top_logprobs"]] == alternatives
        names = [top["token"] for top in entry["top_logprobs"]]
        assert all(names) and "\ufffd" not in "".join(names) and len(set(names)) == 3
    streamed = [
        entry for chunk in chunks for c in chunk["choices"] for entry in (c["logprobs"] or {}).get("content", [])
    ]
    assert streamed == content
    assert "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]) == " \U0001f600"


async def test_api_04_completions(pieces: tuple[Path, dict[str, int]], folder: Path) -> None:
    model_dir, ids = pieces
    body = {"model": "tiny", "prompt": "x", "logprobs": 3}
    async with stage(model_dir, folder, engine_of(ids)) as s:
        async with s.http.post(s.url + "/v1/completions", json=body) as answer:
            whole = strict(await answer.text())["choices"][0]["logprobs"]
        async with s.http.post(s.url + "/v1/completions", json=body | {"stream": True}) as answer:
            chunks = [strict(line[6:]) for line in (await answer.text()).split("\n\n")[:-2]]
    assert whole["tokens"] == ["bytes:\\x20\\xf0\\x9f", "bytes:\\x98\\x80"]
    assert whole["token_logprobs"] == [-0.1, -9999.0]
    assert [len(top) for top in whole["top_logprobs"]] == [3, 3]
    assert whole["text_offset"] == [0, 1]
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"]]
    assert {key: [value for part in parts for value in part[key]] for key in whole} == whole
