"""What requests to `serve` take of memory: bodies that are received, parsed and let go of."""

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

from decoding.app.server.http.guards import Refused, RequestGuard
from decoding.app.server.http.parsing import ServedModel
from decoding.app.server.http.receiving import Uploads, parse_json
from decoding.app.server.http.routes import Server
from decoding.app.server.worker import limits
from decoding.app.server.worker.jobs import (
    Failed,
    QueuedRequest,
    QueueUpdate,
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
    """A request whose body comes in these parts, and then ends or is never complete."""
    coming = iter(parts)

    async def receive() -> Message:
        for part in coming:
            return {"type": "http.request", "body": part, "more_body": True}
        if not ends:
            await asyncio.sleep(1000)
        return {"type": "http.request", "body": b"", "more_body": False}

    return Request(POST, receive)


async def status_of(
    uploads: Uploads, request: Request, held_until: asyncio.Event | None = None
) -> int:
    """The status that a request is refused with; 200 where it is received."""
    try:
        async with uploads.received(request) as body:
            assert len(body) % len(PART) == 0
            if held_until is not None:
                await held_until.wait()
    except Refused as refused:
        return refused.failed.status
    return 200


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BODY_S", 0.3), ("SLOW_S", 0.1)):
        monkeypatch.setattr(limits, name, seconds)


@pytest.mark.usefixtures("_hasty")
def test_a_body_is_bounded_in_size_and_time() -> None:
    async def run() -> None:
        uploads = Uploads(MAX_BODY)
        for request, status in (
            (upload([PART] * 10), 200),
            (upload([PART] * 11), 413),
            (upload(iter(lambda: PART, None)), 413),  # without an end
            (upload([], ends=False), 408),
            (upload([PART], ends=False), 408),
        ):
            assert await status_of(uploads, request) == status

    asyncio.run(run())


@pytest.mark.usefixtures("_hasty")
def test_stalled_bodies_give_way() -> None:
    """They hold no more than the limit, and a small body never waits for them."""

    async def run() -> None:
        uploads = Uploads(MAX_BODY)
        stalled = [
            asyncio.create_task(status_of(uploads, upload([PART] * 9, ends=False)))
            for _ in range(20)
        ]
        await asyncio.sleep(0.01)
        held = sum(each.size for each in uploads._uploads)
        assert limits.BODIES * MAX_BODY < held < (limits.BODIES + 1) * MAX_BODY + 20 * len(PART)
        assert await status_of(uploads, upload([])) == 200
        assert await status_of(uploads, upload([PART] * 10)) == 200
        gone = [each.result() for each in stalled if each.done()]
        assert 408 in gone  # long before their own time was up
        assert set(gone) <= {408, 503}
        for each in stalled:
            each.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)
        assert not uploads._uploads

    asyncio.run(run())


def test_whole_bodies_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While others are parsed, for a bounded time."""

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
    "texts": b"[" + b'"",' * 98 + b'""]',
    "text that looks like values": json.dumps('[{,"\\' * 1000).encode(),
    "an escape at the end": json.dumps([',\\"\\\\', "," * 1000, '"']).encode(),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_counted_before_any_is_made(name: str) -> None:
    text = VALUES[name]
    assert parse_json(text, 101) == json.loads(text)
    if not name.startswith(("text that", "an escape")):
        with pytest.raises(Refused, match="more than 98 JSON values"):
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
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(Refused, match=r"not JSON|JSON values") as refused:
        parse_json(text, 1000)
    assert refused.value.failed.status == 400
    refused.value.reply()  # can be sent


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', 10) == {"a": 1}


class _Prompts:
    """A tokenizer that makes little of a text."""

    def of_text(self, _: str) -> list[int]:
        return [1, 2, 3]


def test_nothing_of_a_body_is_kept_while_its_request_waits() -> None:
    """Neither its bytes nor what they stand for, in a stream or not."""
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
        metrics = Metrics(queue)
        served = ServedModel("model", "model", 1000, 10, Sampling(), 5)
        server = Server(queue, _Prompts(), metrics, served, 16_000_000)  # type: ignore[arg-type]
        app = RequestGuard(server.app(), None, [], metrics)
        tracemalloc.start()
        asking = [asyncio.create_task(ask(app, streamed)) for streamed in (True, False)]
        while queue.waiting < 2:
            await asyncio.sleep(0.01)
        for _ in range(500):  # the thread that has parsed it may still be about to let go
            gc.collect()
            kept, peak = tracemalloc.get_traced_memory()
            if kept < 4_000_000:
                break
            await asyncio.sleep(0.01)
        tracemalloc.stop()
        assert peak > 8_000_000
        assert kept < 4_000_000
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(run())


def test_an_answer_that_is_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNREAD_EVENTS", 10)

    async def run() -> None:
        job = QueuedRequest(None)  # type: ignore[arg-type]
        for _ in range(100):
            job.send(TextDelta("a"))
            await asyncio.sleep(0)
        assert job.is_over  # so the engine stops
        events = [job.events.get_nowait() for _ in range(job.events.qsize())]
        assert events[:10] == [TextDelta("a")] * 10
        assert isinstance(events[10], Failed)
        assert len(events) == 11
        read = QueuedRequest(None)  # type: ignore[arg-type]
        for before in range(100):
            read.send(QueueUpdate({"waiting": before}))
            assert await read.events.get() == QueueUpdate({"waiting": before})
        assert not read.is_over

    asyncio.run(run())
