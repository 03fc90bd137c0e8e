"""What each route does. Raised ApiErrors become answers in `app.py`."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from shoal.core.request import Refusal, Sampling
from shoal.gateway.answers import Answer, ChatAnswer, CompletionAnswer
from shoal.gateway.body import read_json
from shoal.gateway.dispatch import Dispatcher
from shoal.gateway.errors import ApiError, Reason, invalid
from shoal.gateway.job import Order
from shoal.gateway.metrics import Metrics
from shoal.gateway.params import Params, chat_params, check_ids, completion_params, fit, plain_messages
from shoal.gateway.prompts import Prompt, Prompts, off_loop
from shoal.gateway.reply import Reply, record_of
from shoal.gateway.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from shoal.wire.messages import EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    model: str  # the served name
    advised: Sampling  # by the model's authors, for what a request leaves open
    prompts: Prompts
    dispatcher: Dispatcher
    metrics: Metrics
    max_body_bytes: int
    started_s: int  # wall clock, for `created` of the model

    # -- text ----------------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        body = await read_json(request, ChatRequest, self.max_body_bytes)
        params, messages = chat_params(body, self.advised), plain_messages(body.messages)
        info = self._served(body.model)
        prompt = await self.prompts.chat(messages, window=info.max_model_len)
        return await self._reply(request, ChatAnswer, params, [prompt], "messages", info)

    async def complete(self, request: Request) -> Response:
        body = await read_json(request, CompletionRequest, self.max_body_bytes)
        params = completion_params(body, self.advised)
        info = self._served(body.model)
        prompts = await self.prompts.completion(body.prompt, window=info.max_model_len, echo=params.echo)
        return await self._reply(request, CompletionAnswer, params, prompts, "prompt", info)

    async def _reply(
        self,
        request: Request,
        kind: type[Answer],
        params: Params,
        prompts: list[Prompt],
        field: str,
        info: EngineInfo,
    ) -> Response:
        check_ids((token for token, _ in params.sampling.logit_bias), info.vocab_size, "logit_bias")
        check_ids(params.stop_token_ids, info.vocab_size, "stop_token_ids")
        for prompt in prompts:
            if not prompt.ids:
                raise ApiError(Refusal.EMPTY_PROMPT, f"'{field}' is empty", param=field)
            check_ids(prompt.ids, info.vocab_size, field)
        record = record_of(request)
        order = Order(
            id=record.id,
            params=params,
            prompts=tuple(prompts),
            max_tokens=tuple(fit(len(prompt.ids), params, info.max_model_len, field) for prompt in prompts),
            arrived_s=record.arrived_s,
        )
        record.job = job = await self.dispatcher.start(order)
        answer = kind(job, model=self.model, created=int(time.time()), tokenizer=self.prompts.tokenizer)
        return Reply(answer, self.dispatcher, record)

    def _served(self, model: str) -> EngineInfo:
        self._check_model(model)
        return self.dispatcher.info()

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
