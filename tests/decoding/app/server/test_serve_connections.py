"""Connections of `serve` that are slow, idle, many or not quite HTTP: they hold up nobody else."""

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
QUEUE, CLIENT, TOTAL = 4, 16, 20  # requests, and connections with what `hasty` sets


def hasty() -> None:
    """Let the server's limits be short and low."""
    from decoding.app.server.worker import limits

    limits.CONNECTIONS, limits.CLIENT_CONNECTIONS = TOTAL - QUEUE, CLIENT - QUEUE
    limits.CHECK_S, limits.IDLE_S, limits.HEAD_S, limits.BODY_S = 0.1, 0.7, 1.0, 1.0
    limits.STALL_S, limits.LINGER_S, limits.DRAIN_IDLE_S = 0.7, 0.3, 0.2


@pytest.fixture(scope="module")
def server(model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("connections") / "run"
    with serving(folder, *model, "--queue", str(QUEUE), before=hasty) as running:
        yield running


class Client:
    """A connection, on which anything can be sent."""

    def __init__(self, server: Serving, sent: bytes = b"", address: str = "127.0.0.1"):
        at = urlsplit(server.url)
        assert at.hostname is not None
        target = (at.hostname, at.port or 0)
        self.socket = socket.create_connection(target, PATIENCE, source_address=(address, 0))
        self.socket.sendall(sent)

    def rest(self) -> bytes:
        """Return all that comes until the server closes the connection."""
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
        """Tell whether the server has left it open; drops what was received."""
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
    "a body for nobody": request(CHAT, path=b"/nowhere")[:-9],
    "idle behind a reply": GET,
}


@pytest.mark.parametrize("name", slow_except(SLOW, 2, 4, 7))
def test_slow_clients_hold_nobody_up(name: str, server: Serving) -> None:
    """However many they are; and they are not kept."""
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
def test_what_comes_drop_by_drop_has_an_end(name: str, server: Serving) -> None:
    client = Client(server, SLOW[name])
    end = time.monotonic() + PATIENCE
    while client.is_open():
        assert time.monotonic() < end, "it is never closed"
        client.socket.settimeout(PATIENCE)
        client.socket.sendall(b"a")
        time.sleep(0.1)
    client.socket.close()


def test_a_slow_client_is_told(server: Serving) -> None:
    head, body, nothing = (
        Client(server, SLOW[name]) for name in ("half a head", "half a body", "nothing")
    )
    assert b" 408 Request Timeout\r\n" in head.rest()
    reply = body.rest()
    assert b" 408 Request Timeout\r\n" in reply
    assert b"too slowly" in reply
    assert nothing.rest() == b""


def test_one_clients_connections_cost_another_none(server: Serving) -> None:
    """Of the client that has the most, the one that has waited longest is closed for the next."""
    other = [Client(server, b"GET /", address="127.0.0.2") for _ in range(3)]
    own = [Client(server, b"GET /") for _ in range(2 * TOTAL)]
    assert b"200 OK" in Client(server, GET[:-2] + b"Connection: close\r\n\r\n").rest()
    assert all(each.is_open() for each in other)
    wait_for(lambda: sum(each.is_open() for each in own) <= CLIENT)
    assert not own[0].is_open()
    for each in (*other, *own):
        each.socket.close()


def test_requests_that_wait_keep_their_connections(server: Serving) -> None:
    """Slow ones give way to the next, and those that wait for an answer do not."""
    long = CHAT[:-1] + b', "max_tokens": 60}'
    asking = [Client(server, request(long, b"Connection: close")) for _ in range(QUEUE)]
    slow = [Client(server, b"GET /") for _ in range(TOTAL)]
    for each in asking:
        assert b"200 OK" in each.rest()
    for each in slow:
        each.socket.close()


def test_a_client_that_reads_nothing_is_dropped(server: Serving) -> None:
    pages = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000
    client = Client(server)
    with pytest.raises(ConnectionError):  # the server reads no more, and then closes it
        client.socket.sendall(pages * 100)
    client.socket.close()
    assert server.ask("/health")["status"] == "ok"


HALF_CLOSED = {
    "a look": (GET, b"200 OK"),
    "a look by HTTP/1.0": (GET.replace(b"1.1", b"1.0"), b"200 OK"),
    "a question": (request(CHAT), b'"finish_reason":"length"'),
    "a stream": (request(STREAM), b"[DONE]"),
    "two looks": (GET + GET, b"200 OK"),
}


