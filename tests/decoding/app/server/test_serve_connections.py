"""Slow, idle, excess or malformed connections to `serve`: they do not block other clients."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from decoding.app.server.http.connections import Connection
from support.commands import PATIENCE, wait_for
from support.serving import Serving, serving
from support.slow import slow_except

CHAT = json.dumps({"model": "model", "messages": [{"role": "user", "content": "Who?"}]}).encode()
STREAM = CHAT[:-1] + b', "stream": true}'
QUEUE = 4  # requests
CLIENT, TOTAL = 16, 20  # connections, with the limits of `set_low_limits`


def set_low_limits() -> None:
    """Set the server's limits to low numbers and short times."""
    from decoding.app.server.worker import limits

    limits.CONNECTIONS, limits.CLIENT_CONNECTIONS = TOTAL - QUEUE, CLIENT - QUEUE
    limits.CHECK_S, limits.IDLE_S, limits.HEAD_S, limits.BODY_S = 0.1, 0.7, 1.0, 1.0
    limits.STALL_S, limits.LINGER_S, limits.DRAIN_IDLE_S = 0.7, 0.3, 0.2


@pytest.fixture(scope="module")
def server(model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("connections") / "run"
    with serving(folder, *model, "--queue", str(QUEUE), before=set_low_limits) as running:
        yield running


class Client:
    """A raw connection that can send any bytes."""

    def __init__(self, server: Serving, sent: bytes = b"", address: str = "127.0.0.1"):
        url = urlsplit(server.url)
        assert url.hostname is not None
        target = (url.hostname, url.port or 0)
        self.socket = socket.create_connection(target, PATIENCE, source_address=(address, 0))
        self.socket.sendall(sent)

    def rest(self) -> bytes:
        """Return all data received until the server closes the connection."""
        received = b""
        try:
            while part := self.socket.recv(65536):
                received += part
        except ConnectionError:
            pass
        finally:
            self.socket.close()
        return received

    def is_open(self) -> bool:
        """Return whether the server has left the connection open; discards received data."""
        self.socket.settimeout(0)
        try:
            while self.socket.recv(65536):
                pass
        except BlockingIOError:
            return True
        except ConnectionError:
            pass
        return False


def request(body: bytes, *headers: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    head = [
        b"POST " + path + b" HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        *headers,
    ]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SLOW = {
    "nothing": b"",
    "half a request line": b"GET /hea",
    "half a head": GET[:-4],
    "no body": request(CHAT)[: -len(CHAT)],
    "half a body": request(CHAT)[:-9],
    "half a chunk": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
    b"application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    "half a body for an unknown route": request(CHAT, path=b"/nowhere")[:-9],
    "idle after a response": GET,
}


@pytest.mark.parametrize("name", slow_except(SLOW, 2, 4, 7))
def test_slow_clients_do_not_block_others(name: str, server: Serving) -> None:
    """Any number of them: their connections are closed."""
    slow = [Client(server, SLOW[name]) for _ in range(3 * TOTAL)]
    assert server.ask("/health")["status"] == "ok"
    assert server.status("/v1/chat/completions", CHAT) == 200
    for client in slow:
        wait_for(lambda client=client: not client.is_open())
        client.socket.close()


@pytest.mark.parametrize(
    "name", slow_except(["half a request line", "half a head", "half a body"], 2)
)
@pytest.mark.slow
def test_a_request_sent_byte_by_byte_is_closed(name: str, server: Serving) -> None:
    client = Client(server, SLOW[name])
    end = time.monotonic() + PATIENCE
    while client.is_open():
        assert time.monotonic() < end, "the connection is never closed"
        client.socket.settimeout(PATIENCE)
        client.socket.sendall(b"a")
        time.sleep(0.1)
    client.socket.close()


def test_a_slow_client_receives_a_timeout_error(server: Serving) -> None:
    head, body, nothing = (
        Client(server, SLOW[name]) for name in ("half a head", "half a body", "nothing")
    )
    assert b" 408 Request Timeout\r\n" in head.rest()
    reply = body.rest()
    assert b" 408 Request Timeout\r\n" in reply
    assert b"too slowly" in reply
    assert nothing.rest() == b""


def test_excess_connections_of_a_client_do_not_close_those_of_another(server: Serving) -> None:
    """The client with the most loses the one that has waited longest."""
    other = [Client(server, b"GET /", address="127.0.0.2") for _ in range(3)]
    own = [Client(server, b"GET /") for _ in range(2 * TOTAL)]
    assert b"200 OK" in Client(server, GET[:-2] + b"Connection: close\r\n\r\n").rest()
    assert all(each.is_open() for each in other)
    wait_for(lambda: sum(each.is_open() for each in own) <= CLIENT)
    assert not own[0].is_open()
    for client in (*other, *own):
        client.socket.close()


def test_connections_of_queued_requests_stay_open(server: Serving) -> None:
    """Slow ones are closed for new ones, and those waiting for an answer are not."""
    long = CHAT[:-1] + b', "max_tokens": 60}'
    queued = [Client(server, request(long, b"Connection: close")) for _ in range(QUEUE)]
    slow = [Client(server, b"GET /") for _ in range(TOTAL)]
    for client in queued:
        assert b"200 OK" in client.rest()
    for client in slow:
        client.socket.close()


def test_a_client_that_does_not_read_is_closed(server: Serving) -> None:
    pages = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000
    client = Client(server)
    with pytest.raises(ConnectionError):  # the server reads no more, and then closes it
        client.socket.sendall(pages * 100)
    client.socket.close()
    assert server.ask("/health")["status"] == "ok"


HALF_CLOSED = {
    "get": (GET, b"200 OK"),
    "get by HTTP/1.0": (GET.replace(b"1.1", b"1.0"), b"200 OK"),
    "completion": (request(CHAT), b'"finish_reason":"length"'),
    "stream": (request(STREAM), b"[DONE]"),
    "two gets": (GET + GET, b"200 OK"),
}


@pytest.mark.parametrize("name", HALF_CLOSED)
def test_a_client_that_closes_its_own_side_is_answered(name: str, server: Serving) -> None:
    sent, expected = HALF_CLOSED[name]
    client = Client(server, sent)
    client.socket.shutdown(socket.SHUT_WR)
    reply = client.rest()
    assert reply.count(expected) == sent.count(b"Host:")
    # an incomplete request is not waited for: it gets no response, not even a timeout error
    client = Client(server, sent[:-3])
    client.socket.shutdown(socket.SHUT_WR)
    reply = client.rest()
    assert reply.count(expected) == reply.count(b"HTTP/1.") == sent.count(b"Host:") - 1


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Content-Type: text/plain\r\nContent-Length: 500000", b"415"),
        (b"Content-Type: application/json\r\nContent-Length: 500000000", b"413"),
    ],
)
def test_a_refused_request_gets_no_continue(head: bytes, status: bytes, server: Serving) -> None:
    line = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    client = Client(server, line + head + b"\r\nExpect: 100-continue\r\n\r\n")
    assert client.rest().startswith(b"HTTP/1.1 " + status)


