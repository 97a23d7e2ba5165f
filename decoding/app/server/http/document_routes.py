"""The routes of documents: files that a client sends as text, and those in the prompt cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from tempfile import TemporaryFile
from threading import Event, Thread
from typing import BinaryIO, TypeVar, cast

import anyio
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from decoding.app.documents.conversion import cancellable
from decoding.app.server.http.guards import RequestRefused
from decoding.app.server.http.receiving import DISCONNECT_POLL_S, Uploads, disconnected
from decoding.app.server.worker import limits
from decoding.app.server.worker.prompts import Prompts
from decoding.app.server.worker.stored_documents import StoredDocuments
from decoding.app.server.worker.uploaded_documents import label_of, read_upload
from offload.errors import InvalidRequestError

_Result = TypeVar("_Result")
_FILE = {  # in the description of the API
    "required": True,
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}


class DocumentRoutes:
    """Answers `/documents` and `/documents/{id}`."""

    def __init__(self, prompts: Prompts, uploads: Uploads, stored: StoredDocuments | None):
        """`stored`: the documents in the prompt cache, if there is one."""
        self._prompts, self._uploads, self._stored = prompts, uploads, stored
        self._converting = asyncio.Semaphore(limits.CONCURRENT_CONVERSIONS)
        self._searching = asyncio.Semaphore(1)  # the prompt cache
        self._pending = 0  # documents in temporary files
        self._searches = 0  # running or waiting

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        app.post("/documents", openapi_extra={"requestBody": _FILE})(self.convert)
        app.get("/documents")(self.list_stored)
        app.get("/documents/{id}")(self.read_stored)

    async def convert(self, request: Request, name: str = "") -> Response:
        """Return the text of the document that is the request's body."""
        label = label_of(name)

        def response() -> Response:
            with cancellable(gone.is_set):
                return JSONResponse(read_upload(label, file, self._prompts))

        async with self._received(request) as file, self._turn(request), _watched(request) as gone:
            try:
                return await _run_daemon(response)
            except InvalidRequestError as error:
                raise RequestRefused(400, str(error)) from error

    async def list_stored(self, request: Request) -> Response:
        """Return the documents in the prompt cache, latest used first."""
        if self._stored is None:
            return JSONResponse({"data": []})
        return JSONResponse({"data": await self._search(request, self._stored.find)})

    async def read_stored(self, request: Request, id: str) -> Response:
        """Return a document in the prompt cache, with its text."""
        found = None
        if self._stored is not None:
            found = await self._search(request, partial(self._stored.read, id))
        if found is None:
            raise RequestRefused(
                404,
                "there is no document with this id: /documents lists those in the prompt cache.",
                param="id",
            )
        return await run_sync(JSONResponse, found)  # writing a book takes a while

    @asynccontextmanager
    async def _received(self, request: Request) -> AsyncIterator[BinaryIO]:
        """Yield the body in a temporary file without a name, which is gone after the block.

        It takes no memory of other requests while the document waits and is read. Raises
        RequestRefused as `Uploads.receive` does, and if too many documents wait.
        """
        with ExitStack() as stack:
            async with self._uploads.receive(request) as body:
                stack.enter_context(self._counted())
                try:
                    file = stack.enter_context(await run_sync(_temporary_file, body))
                except OSError as error:
                    reason = f"the server cannot store the document: {error.strerror}."
                    raise RequestRefused(507, reason) from error
                del body
            yield file

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a document as pending in a block. Raises RequestRefused if there are too many."""
        if self._pending >= limits.DOCUMENTS:
            raise _too_many()
        self._pending += 1
        try:
            yield
        finally:
            self._pending -= 1

    async def _search(self, request: Request, function: Callable[[], _Result]) -> _Result:
        """Return a function's result, one search of the prompt cache at a time.

        Raises RequestRefused if too many wait, and ClientDisconnect if the client is gone.
        """
        if self._searches >= limits.SEARCHES:
            raise RequestRefused(503, "too many requests for documents: try again later.")
        self._searches += 1
        try:
            async with self._searching:
                if await request.is_disconnected():
                    raise ClientDisconnect
                return await run_sync(function)
        finally:
            self._searches -= 1

    @asynccontextmanager
    async def _turn(self, request: Request) -> AsyncIterator[None]:
        """Wait until fewer documents are being read.

        Raises RequestRefused if that takes long, and ClientDisconnect if the client is gone.
        """
        deadline = anyio.current_time() + limits.CONVERSION_WAIT_S
        has_turn = False
        try:
            while not has_turn:
                with anyio.move_on_after(DISCONNECT_POLL_S):
                    has_turn = await self._converting.acquire()
                if await request.is_disconnected():
                    raise ClientDisconnect
                if not has_turn and anyio.current_time() > deadline:
                    raise _too_many()
            yield
        finally:
            if has_turn:
                self._converting.release()


@asynccontextmanager
async def _watched(request: Request) -> AsyncIterator[Event]:
    """Yield an event that is set if the client disconnects in the block."""
    gone = Event()

    async def watch() -> None:
        await disconnected(request)
        gone.set()

    watching = asyncio.create_task(watch())
    try:
        yield gone
    finally:
        watching.cancel()


def _too_many() -> RequestRefused:
    return RequestRefused(503, "too many documents at once: try again later.")


def _temporary_file(content: bytes) -> BinaryIO:
    """Return an open file without a name. Raises OSError."""
    with ExitStack() as stack:
        file = stack.enter_context(TemporaryFile())
        file.write(content)
        file.seek(0)
        stack.pop_all()
    return cast(BinaryIO, file)


async def _run_daemon(function: Callable[[], _Result]) -> _Result:
    """Return a function's result, from a thread that does not keep the process from exiting."""
    future: Future[_Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="document", daemon=True).start()
    return await asyncio.wrap_future(future)
