"""The routes of a server, and their handlers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any

from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from decoding.app.environment import installed_version
from decoding.app.server.formats.chat import ChatBody
from decoding.app.server.formats.completions import CompletionBody
from decoding.app.server.formats.replies import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ReplyBuilder,
    error_body,
)
from decoding.app.server.formats.responses import ResponsesBody
from decoding.app.server.formats.tokens import DetokenizeBody, TokenizeBody
from decoding.app.server.http.delivery import SEPARATOR, Delivery
from decoding.app.server.http.document_routes import DocumentRoutes
from decoding.app.server.http.guards import RequestRefused
from decoding.app.server.http.openapi import describe
from decoding.app.server.http.page import PAGE, POLICY
from decoding.app.server.http.parsing import AnyBody, ParsedRequest, RequestParser, ServedModel
from decoding.app.server.http.receiving import Uploads
from decoding.app.server.http.response_routes import ResponseRoutes
from decoding.app.server.http.token_routes import TokenRoutes
from decoding.app.server.worker import limits
from decoding.app.server.worker.jobs import (
    INTERNAL_ERROR,
    Failed,
    QueuedRequest,
    QueueFull,
    RequestQueue,
)
from decoding.app.server.worker.metrics import Metrics
from decoding.app.server.worker.prompts import Prompts
from decoding.app.server.worker.stored_documents import StoredDocuments
from decoding.app.terminal.streams import say
from offload.errors import one_line

CLIPPED = "X-Max-Tokens"  # header with the new tokens there is room for, if fewer than asked for
_BODIES: dict[str, type[BaseModel]] = {  # their routes
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_UNBUFFERED = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}


class Server:
    """Answers requests through the queue of one engine; runs in the event loop."""

    def __init__(
        self,
        queue: RequestQueue,
        prompts: Prompts,
        metrics: Metrics,
        served: ServedModel,
        max_body: int,
        stored: StoredDocuments | None = None,
    ):
        """Serve one model through `queue`; a body has at most `max_body` bytes.

        `stored`: the documents in the prompt cache.
        """
        self.queue, self.metrics, self.served = queue, metrics, served
        self._parser = RequestParser(prompts, served)
        self._uploads = Uploads(max_body)
        self._documents = DocumentRoutes(prompts, self._uploads, stored)
        self._parsing = asyncio.Semaphore(limits.CONCURRENT_PARSES)
        self._compiling = asyncio.Semaphore(1)  # grammars, one at a time
        building = asyncio.Semaphore(1)  # whole answers, likewise
        self._deliver = partial(Delivery, queue=queue, prompts=prompts, building=building)
        self._created = int(time.time())

    def app(self) -> FastAPI:
        """Return the ASGI application."""
        app = FastAPI(
            title="TierForce",
            docs_url=None,
            redoc_url=None,
            version=installed_version("tierforce"),
            redirect_slashes=False,  # a redirect would go to the host in the request
        )
        app.add_exception_handler(ClientDisconnect, _on_disconnect)
        app.add_exception_handler(HTTPException, _on_http_exception)
        app.add_exception_handler(RequestRefused, _on_refused)
        app.add_exception_handler(Exception, _on_error)
        app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)(self.page)
        app.head("/health", include_in_schema=False)(self.health)
        app.get("/health")(self.health)
        app.get("/metrics")(self.show_metrics)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/v1/completions")(self.complete)
        ResponseRoutes(self._answer, self.served.model).add_to(app)
        TokenRoutes(self._parser, self._uploads, self._parsing).add_to(app)
        self._documents.add_to(app)
        describe(app, _BODIES)
        return app

    async def page(self) -> Response:
        """Return the chat page."""
        return HTMLResponse(PAGE, headers=POLICY)

    async def health(self) -> Response:
        """Return whether requests are accepted, and the length of the queue."""
        state = {
            "status": "closing" if self.queue.is_closed else "ok",
            "running": self.queue.running,
            "waiting": self.queue.waiting,
        }
        return JSONResponse(state, 503 if self.queue.is_closed else 200)

    async def show_metrics(self) -> Response:
        """Return all metrics."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self) -> Response:
        """Return the list of models, which has one."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        """Return a model's card."""
        self._parser.check_model(name)
        return JSONResponse(self._card())

    async def chat(self, request: Request) -> Response:
        """Answer a chat completion."""
        return await self._answer(request, ChatBody, ChatResponseBuilder(self.served.model))

    async def complete(self, request: Request) -> Response:
        """Answer a plain completion."""
        return await self._answer(
            request, CompletionBody, CompletionResponseBuilder(self.served.model)
        )

    async def _answer(
        self, request: Request, kind: type[AnyBody], builder: ReplyBuilder
    ) -> Response:
        """Queue a request, and answer it."""
        # the body is not kept in memory while the request is queued
        parsed = await self._receive(request, kind)
        batch = QueuedRequest.batch(parsed.params)
        try:
            self.queue.put(batch)
        except QueueFull as error:
            raise RequestRefused(429, str(error), "queue_full") from error
        builder.begin(parsed.params, parsed.repeated, parsed.calls)
        clipped = [each.max_new_tokens for each in parsed.params if each.is_clipped]
        headers = {CLIPPED: str(min(clipped))} if clipped else {}
        delivery = self._deliver(batch, builder)
        if parsed.stream_options is not None:
            events = delivery.stream(bool(parsed.stream_options.include_usage))
            return EventSourceResponse(
                events, sep=SEPARATOR, headers={**_UNBUFFERED, **headers}, ping=limits.PING_S
            )
        response = await delivery.whole(request)
        response.headers.update(headers)
        return response

    async def _receive(self, request: Request, kind: type[AnyBody]) -> ParsedRequest:
        """Return a request, with its grammar compiled."""
        async with self._uploads.receive(request) as body, self._parsing:
            parsed = await run_sync(self._parser.parse, body, kind)
        if parsed.grammar is None:
            return parsed
        async with self._compiling:
            compiled = await run_sync(self._parser.compile, *parsed.grammar)
        return replace(parsed, params=[replace(each, grammar=compiled) for each in parsed.params])

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.served.model,
            "object": "model",
            "created": self._created,
            "owned_by": "tierforce",
            "max_model_len": self.served.context,
        }


async def _on_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return error.response()


async def _on_error(_: Request, error: Exception) -> Response:
    """Log an unexpected error."""
    say(f"request failed: {type(error).__name__}: {one_line(error)}")
    return JSONResponse(error_body(INTERNAL_ERROR), INTERNAL_ERROR.status)


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """Return a response for the metrics: the client left before its request was complete."""
    return Response(status_code=499)


async def _on_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    failed = Failed(error.status_code, f"{error.detail}.")
    return JSONResponse(error_body(failed), error.status_code, error.headers)
