"""HTTP/1.1 connections of uvicorn, with limits of their number and duration per client."""

from __future__ import annotations

import http
import json
import sys
import time
from asyncio import BaseTransport
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from decoding.app.server.formats.replies import error_body
from decoding.app.server.worker import limits
from decoding.app.server.worker.jobs import Failed


@dataclass(frozen=True)
class ConnectionLimits:
    """The maximum numbers of open connections."""

    total: int
    per_client: int  # per IP address

    @classmethod
    def for_queue(cls, queue: int) -> ConnectionLimits:
        """Return the limits of a server that queues at most `queue` requests."""
        return cls(queue + limits.CONNECTIONS, queue + limits.CLIENT_CONNECTIONS)

    @property
    def hard_limit(self) -> int:
        """Return the maximum number of open connections until the next check closes some."""
        return 2 * self.total

    @property
    def open_files(self) -> int:
        """Return the maximum number of open files of the server."""
        return self.hard_limit + limits.BACKLOG + limits.OTHER_FILES


class HttpServer(uvicorn.Server):
    """A server that closes connections beyond the limits of number and time."""

    _next_check = 0.0

    def __init__(self, config: uvicorn.Config, connection_limits: ConnectionLimits):
        super().__init__(config)
        self._limits = connection_limits

    async def on_tick(self, counter: int) -> bool:
        """Enforce the limits of all connections; called ten times per second."""
        connections = cast(set[Connection], self.server_state.connections)
        if len(connections) > self._limits.per_client:
            self._close_excess([each for each in connections if not each.transport.is_closing()])
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + limits.CHECK_S
            for connection in list(connections):
                connection.check()
        return await super().on_tick(counter)

    def _close_excess(self, connections: Sequence[Connection]) -> None:
        """Close connections that wait for their clients until the limits hold.

        The client with the most connections loses the one that has waited longest. New ones are
        spared, since nothing has been read from them yet.
        """
        open_per_client = Counter(each.address for each in connections)
        closable = [each for each in connections if each.is_waiting_for_client and not each.is_new]
        # connections, with the number of open ones of their client at their turn
        candidates = list[tuple[int, Connection]]()
        for each in sorted(closable, key=lambda each: each.idle_since):
            candidates.append((open_per_client[each.address], each))
            open_per_client[each.address] -= 1
        total = len(connections)
        for count, each in sorted(candidates, key=lambda pair: pair[0], reverse=True):
            if count <= self._limits.per_client and total <= self._limits.total:
                return
            each.transport.abort()
            total -= 1


