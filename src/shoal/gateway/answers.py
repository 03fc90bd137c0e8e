"""What clients get back: OpenAI's objects, whole or as chunks, made from the same deltas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from shoal.core.plan import Logprobs
from shoal.gateway.errors import ApiError, Reason
from shoal.gateway.job import Job
from shoal.gateway.output import Delta, Entry
from shoal.gateway.text.decode import IncrementalDecoder
from shoal.gateway.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # JSON has no infinity


def event(payload: Any) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


class Answer:
    """Shared by both endpoints. A subclass says what a chunk and a whole choice look like."""

    object_name = chunk_name = id_prefix = ""

    def __init__(self, job: Job, *, model: str, created: int, tokenizer: Tokenizer) -> None:
        self.job = job
        self.tokenizer = tokenizer
        self._head = {
            "id": f"{self.id_prefix}-{job.order.id}",
            "object": self.chunk_name if job.order.params.stream else self.object_name,
            "created": created,
            "model": model,
        }

    def opening(self) -> bytes:
        """Events before the first delta."""
        return b""

    def prepared(self, delta: Delta) -> Delta:
        """Each delta passes here once, in order, before it is written."""
        return delta

    def chunk(self, delta: Delta) -> bytes:
        raise NotImplementedError

    def closing(self) -> bytes:
        """After the last choice ended: usage where it was asked for, and the mark that nothing is missing."""
        if not self.job.order.params.include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self.usage()}) + DONE

    def whole(self, deltas: Iterable[Delta]) -> bytes:
        per_choice: list[list[Delta]] = [[] for _ in self.job.outputs]
        for delta in deltas:
            per_choice[delta.choice].append(self.prepared(delta))
        choices = []
        for number, parts in enumerate(per_choice):
            entries = tuple(entry for part in parts for entry in part.entries)
            merged = Delta(number, "".join(part.text for part in parts), entries, self.job.outputs[number].finish)
            choices.append(self._choice(merged))
        return msgspec.json.encode({**self._head, "choices": choices, "usage": self.usage()})

    def usage(self) -> dict[str, Any]:
        """Counted from token ids: the prompt once however many choices, stop tokens included."""
        prompt, completion = self.job.num_prompt_tokens, self.job.num_output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.job.cached_tokens},
        }

    def _choice(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        if self.job.order.params.include_usage:
            return event({**self._head, "choices": choices, "usage": None})
        return event({**self._head, "choices": choices})


class ChatAnswer(Answer):
    object_name, chunk_name, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._event([_chat_chunk(number, delta)]) for number in range(len(self.job.outputs)))

    def chunk(self, delta: Delta) -> bytes:
        events = b""
        if delta.text or delta.entries:
            events = self._event([_chat_chunk(delta.choice, {"content": delta.text}, self._logprobs(delta.entries))])
        if delta.finish is not None:
            events += self._event([_chat_chunk(delta.choice, {}, finish=delta.finish)])
        return events

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.choice,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta.entries),
            "finish_reason": delta.finish,
        }

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if self.job.order.params.sampling.logprobs is None:
            return None
        return {"content": [self._token(entry) for entry in entries], "refusal": None}

    def _token(self, entry: Entry) -> dict[str, Any]:
        assert entry.logprobs is not None
        top = [self._alternative(token, logprob) for token, logprob in entry.logprobs.top]
        return {**self._alternative(entry.token, entry.logprobs.logprob), "top_logprobs": top}

    def _alternative(self, token: int, logprob: float) -> dict[str, Any]:
        """A token by itself: its own bytes, whatever it would be a part of."""
        spelled = self.tokenizer.token_bytes(token)
        return {"token": readable(spelled) or f"<{token}>", "logprob": finite(logprob), "bytes": list(spelled)}


class CompletionAnswer(Answer):
    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, job: Job, *, model: str, created: int, tokenizer: Tokenizer) -> None:
        super().__init__(job, model=model, created=created, tokenizer=tokenizer)
        self._to_echo = set(range(len(job.outputs))) if job.order.params.echo else set()

    def prepared(self, delta: Delta) -> Delta:
        """The first delta of a choice is preceded by the prompt, where that was asked for."""
        if delta.choice not in self._to_echo:
            return delta
        self._to_echo.remove(delta.choice)
        number = delta.choice // self.job.order.params.n
        prompt = self.job.order.prompts[number]
        return delta._replace(text=prompt.text + delta.text, entries=self._prompt_entries(number) + delta.entries)

    def chunk(self, delta: Delta) -> bytes:
        return self._event([self._choice(self.prepared(delta))])

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.choice,
            "text": delta.text,
            "logprobs": self._logprobs(delta.entries),
            "finish_reason": delta.finish,
        }

    def _prompt_entries(self, number: int) -> tuple[Entry, ...]:
        if self.job.order.params.sampling.prompt_logprobs is None:
            return ()
        ids, scores = self.job.order.prompts[number].ids, self.job.prompt_scores[number]
        if len(scores) != len(ids) - 1:
            raise ApiError(Reason.SEAM_BROKEN, f"{len(scores)} scores came for a prompt of {len(ids)} tokens")
        decoder = IncrementalDecoder(self.tokenizer, skip_special_tokens=self.job.order.params.skip_special_tokens)
        entries, offset = [], 0
        for token, logprobs in zip(ids, [None, *scores], strict=True):
            entries.append(Entry(token, logprobs, offset))
            offset += len(decoder.push(token))
        return tuple(entries)

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if self.job.order.params.sampling.logprobs is None:
            return None
        return {
            "tokens": [self._name(entry.token) for entry in entries],
            "token_logprobs": [entry.logprobs and finite(entry.logprobs.logprob) for entry in entries],
            "top_logprobs": [entry.logprobs and self._top(entry.token, entry.logprobs) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, token: int, logprobs: Logprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that was sampled."""
        named = {self._name(other): finite(logprob) for other, logprob in logprobs.top}
        named.setdefault(self._name(token), finite(logprobs.logprob))
        return named

    def _name(self, token: int) -> str:
        """OpenAI's spelling here: parts of characters as `bytes:\\xf0\\x9f`, so that no two of them share a name."""
        spelled = self.tokenizer.token_bytes(token)
        try:
            return spelled.decode() or f"<{token}>"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _chat_chunk(
    index: int, delta: dict[str, str], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def readable(spelled: bytes) -> str:
    """Bytes of a part of a character show as escapes, never as the replacement character."""
    return spelled.decode("utf-8", "backslashreplace")


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
