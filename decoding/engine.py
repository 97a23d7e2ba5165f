"""The engine: models in memory on all ranks, and one text after another through them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from decoding.loading import load
from decoding.pieces import pieces
from decoding.prompt import Template
from decoding.runtime import Runtime
from decoding.session import Lengths, Session, draft_lengths
from decoding.sessions import Sessions
from decoding.settings import Settings
from decoding.speculation.draft_length import RecordingLength
from decoding.speculation.sampling import Sampling, draw
from decoding.speculation.text import Text
from decoding.speculation.verify import read
from decoding.stats import Stats
from offload.errors import DocumentError, FitError, TierForceError, is_out_of_memory, one_line
from offload.memory_plan import MemoryPlan
from parallel.group import Group
from parallel.lockstep import PassLeader

Progress = Callable[[int, int], None]  # prefill: units done, units in all


class Engine:
    """Exact decoding of long texts with a model on one or more ranks.

    Under torchrun every rank makes an Engine; rank 0 generates text after text, and the others
    `follow` until it closes. `stats` tells what the text being generated, or the last one, took.
    """

    def __init__(self, runtime: Runtime, tokenizer: Any, stop_tokens: frozenset[int]):
        self.runtime, self.tokenizer, self.stop_tokens = runtime, tokenizer, stop_tokens
        self.group: Group = runtime.target.group
        self.stats = Stats()
        self.lengths: dict[str, Lengths] = {}  # by mode, from text to text
        self._busy = False  # a text is being generated, and the arena is its own
        limit, wanted = runtime.target.config.context_limit, runtime.settings.context
        if wanted is not None and wanted > limit:
            raise TierForceError(f"`context` {wanted} is more than the model's {limit} positions.")
        self.context = wanted or limit
        self.sessions = Sessions(runtime)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        draft: str | Path | None = None,
        settings: Settings | None = None,
        device: str = "auto",
        group: Group | None = None,
    ) -> Engine:
        """Load a target, and a draft of the same tokenizer.

        Args:
            model: the target: a Hugging Face folder, a GGUF file, a hub name, or `smollm2`.
            draft: the draft model, likewise. Its vocabulary may be padded to another size, or it
                may borrow the target's embedding and head.
            settings: how the engine runs; by default as `Settings()` says.
            device: auto, cpu or cuda.
            group: the ranks, by default those a launcher started.

        Returns:
            An engine, the same on every rank.

        Raises TierForceError on all ranks when any rank cannot: ConfigError, CheckpointError,
        FitError.
        """
        group = group or Group.from_environment(device)
        return cls(*load(model, draft, settings or Settings(), group))

    def check(self, prompt: int, new: int) -> MemoryPlan:
        """Plan a text of `prompt` + `new` tokens as `generate` would now; this rank's plan.

        All ranks call it. Raises FitError, on all ranks, when the text would not fit.
        """
        return self.sessions.check(prompt, new)

    def stream(
        self,
        text: str,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        progress: Progress | None = None,
        chat: bool = False,
    ) -> Iterator[str]:
        """Yield what follows a text of any length, in pieces of whole characters.

        Of a text longer than the context the beginning is dropped; `stats.dropped_tokens` tells how
        much. Special tokens are left out. All else is as in `generate`.

        Args:
            text: the text to continue, in which nothing is taken for a special token.
            max_new_tokens: tokens to write at most.
            sampling: the law they are drawn from; greedy by default.
            progress: called with units of prefill done, and in all.
            chat: ask the text as a user's message, through the tokenizer's chat template.

        Returns:
            Pieces of text, as their tokens are verified.
        """
        if self.group.rank:
            self.sessions.follow()
            return
        room = self.context - max_new_tokens
        template = Template.chat(self.tokenizer) if chat else Template.plain(self.tokenizer)
        prompt, dropped = template.fill(self.tokenizer, text, room, keep_end=True)
        tokens = self._generate(prompt, max_new_tokens, sampling, progress, dropped)
        with closing(tokens):
            yield from pieces(self.tokenizer, tokens)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        progress: Progress | None = None,
    ) -> Iterator[int]:
        """Yield new tokens as they are verified, up to and without a stop token.

        Raises DocumentError when this text cannot be processed; the engine is good for the next
        one. On ranks other than 0 it takes part in one text that rank 0 accepts, and yields
        nothing.

        Args:
            prompt: token ids, or a text, in which nothing is taken for a special token.
            max_new_tokens: tokens to write at most; with the prompt they must fit the context.
            sampling: the law they are drawn from; greedy by default.
            progress: called with units of prefill done, and in all.

        Returns:
            Token ids, in rounds of one or more.
        """
        if self.group.rank:
            self.sessions.follow()
            return
        if isinstance(prompt, str):
            # never cut: what is too long for the context is refused
            prompt, _ = Template.plain(self.tokenizer).fill(self.tokenizer, prompt, sys.maxsize)
        yield from self._generate(list(prompt), max_new_tokens, sampling, progress)

    def follow(self) -> None:
        """Take part in all texts until rank 0 closes the engine; on the other ranks."""
        while self.sessions.follow():
            pass

    def close(self) -> None:
        """Let go of the link, and on rank 0 of the other ranks."""
        if self.group.rank == 0:
            self.group.broadcast(None)
        self.runtime.link.close()

    def _generate(
        self,
        prompt: list[int],
        new: int,
        sampling: Sampling | None,
        progress: Progress | None,
        dropped: int = 0,
    ) -> Generator[int, None, None]:
        """Open a session on all ranks, write its text, and close it."""
        started = time.perf_counter()
        self._refuse(prompt, new)
        with self._one_text():
            self.stats = Stats()  # the caches of the text before go before memory is planned
            self.group.broadcast((prompt, new))
            choice = self.sessions.choose(len(prompt), new)
            with closing(self.sessions.open(prompt, new, choice)) as session:
                self.stats = Stats(
                    prompt_tokens=len(prompt),
                    dropped_tokens=dropped,
                    plan=session.plan,
                    mode=session.runtime.mode,
                    choice=choice,
                )
                with closing(
                    PassLeader(session.announced, session.max_tokens, session.forward)
                ) as leader:
                    yield from self._loop(
                        session, leader, sampling or Sampling(), progress, started
                    )
                    self.sessions.record(session, self.stats.rounds)

    def _loop(
        self,
        session: Session,
        leader: PassLeader,
        sampling: Sampling,
        progress: Progress | None,
        started: float,
    ) -> Iterator[int]:
        """Read the prompt, then yield the tokens of round after round."""
        stats = self.stats
        generator = torch.Generator(self.group.device).manual_seed(sampling.seed)
        law = sampling.law(session.prefill(progress))[0]
        new = read(draw(law, generator), law)
        text = Text([*session.prompt.tolist(), *new])
        mode, settings = session.runtime.mode, session.runtime.settings
        outer, *inner = self.lengths.setdefault(mode, draft_lengths(settings))
        lengths = (RecordingLength(outer, stats.rounds), *inner)
        decoder = session.decoder(text, leader, sampling, generator, lengths)
        stats.watch(session, decoder)
        stats.first_token_s = time.perf_counter() - started
        while True:
            for token in new:
                if token in self.stop_tokens:
                    stats.finish_reason = "stop"
                    return
                stats.new_tokens += 1
                stats.decode_s = time.perf_counter() - started - stats.first_token_s
                yield token
            if stats.new_tokens >= session.new:
                stats.finish_reason = "length"
                return
            new = decoder.round(session.new - stats.new_tokens)

    @contextmanager
    def _one_text(self) -> Iterator[None]:
        """Keep other texts out, and tell memory that runs out from other errors."""
        self._busy = True
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if self.group.size > 1 or not is_out_of_memory(error):
                # other ranks are in the middle of the same pass: there is no going on together
                raise
            raise FitError(f"out of memory: {one_line(error)}") from error
        finally:
            self._busy = False

    def _refuse(self, tokens: list[int], new: int) -> None:
        """Raise an error for a text that makes no sense, before other ranks hear of it."""
        if self._busy:
            raise TierForceError(
                "one text at a time: exhaust or close the generator of the text before."
            )
        if not tokens:
            raise DocumentError("the prompt is empty: there is nothing to read.")
        if new < 1:
            raise DocumentError(f"no room left to generate: {new} new tokens asked for.")
        if len(tokens) + new > self.context:
            raise DocumentError(
                f"{len(tokens)} prompt tokens and {new} new ones are more than the context of "
                f"{self.context}."
            )
        vocab = self.runtime.target.config.vocab
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < vocab:
                raise DocumentError(
                    f"the prompt has token {token}, outside the model's vocabulary of {vocab}."
                )
