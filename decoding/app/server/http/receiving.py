"""Bodies of requests: received within limits of size, time and memory, and parsed as JSON."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from pydantic_core import from_json
from starlette.requests import Request

from decoding.app.server.http.guards import RequestRefused
from decoding.app.server.worker import limits
from offload.memory.host import trim_heap

_POLL_S = 0.05  # interval of polling for memory
DISCONNECT_POLL_S = 0.1  # interval of checks whether a client is still connected


@dataclass(eq=False)
class _Upload:
    """A body in memory, complete or not. Times are on the event loop's clock."""

    started: float
    waited: float = 0.0  # seconds waited for memory
    size: int = 0  # bytes so far
    is_receiving: bool = True  # False: complete, or waiting for memory
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    marked: tuple[float, int] = (0.0, 0)  # time and size at the start of the measured interval

    def is_slow(self) -> bool:
        """Return whether the body arrives too slowly since the last mark, and set a new mark."""
        now = anyio.current_time()
        marked_at, size = self.marked
        if not self.is_receiving or now - marked_at < limits.SLOW_S:
            return False
        self.marked = now, self.size
        return self.size - size < limits.SLOW_RATE * (now - marked_at)


class Uploads:
    """The bodies in memory, with a common limit."""

    def __init__(self, max_body: int):
        """Accept bodies of at most `max_body` bytes each, and a few times that in all."""
        self._max_body = max_body
        self._uploads: list[_Upload] = []  # oldest first

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[bytes]:
        """Receive a request's body; it counts as in memory until the end of the block.

        Raises RequestRefused for one that is too large or too slow, and ClientDisconnect.
        """
        now = anyio.current_time()
        upload = _Upload(now, marked=(now, 0))
        self._uploads.append(upload)
        try:
            yield await self._read(upload, request)
        finally:
            self._uploads.remove(upload)
            if upload.size > limits.SMALL_BODY:
                trim_heap()  # glibc would keep the memory, once per parsing thread

    async def _read(self, upload: _Upload, request: Request) -> bytes:
        if int(request.headers.get("content-length", 0)) > self._max_body:
            raise self._too_large()
        parts = list[bytes]()
        try:
            with upload.scope:
                self._set_deadline(upload)
                async for part in request.stream():
                    parts.append(part)
                    upload.size += len(part)
                    if upload.size > self._max_body:
                        raise self._too_large()
                    await self._wait_for_memory(upload)
                    self._set_deadline(upload)
                upload.is_receiving = False
                return b"".join(parts)
        finally:
            parts.clear()  # an error refers to this frame until its response is sent
        raise RequestRefused(
            408,
            f"the body arrived too slowly: send it within {limits.BODY_S:g} s, a large one at "
            f"{limits.BODY_RATE / 1e3:g} KB/s, or at {limits.SLOW_RATE / 1e3:g} KB/s while other "
            "requests wait.",
        )

    def _set_deadline(self, upload: _Upload) -> None:
        upload.scope.deadline = (
            upload.started + upload.waited + limits.BODY_S + upload.size / limits.BODY_RATE
        )

    async def _wait_for_memory(self, upload: _Upload) -> None:
        """Wait until there is memory for more of a body; a small one and the oldest never wait.

        Slow bodies are refused while another waits.
        """
        while (
            upload.size > limits.SMALL_BODY
            and upload is not self._uploads[0]
            and sum(each.size for each in self._uploads) > limits.BODIES * self._max_body
        ):
            upload.is_receiving = False
            for each in self._uploads:
                if each.is_slow():
                    each.scope.cancel()
            if upload.waited >= limits.MEMORY_S:
                raise RequestRefused(503, "too many large requests at once: try again later.")
            upload.waited += _POLL_S
            self._set_deadline(upload)
            await anyio.sleep(_POLL_S)
            upload.marked = anyio.current_time(), upload.size
        upload.is_receiving = True

    def _too_large(self) -> RequestRefused:
        return RequestRefused(
            413,
            f"the body is larger than {self._max_body / 1e6:g} MB: send less, or start the server "
            "with a larger --max-body.",
        )


async def disconnected(request: Request) -> None:
    """Wait until the client of a request disconnects; its body has been received."""
    while not await request.is_disconnected():
        await anyio.sleep(DISCONNECT_POLL_S)


def parse_json(body: bytes, max_values: int) -> Any:
    """Return the value of a JSON text in UTF-8.

    The parser limits the nesting and the length of a number, and rejects lone surrogates in names
    and strings. Raises RequestRefused for an invalid body.
    """
    if _has_more_values(body, max_values):
        raise RequestRefused(400, f"the body has more than {max_values:,} JSON values: send fewer.")
    try:
        body = body.removeprefix(codecs.BOM_UTF8)
        return from_json(body, cache_strings="none")
    except ValueError as error:
        hint = " (a lone surrogate)" if "hex escape" in str(error) else ""
        raise RequestRefused(400, f"the body is not JSON: {error}{hint}.") from error


def _has_more_values(body: bytes, maximum: int) -> bool:
    """Return whether a JSON text may have more than `maximum` values, without building any.

    Every value but the first follows a comma or an opening bracket outside of strings. A bracket
    may also be followed by no value, so this is an upper bound.
    """
    if _count_marks(body) < maximum:
        return False
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if body.count(b'"') > 4 * maximum:  # 4 quotes: a string and its key
        return True
    return _count_marks(b"".join(body.split(b'"')[::2])) >= maximum


def _count_marks(text: bytes) -> int:
    return sum(text.count(mark) for mark in b",[{")
