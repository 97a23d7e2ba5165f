"""Who may ask, and how much: what stands before all else that a server does."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

import anyio
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoding.app.server.http.replies import error_of
from decoding.app.server.worker import limits
from decoding.app.server.worker.jobs import Failed
from decoding.app.server.worker.metrics import Metrics

_OPEN = ("/", "/health")  # what is shown to everybody
_BAD_KEY = "invalid_api_key"
_HEADERS = {  # by status
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    429: {"Retry-After": "5"},
    503: {"Retry-After": "5"},
}


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
        self.failed = Failed(status, message, code, param, details)

    def reply(self) -> JSONResponse:
        """Return what its client is told."""
        status = self.failed.status
        return JSONResponse(error_of(self.failed), status, _HEADERS.get(status))


class RequestGuard:
    """Lets requests through to an application, and refuses others before their body is read."""

    def __init__(
        self, app: ASGIApp, hosts: Sequence[str] | None, keys: Sequence[str], metrics: Metrics
    ):
        """Guard `app`.

        Args:
            app: what is behind.
            hosts: by which clients may call this server; None for any. A page of another site
                could let its own name stand for this machine.
            keys: one of which has to come with a request; none where it is for everybody.
            metrics: count replies.
        """
        self._app, self._hosts = app, hosts
        self._keys = [_digest(key) for key in keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        headers = Headers(scope=scope)
        incoming = _Incoming(receive, headers.get("expect", "").lower() == "100-continue")

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] != 408:  # of a slow one there is nothing to discard
                    await incoming.drain()
                self._metrics.replies.labels(str(message["status"])).inc()
            await send(message)

        try:
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            if scope["method"] == "POST":
                _check_type(headers)
        except Refused as refused:
            await refused.reply()(scope, incoming.receive, reply)
            return
        await self._app(scope, incoming.receive, reply)

    def _check_host(self, headers: Headers) -> None:
        host = re.sub(r":\d*$", "", headers.get("host", ""))
        if self._hosts is not None and host.lower() not in self._hosts:
            raise Refused(403, "this server does not go by the name in the Host header.")

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


class _Incoming:
    """A request's body, as it comes."""

    def __init__(self, receive: Receive, is_announced: bool):
        """`is_announced`: whether the client sends it only once it has been received from."""
        self._receive = receive
        self._is_complete = False
        self._is_announced = is_announced

    async def receive(self) -> Message:
        """Return what comes next: of the body, or that the client is gone."""
        self._is_announced = False
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._is_complete = True
        return message

    async def drain(self) -> None:
        """Discard the rest of the body, for a while: a client that is still sending may not read.

        Where the connection is closed with the reply, unread input would reset it.
        """
        if self._is_announced:
            return
        with anyio.move_on_after(limits.DRAIN_S):
            while not self._is_complete:
                with anyio.move_on_after(limits.DRAIN_IDLE_S) as waiting:
                    await self.receive()
                if waiting.cancelled_caught:
                    return


def _check_type(headers: Headers) -> None:
    """Refuse what a page of another site may send without asking."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "send JSON, with the header `Content-Type: application/json`.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
