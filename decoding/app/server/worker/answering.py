"""The engine's side of a server: one request after another, on the thread that has the models."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from decoding.app.options import as_flags
from decoding.app.server.worker.counts import counts_of
from decoding.app.server.worker.jobs import (
    BROKEN,
    Failed,
    Finished,
    GenerationParams,
    QueuedRequest,
    QueueUpdate,
    RequestQueue,
    TextDelta,
    TokenLogprobs,
)
from decoding.app.server.worker.metrics import Metrics
from decoding.app.server.worker.names import name_of
from decoding.app.server.worker.stop_strings import StopStrings
from decoding.app.server.worker.token_texts import TokenTexts
from decoding.app.terminal.messages import summary_line
from decoding.app.terminal.streams import say
from decoding.engine.engine import Engine
from decoding.engine.request import Request
from decoding.engine.stats import Stats
from decoding.text.detokenizer import detokenize_stream
from offload.errors import (
    InsufficientMemoryError,
    InvalidRequestError,
    RequestCancelled,
    TierForceError,
    one_line,
)
from parallel.ranks.environment import RankLost

_LEAST_S = 0.1  # between two reports of how far something is


class EngineWorker:
    """Answers jobs; the caches of one text stay until the next, which may go on from it."""

    def __init__(self, engine: Engine, queue: RequestQueue, metrics: Metrics):
        self.engine, self.queue, self.metrics = engine, queue, metrics
        self._texts = TokenTexts(engine.tokenizer)

    def run(self) -> None:
        """Answer job after job until the queue is closed; for rank 0.

        Raises what leaves no engine to go on with.
        """
        with self.engine.conversation():
            while True:
                with self.engine.keep_workers_alive():
                    job = self.queue.take()
                if job is None:
                    return
                self._answer(job)

    def _answer(self, job: QueuedRequest) -> None:
        """Answer a job; what is wrong with it is told to its client."""
        started, before = time.perf_counter(), self.engine.stats
        try:
            with closing(_Answer(self.engine, job, self._texts)) as answer:
                is_complete = answer.write()
            said = summary_line(self.engine.stats)
            say(said if is_complete else f"given up: {said}")
        except RequestCancelled:
            say("given up while its prompt was read")
        except RankLost:
            raise
        except TierForceError as error:
            job.fail(_told(error))
            say(f"not answered: {as_flags(str(error))}")
        except Exception as error:
            if self.engine.group.size > 1:  # the others are in the middle of a pass
                raise
            job.fail(BROKEN)
            say(f"not answered: {type(error).__name__}: {one_line(error)}")
        if self.engine.stats is not before:
            self.metrics.count(self.engine.stats, time.perf_counter() - started)


def _told(error: TierForceError) -> Failed:
    """Return what a client is told of an error; of what is wrong with this machine not much."""
    if isinstance(error, InvalidRequestError):
        return Failed(400, str(error))
    if isinstance(error, InsufficientMemoryError):
        return Failed(503, as_flags(str(error)), "out_of_memory")
    return BROKEN


class _Answer:
    """The answer to one job, as it is written."""

    def __init__(self, engine: Engine, job: QueuedRequest, texts: TokenTexts):
        asked = job.params
        self.engine, self.job = engine, job
        self._laws = None if asked.top_logprobs is None else _Logprobs(asked, texts)
        self._stops = StopStrings(asked.stops)
        self._new: list[TokenLogprobs] = []  # whose text is still to come
        self._told: deque[tuple[int, TokenLogprobs]] = deque()  # whose text is held back
        self._length = 0  # characters that were written, those that are held back among them
        self._shown = 0  # of which so many were told
        self._next_report = 0.0
        request = Request(
            asked.prompt.tolist(),
            asked.new,
            asked.sampling,
            progress=self._read,
            name=name_of(engine.tokenizer, asked.prompt) if engine.sessions.prefix_cache else "",
            on_stats=self._watch,
            on_logits=self._laws.on_logits if self._laws is not None else None,
            is_cancelled=lambda: job.is_over,
        )
        self._tokens = engine.submit(request)

    def write(self) -> bool:
        """Write it as long as anybody waits for it; return whether it came to its end."""
        for piece in detokenize_stream(self.engine.tokenizer, self._noted()):
            self._told.extend((self._length, law) for law in self._new)
            self._new.clear()
            self._length += len(piece)
            self._show(self._stops.feed(piece))
            if self._stops.is_hit or self.job.is_over:
                break
        if self.job.is_over:
            return False
        if not self._stops.is_hit:
            self._told.extend((self._length, law) for law in self._new)
            self._show(self._stops.rest(), self._length + 1)
        stats = self.engine.stats
        reason = "stop" if self._stops.is_hit else stats.finish_reason
        self.job.send(Finished(reason or "stop", self._counts(stats)))
        return True

    def close(self) -> None:
        """Let nothing more be written."""
        self._tokens.close()

    def _noted(self) -> Iterator[int]:
        """Yield the tokens as they come, while anybody waits for them."""
        for token in self._tokens:
            if self._laws is not None:
                self._new.append(self._laws.of(token))
            yield token
            if self.job.is_over:
                return

    def _show(self, text: str, end: int | None = None) -> None:
        """Tell the client of text, with the tokens that begin before its end."""
        self._shown += len(text)
        end = self._shown if end is None else end
        laws = []
        while self._told and self._told[0][0] < end:
            laws.append(self._told.popleft())
        if text or laws:
            self.job.send(TextDelta(text, laws))

    def _read(self, done: int, total: int) -> None:
        if self._may_report() or done == total:
            self.job.send(QueueUpdate({"prefill": [done, total]}))

    def _watch(self, stats: Stats) -> None:
        if self._may_report():
            self.job.send(QueueUpdate({"counts": self._counts(stats)}))

    def _counts(self, stats: Stats) -> dict[str, Any]:
        return counts_of(stats, self.engine, self.job.params.sampling.seed)

    def _may_report(self) -> bool:
        now = time.monotonic()
        if now < self._next_report:
            return False
        self._next_report = now + _LEAST_S
        return True


class _Logprobs:
    """The target's probabilities of the tokens that are written, from the passes that made them."""

    def __init__(self, asked: GenerationParams, texts: TokenTexts):
        self._top, self._sampling, self._texts = asked.top_logprobs or 0, asked.sampling, texts
        self._rows: deque[Tensor] = deque()  # (V,) of each token that is still to come
        self._laws: deque[Tensor] = deque()  # (V,) likewise

    @torch.inference_mode()
    def on_logits(self, logits: Tensor) -> None:
        """Take the logits (n, V) of the next n tokens."""
        self._rows.extend(logits.float().log_softmax(-1))
        self._laws.extend(self._sampling.probs(logits))

    @torch.inference_mode()
    def of(self, token: int) -> TokenLogprobs:
        """Return what is told of the next token, which is this one."""
        row, law = self._rows.popleft(), self._laws.popleft()
        values, tokens = row.topk(min(self._top, len(row)))
        names = map(self._texts.bytes_of, tokens.tolist())
        top = list(zip(names, values.tolist(), strict=True))
        name = self._texts.bytes_of(token)
        return TokenLogprobs(name, row[token].item(), law[token].log().item(), top)
