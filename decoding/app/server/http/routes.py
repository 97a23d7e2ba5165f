"""The addresses of a server, and how each is answered."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import ValidationError
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from decoding.app.server.http.bodies import ChatBody, CompletionBody, StreamOptions
from decoding.app.server.http.guards import Refused
from decoding.app.server.http.page import PAGE, POLICY
from decoding.app.server.http.receiving import Uploads, parse_json
from decoding.app.server.http.replies import ChatReplies, Replies, TextReplies, error_of
from decoding.app.server.worker import limits
from decoding.app.server.worker.jobs import (
    BROKEN,
    Asked,
    Counted,
    Done,
    Event,
    Failed,
    Job,
    JobQueue,
    QueueFull,
    Reading,
    TokenLaw,
    Waiting,
    Wrote,
)
from decoding.app.server.worker.metrics import Metrics
from decoding.app.server.worker.prompts import Prompts
from decoding.app.terminal.streams import say
from decoding.speculation.sampling import Sampling
from decoding.text.encoding import ContextLengthError
from offload.errors import TierForceError, one_line

_TOO_LONG = "context_length_exceeded"
_LOOK_S = 0.1  # between two looks at whether a client is still there
_SEPARATOR = "\n"
_SEED_BITS = 53  # as many as a number in JavaScript has
_SEEDS = 2**63
_AnyBody = ChatBody | CompletionBody


@dataclass(frozen=True)
class Served:
    """The model of a server, and how it answers where a request does not say."""

    model: str  # what clients call it
    alias: str  # what they may call it, too
    context: int  # tokens of the longest text
    vocab: int
    sampling: Sampling  # its seed is not used
    max_new_tokens: int


class Server:
    """Answers requests through the queue of one engine; in the event loop."""

    def __init__(
        self, queue: JobQueue, prompts: Prompts, metrics: Metrics, served: Served, max_body: int
    ):
        """Serve one model, whose jobs go into `queue`; a request has `max_body` bytes at most."""
        self.queue, self.prompts, self.metrics, self.served = queue, prompts, metrics, served
        self._uploads = Uploads(max_body)
        self._parsing = asyncio.Semaphore(limits.PARSED_AT_ONCE)
        self._since = int(time.time())

    def app(self) -> FastAPI:
        """Return the application."""
        app = FastAPI(
            title="TierForce",
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            redirect_slashes=False,  # it would redirect to the host that the request names
        )
        app.add_exception_handler(ClientDisconnect, _gone)
        app.add_exception_handler(HTTPException, _no_such)
        app.add_exception_handler(Refused, _refused)
        app.add_exception_handler(Exception, _broken)
        app.api_route("/", methods=["GET", "HEAD"])(self.page)
        app.api_route("/health", methods=["GET", "HEAD"])(self.health)
        app.get("/metrics")(self.show_metrics)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.one_model)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/v1/completions")(self.complete)
        return app

    async def page(self) -> Response:
        """Show the page for people."""
        return HTMLResponse(PAGE, headers=POLICY)

    async def health(self) -> Response:
        """Say whether requests are answered."""
        state = {
            "status": "closing" if self.queue.is_closed else "ok",
            "running": self.queue.running,
            "waiting": self.queue.waiting,
        }
        return JSONResponse(state, 503 if self.queue.is_closed else 200)

    async def show_metrics(self) -> Response:
        """Show all counters."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, name: str) -> Response:
        """Show a model."""
        self._check_model(name)
        return JSONResponse(self._card())

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, ChatBody, ChatReplies(self.served.model))

    async def complete(self, request: Request) -> Response:
        """Continue a text."""
        return await self._answer(request, CompletionBody, TextReplies(self.served.model))

    async def _answer(self, request: Request, kind: type[_AnyBody], replies: Replies) -> Response:
        """Put what is asked in the queue, and answer it."""
        # of the body nothing is left in memory once this is known
        asked, stream_options = await self._receive(request, kind)
        job = Job(asked)
        try:
            self.queue.put(job)
        except QueueFull as error:
            raise Refused(429, str(error), "queue_full") from error
        if stream_options is not None:
            events = self._streamed(job, replies, bool(stream_options.include_usage))
            return EventSourceResponse(
                events, sep=_SEPARATOR, headers=_UNBUFFERED, ping=limits.PING_S
            )
        return await self._whole(job, replies, request)

    async def _receive(
        self, request: Request, kind: type[_AnyBody]
    ) -> tuple[Asked, StreamOptions | None]:
        """Return what a request asks for; options only if the answer is to be streamed."""
        async with self._uploads.received(request) as body, self._parsing:
            return await run_sync(self._parse, body, kind)

    def _parse(self, text: bytes, kind: type[_AnyBody]) -> tuple[Asked, StreamOptions | None]:
        """Return what a body asks for; on a thread, for long prompts take a while."""
        value = parse_json(text, self.served.context + limits.EXTRA_VALUES)
        try:
            body = kind.model_validate(value)
        except ValidationError as error:
            raise _invalid(error) from error
        self._check_model(body.model)
        if isinstance(body, ChatBody):
            param, prompt = "messages", self._chat_prompt(body)
        else:
            param, prompt = "prompt", self._text_prompt(body)
        options = (body.stream_options or StreamOptions()) if body.stream else None
        return self._asked(body, prompt, param), options

    def _chat_prompt(self, body: ChatBody) -> list[int]:
        messages = [each.as_template() for each in body.messages]
        return self._prompt(partial(self.prompts.of_messages, messages), "messages")

    def _text_prompt(self, body: CompletionBody) -> list[int]:
        prompt = body.prompt
        if isinstance(prompt, str):
            return self._prompt(partial(self.prompts.of_text, prompt), "prompt")
        if prompt and not 0 <= min(prompt) <= max(prompt) < self.served.vocab:
            raise Refused(
                400,
                f"the prompt has tokens outside the model's vocabulary of {self.served.vocab:,}.",
                param="prompt",
            )
        return prompt

    def _prompt(self, make: Callable[[], list[int]], param: str) -> list[int]:
        """Return a prompt's tokens. Raises Refused where they cannot be made."""
        try:
            return make()
        except ContextLengthError as error:
            length = {"prompt_tokens": error.tokens, "context": self.served.context}
            raise Refused(400, str(error), _TOO_LONG, param, length) from error
        except TierForceError as error:
            raise Refused(400, str(error), param=param) from error

    def _asked(self, body: _AnyBody, prompt: list[int], param: str) -> Asked:
        """Return what a body asks for. Raises Refused for what cannot be done."""
        room = self.served.context - len(prompt)
        length = {"prompt_tokens": len(prompt), "context": self.served.context}
        if not prompt:
            raise Refused(400, "the prompt is empty: there is nothing to read.", param=param)
        if room < 1:
            raise Refused(
                400,
                f"the prompt has {len(prompt):,} tokens, and the model's context is "
                f"{self.served.context:,}, answer included: send a shorter one.",
                _TOO_LONG,
                param,
                length,
            )
        field, most = body.most
        new = min(self.served.max_new_tokens, room) if most is None else most
        if new > room:
            raise Refused(
                400,
                f"the prompt has {len(prompt):,} tokens, and {field} {new:,} more are beyond "
                f"the model's context of {self.served.context:,}: ask for at most {room:,}.",
                _TOO_LONG,
                field,
                length,
            )
        own = {
            name: getattr(body, name)
            for name in ("temperature", "top_p", "top_k", "seed")
            if getattr(body, name) is not None
        }
        try:
            own = {"seed": secrets.randbits(_SEED_BITS), **own}
            own["seed"] %= _SEEDS  # a negative one counts from the end
            sampling = replace(self.served.sampling, **own)
        except TierForceError as error:
            raise Refused(400, str(error)) from error
        return Asked(array("i", prompt), new, sampling, body.stops, body.top)

    async def _whole(self, job: Job, replies: Replies, request: Request) -> Response:
        """Wait for the whole answer, unless the client is gone before."""
        text, laws = list[str](), list[tuple[int, TokenLaw]]()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_client, job, request)
            async for event in _events_of(job):
                if isinstance(event, Wrote):
                    text.append(event.text)
                    laws += event.laws
            tasks.cancel_scope.cancel()
        self.queue.give_up(job)
        if isinstance(event, Failed):
            return JSONResponse(error_of(event), event.status)
        assert isinstance(event, Done)
        shown = None if job.asked.top_logprobs is None else laws
        return JSONResponse(replies.whole("".join(text), shown, event.reason, event.counts))

    async def _watch_client(self, job: Job, request: Request) -> None:
        """End a job whose client is gone."""
        while not await request.is_disconnected():
            await anyio.sleep(_LOOK_S)
        self.queue.give_up(job)
        job.fail(Failed(499, "the client is gone."))

    async def _streamed(
        self, job: Job, replies: Replies, with_usage: bool
    ) -> AsyncIterator[ServerSentEvent]:
        """Yield the answer as it is written; what else happens goes into comments."""
        has_laws = job.asked.top_logprobs is not None
        try:
            if (first := replies.first()) is not None:
                yield _data(first)
            async for event in _events_of(job):
                if isinstance(event, Wrote):
                    yield _data(replies.piece(event.text, event.laws if has_laws else None))
                elif isinstance(event, Done):
                    yield _data(replies.last(event.reason))
                    if with_usage:
                        yield _data(replies.counts(event.counts))
                    yield ServerSentEvent("[DONE]", sep=_SEPARATOR)
                elif isinstance(event, Failed):
                    yield _data(error_of(event))
                else:
                    yield ServerSentEvent(comment=json.dumps(_account(event)), sep=_SEPARATOR)
        finally:
            self.queue.give_up(job)

    def _check_model(self, name: str) -> None:
        if name not in (self.served.model, self.served.alias):
            raise Refused(
                404,
                f"the model {name[:200]!r} is not served here: ask for {self.served.model!r}.",
                "model_not_found",
                "model",
            )

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.served.model,
            "object": "model",
            "created": self._since,
            "owned_by": "tierforce",
            "max_model_len": self.served.context,
        }


