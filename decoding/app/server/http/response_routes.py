"""The routes of OpenAI's Responses API. Nothing is stored."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import Response

from decoding.app.server.formats.replies import ReplyBuilder
from decoding.app.server.formats.response_events import ResponsesBuilder
from decoding.app.server.formats.responses import ResponsesBody
from decoding.app.server.http.guards import RequestRefused
from decoding.app.server.http.parsing import AnyBody

_Answer = Callable[[Request, type[AnyBody], ReplyBuilder], Awaitable[Response]]


class ResponseRoutes:
    """Answers `/v1/responses`."""

    def __init__(self, answer: _Answer, model: str):
        """`answer` queues a request and answers it; `model` is the model's name for clients."""
        self._answer, self._model = answer, model

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        app.post("/v1/responses")(self.respond)
        app.get("/v1/responses/{name}")(self.retrieve)
        app.delete("/v1/responses/{name}")(self.delete)

    async def respond(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, ResponsesBody, ResponsesBuilder(self._model))

    async def retrieve(self, name: str) -> Response:
        """Refuse to return a response, since none is stored."""
        raise _not_stored(name)

    async def delete(self, name: str) -> Response:
        """Refuse to delete a response, since none is stored."""
        raise _not_stored(name)


def _not_stored(name: str) -> RequestRefused:
    return RequestRefused(
        404,
        f"the response {name[:200]!r} is not available: this server stores none. Send the whole "
        "conversation in `input`.",
        "response_not_found",
    )
