"""Memory of requests to `serve`: bodies that are received, parsed and freed."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Awaitable, Callable, Iterable

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
from starlette.requests import Request
from starlette.types import Message

from decoding.app.server.http.guards import RequestGuard, RequestRefused
from decoding.app.server.http.parsing import ServedModel
from decoding.app.server.http.receiving import Uploads, parse_json
from decoding.app.server.http.routes import Server
from decoding.app.server.worker import limits
from decoding.app.server.worker.jobs import (
    Failed,
    ProgressUpdate,
    QueuedRequest,
    RequestQueue,
    TextDelta,
)
from decoding.app.server.worker.metrics import Metrics
from decoding.speculation.sampling import Sampling

MAX_BODY = 1_000_000
PART = bytes(100_000)
POST = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
}


def upload(parts: Iterable[bytes], ends: bool = True) -> Request:
    """Return a request whose body arrives in these parts, and then ends or is never complete."""
    remaining = iter(parts)

    async def receive() -> Message:
        for part in remaining:
            return {"type": "http.request", "body": part, "more_body": True}
        if not ends:
            await asyncio.sleep(1000)
        return {"type": "http.request", "body": b"", "more_body": False}

    return Request(POST, receive)


async def status_of(
    uploads: Uploads, request: Request, held_until: asyncio.Event | None = None
) -> int:
    """Return the status of a refused request, or 200 if the body is received."""
    try:
        async with uploads.receive(request) as body:
            assert len(body) % len(PART) == 0
            if held_until is not None:
                await held_until.wait()
    except RequestRefused as refused:
        return refused.failed.status
    return 200


@pytest.fixture
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BODY_S", 0.3), ("SLOW_S", 0.1)):
        monkeypatch.setattr(limits, name, seconds)


@pytest.mark.usefixtures("_short_times")
def test_the_size_and_the_time_of_a_body_are_limited() -> None:
    async def run() -> None:
        uploads = Uploads(MAX_BODY)
        for request, status in (
            (upload([PART] * 10), 200),
            (upload([PART] * 11), 413),
            (upload(iter(lambda: PART, None)), 413),  # endless body
            (upload([], ends=False), 408),
            (upload([PART], ends=False), 408),
        ):
            assert await status_of(uploads, request) == status

    asyncio.run(run())


@pytest.mark.usefixtures("_short_times")
def test_stalled_bodies_are_refused_for_others() -> None:
    """Their memory is limited, and a small body never waits for them."""

    async def run() -> None:
        uploads = Uploads(MAX_BODY)
        stalled = [
            asyncio.create_task(status_of(uploads, upload([PART] * 9, ends=False)))
            for _ in range(20)
        ]
        await asyncio.sleep(0.01)
        total = sum(each.size for each in uploads._uploads)
        assert limits.BODIES * MAX_BODY < total < (limits.BODIES + 1) * MAX_BODY + 20 * len(PART)
        assert await status_of(uploads, upload([])) == 200
        assert await status_of(uploads, upload([PART] * 10)) == 200
        refused = [each.result() for each in stalled if each.done()]
        assert 408 in refused  # long before their own deadline
        assert set(refused) <= {408, 503}
        for task in stalled:
            task.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)
        assert not uploads._uploads

    asyncio.run(run())


def test_bodies_wait_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for a limited time while others are parsed."""

    async def run() -> None:
        uploads, parsed = Uploads(MAX_BODY), asyncio.Event()

        def ask() -> asyncio.Task[int]:
            return asyncio.create_task(status_of(uploads, upload([PART] * 10), parsed))

        first = [ask() for _ in range(limits.BODIES)]
        await asyncio.sleep(0.01)
        second = [ask() for _ in range(limits.BODIES)]
        await asyncio.sleep(0.1)
        assert sum(each.size for each in uploads._uploads) < 2 * limits.BODIES * MAX_BODY
        assert not any(each.done() for each in (*first, *second))
        parsed.set()
        assert [await each for each in (*first, *second)] == [200] * 2 * limits.BODIES
        monkeypatch.setattr(limits, "MEMORY_S", 0.2)
        parsed.clear()
        first = [ask() for _ in range(limits.BODIES)]
        await asyncio.sleep(0.01)
        assert await ask() == 503
        parsed.set()
        assert [await each for each in first] == [200] * limits.BODIES

    asyncio.run(run())


