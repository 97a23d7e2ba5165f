"""Access control: host names, API keys and content types, checked before a body is read."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

import anyio
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoding.app.server.formats.replies import error_body
from decoding.app.server.worker import limits
from decoding.app.server.worker.jobs import Failed
from decoding.app.server.worker.metrics import Metrics

_OPEN = ("/", "/health")  # paths that need no key
_JSON, _BYTES = "application/json", "application/octet-stream"
_TYPES = {"/documents": _BYTES}  # content types of bodies by path, if they are not JSON
_BAD_KEY = "invalid_api_key"
_HEADERS = {  # additional headers per status
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    429: {"Retry-After": "5"},
    503: {"Retry-After": "5"},
}


class RequestRefused(Exception):
    """A request that is answered with an error, and not processed further."""

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

    def response(self) -> JSONResponse:
        """Return the error response."""
        status = self.failed.status
        return JSONResponse(error_body(self.failed), status, _HEADERS.get(status))


class RequestGuard:
    """ASGI middleware: checks requests before their body is read, and refuses invalid ones."""

    def __init__(
        self, app: ASGIApp, hosts: Sequence[str] | None, keys: Sequence[str], metrics: Metrics
    ):
        """Guard `app`.

        Args:
            app: the application that handles accepted requests.
            hosts: accepted names in the Host header; None for any. The page of another site
                could make its own name resolve to this machine (DNS rebinding).
            keys: accepted API keys; if empty, none is needed.
            metrics: counts the responses by status.
        """
        self._app, self._hosts = app, hosts
        self._keys = [_digest(key) for key in keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        headers = Headers(scope=scope)
        incoming = _Incoming(receive, headers.get("expect", "").lower() == "100-continue")

        async def send_response(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] != 408:  # the body of a slow client would not end
                    await incoming.drain()
                self._metrics.replies.labels(str(message["status"])).inc()
            await send(message)

        try:
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            if scope["method"] == "POST":
                _check_type(scope["path"], headers)
        except RequestRefused as refused:
            await refused.response()(scope, incoming.receive, send_response)
            return
        await self._app(scope, incoming.receive, send_response)

    def _check_host(self, headers: Headers) -> None:
        host = re.sub(r":\d*$", "", headers.get("host", ""))
        if self._hosts is not None and host.lower() not in self._hosts:
            raise RequestRefused(
                403,
                "the Host header is not a name of this server: use the address that it printed.",
            )

    def _check_key(self, path: str, headers: Headers) -> None:
        """Compare with all keys, in a time that does not depend on them."""
        if not self._keys or path in _OPEN:
            return
        kind, _, value = headers.get("authorization", "").partition(" ")
        digest = _digest(value.strip())
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if kind.lower() != "bearer" or not any(matches):
            raise RequestRefused(
                401, "send one of the server's keys as `Authorization: Bearer KEY`.", _BAD_KEY
            )


class _Incoming:
    """The receiving side of a request, which knows whether the body is complete."""

    def __init__(self, receive: Receive, is_announced: bool):
        """`is_announced`: the client sends the body only after a `100 Continue`."""
        self._receive = receive
        self._is_complete = False
        self._is_announced = is_announced

    async def receive(self) -> Message:
        """Return the next message: a part of the body, or the client's disconnect."""
        self._is_announced = False
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._is_complete = True
        return message

    async def drain(self) -> None:
        """Discard the rest of the body, within limits: a client may not read while it sends.

        If the connection is closed after the response, unread input would reset it.
        """
        if self._is_announced:
            return
        with anyio.move_on_after(limits.DRAIN_S):
            while not self._is_complete:
                with anyio.move_on_after(limits.DRAIN_IDLE_S) as idle:
                    await self.receive()
                if idle.cancelled_caught:
                    return


def _check_type(path: str, headers: Headers) -> None:
    """Refuse content types that pages of other sites can send without a CORS preflight."""
    expected = _TYPES.get(path, _JSON)
    if headers.get("content-type", "").partition(";")[0].strip().lower() != expected:
        content = "JSON" if expected == _JSON else "the file's bytes"
        raise RequestRefused(415, f"send {content}, with the header `Content-Type: {expected}`.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
