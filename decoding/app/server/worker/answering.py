"""The engine's side of a server: one request after another, on the thread that owns the models."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from decoding.app.options import as_flags
from decoding.app.server.worker.counts import request_counts
from decoding.app.server.worker.jobs import (
    INTERNAL_ERROR,
    Failed,
    Finished,
    GenerationParams,
    ProgressUpdate,
    QueuedRequest,
    RequestQueue,
    TextDelta,
    TokenLogprobs,
)
from decoding.app.server.worker.metrics import Metrics
from decoding.app.server.worker.names import prompt_name
from decoding.app.server.worker.stop_strings import StopStrings
from decoding.app.server.worker.token_bytes import TokenBytes
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

_REPORT_INTERVAL_S = 0.1  # minimum time between two reports of progress


class EngineWorker:
    """Answers queued requests; each leaves its caches to the next, which may continue it."""

    def __init__(self, engine: Engine, queue: RequestQueue, metrics: Metrics):
        self.engine, self.queue, self.metrics = engine, queue, metrics
        self._token_bytes = TokenBytes(engine.tokenizer)

    def run(self) -> None:
        """Answer requests until the queue is closed; called by rank 0.

        Raises errors after which the engine is unusable.
        """
        with self.engine.conversation():
            while True:
                with self.engine.keep_workers_alive():
                    request = self.queue.take()
                if request is None:
                    return
                self._answer(request)

    def _answer(self, request: QueuedRequest) -> None:
        """Answer a request; errors of its own are sent to its client."""
        started, before = time.perf_counter(), self.engine.stats
        try:
            with closing(_Answer(self.engine, request, self._token_bytes)) as answer:
                is_complete = answer.generate()
            summary = summary_line(self.engine.stats)
            say(summary if is_complete else f"aborted: {summary}")
        except RequestCancelled:
            say("aborted during prefill")
        except RankLost:
            raise
        except TierForceError as error:
            request.fail(_as_failure(error))
            say(f"request failed: {as_flags(str(error))}")
        except Exception as error:
            if self.engine.group.size > 1:  # the other ranks are in the middle of a forward
                raise
            request.fail(INTERNAL_ERROR)
            say(f"request failed: {type(error).__name__}: {one_line(error)}")
        if self.engine.stats is not before:
            self.metrics.count(self.engine.stats, time.perf_counter() - started)


def _as_failure(error: TierForceError) -> Failed:
    """Return an error as its client sees it; most errors of this machine are only logged."""
    if isinstance(error, InvalidRequestError):
        return Failed(400, str(error))
    if isinstance(error, InsufficientMemoryError):
        return Failed(503, as_flags(str(error)), "out_of_memory")
    return INTERNAL_ERROR


class _Answer:
    """The answer to one request, while it is generated."""

    def __init__(self, engine: Engine, queued: QueuedRequest, token_bytes: TokenBytes):
        params = queued.params
        self.engine, self.queued = engine, queued
        self._logprobs = None
        if params.top_logprobs is not None:
            self._logprobs = _LogprobRecorder(params, token_bytes)
        self._stops = StopStrings(params.stops)
        self._new: list[TokenLogprobs] = []  # tokens that have no text yet
        self._unsent: deque[tuple[int, TokenLogprobs]] = deque()  # tokens by their text's offset
        self._length = 0  # characters generated, including those held back
        self._sent = 0  # characters sent
        self._next_report = 0.0
        request = Request(
            params.prompt.tolist(),
            params.max_new_tokens,
            params.sampling,
            progress=self._on_prefill,
            name=(
                prompt_name(engine.tokenizer, params.prompt) if engine.sessions.prefix_cache else ""
            ),
            on_stats=self._on_stats,
            on_logits=self._logprobs.on_logits if self._logprobs is not None else None,
            is_cancelled=lambda: queued.is_over,
        )
        self._tokens = engine.submit(request)

    def generate(self) -> bool:
        """Generate the answer while its client waits for it; return whether it is complete."""
        for piece in detokenize_stream(self.engine.tokenizer, self._recorded_tokens()):
            self._unsent.extend((self._length, token) for token in self._new)
            self._new.clear()
            self._length += len(piece)
            self._send(self._stops.feed(piece))
            if self._stops.is_hit or self.queued.is_over:
                break
        if self.queued.is_over:
            return False
        if not self._stops.is_hit:
            self._unsent.extend((self._length, token) for token in self._new)
            self._send(self._stops.rest(), self._length + 1)
        stats = self.engine.stats
        reason = "stop" if self._stops.is_hit else stats.finish_reason
        self.queued.send(Finished(reason or "stop", self._counts(stats)))
        return True

    def close(self) -> None:
        """Stop generating."""
        self._tokens.close()

    def _recorded_tokens(self) -> Iterator[int]:
        """Yield the new tokens while the client waits, and record their log-probabilities."""
        for token in self._tokens:
            if self._logprobs is not None:
                self._new.append(self._logprobs.take(token))
            yield token
            if self.queued.is_over:
                return

    def _send(self, text: str, end: int | None = None) -> None:
        """Send text to the client, with the tokens that begin before its end."""
        self._sent += len(text)
        end = self._sent if end is None else end
        tokens = []
        while self._unsent and self._unsent[0][0] < end:
            tokens.append(self._unsent.popleft())
        if text or tokens:
            self.queued.send(TextDelta(text, tokens))

    def _on_prefill(self, done: int, total: int) -> None:
        if self._is_report_due() or done == total:
            self.queued.send(ProgressUpdate({"prefill": [done, total]}))

    def _on_stats(self, stats: Stats) -> None:
        if self._is_report_due():
            self.queued.send(ProgressUpdate({"counts": self._counts(stats)}))

    def _counts(self, stats: Stats) -> dict[str, Any]:
        return request_counts(stats, self.engine, self.queued.params.sampling.seed)

    def _is_report_due(self) -> bool:
        now = time.monotonic()
        if now < self._next_report:
            return False
        self._next_report = now + _REPORT_INTERVAL_S
        return True


class _LogprobRecorder:
    """Log-probabilities of the generated tokens, from the target forwards that verified them."""

    def __init__(self, params: GenerationParams, token_bytes: TokenBytes):
        self._top, self._sampling = params.top_logprobs or 0, params.sampling
        self._token_bytes = token_bytes
        self._logprobs: deque[Tensor] = deque()  # (V,) float32 per token that is still to come
        self._probs: deque[Tensor] = deque()  # (V,) likewise, as they are sampled from

    @torch.inference_mode()
    def on_logits(self, logits: Tensor) -> None:
        """Take the logits (n, V) of the next n tokens."""
        self._logprobs.extend(logits.float().log_softmax(-1))
        self._probs.extend(self._sampling.probs(logits))

    @torch.inference_mode()
    def take(self, token: int) -> TokenLogprobs:
        """Return the log-probabilities of the next token, whose id is `token`."""
        logprobs, probs = self._logprobs.popleft(), self._probs.popleft()
        values, tokens = logprobs.topk(min(self._top, len(logprobs)))
        names = map(self._token_bytes.bytes_of, tokens.tolist())
        top = list(zip(names, values.tolist(), strict=True))
        name = self._token_bytes.bytes_of(token)
        return TokenLogprobs(name, logprobs[token].item(), probs[token].log().item(), top)
