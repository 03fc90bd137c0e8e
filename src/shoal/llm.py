"""A model in this process, without a server: prompts in, text out, all of them in one continuous batch.

    with LLM("smollm2-135m") as llm:
        for output in llm.generate(["The sea", "The sky"], SamplingParams(max_tokens=32)):
            print(output.text)

It joins the gateway's text (templates, tokens, stop strings) to an engine's step loop; no socket is opened.
Parameters are checked by the gateway's own schema, so both answer alike.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from shoal import config as configuration
from shoal import models
from shoal.core.classes import STANDARD, ServiceClass
from shoal.engine.loop import StepLoop, Turn
from shoal.gateway import choices
from shoal.gateway import params as checked
from shoal.gateway.errors import ApiError
from shoal.gateway.schema import ChatRequest
from shoal.gateway.text.template import ChatTemplate, TemplateError
from shoal.gateway.text.tokenizer import Tokenizer
from shoal.offline import (
    Answer,
    Choice,
    Delta,
    EngineError,
    Messages,
    Output,
    Prompt,
    Request,
    RequestError,
    SamplingParams,
    convert,
)
from shoal.wire.messages import Refusing, Update

__all__ = ["LLM", "Choice", "Delta", "EngineError", "Output", "Request", "RequestError", "SamplingParams"]

READ_AHEAD = 1024  # requests taken beyond the first one that has no output yet
SILENCE_S = 300.0  # an engine that says nothing for so long, with requests in it, is broken
POLL_S = 0.05  # between two looks at a source that has nothing yet
CLOSE_S = 10.0
_SESSION = 0
# Who calls waits for all of it: no request is more urgent than another, and none is refused for how long it may wait.
_CLASSES = {STANDARD: ServiceClass(rank=0, max_wait_s=1e6, max_queue=1 << 20)}

Inbox = queue.SimpleQueue[Update | Refusing]


class LLM:
    """A loaded model. For one thread at a time; `close` it, or use it in a `with` block."""

    def __init__(self, model: str = models.DEFAULT, **options: Any) -> None:
        """`model` as for `shoal serve`, pulled if it is not here; `options` are fields of the configuration's engine
        section (`max_model_len=2048`). Raises ConfigError, ModelError, and what loading raises."""
        config = configuration.load(None, {"model.name": model, **{f"engine.{k}": v for k, v in options.items()}})
        folder = models.pull(config.model.name)
        self._tokenizer = Tokenizer.load(folder)
        self._template = ChatTemplate.load(folder)
        self._numbers = itertools.count()
        self._inboxes: dict[str, Inbox] = {}  # by a request's id, while it lives
        self._max_live = 2 * config.engine.max_num_seqs
        loaded: Future[tuple[StepLoop, int]] = Future()
        self._thread = threading.Thread(target=self._run, args=(folder, config, loaded), name="steps", daemon=True)
        self._thread.start()
        self._steps, self._window = loaded.result()  # comes, or raises, however large the model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what still runs. Idempotent."""
        self._steps.stop(CLOSE_S)
        self._thread.join(CLOSE_S)

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[Output]:
        """Continue each prompt (text, or token ids); outputs in the order of the prompts.

        Raises RequestError for the first prompt that cannot be answered, and gives the others up; EngineError where
        the engine fails.
        """
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        return self._all([prompts] if one else prompts, params)

    def chat(self, messages: Messages | Sequence[Messages], params: SamplingParams | None = None) -> list[Output]:
        """Answer one conversation, or several. Raises RequestError, as `generate`."""
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        return self._all([messages] if one else messages, params)

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The answer as it is made. Closing the iterator gives the request up. Raises RequestError."""
        inbox: Inbox = queue.SimpleQueue()
        answer = self._submit(Request(prompt, params or SamplingParams()), inbox)
        live = {} if answer.ended else {answer.id: answer}
        try:
            while live:
                yield from self._receive(live, inbox, SILENCE_S)
        finally:
            self._give_up(live)
        if answer.error:
            raise RequestError(answer.error)

    def outputs(self, requests: Iterable[Request | None]) -> Iterator[Output]:
        """Answers in the order of the requests, each as soon as it and all before it are there.

        Requests are taken as there is room for them, so there may be any number. One that cannot be answered has an
        output that says why (`error`). None instead of a request: there is no further one yet, it is asked for again.
        """
        inbox: Inbox = queue.SimpleQueue()
        source = iter(requests)
        line: deque[Answer] = deque()  # taken and not given out yet
        live: dict[str, Answer] = {}
        more = True
        try:
            while more or line:
                room = len(line) < READ_AHEAD and sum(answer.num_open for answer in live.values()) < self._max_live
                if more and room:
                    try:
                        request = next(source)
                    except StopIteration:
                        more = False
                        continue
                    if request is not None:
                        line.append(answer := self._submit(request, inbox))
                        live |= {} if answer.ended else {answer.id: answer}
                        continue
                    self._receive(live, inbox, POLL_S)
                elif live:
                    self._receive(live, inbox, SILENCE_S)
                while line and line[0].ended:
                    yield line.popleft().output()
        finally:
            self._give_up(live)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _run(self, folder: Path, config: configuration.Config, loaded: Future[tuple[StepLoop, int]]) -> None:
        """The step thread. The runner is built on it, because its native threads belong to it."""
        try:
            from shoal.engine.main import build

            parts = build(folder, config.engine, config.model.public_name, _CLASSES)
            steps = StepLoop(
                parts.scheduler,
                parts.runner,
                copier=parts.copier,
                publish=self._publish,
                announce=lambda predicted_ns: None,
                failed=lambda error: None,  # every stream has been told, and the thread ends
            )
        except BaseException as error:
            loaded.set_exception(error)
            return
        if parts.group is not None:
            parts.group.watch(steps.fail)
        loaded.set_result((steps, parts.info.max_model_len))
        steps.run()
        parts.closing()

    def _publish(self, turn: Turn) -> None:
        for message in (*turn.updates.get(_SESSION, ()), *turn.refused.get(_SESSION, ())):
            inbox = self._inboxes.get(message.id.partition(".")[0])
            if inbox is not None:
                inbox.put(message)

    def _all(self, prompts: Iterable[Any], params: SamplingParams | None) -> list[Output]:
        params = params or SamplingParams()
        outputs = []
        for number, output in enumerate(self.outputs(Request(prompt, params) for prompt in prompts)):
            if output.error:
                raise RequestError(f"prompt {number}: {output.error}")
            outputs.append(output)
        return outputs

    def _submit(self, request: Request, inbox: Inbox) -> Answer:
        """The answer to come. Where the request is refused before the engine sees it, it has ended already."""
        if not self._thread.is_alive():
            raise EngineError("the engine has stopped")
        params = request.params.check()
        id = f"{next(self._numbers):016x}"
        try:
            prompt = self._token_ids(request.prompt)
            max_tokens = checked.fit(len(prompt), params, self._window, "prompt")
        except (ApiError, TemplateError, ValueError) as error:
            return Answer(id, (), [], error=str(error))
        outputs = [choices.output(number, prompt, params, self._tokenizer) for number in range(params.n)]
        self._inboxes[id] = inbox
        self._steps.submit(_SESSION, choices.specs(id, prompt, max_tokens, params, self._tokenizer))
        return Answer(id, prompt, outputs, include_stop=params.include_stop)

    def _token_ids(self, prompt: Prompt | Messages) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._tokenizer.encode(prompt))
        if not prompt or not isinstance(prompt[0], Mapping):
            return convert(prompt, tuple[int, ...])
        body = convert({"model": "", "messages": prompt}, ChatRequest)
        checked.chat_params(body)  # refuses what a message may not hold
        text = self._template.render(checked.plain_messages(body.messages))
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _receive(self, live: dict[str, Answer], inbox: Inbox, limit_s: float) -> list[Delta]:
        """Take one message, and wait for it if need be. An answer that ends leaves `live`."""
        try:
            message = inbox.get(timeout=limit_s)
        except queue.Empty:
            if limit_s < SILENCE_S:
                return []
            raise EngineError(f"the engine said nothing for {SILENCE_S:g} s") from None
        answer = live.get(message.id.partition(".")[0])
        if answer is None:
            return []  # late news of what was given up
        deltas = answer.take(message)
        self._steps.abort(_SESSION, answer.unwanted)
        if answer.ended:
            del live[answer.id], self._inboxes[answer.id]
        return deltas

    def _give_up(self, live: dict[str, Answer]) -> None:
        for answer in live.values():
            self._steps.abort(_SESSION, answer.open_ids())
            del self._inboxes[answer.id]
