"""Bodies of requests: received within bounds of size, time and memory, and parsed as JSON."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from pydantic_core import from_json
from starlette.requests import Request

from decoding.app.server.http.guards import Refused
from decoding.app.server.worker import limits
from offload.memory.host import trim_heap

_POLL_S = 0.05  # between two looks at whether there is memory


@dataclass(eq=False)
class _Upload:
    """A body in memory, complete or not. Times are those of the event loop."""

    started: float
    waited: float = 0.0  # seconds, for memory
    size: int = 0  # bytes so far
    is_receiving: bool = True  # whether it waits for its client
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    marked: tuple[float, int] = (0.0, 0)  # a time, and the size then

    def is_slow(self) -> bool:
        """Return whether less has come since the last mark than may be expected, and mark anew."""
        now = anyio.current_time()
        since, size = self.marked
        if not self.is_receiving or now - since < limits.SLOW_S:
            return False
        self.marked = now, self.size
        return self.size - size < limits.SLOW_RATE * (now - since)


class Uploads:
    """The bodies that are in memory, which have a limit in common."""

    def __init__(self, max_body: int):
        """Take bodies of at most `max_body` bytes, and a few times that in all."""
        self._max_body = max_body
        self._uploads: list[_Upload] = []  # the oldest first

    @asynccontextmanager
    async def received(self, request: Request) -> AsyncIterator[bytes]:
        """Receive a request's body; it is taken to be in memory until the end of the block.

        Raises Refused for one that is too large or too slow, and ClientDisconnect.
        """
        now = anyio.current_time()
        upload = _Upload(now, marked=(now, 0))
        self._uploads.append(upload)
        try:
            yield await self._receive(upload, request)
        finally:
            self._uploads.remove(upload)
            if upload.size > limits.SMALL_BODY:
                trim_heap()  # glibc would keep it for each of the threads that parse

    async def _receive(self, upload: _Upload, request: Request) -> bytes:
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
            parts.clear()  # an error refers to this frame until its reply is sent
        raise Refused(
            408,
            f"the request's body came too slowly: send it within {limits.BODY_S:g} s, a large one "
            f"at {limits.BODY_RATE / 1e3:g} KB/s or, while others wait, "
            f"{limits.SLOW_RATE / 1e3:g} KB/s.",
        )

    def _set_deadline(self, upload: _Upload) -> None:
        upload.scope.deadline = (
            upload.started + upload.waited + limits.BODY_S + upload.size / limits.BODY_RATE
        )

    async def _wait_for_memory(self, upload: _Upload) -> None:
        """Wait until more of a body may be received; a small one and the oldest never wait.

        Those that come slowly are refused while another waits.
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
                raise Refused(503, "too many large requests at once: try again later.")
            upload.waited += _POLL_S
            self._set_deadline(upload)
            await anyio.sleep(_POLL_S)
            upload.marked = anyio.current_time(), upload.size
        upload.is_receiving = True

    def _too_large(self) -> Refused:
        return Refused(
            413,
            f"the request is larger than {self._max_body / 1e6:g} MB: send less, or start the "
            "server with a larger --max-body.",
        )


def parse_json(body: bytes, max_values: int) -> Any:
    """Return what a JSON text in UTF-8 stands for.

    Nesting is bounded by the parser, as is the length of a number; names and strings with half of a
    surrogate pair are refused. Raises Refused for what is not accepted.
    """
    if _has_more_values(body, max_values):
        raise Refused(400, f"the body has more than {max_values:,} JSON values: send fewer.")
    try:
        body = body.removeprefix(codecs.BOM_UTF8)
        return from_json(body, cache_strings="none")
    except ValueError as error:
        hint = " (half a character: a lone surrogate)" if "hex escape" in str(error) else ""
        raise Refused(400, f"the body is not JSON: {error}{hint}.") from error


def _has_more_values(body: bytes, most: int) -> bool:
    """Return whether a JSON text may have more values than `most`, without building any of them.

    Each but the first follows a comma or a bracket that is not in a string; nothing need follow a
    bracket.
    """
    if _count_marks(body) < most:
        return False
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if body.count(b'"') > 4 * most:  # each value has a key at most
        return True
    return _count_marks(b"".join(body.split(b'"')[::2])) >= most


def _count_marks(text: bytes) -> int:
    return sum(text.count(mark) for mark in b",[{")