_UNBUFFERED = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}


async def _events_of(job: Job) -> AsyncIterator[Event]:
    """Yield what happens to a job, to its end."""
    while True:
        event = await job.events.get()
        yield event
        if isinstance(event, Done | Failed):
            return


def _account(event: Event) -> dict[str, Any]:
    """Return what a comment in a stream says of an event."""
    if isinstance(event, Waiting):
        return {"waiting": event.before}
    if isinstance(event, Reading):
        return {"reading": [event.done, event.total]}
    assert isinstance(event, Counted)
    return {"counts": event.counts}


def _data(content: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(content), sep=_SEPARATOR)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error.reply()


async def _broken(_: Request, error: Exception) -> Response:
    """Say what nobody foresaw."""
    say(f"not answered: {type(error).__name__}: {one_line(error)}")
    return JSONResponse(error_of(BROKEN), BROKEN.status)


async def _gone(_: Request, __: Exception) -> Response:
    """Answer a client that has left before its request was complete: it receives nothing."""
    return Response(status_code=499)


def _invalid(error: ValidationError) -> Refused:
    """Return what is wrong with a body, and where."""
    # of several, such as those of each kind that a field may be of, what went furthest
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = max(errors, key=lambda each: len(each["loc"]))
    parts = [str(part) for part in first["loc"]]
    param = ".".join(part for part in parts if "[" not in part) or None
    said = first["msg"].removeprefix("Value error, ")
    return Refused(400, f"{param}: {said}." if param else f"{said}.", param=param)


async def _no_such(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    failed = Failed(error.status_code, f"{error.detail}.")
    return JSONResponse(error_of(failed), error.status_code, error.headers)
