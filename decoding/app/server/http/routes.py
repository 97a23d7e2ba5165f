"""The addresses of a server, and how each is answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from decoding.app.server.http.bodies import AnyBody, ChatBody, CompletionBody, StreamOptions
from decoding.app.server.http.guards import Refused
from decoding.app.server.http.page import PAGE, POLICY
from decoding.app.server.http.parsing import RequestParser, ServedModel
from decoding.app.server.http.receiving import Uploads
from decoding.app.server.http.replies import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ResponseBuilder,
    error_of,
)
from decoding.app.server.worker import limits
from decoding.app.server.worker.jobs import (
    BROKEN,
    Event,
    Failed,
    Finished,
    GenerationParams,
    QueuedRequest,
    QueueFull,
    RequestQueue,
    TextDelta,
    TokenLogprobs,
)
from decoding.app.server.worker.metrics import Metrics
from decoding.app.server.worker.prompts import Prompts
from decoding.app.terminal.streams import say
from offload.errors import one_line

_LOOK_S = 0.1  # between two looks at whether a client is still there
_SEPARATOR = "\n"
_UNBUFFERED = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}


class Server:
    """Answers requests through the queue of one engine; in the event loop."""

    def __init__(
        self,
        queue: RequestQueue,
        prompts: Prompts,
        metrics: Metrics,
        served: ServedModel,
        max_body: int,
    ):
        """Serve one model, whose jobs go into `queue`; a request has `max_body` bytes at most."""
        self.queue, self.metrics, self.served = queue, metrics, served
        self._parser = RequestParser(prompts, served)
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
        self._parser.check_model(name)
        return JSONResponse(self._card())

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, ChatBody, ChatResponseBuilder(self.served.model))

    async def complete(self, request: Request) -> Response:
        """Continue a text."""
        return await self._answer(
            request, CompletionBody, CompletionResponseBuilder(self.served.model)
        )

    async def _answer(
        self, request: Request, kind: type[AnyBody], replies: ResponseBuilder
    ) -> Response:
        """Put what is asked in the queue, and answer it."""
        # of the body nothing is left in memory once this is known
        asked, stream_options = await self._receive(request, kind)
        job = QueuedRequest(asked)
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
        self, request: Request, kind: type[AnyBody]
    ) -> tuple[GenerationParams, StreamOptions | None]:
        """Return what a request asks for; options only if the answer is to be streamed."""
        async with self._uploads.received(request) as body, self._parsing:
            return await run_sync(self._parser.parse, body, kind)

    async def _whole(
        self, job: QueuedRequest, replies: ResponseBuilder, request: Request
    ) -> Response:
        """Wait for the whole answer, unless the client is gone before."""
        text, laws = list[str](), list[tuple[int, TokenLogprobs]]()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_client, job, request)
            async for event in _events_of(job):
                if isinstance(event, TextDelta):
                    text.append(event.text)
                    laws += event.logprobs
            tasks.cancel_scope.cancel()
        self.queue.cancel(job)
        if isinstance(event, Failed):
            return JSONResponse(error_of(event), event.status)
        assert isinstance(event, Finished)
        shown = None if job.params.top_logprobs is None else laws
        return JSONResponse(replies.whole("".join(text), shown, event.reason, event.counts))

    async def _watch_client(self, job: QueuedRequest, request: Request) -> None:
        """End a job whose client is gone."""
        while not await request.is_disconnected():
            await anyio.sleep(_LOOK_S)
        self.queue.cancel(job)
        job.fail(Failed(499, "the client is gone."))

    async def _streamed(
        self, job: QueuedRequest, replies: ResponseBuilder, with_usage: bool
    ) -> AsyncIterator[ServerSentEvent]:
        """Yield the answer as it is written; what else happens goes into comments."""
        has_laws = job.params.top_logprobs is not None
        try:
            if (first := replies.first()) is not None:
                yield _data(first)
            async for event in _events_of(job):
                if isinstance(event, TextDelta):
                    yield _data(replies.piece(event.text, event.logprobs if has_laws else None))
                elif isinstance(event, Finished):
                    yield _data(replies.last(event.reason))
                    if with_usage:
                        yield _data(replies.counts(event.counts))
                    yield ServerSentEvent("[DONE]", sep=_SEPARATOR)
                elif isinstance(event, Failed):
                    yield _data(error_of(event))
                else:
                    yield ServerSentEvent(comment=json.dumps(event.said), sep=_SEPARATOR)
        finally:
            self.queue.cancel(job)

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.served.model,
            "object": "model",
            "created": self._since,
            "owned_by": "tierforce",
            "max_model_len": self.served.context,
        }


async def _events_of(job: QueuedRequest) -> AsyncIterator[Event]:
    """Yield what happens to a job, to its end."""
    while True:
        event = await job.events.get()
        yield event
        if isinstance(event, Finished | Failed):
            return


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


async def _no_such(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    failed = Failed(error.status_code, f"{error.detail}.")
    return JSONResponse(error_of(failed), error.status_code, error.headers)
