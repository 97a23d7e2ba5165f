"""The engine: models in memory on all ranks, and one text after another through them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch

from decoding.loading import load
from decoding.planning.budget import BudgetChoice, BudgetChooser
from decoding.planning.defaults import BUDGETS
from decoding.planning.fit import affordable
from decoding.planning.observed import ObservedCosts
from decoding.runtime import Runtime
from decoding.session import Session, draft_lengths
from decoding.settings import Settings
from decoding.speculation.decoders import Decoder
from decoding.speculation.draft_length import RecordingLength
from decoding.speculation.sampling import Sampling, draw
from decoding.speculation.text import Text
from decoding.speculation.verify import read
from decoding.stats import Stats
from offload.errors import DocumentError, FitError, TierForceError, is_out_of_memory, one_line
from offload.memory_plan import MemoryPlan
from parallel.group import Group
from parallel.lockstep import PassLeader, follow_passes

Progress = Callable[[int, int], None]  # prefill: units done, units in all


class Engine:
    """Exact decoding of long texts with a model on one or more ranks.

    Under torchrun every rank makes an Engine; rank 0 generates text after text, and the others
    `follow` until it closes.
    """

    def __init__(self, runtime: Runtime, tokenizer: Any, stop_tokens: frozenset[int]):
        self.runtime, self.tokenizer, self.stop_tokens = runtime, tokenizer, stop_tokens
        self.group: Group = runtime.target.group
        self.stats = Stats()
        self.lengths = draft_lengths(runtime.settings)
        self._busy = False  # a text is being generated, and the arena is its own
        limit, wanted = runtime.target.config.context_limit, runtime.settings.context
        if wanted is not None and wanted > limit:
            raise TierForceError(f"--context {wanted} is more than the model's {limit} positions.")
        self.context = wanted or limit
        self.chooser = BudgetChooser(ObservedCosts(runtime.link_rate() if self._tunes else None))

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        draft: str | Path | None = None,
        settings: Settings | None = None,
        device: str = "auto",
        group: Group | None = None,
    ) -> Engine:
        """Load a target, and a draft with the same vocabulary, from Hugging Face folders (or hub
        names).

        Raises TierForceError on all ranks when any rank cannot: ConfigError, CheckpointError,
        FitError.
        """
        group = group or Group.from_environment(device)
        return cls(*load(model, draft, settings or Settings(), group))

    def check(self, prompt: int, new: int) -> MemoryPlan:
        """Plan a text of that many tokens as `generate` would now; this rank's plan. All ranks call
        it.

        Raises FitError, on all ranks, when the text would not fit.
        """
        with self.group.together():
            plans = self._affordable(prompt, new)
        if self._tunes and not self._common(plans):
            raise FitError(
                "no one retrieval budget fits all ranks: set --budget, or free memory on the "
                "fullest GPU."
            )
        choice = self._spend(prompt, new)
        with self.group.together():
            return self.runtime.with_budget(choice.budget).plan(prompt, new)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        progress: Progress | None = None,
    ) -> Iterator[int]:
        """Yield new tokens as they are verified, up to and without a stop token. `stats` tells what
        it took.

        Raises DocumentError when this text cannot be processed; the engine is good for the next
        one. On ranks other than 0 it takes part in one text that rank 0 accepts, and yields
        nothing.
        """
        if self.group.rank:
            self._follow_one()
            return
        started = time.perf_counter()
        tokens = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
        self._refuse(tokens, max_new_tokens)
        self._busy = True
        try:
            self.stats = Stats()  # the caches of the text before go before memory is planned
            self.group.broadcast((tokens, max_new_tokens))
            choice = self._spend(len(tokens), max_new_tokens)
            with closing(self._open(tokens, max_new_tokens, choice)) as session:
                self.stats = Stats(
                    prompt_tokens=len(tokens),
                    plan=session.plan,
                    mode=self.runtime.mode,
                    choice=choice,
                )
                with closing(
                    PassLeader(session.announced, session.max_tokens, session.forward)
                ) as leader:
                    yield from self._tokens(
                        session, leader, sampling or Sampling(), progress, started
                    )
                    self.chooser.record(
                        session.runtime.needs, session.plan, len(tokens), self.stats.rounds
                    )
        except (RuntimeError, MemoryError) as error:
            if self.group.size > 1 or not is_out_of_memory(error):
                # other ranks are in the middle of the same pass: there is no going on together
                raise
            raise FitError(f"out of memory: {one_line(error)}") from error
        finally:
            self._busy = False

    def follow(self) -> None:
        """On ranks other than 0: take part in all texts until rank 0 closes the engine."""
        while self._follow_one():
            pass

    def close(self) -> None:
        """Rank 0: let the other ranks go."""
        if self.group.rank == 0:
            self.group.broadcast(None)
        self.runtime.link.close()

    def _tokens(
        self,
        session: Session,
        leader: PassLeader,
        sampling: Sampling,
        progress: Progress | None,
        started: float,
    ) -> Iterator[int]:
        generator = torch.Generator(self.group.device).manual_seed(sampling.seed)
        stats = self.stats
        law = sampling.law(session.prefill(progress))[0]
        new = read(draw(law, generator), law)
        text = Text([*session.prompt.tolist(), *new])
        decoder = session.decoder(
            text,
            leader,
            sampling,
            generator,
            (RecordingLength(self.lengths[0], stats.rounds), self.lengths[1]),
        )
        stats.levels = decoder.levels()
        stats.traffic = {
            level.name: level.cache.traffic for level in stats.levels if isinstance(level, Decoder)
        }
        stats.retrieval, stats.peaks, stats.fixed_shapes = (
            session.retrieval,
            session.peaks,
            session.forward.report,
        )
        stats.prefill_link_in, stats.prefill_link_out = (
            session.target.traffic.link_in,
            session.target.traffic.link_out,
        )
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

    @property
    def _tunes(self) -> bool:
        """Whether budgets are to be chosen."""
        return self.runtime.needs.chooses_budget

    def _affordable(self, prompt: int, new: int) -> dict[int, MemoryPlan]:
        return affordable(self.runtime.needs, self.runtime.memory(), prompt, new)

    def _spend(self, prompt: int, new: int) -> BudgetChoice:
        """What this text's memory goes to, on all ranks. What fits nowhere is left to `_open` to
        refuse.
        """
        settings = self.runtime.settings
        if not self._tunes:
            return BudgetChoice(settings.budget, "set")
        try:
            plans = self._affordable(prompt, new)
        except FitError:
            plans = {}
        if not (common := self._common(plans)):
            return BudgetChoice(max(BUDGETS[0], settings.chunk_size), "nothing fits")
        return self.group.broadcast(self.chooser.choose(self.runtime.needs, common, prompt))

    def _common(self, plans: Mapping[int, MemoryPlan]) -> dict[int, MemoryPlan]:
        """Of the plans of this rank, by budget, those whose budgets fit all ranks. All ranks call
        it.
        """
        return {
            budget: plans[budget]
            for budget in sorted(set.intersection(*self.group.gather(set(plans))))
        }

    def _refuse(self, tokens: list[int], new: int) -> None:
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

    def _open(self, tokens: list[int], new: int, choice: BudgetChoice) -> Session:
        """On all ranks, or on none."""
        with self.group.together():
            return Session(self.runtime.with_budget(choice.budget), tokens, new)

    def _follow_one(self) -> bool:
        request = self.group.broadcast(None)
        if request is None:
            return False
        try:
            session = self._open(*request, self._spend(len(request[0]), request[1]))
        except TierForceError:
            return True  # raised on rank 0 too, which tells
        with closing(session):
            # raised on rank 0 too, which ends the passes before there is one
            with suppress(TierForceError):
                session.prefill()
            follow_passes(session.announced, session.max_tokens, session.forward)
        return True
