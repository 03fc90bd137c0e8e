"""What each route does. Raised ApiErrors become answers in `app.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from shoal.core.classes import ServiceClass
from shoal.core.request import Refusal, Sampling
from shoal.gateway.answers import Answer, ChatAnswer, CompletionAnswer
from shoal.gateway.body import parse, read_json
from shoal.gateway.dispatch import Dispatcher
from shoal.gateway.errors import ApiError, Reason, invalid, unsupported
from shoal.gateway.job import Order
from shoal.gateway.metrics import Metrics
from shoal.gateway.params import Asked, Params, chat_params, check_ids, completion_params, fit, plain_messages
from shoal.gateway.prompts import Prompt, Prompts, off_loop
from shoal.gateway.reply import Reply, collect, record_of
from shoal.gateway.schema import BATCHED, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from shoal.gateway.tenants import Hold, Tenants
from shoal.gateway.terms import Terms, terms_of
from shoal.wire.messages import EngineInfo

BATCH = "batch"  # the service class of batches' lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    model: str  # the served name
    advised: Sampling  # by the model's authors, for what a request leaves open
    prompts: Prompts
    dispatcher: Dispatcher
    metrics: Metrics
    max_body_bytes: int
    classes: Mapping[str, ServiceClass]
    tenants: Tenants
    started_s: int  # wall clock, for `created` of the model

    # -- text ----------------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        return await self._reply(request, await read_json(request, ChatRequest, self.max_body_bytes))

    async def complete(self, request: Request) -> Response:
        return await self._reply(request, await read_json(request, CompletionRequest, self.max_body_bytes))

    async def _reply(self, request: Request, body: Asked) -> Response:
        record = record_of(request)
        record.terms = terms_of(request.scope["headers"], body.priority or 0, record.grant, self.classes)
        record.hold = self.tenants.enter(record.grant.tenant, record.grant.limits, time.monotonic())
        answer = await self.begin(body, id=record.id, arrived_s=record.arrived_s, terms=record.terms, hold=record.hold)
        record.job = answer.job
        return Reply(answer, self.dispatcher, record)

    async def line(self, path: str, body: bytes, *, id: str, tenant: str) -> bytes:
        """The whole answer to a request that came as a batch's line: what `path` would answer over HTTP, refusals
        included (ApiError). It has no time limit of its own; cancelling withdraws it."""
        asked = await parse(body, BATCHED[path])
        if asked.stream:
            raise unsupported("stream", "'stream' is not supported in a batch")
        answer = await self.begin(
            asked,
            id=id,
            arrived_s=time.monotonic(),
            terms=Terms(tenant=tenant, service_class=BATCH),
            timeout_s=math.inf,
        )
        try:
            return await collect(answer)
        finally:
            self.dispatcher.finish(answer.job)

    async def begin(
        self,
        body: Asked,
        *,
        id: str,
        arrived_s: float,
        terms: Terms,
        hold: Hold | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """A request's answer, under way. Raises ApiError. `dispatcher.finish` must follow."""
        asked_s, name = time.monotonic(), terms.service_class
        begun = self._chat(body, name) if isinstance(body, ChatRequest) else self._text(body, name)
        params, prompts, field, info = await begun
        check_ids((token for token, _ in params.sampling.logit_bias), info.vocab_size, "logit_bias")
        check_ids(params.stop_token_ids, info.vocab_size, "stop_token_ids")
        for prompt in prompts:
            if not prompt.ids:
                raise ApiError(Refusal.EMPTY_PROMPT, f"'{field}' is empty", param=field)
            check_ids(prompt.ids, info.vocab_size, field)
        order = Order(
            id=id,
            params=params,
            prompts=tuple(prompts),
            max_tokens=tuple(fit(len(prompt.ids), params, info.max_model_len, field) for prompt in prompts),
            arrived_s=arrived_s,
            asked_s=asked_s,
            terms=terms,
            hold=hold,
            timeout_s=timeout_s,
        )
        if hold is not None:
            hold.charge(order.most_tokens, time.monotonic())
        job = await self.dispatcher.start(order)
        kind = ChatAnswer if isinstance(body, ChatRequest) else CompletionAnswer
        return kind(job, model=self.model, created=int(time.time()), tokenizer=self.prompts.tokenizer)

    async def _chat(self, body: ChatRequest, service_class: str) -> tuple[Params, list[Prompt], str, EngineInfo]:
        params, messages = chat_params(body, self.advised), plain_messages(body.messages)
        info = self._served(body.model, service_class)
        return params, [await self.prompts.chat(messages, window=info.max_model_len)], "messages", info

    async def _text(self, body: CompletionRequest, service_class: str) -> tuple[Params, list[Prompt], str, EngineInfo]:
        params = completion_params(body, self.advised)
        info = self._served(body.model, service_class)
        prompts = await self.prompts.completion(body.prompt, window=info.max_model_len, echo=params.echo)
        return params, prompts, "prompt", info

    def _served(self, model: str, service_class: str) -> EngineInfo:
        self._check_model(model)
        info = self.dispatcher.info()
        self.dispatcher.check_room(service_class)  # before anything that takes long: who is refused hears it at once
        return info

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self.model:
            message = f"the model '{model[:200]}' does not exist; this service has '{self.model}'"
            raise ApiError(Reason.MODEL_NOT_FOUND, message, param="model")

    # -- tokens --------------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        body = await read_json(request, TokenizeRequest, self.max_body_bytes)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("either 'prompt' or 'messages' is required", "prompt")
        if body.messages is not None:
            messages, generate = plain_messages(body.messages), body.add_generation_prompt is not False
            prompt = await self.prompts.chat(messages, window=None, add_generation_prompt=generate)
        else:
            special = body.add_special_tokens is not False
            prompt = await self.prompts.text(body.prompt or "", window=None, add_special_tokens=special)
        info = self.dispatcher.replicas.info()
        answer: dict[str, object] = {
            "count": len(prompt.ids),
            "max_model_len": info and info.max_model_len,
            "tokens": prompt.ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = [self.prompts.tokenizer.token_text(token) for token in prompt.ids]
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        body = await read_json(request, DetokenizeRequest, self.max_body_bytes)
        self._check_model(body.model)
        tokenizer = self.prompts.tokenizer
        check_ids(body.tokens, tokenizer.vocab_size, "tokens")
        text = await off_loop(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False), 4 * len(body.tokens))
        return _json({"prompt": text})

    # -- about the service ---------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model_by_id(self, request: Request) -> Response:
        self._check_model(request.path_params["id"])
        return _json(self._model())

    def _model(self) -> dict[str, object]:
        info = self.dispatcher.replicas.info()
        return {
            "id": self.model,
            "object": "model",
            "created": self.started_s,
            "owned_by": "shoal",
            "max_model_len": info and info.max_model_len,
        }

    async def health(self, request: Request) -> Response:
        """This process is alive; nothing is said of the replicas."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """A replica can take work: connected, its step loop turning, heard from just now."""
        ready = self.dispatcher.replicas.ready and not self.dispatcher.draining
        return _json({"status": "ready" if ready else "not ready"}, status=200 if ready else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