class _StrictParser(h11.Connection):
    """h11's parser, which also refuses requests that are ambiguous, too large or slow to parse.

    A request with both Content-Length and Transfer-Encoding may be an attempt to hide a second one
    from a proxy (RFC 9112, 6.1). h11 limits only headers that arrive in several pieces.
    """

    _chunks = _bytes = 0  # received parts of the body

    def next_event(self) -> Any:
        """Return the next event. Raises RemoteProtocolError for a refused request."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            size = len(event.target) + sum(len(name) + len(value) for name, value in event.headers)
            if size > limits.HEAD_BYTES:
                raise h11.RemoteProtocolError("too large", error_status_hint=431)
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("ambiguous length")
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._bytes += len(event.data)
            if self._chunks > limits.CHUNKS + self._bytes / limits.CHUNK_BYTES:
                raise h11.RemoteProtocolError("tiny chunks")
        return event


class Connection(H11Protocol):
    """A client's connection.

    It waits for its client while no request is complete, and while the client does not read.
    """

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any):
        """`max_connections`: limit of open connections, enforced as soon as one is made."""
        super().__init__(*args, **kwargs)
        self.conn = _StrictParser(h11.SERVER, limits.HEAD_BYTES)
        self.address = ""
        self.idle_since = 0.0  # time of its opening, last complete response, or refusal
        self._max_connections = max_connections
        self._unsent = 0  # bytes of responses
        self._sent_at = 0.0  # time when `_unsent` was measured
        self._has_ended = False  # the client has closed its side; it may still read
        self._is_rejected = False

    def connection_made(self, transport: BaseTransport) -> None:
        """Accept a connection; if there are too many, close another or refuse this one."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.address = self.client[0] if self.client else ""
        self.idle_since = self._sent_at = self.loop.time()
        connections = cast(set[Connection], self.connections)
        open_ = [each for each in connections if not each.transport.is_closing()]
        if len(open_) > self._max_connections:
            waiting = [each for each in open_ if each.is_waiting_for_client and each is not self]
            if waiting:
                # the client with the most connections loses the one that has waited longest
                per_client = Counter(each.address for each in open_)
                first = min(waiting, key=lambda each: (-per_client[each.address], each.idle_since))
                first.transport.abort()
            else:
                self._reject(503, "too many connections: close some, or try again later.")

    def data_received(self, data: bytes) -> None:
        """Handle received data; after an error it is discarded."""
        if not self._is_rejected:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to stay open: a client that sends no more may wait for its response."""
        self._has_ended = True
        return not (self._is_rejected or self._is_between_requests or self.cycle.more_body)

    def send_400_response(self, msg: str) -> None:
        """Reject what is not HTTP/1.1; called while h11's error is being handled."""
        error = sys.exc_info()[1]
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            size = limits.HEAD_BYTES // 1024
            self._reject(431, f"the header of the request or of a chunk exceeds {size} KB.")
        else:
            self._reject(
                400,
                "not a valid HTTP/1.1 request: it is malformed, its length is ambiguous, or its "
                "chunks are too small.",
            )

    def on_response_complete(self) -> None:
        """Wait for the next request, unless the client has closed its side."""
        self.idle_since = self.loop.time()
        super().on_response_complete()
        if self._has_ended and self._is_between_requests:
            self.transport.close()

    def shutdown(self) -> None:
        """Close the connection, now or after the current response."""
        if self._is_rejected or (not self._is_between_requests and self.cycle.more_body):
            self.transport.abort()
        else:
            super().shutdown()

    def check(self) -> None:
        """Close the connection if its client has exceeded a time limit."""
        now = self.loop.time()
        unsent = self.transport.get_write_buffer_size()
        has_read = self._unsent - unsent >= limits.STALL_BYTES
        if has_read or unsent > self._unsent or not unsent:
            self._unsent, self._sent_at = unsent, now
        waited = now - self.idle_since
        if now - self._sent_at > limits.STALL_S or (self._is_rejected and waited > limits.LINGER_S):
            self.transport.abort()
        elif self._is_rejected or self.transport.is_closing():
            return  # unsent data may still be read
        elif self._is_between_requests:
            if waited > limits.HEAD_S:
                self._reject(408, f"no complete request arrived within {limits.HEAD_S:g} s.")
        elif self._has_ended and not self.cycle.response_started:
            self._probe()

    @property
    def is_new(self) -> bool:
        return self.loop.time() - self.idle_since < limits.NEW_S

    @property
    def is_waiting_for_client(self) -> bool:
        return (
            self._is_rejected
            or self._is_between_requests
            or self.cycle.more_body
            or self.flow.write_paused
        )

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _probe(self) -> None:
        """Send a `100 Continue`, which clients ignore; to one that is gone, the second send fails.

        A full close by the client and a close of only its own side look the same until then.
        """
        if self.scope["http_version"] == "1.1":
            interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(interim))

    def _reject(self, status: int, message: str) -> None:
        """Send an error if no response has begun, and close the connection shortly after."""
        self._is_rejected = True
        self.idle_since = self.loop.time()
        self._unset_keepalive_if_required()
        has_begun = False
        if not self._is_between_requests:
            has_begun = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        is_expected = status != 408 or self.conn.trailing_data[0]
        if has_begun or not is_expected or self.transport.is_closing():
            self.transport.close()
            return
        body = json.dumps(error_body(Failed(status, message))).encode()
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        # a close at once would make the kernel reset the connection if input is unread, and the
        # client could lose the error
        with suppress(OSError):  # the client has just reset the connection
            self.transport.write_eof()
