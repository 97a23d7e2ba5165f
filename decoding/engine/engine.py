"""The engine: models in memory on all ranks, and the requests they serve."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from decoding.config.defaults import NEW_TOKENS
from decoding.config.settings import Settings
from decoding.engine.cached_sequence import DEFAULT_ROOM
from decoding.engine.request import Request, RequestState, check_request
from decoding.engine.scheduler import Scheduler
from decoding.engine.session_manager import SequenceManager
from decoding.engine.stats import Stats
from decoding.grammars.grammar import Grammar, GrammarCompiler
from decoding.models.loading import load
from decoding.models.runtime import Runtime
from decoding.planning.plan import Plan
from decoding.speculation.sampling import Sampling
from decoding.text.detokenizer import detokenize_stream
from decoding.text.prompt import Template
from offload.errors import TierForceError, TruncatedPromptWarning
from parallel.execution.executor import Idle, Stop
from parallel.model.pipeline import Progress
from parallel.ranks.process_group import TensorParallelGroup

# other ranks wait for at most two hours (`TensorParallelGroup.from_environment`)
KEEP_ALIVE_S = 300


class Engine:
    """Exact decoding of long sequences with a model on one or more ranks.

    Under torchrun every rank creates an Engine; rank 0 generates, and the others call `run_worker`
    until it closes. `stats` has the counts of the current request, or of the last one.
    """

    def __init__(self, runtime: Runtime, tokenizer: Any, stop_tokens: frozenset[int]):
        self.runtime, self.tokenizer = runtime, tokenizer
        self.group: TensorParallelGroup = runtime.target.group
        self.stats = Stats()
        config, context = runtime.target.config, runtime.settings.context
        self.grammars = GrammarCompiler(tokenizer, config.vocab, stop_tokens)
        config.check_context(context or 1)
        self.context = context or config.context_limit
        self.sessions = SequenceManager(runtime)
        self.scheduler = Scheduler(self.sessions, self.context, stop_tokens)
        self._is_closed = False

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        draft: str | Path | None = None,
        settings: Settings | None = None,
        device: str = "auto",
        group: TensorParallelGroup | None = None,
    ) -> Engine:
        """Load a target model, and a draft model with the same tokenizer.

        Args:
            model: the target: a Hugging Face folder, a GGUF file, a hub name, or `smollm2`.
            draft: the draft model, likewise. Its vocabulary may be padded to another size. Without
                one, the target's own multi-token-prediction block drafts, if it has one.
            settings: how the engine runs; by default `Settings()`.
            device: auto, cpu or cuda.
            group: the ranks; by default those that a launcher started.

        Returns:
            An engine, the same on every rank.

        Raises TierForceError on all ranks if any rank fails: ConfigError, CheckpointError,
        InsufficientMemoryError.
        """
        group = group or TensorParallelGroup.from_environment(device)
        return cls(*load(model, draft, settings or Settings(), group))

    def plan(self, prompt_tokens: int, max_new_tokens: int, concurrency: int = 1) -> Plan:
        """Return this rank's plan for a request of this size, if it started now.

        It is one of `concurrency` requests that share the memory. All ranks call it. Raises
        InsufficientMemoryError on all ranks if the request would not fit.
        """
        return self.sessions.plan(prompt_tokens, max_new_tokens, concurrency)

    def max_concurrency(self, prompt_tokens: int, max_new_tokens: int, limit: int) -> int:
        """Return how many such requests, at most `limit`, run concurrently at no cost to each.

        Each keeps as much of its KV on the device as it would alone. The result is 1 if forwards
        are not shared. All ranks call it. Raises InsufficientMemoryError on all ranks if one alone
        would not fit.
        """
        return self.sessions.max_concurrency(prompt_tokens, max_new_tokens, limit)

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = NEW_TOKENS,
        sampling: Sampling | None = None,
        progress: Progress | None = None,
        chat: bool = False,
        name: str = "",
        grammar: Grammar | None = None,
    ) -> Iterator[str]:
        """Yield the continuation of a prompt of any length, in pieces of whole characters.

        The beginning of a prompt longer than the context is dropped, with a warning:
        TruncatedPromptWarning; `stats.truncated_tokens` says how much. Special tokens are left out.
        Otherwise as `generate`.

        Args:
            prompt: the string to continue; nothing in it is parsed as a special token.
            max_new_tokens: maximum number of tokens to generate.
            sampling: how they are sampled; by default `Sampling()`, as on the command line.
            progress: called with the finished units of prefill, and their total.
            chat: send the prompt as a user message, through the tokenizer's chat template.
            name: display name in the prompt cache (`Settings.prompt_cache`).
            grammar: what the text must match.

        Returns:
            Pieces of text, as their tokens are verified.
        """
        if self.group.rank:
            self.sessions.run_worker()
            return
        check_request(prompt, max_new_tokens, sampling, takes_tokens=False)
        room = self.context - max_new_tokens
        template = Template.chat(self.tokenizer) if chat else Template.plain(self.tokenizer)
        tokens, dropped = template.build(self.tokenizer, prompt, room, keep_end=True)
        if dropped:
            warnings.warn(
                f"the prompt is longer than the context of {self.context} tokens: its first "
                f"{dropped} tokens are dropped",
                TruncatedPromptWarning,
                stacklevel=2,
            )
        compiled = self.grammars.compile_optional(grammar)
        options = sampling or Sampling(), dropped, progress, name
        request = Request(tokens, max_new_tokens, *options, grammar=compiled)
        with closing(self.submit(request)) as new_tokens:
            yield from detokenize_stream(self.tokenizer, new_tokens)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = NEW_TOKENS,
        sampling: Sampling | None = None,
        progress: Progress | None = None,
        name: str = "",
        grammar: Grammar | None = None,
    ) -> Generator[int, None, None]:
        """Yield new tokens as they are verified, up to and excluding a stop token.

        Raises InvalidRequestError if this request cannot be processed; the engine remains usable.
        On ranks other than 0, takes part in one request that rank 0 accepts, and yields nothing.

        Args:
            prompt: token ids, or a string, in which nothing is parsed as a special token.
            max_new_tokens: maximum number of tokens; with the prompt they must fit the context.
            sampling: how they are sampled; by default `Sampling()`, as on the command line.
            progress: called with the finished units of prefill, and their total.
            name: display name in the prompt cache (`Settings.prompt_cache`).
            grammar: what their text must match.

        Returns:
            Token ids, in rounds of one or more.
        """
        if self.group.rank:
            self.sessions.run_worker()
            return
        check_request(prompt, max_new_tokens, sampling)
        if isinstance(prompt, str):
            prompt = Template.plain(self.tokenizer).fit(self.tokenizer, prompt, self.context)
        compiled = self.grammars.compile_optional(grammar)
        options = sampling or Sampling(), 0, progress, name
        request = Request(list(prompt), max_new_tokens, *options, grammar=compiled)
        yield from self.submit(request)

    def submit(self, request: Request) -> Generator[int, None, None]:
        """Yield the new tokens of a request as they are verified, as `generate`; for rank 0.

        Closing the generator ends the request: the tokens taken by then are its output. Raises
        RequestCancelled if the request is cancelled during prefill.
        """
        self._check_not_busy()
        state, taken = self.scheduler.add(request), 0
        self.stats = state.stats
        try:
            while not state.is_finished:
                self.scheduler.step()
                self.stats = state.stats  # new ones if it was started again
                while taken < len(state.tokens):
                    taken += 1
                    yield state.tokens[taken - 1]
            if state.error is not None:
                raise state.error
        finally:
            state.cut(taken)
            self.scheduler.abort(state)

    @contextmanager
    def conversation(
        self, room: int = DEFAULT_ROOM, concurrency: int = 1, swap_space: int | None = 0
    ) -> Iterator[None]:
        """Keep the caches of a sequence from one `generate` or `stream` to the next, inside.

        A prompt that starts with the previous prompt and its output continues in their caches: only
        the rest is prefilled. The output is the same as after prefilling the whole prompt. Other
        ranks take part in `run_worker`.

        Args:
            room: tokens of later turns that memory is planned for when a sequence starts, and each
                time it has outgrown its caches.
            concurrency: number of sequences whose caches are kept, and which share the memory.
            swap_space: bytes of host memory, of all ranks together, for the KV of sequences that
                had to make room for others; None for half of what is free.
        """
        if self.group.rank:
            raise TierForceError(
                "rank 0 leads conversations: call `run_worker` on the other ranks."
            )
        self._check_not_busy()
        if self.scheduler.caches.room is not None:
            raise TierForceError("one conversation at a time: leave the previous one first.")
        self._check_concurrency(concurrency)
        caches = self.scheduler.caches
        caches.room, self.scheduler.concurrency = room, concurrency
        limit = None if swap_space is None else swap_space // self.group.size
        caches.swap_space.limit = limit
        try:
            yield
        finally:
            caches.room, caches.swap_space.limit, self.scheduler.concurrency = None, 0, 1
            self.scheduler.close()

    def generate_batch(
        self, requests: Iterable[Request | None], concurrency: int
    ) -> Iterator[RequestState]:
        """Yield the state of each request as it finishes; up to `concurrency` run at a time.

        A request is taken when there is room for it. One that cannot be processed is yielded with
        its error, and the others continue. Other ranks take part until rank 0 closes the engine,
        and yield nothing. Raises TierForceError for several concurrent requests with
        `deterministic`.

        Args:
            requests: the requests, in order; None if the next depends on one that is not finished.
            concurrency: maximum number of requests that share memory and forwards.
        """
        if self.group.rank:
            self.run_worker()
            return
        self._check_not_busy()
        self._check_concurrency(concurrency)
        if self.scheduler.caches.room is not None:
            raise TierForceError("a batch cannot run inside a conversation: leave it first.")
        with closing(self.scheduler.run(requests, concurrency)) as finished:
            for state in finished:
                self.stats = state.stats
                yield state

    def run_worker(self) -> None:
        """Take part in all requests until rank 0 closes the engine; for the other ranks."""
        while self.sessions.run_worker():
            pass
        self._free_graphs()  # as in `close`, which may not be called

    @contextmanager
    def keep_workers_alive(self) -> Iterator[None]:
        """Let the other ranks wait while the block runs; nothing is generated in it."""
        if self.group.size == 1:
            yield
            return
        is_over = Event()

        def keep_alive() -> None:
            # the next collective reports a lost rank
            with suppress(TierForceError):
                while not is_over.wait(KEEP_ALIVE_S):
                    self.sessions.executor.send(Idle())

        thread = Thread(target=keep_alive, name="keep-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def close(self) -> None:
        """Close the host link, and on rank 0 release the other ranks.

        With several ranks no captured graph stays: `torch.distributed.destroy_process_group`, which
        a program may call next, would hang (`GraphCapturer.reset`).
        """
        if self.group.rank == 0:
            self.sessions.executor.send(Stop())
        self._is_closed = True
        self._free_graphs()
        self.runtime.link.close()

    def _free_graphs(self) -> None:
        self.sessions.slots.free_caches()
        if self.group.size > 1:
            self.group.graph_capturer.reset()

    def _check_concurrency(self, concurrency: int) -> None:
        if self.runtime.settings.deterministic and concurrency > 1:
            raise TierForceError(
                f"`concurrency` {concurrency} cannot be combined with `deterministic`, whose "
                "requests share no forwards: leave it out, or use 1."
            )

    def _check_not_busy(self) -> None:
        """Raise TierForceError while a request is being processed, and if the engine is closed."""
        if self._is_closed:
            raise TierForceError("the engine is closed: make another one.")
        if self.scheduler.is_busy:
            raise TierForceError(
                "one request at a time: exhaust or close the previous request's generator."
            )
