"""Who may ask, and how much: what stands before all else that a server does."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import anyio
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoding.app.server.jobs import Failed
from decoding.app.server.metrics import Metrics
from decoding.app.server.replies import error_of

_OPEN = ("/", "/health")  # what is shown to everybody
_BAD_KEY = "invalid_api_key"
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "5"}}  # by status
_AT_ONCE = 64  # requests that are being received
_BODY_S = 60.0  # that a client may take to send its request
_READ_AWAY_S = 10.0  # that a request which is too large is read for, so that its client hears so


class Refused(Exception):
    """A request that goes no further."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        details: dict[str, int] | None = None,
    ):
        super().__init__(message)
        self.failed = Failed(status, message, code)
        self._about = param, details  # a field, and numbers for programs

    def reply(self) -> JSONResponse:
        """Return what its client is told."""
        status = self.failed.status
        return JSONResponse(error_of(self.failed, *self._about), status, _HEADERS.get(status))


class Guards:
    """Lets requests through to an application whole: their bodies have been received."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Sequence[str] | None,
        keys: Sequence[str],
        max_body: int,
        metrics: Metrics,
    ):
        """Guard `app`.

        Args:
            app: what is behind.
            hosts: by which clients may call this server; None for any. A page of another site
                could let its own name stand for this machine.
            keys: one of which has to come with a request; none where it is for everybody.
            max_body: bytes of a request, at most.
            metrics: count replies.
        """
        self._app, self._hosts, self._max_body = app, hosts, max_body
        self._keys = [_digest(key) for key in keys]
        self._metrics = metrics
        self._receiving = asyncio.Semaphore(_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.replies.labels(str(message["status"])).inc()
            await send(message)

        incoming = _Incoming(receive)
        try:
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            body = b""
            if scope["method"] == "POST":
                _check_type(headers)
                async with self._receiving:
                    body = await self._body(headers, incoming)
        except Refused as refused:
            await incoming.read_away()
            await refused.reply()(scope, receive, counted)
            return
        except _Gone:
            return
        await self._app(scope, _replayed(body, receive), counted)

    def _check_host(self, headers: Headers) -> None:
        host = re.sub(r":\d*$", "", headers.get("host", ""))
        if self._hosts is not None and host.lower() not in self._hosts:
            raise Refused(403, f"this server does not go by the name {host!r}.")

    def _check_key(self, path: str, headers: Headers) -> None:
        """Compare with all keys, in a time that tells nothing of them."""
        if not self._keys or path in _OPEN:
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip())
        known = [hmac.compare_digest(digest, key) for key in self._keys]
        if kind.lower() != "bearer" or not any(known):
            raise Refused(
                401, "send one of the server's keys as `Authorization: Bearer KEY`.", _BAD_KEY
            )

    async def _body(self, headers: Headers, incoming: _Incoming) -> bytes:
        """Return a request's body, which may be no larger and no slower than that."""
        said = headers.get("content-length", "0")
        if said.isdigit() and int(said) > self._max_body:
            raise self._too_large()
        parts, size = list[bytes](), 0
        try:
            with anyio.fail_after(_BODY_S):
                async for part in incoming.parts():
                    parts.append(part)
                    size += len(part)
                    if size > self._max_body:
                        parts.clear()
                        raise self._too_large()
        except TimeoutError as error:
            raise Refused(408, f"the request was not complete after {_BODY_S:.0f} s.") from error
        return b"".join(parts)

    def _too_large(self) -> Refused:
        return Refused(
            413,
            f"the request is larger than {self._max_body / 1e6:g} MB: send less, or start the "
            "server with a larger --max-body.",
        )


class _Gone(Exception):
    """The client is gone before it had said all."""


class _Incoming:
    """A request's body, as it comes."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._is_complete = False

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield what is left of it. Raises _Gone."""
        while not self._is_complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            self._is_complete = not message.get("more_body", False)
            yield message.get("body", b"")

    async def read_away(self) -> None:
        """Receive what nobody wants, for a while: who is still sending does not listen."""
        with anyio.move_on_after(_READ_AWAY_S), suppress(_Gone):
            async for _ in self.parts():
                pass


def _check_type(headers: Headers) -> None:
    """Refuse what a page of another site may send without asking."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, f"send JSON, as `Content-Type: application/json`; found {kind!r}.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return what gives a body at first, and then whatever else comes from the client."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