SMUGGLED = b"0\r\n\r\n" + GET
AMBIGUOUS = {
    "two framings": (b"Content-Length: 6", b"Transfer-Encoding: chunked"),
    "two framings, chunked first": (b"Transfer-Encoding: chunked", b"Content-Length: 6"),
    "two lengths": (b"Content-Length: 5", b"Content-Length: 6"),
    "two lengths in one": (b"Content-Length: 5, 6",),
    "sign": (b"Content-Length: +5",),
    "negative": (b"Content-Length: -5",),
    "hexadecimal": (b"Content-Length: 0x5",),
    "blank": (b"Content-Length : 5",),
    "two encodings": (b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    "another encoding": (b"Transfer-Encoding: gzip, chunked",),
    "identity encoding": (b"Transfer-Encoding: identity",),
    "another blank": (b"Transfer-Encoding : chunked",),
    "two hosts": (b"Host: evil.example",),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_requests_of_ambiguous_length_are_refused(name: str, server: Serving) -> None:
    """Data after the header is not parsed as another request."""
    head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reply = Client(server, head + b"\r\n".join(AMBIGUOUS[name]) + b"\r\n\r\n" + SMUGGLED).rest()
    assert reply.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert reply.count(b"HTTP/1.1 ") == 2  # the status line, and the error message
    assert b"Connection: close\r\n" in reply


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
MALFORMED = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300), 400),
    "long line": (b"GET /" + b"a" * 1_000_000, 431),
    "large header": (GET[:-2] + b"".join(b"X-%d: a\r\n" % i for i in range(9000)), 431),
    "large header in one piece": (GET[:-2] + b"X: " + b"a" * 60_000 + b"\r\n\r\n", 431),
    "invalid chunk size": (CHUNKED + b"ZZ\r\n", 400),
    "wrong chunk size": (CHUNKED + b"1\r\nabcd\r\n", 400),
    "large chunk header": (CHUNKED + b"1;" + b"a" * 100_000, 431),
    "tiny chunks": (CHUNKED + b"1\r\na\r\n" * 100_000, 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "null": (b"GET /\x00 HTTP/1.1\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused(name: str, server: Serving) -> None:
    sent, status = MALFORMED[name]
    client = Client(server)
    client.socket.sendall(sent)
    reply = client.rest()
    assert reply.startswith(b"HTTP/1.1 %d " % status)
    error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert server.ask("/health")["status"] == "ok"


UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"


def test_an_upgrade_is_ignored(server: Serving) -> None:
    reply = Client(server, GET[:-2] + UPGRADE + b"\r\n").rest()
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("path", [b"/health/", b"/v1/models/", b"/v1/completions/", b"//evil/"])
def test_responses_have_no_redirect_and_do_not_echo_the_host(path: bytes, server: Serving) -> None:
    for host, status in ((b"localhost:99", b" 404 "), (b"evil.example", b" 403 ")):
        head = b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"
        reply = Client(server, head).rest()
        assert status in reply.partition(b"\r\n")[0]
        assert b"location" not in reply.lower()
        assert host not in reply


def test_a_connection_beyond_the_limit_receives_an_error() -> None:
    """None of the others is closed for it if all wait for the server."""

    async def run() -> bytes:
        config = uvicorn.Config(FastAPI(), lifespan="off", ws="none", log_config=None)
        state = ServerState()
        listener = await asyncio.get_running_loop().create_server(
            lambda: Connection(config=config, server_state=state, app_state={}, max_connections=0),
            "127.0.0.1",
        )
        async with listener:
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
            writer.write(GET)
            reply = await reader.read()
            writer.close()
            await writer.wait_closed()
            while state.connections:
                await asyncio.sleep(0.01)
        return reply

    reply = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert reply.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"too many connections" in reply
