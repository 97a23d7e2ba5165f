"""The routes between text and tokens, which need no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from decoding.app.server.http.parsing import RequestParser
from decoding.app.server.http.receiving import Uploads


class TokenRoutes:
    """Answers `/tokenize` and `/detokenize`, as vLLM's server does."""

    def __init__(self, parser: RequestParser, uploads: Uploads, parsing: asyncio.Semaphore):
        """`parsing` limits the bodies that are parsed at a time."""
        self._parser, self._uploads, self._parsing = parser, uploads, parsing

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text."""
        return await self._convert(request, self._parser.tokenize)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        return await self._convert(request, self._parser.detokenize)

    async def _convert(
        self, request: Request, convert: Callable[[bytes], dict[str, Any]]
    ) -> Response:
        def response(body: bytes) -> Response:
            return JSONResponse(convert(body))  # writing many numbers takes a while, too

        async with self._uploads.receive(request) as body, self._parsing:
            return await run_sync(response, body)
