"""The engine's side of a server: requests are answered on the thread that owns the models."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
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
    PromptScored,
    QueuedRequest,
    RequestQueue,
    TextDelta,
    TokenLogprobs,
)
from decoding.app.server.worker.metrics import Metrics
from decoding.app.server.worker.names import prompt_name
from decoding.app.server.worker.stop_strings import StopStrings
from decoding.app.server.worker.token_bytes import TokenBytes
from decoding.app.terminal.messages import stats_line
from decoding.app.terminal.streams import say
from decoding.engine.engine import Engine
from decoding.engine.request import Request
from decoding.text.detokenizer import Detokenizer
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
    """Answers queued requests, several at once; each leaves its caches to those that follow."""

    def __init__(
        self, engine: Engine, queue: RequestQueue, metrics: Metrics, swap_space: int | None = None
    ):
        """Answer requests; `swap_space` as in `Engine.conversation`."""
        self.engine, self.queue, self.metrics = engine, queue, metrics
        self._swap_space = swap_space
        self._token_bytes = TokenBytes(engine.tokenizer)
        self._answers: list[_Answer] = []

    def run(self) -> None:
        """Answer requests until the queue is closed; called by rank 0.

        Raises errors after which the engine is unusable.
        """
        concurrency, swap_space = self.queue.concurrency, self._swap_space
        with self.engine.conversation(concurrency=concurrency, swap_space=swap_space):
            while (requests := self._take()) is not None:
                for request in requests:
                    self._begin(request)
                self._step()
            for answer in list(self._answers):
                self._end(answer)

    def _take(self) -> list[QueuedRequest] | None:
        if self._answers:
            return self.queue.take(wait=False)
        with self.engine.keep_workers_alive():
            return self.queue.take()

    def _begin(self, request: QueuedRequest) -> None:
        try:
            self._answers.append(_Answer(self.engine, request, self._token_bytes))
        except Exception as error:  # a tokenizer's
            _fail(request, error)
            self.queue.finish(request)

    def _step(self) -> None:
        """Drop requests whose clients are gone, run one step, and send what is new."""
        for answer in list(self._answers):
            if answer.is_over:
                self._end(answer)
        try:
            self.engine.scheduler.step()
        except RankLost:
            raise
        except Exception as error:
            if self.engine.group.size > 1:  # the other ranks are in the middle of a forward
                raise
            for answer in self._answers:
                answer.fail(error)
        for answer in list(self._answers):
            try:
                answer.send_new()
            except Exception as error:  # a tokenizer's
                answer.fail(error)
            if answer.is_over:
                self._end(answer)

    def _end(self, answer: _Answer) -> None:
        """End an answer, log it, and make room for another one."""
        self._answers.remove(answer)
        answer.close()
        self.queue.finish(answer.queued)
        stats, line = answer.state.stats, answer.log_line()
        if line is not None:
            say(line)
        self.metrics.count(stats, time.perf_counter() - answer.started)


def _fail(request: QueuedRequest, error: Exception) -> None:
    """Fail a request after an error of the program, and log it."""
    request.fail(INTERNAL_ERROR)
    say(f"request failed: {type(error).__name__}: {one_line(error)}")


def _as_failure(error: TierForceError, concurrency: int) -> Failed:
    """Return an error as its client sees it; most errors of this machine are only logged."""
    if isinstance(error, InvalidRequestError):
        return Failed(400, str(error))
    if isinstance(error, InsufficientMemoryError):
        hint = f" Each of {concurrency} concurrent requests has a share of it: use fewer."
        message = as_flags(str(error)) + (hint if concurrency > 1 else "")
        return Failed(503, message, "out_of_memory")
    return INTERNAL_ERROR


class _Answer:
    """The answer to one request, while it is generated."""

    def __init__(self, engine: Engine, queued: QueuedRequest, token_bytes: TokenBytes):
        params = queued.params
        self.engine, self.queued = engine, queued
        self.started = time.perf_counter()
        self.is_complete = self.has_failed = False  # has_failed: by an error of the program
        self._logprobs = None
        if params.top_logprobs is not None:
            self._logprobs = _LogprobRecorder(params, token_bytes)
        detokenizer = Detokenizer(engine.tokenizer, params.shown_tokens)
        self._text = _AnswerText(detokenizer, params.stops, params.returns_ids)
        self._taken = 0  # tokens whose text has been sent, or is held back
        self._next_report = 0.0
        has_names = engine.sessions.prefix_cache is not None
        request = Request(
            params.prompt,
            params.max_new_tokens,
            params.sampling,
            progress=self._on_prefill,
            name=prompt_name(engine.tokenizer, params.prompt) if has_names else "",
            on_logits=self._logprobs.on_logits if self._logprobs is not None else None,
            is_cancelled=lambda: queued.is_over,
            grammar=params.grammar,
            num_prompt_logprobs=params.num_prompt_logprobs,
            on_prompt_logprobs=lambda logprobs: queued.send(PromptScored(logprobs)),
        )
        self.state = engine.scheduler.add(request)

    @property
    def is_over(self) -> bool:
        """Return whether nothing more will be sent."""
        return self.is_complete or self.queued.is_over

    def send_new(self) -> None:
        """Send the client what is new, and how the answer ends once it does."""
        state, queued, text = self.state, self.queued, self._text
        while self._taken < len(state.tokens) and not (text.is_stopped or queued.is_over):
            token = state.tokens[self._taken]
            self._taken += 1
            logprobs = None if self._logprobs is None else self._logprobs.take(token)
            self._send(text.feed(token, logprobs))
        if queued.is_over:
            return
        if state.error is not None:
            concurrency = 1 if state.runs_alone else self.engine.scheduler.concurrency
            queued.fail(_as_failure(state.error, concurrency))
        elif state.is_finished or text.is_stopped:
            self._send(text.rest())
            state.cut(self._taken)
            self.is_complete = True
            reason = "stop" if text.is_stopped else state.stats.finish_reason
            queued.send(Finished(reason or "stop", self._counts()))
        elif state.tokens and self._is_report_due():
            queued.send(ProgressUpdate({"counts": self._counts()}))

    def log_line(self) -> str | None:
        """Return how the answer ended; None if that is logged already."""
        stats, error = self.state.stats, self.state.error
        if self.has_failed:
            return None
        if error is not None and not isinstance(error, RequestCancelled):
            return f"request failed: {as_flags(str(error))}"
        if not stats.plan:
            return "aborted during prefill, or before"
        line = stats_line(stats.as_dict())
        return line if self.is_complete else f"aborted: {line}"

    def fail(self, error: Exception) -> None:
        """Fail after an error of the program."""
        self.has_failed = True
        _fail(self.queued, error)

    def close(self) -> None:
        """Stop generating: the tokens taken by now are the answer."""
        self.state.cut(self._taken)
        self.engine.scheduler.abort(self.state)

    def _send(self, delta: TextDelta | None) -> None:
        if delta is not None:
            self.queued.send(delta)

    def _on_prefill(self, done: int, total: int) -> None:
        if self._is_report_due() or done == total:
            self.queued.send(ProgressUpdate({"prefill": [done, total]}))

    def _counts(self) -> dict[str, Any]:
        return request_counts(self.state.stats, self.engine, self.queued.params.sampling.seed)

    def _is_report_due(self) -> bool:
        now = time.monotonic()
        if now < self._next_report:
            return False
        self._next_report = now + _REPORT_INTERVAL_S
        return True


class _AnswerText:
    """The text of an answer, up to a stop string, and where its tokens begin."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], keeps_ids: bool = False):
        self._detokenizer, self._stops = detokenizer, StopStrings(stops)
        self._keeps_ids, self._ids = keeps_ids, list[int]()  # tokens since the last part
        self._new: list[TokenLogprobs] = []  # tokens that have no text yet
        self._unsent: deque[tuple[int, TokenLogprobs]] = deque()  # tokens by their text's offset
        self._length = 0  # characters generated, including those held back
        self._sent = 0  # characters sent

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop string has ended the answer."""
        return self._stops.is_hit

    def feed(self, token: int, logprobs: TokenLogprobs | None) -> TextDelta | None:
        """Return the text to send after a token, with the tokens that begin in it."""
        if self._keeps_ids:
            self._ids.append(token)
        if (piece := self._detokenizer.feed(token)) is None:
            return None  # nor its log-probabilities
        if logprobs is not None:
            self._new.append(logprobs)
        return self._delta(self._add(piece)) if piece else None

    def rest(self) -> TextDelta | None:
        """Return what is held back, after the last token."""
        text = ""
        if not self.is_stopped and (piece := self._detokenizer.rest()):
            text = self._add(piece)
        if self.is_stopped:
            return self._delta(text) or self._last_ids()
        self._unsent.extend((self._length, token) for token in self._new)
        return self._delta(text + self._stops.rest(), self._length + 1) or self._last_ids()

    def _add(self, piece: str) -> str:
        self._unsent.extend((self._length, token) for token in self._new)
        self._new.clear()
        self._length += len(piece)
        return self._stops.feed(piece)

    def _delta(self, text: str, end: int | None = None) -> TextDelta | None:
        """Return text to send with the tokens that begin before its end."""
        self._sent += len(text)
        end = self._sent if end is None else end
        tokens = []
        while self._unsent and self._unsent[0][0] < end:
            tokens.append(self._unsent.popleft())
        return TextDelta(text, tokens, self._take_ids()) if text or tokens else None

    def _last_ids(self) -> TextDelta | None:
        """Return a part without text for tokens that have none."""
        return TextDelta("", token_ids=self._take_ids()) if self._ids else None

    def _take_ids(self) -> list[int]:
        ids, self._ids = self._ids, []
        return ids


class _LogprobRecorder:
    """Log-probabilities of the generated tokens, from the target forwards that verified them."""

    def __init__(self, params: GenerationParams, token_bytes: TokenBytes):
        self._top = params.top_logprobs or 0
        self._token_bytes = token_bytes
        self._logprobs: deque[Tensor] = deque()  # (V,) float32 per token that is still to come
        self._probs: deque[Tensor] = deque()  # (V,) likewise, as they are sampled from

    @torch.inference_mode()
    def on_logits(self, logits: Tensor, probs: Tensor) -> None:
        """Take the logits (n, V) and the distributions (n, V) of the next n tokens."""
        self._logprobs.extend(logits.float().log_softmax(-1))
        self._probs.extend(probs)

    @torch.inference_mode()
    def take(self, token: int) -> TokenLogprobs:
        """Return the log-probabilities of the next token, whose id is `token`."""
        logprobs, probs = self._logprobs.popleft(), self._probs.popleft()
        values, tokens = logprobs.topk(min(self._top, len(logprobs)))
        names = map(self._token_bytes.bytes_of, tokens.tolist())
        top = list(zip(names, values.tolist(), strict=True))
        name = self._token_bytes.bytes_of(token)
        return TokenLogprobs(name, logprobs[token].item(), probs[token].log().item(), top)
