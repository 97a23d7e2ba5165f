"""The answers to a request's prompts, delivered whole or as a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import ServerSentEvent

from decoding.app.server.formats.replies import Answer, ReplyBuilder, error_body
from decoding.app.server.http.receiving import disconnected
from decoding.app.server.worker.echo import echo
from decoding.app.server.worker.jobs import (
    Event,
    Failed,
    Finished,
    ProgressUpdate,
    PromptScored,
    QueuedRequest,
    RequestQueue,
    TextDelta,
)
from decoding.app.server.worker.prompts import Prompts

_Result = TypeVar("_Result")
SEPARATOR = "\n"


class Delivery:
    """The answers to the prompts of one request, which are queued; used once."""

    def __init__(
        self,
        batch: Sequence[QueuedRequest],
        builder: ReplyBuilder,
        queue: RequestQueue,
        prompts: Prompts,
        building: asyncio.Semaphore,
    ):
        """`building` limits the large answers that are built at a time, on other threads."""
        self._batch, self._queue, self._builder = batch, queue, builder
        self._prompts, self._building = prompts, building
        params = batch[0].params
        self._has_logprobs, self._has_echo = params.top_logprobs is not None, params.has_echo
        self._offsets: dict[int, int] = {}  # characters before the answer to a prompt, once begun
        self._counts: list[dict[str, Any]] = [{} for _ in batch]  # each prompt's statistics

    async def whole(self, request: Request) -> Response:
        """Return the whole answers; the wait ends early if the client disconnects."""
        events: list[list[Event]] = [[] for _ in self._batch]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_client, request)
            async for index, event in self._events():
                if not isinstance(event, ProgressUpdate):
                    events[index].append(event)
            tasks.cancel_scope.cancel()
        self._queue.cancel(self._batch)
        if isinstance(event, Failed):
            return JSONResponse(error_body(event), event.status)
        return await self._build(partial(self._response, events))

    async def stream(self, with_usage: bool) -> AsyncIterator[ServerSentEvent]:
        """Yield the answers as they are generated, with progress as comments."""
        try:
            for content in self._builder.opening():
                yield _data(content)
            async for index, event in self._events():
                # not before there is a token: clients time the prefill
                if index not in self._offsets and not _precedes_tokens(event):
                    async for chunk in self._begin(index, event):
                        yield chunk
                for chunk in await self._chunks(index, event):
                    yield chunk
            if isinstance(event, Failed):
                return
            for content in self._builder.usage(self._counts) if with_usage else ():
                yield _data(content)
            if self._builder.ends_with_done:
                yield ServerSentEvent("[DONE]", sep=SEPARATOR)
        finally:
            self._queue.cancel(self._batch)

    async def _chunks(self, index: int, event: Event) -> list[ServerSentEvent]:
        """Return what the stream has for an event of a prompt."""
        if isinstance(event, ProgressUpdate):
            return [self._comment(index, event)]
        if isinstance(event, TextDelta):
            return _all_data(self._builder.chunk(index, event.after(self._offsets[index])))
        if isinstance(event, Failed):
            return [_data(self._builder.failure(event))]
        if not isinstance(event, Finished):
            return []
        self._counts[index] = event.counts
        return await self._build(lambda: _all_data(self._builder.last(index, event)))

    async def _build(self, function: Callable[[], _Result]) -> _Result:
        """Return a function's result, which may have all of the answer.

        A large one takes a while; small ones wait neither for a thread nor for a large one.
        """
        if not (self._has_logprobs or self._has_echo):
            return function()
        async with self._building:
            return await run_sync(function)

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events of all prompts, to the end of the last one or the first failure."""
        missing = len(self._batch)
        while missing:
            index, event = await self._batch[0].events.get()
            missing -= isinstance(event, Finished)
            yield index, event
            if isinstance(event, Failed):
                return

    async def _watch_client(self, request: Request) -> None:
        """Cancel the request when its client disconnects."""
        await disconnected(request)
        self._queue.cancel(self._batch)
        self._batch[0].fail(Failed(499, "the client disconnected."))

    async def _begin(self, index: int, event: Event) -> AsyncIterator[ServerSentEvent]:
        """Yield the chunks before the answer to a prompt, given its first event that is sent."""
        self._offsets[index] = 0
        for content in self._builder.first(index):
            yield _data(content)
        parts = self._echo(index, event)
        while self._has_echo and (chunks := await run_sync(self._next_chunks, index, parts)):
            for chunk in chunks:
                yield chunk

    def _next_chunks(self, index: int, parts: Iterator[TextDelta]) -> list[ServerSentEvent]:
        """Return chunks with the next part of a prompt; none after the last one."""
        if (part := next(parts, None)) is None:
            return []
        self._offsets[index] += len(part.text)
        return _all_data(self._builder.chunk(index, part))

    def _response(self, events: Sequence[Sequence[Event]]) -> Response:
        """Return the response, given the events of each prompt."""
        answers = [self._answer(index, own) for index, own in enumerate(events)]
        return JSONResponse(self._builder.whole(answers))

    def _answer(self, index: int, events: Sequence[Event]) -> Answer:
        *others, last = events
        assert isinstance(last, Finished)
        echoed = TextDelta.joined(list(self._echo(index, events[0])))
        deltas = [each for each in others if isinstance(each, TextDelta)]
        answer = TextDelta.joined(deltas).after(len(echoed.text))
        return Answer(TextDelta.joined([echoed, answer]), last.reason, last.counts)

    def _echo(self, index: int, event: Event) -> Iterator[TextDelta]:
        """Yield a prompt in parts if it is echoed, given the first event with any of its answer."""
        params = self._batch[index].params
        if params.has_echo:
            scored = event.logprobs if isinstance(event, PromptScored) else None
            yield from echo(self._prompts, params, scored if self._has_logprobs else None)

    def _comment(self, index: int, progress: ProgressUpdate) -> ServerSentEvent:
        """Return progress as a comment; that of one of several prompts with its index."""
        place = {"index": index} if len(self._batch) > 1 else {}
        return ServerSentEvent(comment=json.dumps({**place, **progress.data}), sep=SEPARATOR)


def _precedes_tokens(event: Event) -> bool:
    """Return whether an answer has no tokens yet when an event comes, or never has."""
    is_early = isinstance(event, ProgressUpdate) and "counts" not in event.data
    return is_early or isinstance(event, Failed)


def _all_data(contents: Sequence[dict[str, Any]]) -> list[ServerSentEvent]:
    return list(map(_data, contents))


def _data(content: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(content), event=content.get("type"), sep=SEPARATOR)
