"""The engine: models in memory on all ranks, and one text after another through them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from decoding.config.defaults import NEW_TOKENS
from decoding.config.settings import Settings
from decoding.engine.conversation import DEFAULT_ROOM, Conversation
from decoding.engine.request import Progress, Request, check_request
from decoding.engine.scheduler import Completion, Scheduler
from decoding.engine.session_manager import SequenceManager
from decoding.engine.stats import Stats
from decoding.models.loading import load
from decoding.models.runtime import Runtime
from decoding.planning.fit import concurrency_pays
from decoding.planning.memory_plan import MemoryPlan
from decoding.speculation.draft_length import Lengths
from decoding.speculation.sampling import Sampling
from decoding.text.detokenizer import detokenize_stream
from decoding.text.prompt import Template
from offload.errors import InsufficientMemoryError, TierForceError, is_out_of_memory, one_line
from parallel.ranks.process_group import TensorParallelGroup

KEEP_ALIVE_S = 300  # other ranks wait for two hours at most (`Group.from_environment`)


class Engine:
    """Exact decoding of long texts with a model on one or more ranks.

    Under torchrun every rank makes an Engine; rank 0 generates text after text, and the others
    `follow` until it closes. `stats` tells what the text being generated, or the last one, took.
    """

    def __init__(self, runtime: Runtime, tokenizer: Any, stop_tokens: frozenset[int]):
        self.runtime, self.tokenizer, self.stop_tokens = runtime, tokenizer, stop_tokens
        self.group: TensorParallelGroup = runtime.target.group
        self.stats = Stats()
        self.lengths: dict[str, Lengths] = {}  # by mode, from text to text
        self.is_busy = False  # a text is being generated, and the arena is its own
        self._conversation: Conversation | None = None  # whose caches stay from text to text
        config, wanted = runtime.target.config, runtime.settings.context
        config.check_context(wanted or 1)
        self.context = wanted or config.context_limit
        self.sessions = SequenceManager(runtime)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        draft: str | Path | None = None,
        settings: Settings | None = None,
        device: str = "auto",
        group: TensorParallelGroup | None = None,
    ) -> Engine:
        """Load a target, and a draft of the same tokenizer.

        Args:
            model: the target: a Hugging Face folder, a GGUF file, a hub name, or `smollm2`.
            draft: the draft model, likewise. Its vocabulary may be padded to another size.
            settings: how the engine runs; by default as `Settings()` says.
            device: auto, cpu or cuda.
            group: the ranks, by default those a launcher started.

        Returns:
            An engine, the same on every rank.

        Raises TierForceError on all ranks when any rank cannot: ConfigError, CheckpointError,
        InsufficientMemoryError.
        """
        group = group or TensorParallelGroup.from_environment(device)
        return cls(*load(model, draft, settings or Settings(), group))

    def plan(self, prompt: int, new: int, concurrency: int = 1) -> MemoryPlan:
        """Plan a text of `prompt` + `new` tokens as it would be written now; this rank's plan.

        It is one of `concurrency`, which share the memory. All ranks call it. Raises InsufficientMemoryError, on all
        ranks, when the text would not fit.
        """
        return self.sessions.plan(prompt, new, concurrency)

    def max_concurrency(self, prompt: int, new: int, most: int) -> int:
        """Return how many such texts, at most `most`, go together at no cost to each.

        Each keeps as much of its KV on the device as it would alone. It is one where passes are not
        shared, or that would not pay. All ranks call it. Raises InsufficientMemoryError, on all ranks, when one
        alone would not fit.
        """
        pays = concurrency_pays(self.runtime.requirements, bool(self.runtime.settings.graphs))
        shares = pays and not self.runtime.settings.deterministic
        return self.sessions.max_fitting(prompt, new, most if shares else 1)

    def stream(
        self,
        text: str,
        max_new_tokens: int = NEW_TOKENS,
        sampling: Sampling | None = None,
        progress: Progress | None = None,
        chat: bool = False,
        name: str = "",
    ) -> Iterator[str]:
        """Yield what follows a text of any length, in pieces of whole characters.

        Of a text longer than the context the beginning is dropped; `stats.truncated_tokens` tells how
        much. Special tokens are left out. All else is as in `generate`.

        Args:
            text: the text to continue, in which nothing is taken for a special token.
            max_new_tokens: tokens to write at most.
            sampling: the law they are drawn from; by default `Sampling()`, as on the command line.
            progress: called with units of prefill done, and in all.
            chat: ask the text as a user's message, through the tokenizer's chat template.
            name: what people call the text, where it is kept on disk (`Settings.keep`).

        Returns:
            Pieces of text, as their tokens are verified.
        """
        if self.group.rank:
            self.sessions.run_worker()
            return
        check_request(text, max_new_tokens, sampling, takes_tokens=False)
        room = self.context - max_new_tokens
        template = Template.chat(self.tokenizer) if chat else Template.plain(self.tokenizer)
        prompt, dropped = template.build(self.tokenizer, text, room, keep_end=True)
        request = Request(prompt, max_new_tokens, sampling or Sampling(), dropped, progress, name)
        with closing(self.submit(request)) as tokens:
            yield from detokenize_stream(self.tokenizer, tokens)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = NEW_TOKENS,
        sampling: Sampling | None = None,
        progress: Progress | None = None,
        name: str = "",
    ) -> Generator[int, None, None]:
        """Yield new tokens as they are verified, up to and without a stop token.

        Raises InvalidRequestError when this text cannot be processed; the engine is good for the next
        one. On ranks other than 0 it takes part in one text that rank 0 accepts, and yields
        nothing.

        Args:
            prompt: token ids, or a text, in which nothing is taken for a special token.
            max_new_tokens: tokens to write at most; with the prompt they must fit the context.
            sampling: the law they are drawn from; by default `Sampling()`, as on the command line.
            progress: called with units of prefill done, and in all.
            name: what people call the text, where it is kept on disk (`Settings.keep`).

        Returns:
            Token ids, in rounds of one or more.
        """
        if self.group.rank:
            self.sessions.run_worker()
            return
        check_request(prompt, max_new_tokens, sampling)
        if isinstance(prompt, str):
            prompt = Template.plain(self.tokenizer).fit(self.tokenizer, prompt, self.context)
        sampling = sampling or Sampling()
        request = Request(list(prompt), max_new_tokens, sampling, 0, progress, name)
        yield from self.submit(request)

    def submit(self, request: Request) -> Generator[int, None, None]:
        """Yield the new tokens of a request as they are verified; for rank 0.

        All is as in `generate`, which makes one. Raises RequestCancelled when the request says so while
        its prompt is read.
        """
        self._check_not_busy()
        # before other ranks hear of it
        request.validate(self.context, self.runtime.target.config.vocab)
        with ExitStack() as stack:
            stack.enter_context(self._one_text())
            self.stats = Stats()  # the caches of the text before go before memory is planned
            conversation = self._conversation
            if conversation is None:
                conversation = stack.enter_context(closing(self._new_conversation(0)))
            yield from conversation.generate(request, self.stats)

    @contextmanager
    def conversation(self, room: int = DEFAULT_ROOM) -> Iterator[None]:
        """Keep the caches of a text from one `generate` or `stream` to the next, inside.

        A prompt that begins like the text before, with what was written behind it, goes on in its
        caches: the rest alone is read. What is written is what it would be behind the whole prompt.
        On ranks other than 0 `follow` takes part.

        Args:
            room: tokens of later turns that memory is planned for when a text is begun, and each
                time it has outgrown its caches.
        """
        if self.group.rank:
            raise TierForceError("rank 0 leads conversations: call `follow` on the other ranks.")
        self._check_not_busy()
        if self._conversation is not None:
            raise TierForceError("one conversation at a time: leave the one before.")
        self._conversation = self._new_conversation(room)
        try:
            yield
        finally:
            conversation, self._conversation = self._conversation, None
            conversation.close()

    def generate_batch(self, requests: Iterable[Request], concurrency: int) -> Iterator[Completion]:
        """Yield what comes of each text, as it is done; up to `concurrency` are written together.

        A request is taken when there is room for it. One that cannot be processed is yielded with
        its error, and the others go on. On ranks other than 0 it takes part until rank 0 closes the
        engine, and yields nothing. Raises TierForceError for several at once that are to be
        `deterministic`.

        Args:
            requests: the texts, in their order.
            concurrency: texts that share memory and passes, at most.
        """
        if self.group.rank:
            self.run_worker()
            return
        self._check_not_busy()
        if self.runtime.settings.deterministic and concurrency > 1:
            raise TierForceError(
                f"`concurrency` {concurrency}, but `deterministic` texts share no passes: leave it out, "
                "or use 1."
            )
        if self._conversation is not None:
            raise TierForceError("texts are not written together in a conversation: leave it.")
        batch = Scheduler(self.sessions, self.context, self.stop_tokens, self.lengths, concurrency)
        with self._one_text(), closing(batch.run(requests)) as texts:
            self.stats = Stats()  # the caches of the text before go before memory is planned
            for written in texts:
                self.stats = written.stats
                yield written

    def run_worker(self) -> None:
        """Take part in all texts until rank 0 closes the engine; on the other ranks."""
        while self.sessions.run_worker():
            pass
        self.group.graph_capturer.reset()  # as in `close`, which may not follow

    @contextmanager
    def keep_workers_alive(self) -> Iterator[None]:
        """Let the other ranks wait as long as the block takes; nothing is generated in it."""
        if self.group.size == 1:
            yield
            return
        over = Event()

        def keep_alive() -> None:
            # where a rank is lost, whatever comes next says so
            with suppress(TierForceError):
                while not over.wait(KEEP_ALIVE_S):
                    self.sessions.keep_alive()

        thread = Thread(target=keep_alive, name="keep-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """Let go of the link, and on rank 0 of the other ranks.

        Of several ranks nothing recorded stays: `torch.distributed.destroy_process_group`, which a
        program may call next, would hang (`Recorder.reset`).
        """
        if self.group.rank == 0:
            self.group.broadcast(None)
        if self.group.size > 1:
            self.group.graph_capturer.reset()
        self.runtime.link.close()

    def _new_conversation(self, room: int) -> Conversation:
        return Conversation(self.sessions, self.stop_tokens, self.lengths, self.context, room)

    @contextmanager
    def _one_text(self) -> Iterator[None]:
        """Keep other texts out, and tell memory that runs out from other errors."""
        self.is_busy = True
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            if self.group.size > 1 or not is_out_of_memory(error):
                # other ranks are in the middle of the same pass: there is no going on together
                raise
            raise InsufficientMemoryError(f"out of memory: {one_line(error)}") from error
        finally:
            self.is_busy = False

    def _check_not_busy(self) -> None:
        """Raise TierForceError while a text is being generated."""
        if self.is_busy:
            raise TierForceError(
                "one text at a time: exhaust or close the generator of the text before."
            )