@pytest.mark.parametrize("name", HALF_CLOSED)
def test_a_client_that_ends_its_side_is_answered(name: str, server: Serving) -> None:
    sent, expected = HALF_CLOSED[name]
    client = Client(server, sent)
    client.socket.shutdown(socket.SHUT_WR)
    reply = client.rest()
    assert reply.count(expected) == sent.count(b"Host:")
    # and what was not sent whole is not waited for: it gets no reply, not even that it is late
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
def test_a_client_that_is_refused_is_not_asked_for_its_body(
    head: bytes, status: bytes, server: Serving
) -> None:
    line = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    client = Client(server, line + head + b"\r\nExpect: 100-continue\r\n\r\n")
    assert client.rest().startswith(b"HTTP/1.1 " + status)


SMUGGLED = b"0\r\n\r\n" + GET
AMBIGUOUS = {
    "two framings": (b"Content-Length: 6", b"Transfer-Encoding: chunked"),
    "two framings, chunked first": (b"Transfer-Encoding: chunked", b"Content-Length: 6"),
    "two lengths": (b"Content-Length: 5", b"Content-Length: 6"),
    "two lengths in one": (b"Content-Length: 5, 6",),
    "a sign": (b"Content-Length: +5",),
    "less than none": (b"Content-Length: -5",),
    "no decimal": (b"Content-Length: 0x5",),
    "a blank": (b"Content-Length : 5",),
    "two encodings": (b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    "another encoding": (b"Transfer-Encoding: gzip, chunked",),
    "no encoding": (b"Transfer-Encoding: identity",),
    "another blank": (b"Transfer-Encoding : chunked",),
    "two hosts": (b"Host: evil.example",),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_requests_of_ambiguous_length_are_refused(name: str, server: Serving) -> None:
    """And what follows is not taken for another request."""
    head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reply = Client(server, head + b"\r\n".join(AMBIGUOUS[name]) + b"\r\n\r\n" + SMUGGLED).rest()
    assert reply.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert reply.count(b"HTTP/1.1 ") == 2  # its own message names the protocol
    assert b"Connection: close\r\n" in reply


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
WRONG = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300), 400),
    "a long line": (b"GET /" + b"a" * 1_000_000, 431),
    "a large head": (GET[:-2] + b"".join(b"X-%d: a\r\n" % each for each in range(9000)), 431),
    "a large whole head": (GET[:-2] + b"X: " + b"a" * 60_000 + b"\r\n\r\n", 431),
    "no chunk": (CHUNKED + b"ZZ\r\n", 400),
    "a longer chunk": (CHUNKED + b"1\r\nabcd\r\n", 400),
    "a chunk's large head": (CHUNKED + b"1;" + b"a" * 100_000, 431),
    "tiny chunks": (CHUNKED + b"1\r\na\r\n" * 100_000, 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "null": (b"GET /\x00 HTTP/1.1\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_http_is_refused(name: str, server: Serving) -> None:
    sent, status = WRONG[name]
    client = Client(server)
    client.socket.sendall(sent)
    reply = client.rest()
    assert reply.startswith(b"HTTP/1.1 %d " % status)
    error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert server.ask("/health")["status"] == "ok"


UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"


def test_an_upgrade_is_not_made(server: Serving) -> None:
    reply = Client(server, GET[:-2] + UPGRADE + b"\r\n").rest()
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("path", [b"/health/", b"/v1/models/", b"/v1/completions/", b"//evil/"])
def test_nothing_is_redirected_and_no_header_repeated(path: bytes, server: Serving) -> None:
    for host, status in ((b"localhost:99", b" 404 "), (b"evil.example", b" 403 ")):
        head = b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"
        reply = Client(server, head).rest()
        assert status in reply.partition(b"\r\n")[0]
        assert b"location" not in reply.lower()
        assert host not in reply


def test_a_connection_for_which_there_is_no_room_is_told() -> None:
    """Where all others wait for the server, none is closed for it."""

    async def run() -> bytes:
        config = uvicorn.Config(FastAPI(), lifespan="off", ws="none", log_config=None)
        state = ServerState()
        listening = await asyncio.get_running_loop().create_server(
            lambda: Connection(config=config, server_state=state, app_state={}, at_most=0),
            "127.0.0.1",
        )
        async with listening:
            reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
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
