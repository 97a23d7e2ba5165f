"""HTTP/1.1 connections of uvicorn, with bounds on how long and how many a client may hold."""

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

from decoding.app.server.http.replies import error_of
from decoding.app.server.worker import limits
from decoding.app.server.worker.jobs import Failed


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections may be open."""

    total: int
    per_client: int  # by IP address

    @classmethod
    def for_queue(cls, queue: int) -> ConnectionLimits:
        """Return the limits of a server where `queue` requests may wait for their answer."""
        return cls(queue + limits.CONNECTIONS, queue + limits.CLIENT_CONNECTIONS)

    @property
    def momentary(self) -> int:
        """Return how many may be open until the server comes round to closing some."""
        return 2 * self.total

    @property
    def open_files(self) -> int:
        """Return how many files the server may have open at a time."""
        return self.momentary + limits.BACKLOG + limits.OTHER_FILES


class HttpServer(uvicorn.Server):
    """A server that closes connections which hold up others, and those that take too long."""

    _next_check = 0.0

    def __init__(self, config: uvicorn.Config, at_most: ConnectionLimits):
        super().__init__(config)
        self._at_most = at_most

    async def on_tick(self, counter: int) -> bool:
        """Look at all connections; called ten times a second."""
        connections = cast(set[Connection], self.server_state.connections)
        if len(connections) > self._at_most.per_client:
            self._make_room([each for each in connections if not each.transport.is_closing()])
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + limits.CHECK_S
            for each in list(connections):
                each.check()
        return await super().on_tick(counter)

    def _make_room(self, connections: Sequence[Connection]) -> None:
        """Close connections that wait for their clients until the limits are kept.

        The client that holds most loses the one that has waited longest. Those that are new have
        not been read from yet.
        """
        held = Counter(each.address for each in connections)
        closable = [
            each for each in connections if each.is_waiting_for_client and not each.has_sent_nothing
        ]
        order = list[tuple[int, Connection]]()  # each with what its client holds at its turn
        for each in sorted(closable, key=lambda each: each.since):
            order.append((held[each.address], each))
            held[each.address] -= 1
        total = len(connections)
        for holds, each in sorted(order, key=lambda pair: pair[0], reverse=True):
            if holds <= self._at_most.per_client and total <= self._at_most.total:
                return
            each.transport.abort()
            total -= 1


class _StrictParser(h11.Connection):
    """h11's parser, which also refuses what is ambiguous, too large or too costly to parse.

    By RFC 9112, 6.1, a request with both Content-Length and Transfer-Encoding may be an attempt to
    hide a second one from a proxy. h11 bounds only heads that come in several pieces.
    """

    _chunks = _bytes = 0  # of the body

    def next_event(self) -> Any:
        """Return the next event. Raises RemoteProtocolError for what is not accepted."""
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

    It waits for its client while no request is complete, or while the client does not read.
    """

    def __init__(self, *arguments: Any, at_most: int, **named: Any):
        """Let there be `at_most` of them, whatever the server has not come round to closing."""
        super().__init__(*arguments, **named)
        self.conn = _StrictParser(h11.SERVER, limits.HEAD_BYTES)
        self.address = ""
        self.since = 0.0  # when it was opened, or its last reply was complete
        self._at_most = at_most
        self._unsent, self._sent_at = 0, 0.0  # bytes of replies, and when their number last changed
        self._has_ended = False  # the client sends no more; it may still read
        self._is_refused = False

    def connection_made(self, transport: BaseTransport) -> None:
        """Take a connection, in place of another or not at all if there are too many."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.address = self.client[0] if self.client else ""
        self.since = self._sent_at = self.loop.time()
        every = cast(set[Connection], self.connections)
        open_ = [each for each in every if not each.transport.is_closing()]
        if len(open_) > self._at_most:
            waiting = [each for each in open_ if each.is_waiting_for_client and each is not self]
            if waiting:  # the one that has waited longest of the client that holds most
                held = Counter(each.address for each in open_)
                min(waiting, key=lambda each: (-held[each.address], each.since)).transport.abort()
            else:
                self._refuse(503, "too many connections: close some, or try again later.")

    def data_received(self, data: bytes) -> None:
        """Take what the client sends; after a refusal it is discarded."""
        if not self._is_refused:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to stay open: a client that sends no more may wait for its reply."""
        self._has_ended = True
        return not (self._is_refused or self._is_between_requests or self.cycle.more_body)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP/1.1; called while h11's error is being handled."""
        error = sys.exc_info()[1]
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            size = limits.HEAD_BYTES // 1024
            self._refuse(431, f"the head of the request, or of a chunk, exceeds {size} KB.")
        else:
            self._refuse(
                400,
                "this is not a valid HTTP/1.1 request, or its length is ambiguous, or its chunks "
                "are too small.",
            )

    def on_response_complete(self) -> None:
        """Wait for the next request, unless the client has said that there is none."""
        self.since = self.loop.time()
        super().on_response_complete()
        if self._has_ended and self._is_between_requests:
            self.transport.close()

    def shutdown(self) -> None:
        """End it, now or after the reply that is under way."""
        if self._is_refused or (not self._is_between_requests and self.cycle.more_body):
            self.transport.abort()
        else:
            super().shutdown()

    def check(self) -> None:
        """Close the connection if its client has used up its time."""
        now = self.loop.time()
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent or not unsent:
            self._unsent, self._sent_at = unsent, now
        waited = now - self.since
        if now - self._sent_at > limits.STALL_S or (self._is_refused and waited > limits.LINGER_S):
            self.transport.abort()
        elif self._is_refused or self.transport.is_closing():
            return  # what is unsent has time until then
        elif self._is_between_requests:
            if waited > limits.HEAD_S:
                self._refuse(408, f"no complete request came within {limits.HEAD_S:g} s.")
        elif self._has_ended and not self.cycle.response_started:
            self._probe()

    @property
    def has_sent_nothing(self) -> bool:
        return self.loop.time() - self.since < limits.NEW_S

    @property
    def is_waiting_for_client(self) -> bool:
        return (
            self._is_refused
            or self._is_between_requests
            or self.cycle.more_body
            or self.flow.write_paused
        )

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _probe(self) -> None:
        """Send what clients have to ignore: to one that is gone it fails the second time.

        A client that closes its connection and one that only ends its side of it look the same.
        """
        if self.scope["http_version"] == "1.1":
            interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(interim))

    def _refuse(self, status: int, message: str) -> None:
        """Send an error if no reply has begun, and close the connection shortly after."""
        self._is_refused, self.since = True, self.loop.time()
        self._unset_keepalive_if_required()
        has_begun = False
        if not self._is_between_requests:
            has_begun = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        is_heard = status != 408 or self.conn.trailing_data[0]
        if has_begun or not is_heard or self.transport.is_closing():
            self.transport.close()
            return
        body = json.dumps(error_of(Failed(status, message))).encode()
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        # not closed at once: unread input would make the kernel reset the connection, and the
        # client could lose the error
        with suppress(OSError):  # reset by the client at this moment
            self.transport.write_eof()