VALUES = {
    "numbers": b"[" + b"1," * 99 + b"1]",
    "lists": b"[" + b"[1]," * 48 + b"[1,1]]",
    "pairs": b"{" + b",".join(b'"%d":1' % each for each in range(99)) + b"}",
    "strings": b"[" + b'"",' * 98 + b'""]',
    "string that looks like values": json.dumps('[{,"\\' * 1000).encode(),
    "escape at the end": json.dumps([',\\"\\\\', "," * 1000, '"']).encode(),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_counted_before_parsing(name: str) -> None:
    text = VALUES[name]
    assert parse_json(text, 101) == json.loads(text)
    if not name.startswith(("string that", "escape")):
        with pytest.raises(RequestRefused, match="more than 98 JSON values"):
            parse_json(text, 98)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b"[" * 300 + b"]" * 300,
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b"1" * 5000,
        b'"' + b"a" * 1_000_000,
        b'"' + b"\\" * 1_000_001,
        b"",
        b"{} {}",
        '{"a": "é"}'.encode("latin-1"),
        "{}".encode("utf-16"),
        b'{"\\ud83d": 1}',
        b'["\\udc00"]',
        b'"\xed\xa0\xbd"',
    ],
)
def test_invalid_json_is_refused(text: bytes) -> None:
    with pytest.raises(RequestRefused, match=r"not JSON|JSON values") as refused:
        parse_json(text, 1000)
    assert refused.value.failed.status == 400
    refused.value.response()  # the message can be encoded


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', 10) == {"a": 1}


class _Prompts:
    """A tokenizer that returns the same few tokens for any text."""

    def tokenize_text(self, _: str) -> list[int]:
        return [1, 2, 3]


def test_the_body_of_a_queued_request_is_freed() -> None:
    """Its bytes and its parsed values, whether the answer is streamed or not."""
    body = {
        "model": "model",
        "prompt": "a" * 4_000_000,
        "metadata": {"a": "b" * 4_000_000, "nested": [[[]] * 100] * 300},
    }

    async def ask(app: Callable[..., Awaitable[None]], streamed: bool) -> None:
        sent = [json.dumps({**body, "stream": streamed}).encode()]

        async def receive() -> Message:
            if sent:
                return {"type": "http.request", "body": sent.pop(), "more_body": False}
            await asyncio.sleep(1000)
            return {"type": "http.disconnect"}

        async def send(_: Message) -> None:
            pass

        await app({**POST, "asgi": {}, "query_string": b""}, receive, send)

    async def run() -> None:
        queue = RequestQueue(limit=4)
        metrics = Metrics(queue, None)  # type: ignore[arg-type]
        served = ServedModel("model", "model", 1000, 10, Sampling(), 5)
        server = Server(queue, _Prompts(), metrics, served, 16_000_000)  # type: ignore[arg-type]
        app = RequestGuard(server.app(), None, [], metrics)
        tracemalloc.start()
        tasks = [asyncio.create_task(ask(app, streamed)) for streamed in (True, False)]
        while queue.waiting < 2:
            await asyncio.sleep(0.01)
        for _ in range(500):  # the parsing thread may still hold it for a moment
            gc.collect()
            current, peak = tracemalloc.get_traced_memory()
            if current < 4_000_000:
                break
            await asyncio.sleep(0.01)
        tracemalloc.stop()
        assert peak > 8_000_000
        assert current < 4_000_000
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_an_unread_answer_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNREAD_EVENTS", 10)

    async def run() -> None:
        unread = QueuedRequest(None)  # type: ignore[arg-type]
        for _ in range(100):
            unread.send(TextDelta("a"))
            await asyncio.sleep(0)
        assert unread.is_over  # the engine stops
        events = [unread.events.get_nowait() for _ in range(unread.events.qsize())]
        assert events[:10] == [(0, TextDelta("a"))] * 10
        assert isinstance(events[10][1], Failed)
        assert len(events) == 11
        read = QueuedRequest(None)  # type: ignore[arg-type]
        for position in range(100):
            read.send(ProgressUpdate({"waiting": position}))
            assert await read.events.get() == (0, ProgressUpdate({"waiting": position}))
        assert not read.is_over

    asyncio.run(run())
