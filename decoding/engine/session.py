"""One text in the making: its memory plan, its caches and the decoders nested over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from decoding.config.defaults import (
    FIRST_DRAFT_ON_DEVICE,
    FIRST_DRAFT_OVER_LINK,
    FIRST_INNER_DRAFT,
)
from decoding.engine.draft_prefill import check_cancelled, partial_progress, prefill_draft
from decoding.engine.levels import DecodingLevels
from decoding.models.runtime import Runtime
from decoding.planning.fit import extend_chunk
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.strategy_selector import StrategyChoice
from decoding.prefix_cache.manager import PrefixCacheManager
from decoding.prefix_cache.store import is_worth_saving
from decoding.prefix_cache.writer import BackgroundWriter
from decoding.speculation.decoders import Autoregressive, Decoder, Proposer, Speculative
from decoding.speculation.draft_length import Lengths, draft_lengths
from decoding.speculation.draft_vocabulary import PaddedVocabDraft, clamp_to_vocab
from decoding.speculation.prompt_lookup import PromptLookup
from decoding.speculation.randomness import Randomness
from decoding.speculation.sampling import Sampling
from decoding.speculation.sequence import TokenSequence
from offload.errors import InsufficientMemoryError
from offload.layout import ceil_div, shares
from offload.tiered.cache import TieredCache
from offload.tiered.kv_file import head_blocks
from offload.tiered.prefill import Prefill
from parallel.execution.batched_forward import ForwardRequest
from parallel.execution.cuda_graphs import GraphRunner
from parallel.execution.executor import Level, OpenSequence
from parallel.model.transformer import Progress


class SequenceState:
    """The caches of one text on this rank, and on rank 0 its decoders.

    `levels` are those of the text's mode (`DecodingLevels`). With a keeper the prompt's beginning may
    come from disk, and what was read goes there behind decoding.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt: list[int],
        new: int,
        choice: StrategyChoice | None = None,
        plan: MemoryPlan | None = None,
        keeper: PrefixCacheManager | None = None,
        name: str = "",
    ):
        """Allocate everything the text needs. Raises InsufficientMemoryError.

        Args:
            runtime: what it is decoded with.
            prompt: token ids.
            new: new tokens, at most.
            choice: how the runtime came by its way.
            plan: where its KV goes on this rank; by default in all the memory there is.
            keeper: of prompts on disk.
            name: what people call the text there.
        """
        self.runtime, self.new, self.choice = runtime, new, choice
        runtime.link.peak_bytes()
        self.peaks: dict[str, int | None] = {}  # memory in use at most, by phase (`Link.peak`)
        self.prompt = torch.tensor(prompt, device=runtime.target.group.device)
        self.max_tokens = runtime.requirements.max_forward_tokens
        self._make_caches(plan or runtime.plan(len(prompt), new))
        self._keeper, self._name = keeper, name
        self.saving: BackgroundWriter | None = None  # of what was read
        self.loaded_tokens = 0  # of the prompt, from disk
        self.is_cancelled: Callable[[], bool] = lambda: False  # what is being read; rank 0 tells

    def prefill(self, progress: Progress | None = None) -> Tensor:
        """Read the prompt on all ranks, behind what is on disk; return the logits (1, V).

        Raises InsufficientMemoryError, and RequestCancelled where the text is given up meanwhile, on all ranks.
        """
        if self._keeper is not None:
            prompt = self.prompt.tolist()
            self.loaded_tokens = self._keeper.load(self._identity, prompt, self.target)
        rest = self.prompt[self.loaded_tokens :]
        if progress is not None and self.loaded_tokens:
            progress = partial_progress(progress, self.loaded_tokens, len(rest), len(self.prompt))
        logits = self._prefill(rest, progress)
        with self.runtime.target.group.sync_errors():
            self.target.onload_deferred()
        self._prefill_draft()
        self._save(logits)
        self.peaks["prefill"] = self.runtime.link.peak_bytes()
        return logits

    @torch.inference_mode()
    def extend(
        self,
        tokens: Sequence[int],
        kept: int,
        rooms: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> Tensor:
        """Read the text on, on all ranks, or another with the same beginning; return the logits.

        It is `tokens` now, of which the first `kept`, not all, are what it was; the logits (1, V)
        are those behind it. What the target's cache lacks is read in parts of `extend_chunk`, each
        layer by layer, or in a pass like any other where it takes no more rows. With `rooms`
        there are new caches first, for so many new tokens, the first that fit. Raises InsufficientMemoryError, on
        all ranks, where none do; the session is good for nothing then.
        """
        self.peaks["decoding"] = self.runtime.link.peak_bytes()
        self.peaks = {}
        self.loaded_tokens = 0
        self._finish_saving(kept, bool(rooms))
        self.prompt = torch.tensor(tokens, device=self.prompt.device)
        for level in self.levels:
            level.cache.traffic.reset()
        self.target.truncate(kept)
        if rooms:
            self._reallocate(rooms)
        target = self.target
        rest = self.prompt[target.length :]
        pieces = shares(len(rest), ceil_div(len(rest), self.extend_chunk))
        done = 0
        for part in rest.split(pieces):
            tell = (
                None if progress is None else partial_progress(progress, done, len(part), len(rest))
            )
            logits = self._prefill_chunk(part, tell)
            done += len(part)
        self._prefill_draft(kept)
        self._save(logits)
        self.peaks["prefill"] = self.runtime.link.peak_bytes()
        return logits

    @property
    def capacity(self) -> int:
        """Return the tokens that its caches were made for."""
        return self.target.shape.capacity

    def same_rope_as(self, prompt: int, new: int) -> bool:
        """Return whether a text of `prompt` + `new` tokens would have the angles of this one."""
        angles = self.runtime.target.config.rope_key
        return angles(self._planned, self.capacity) == angles(prompt, prompt + new)

    @cached_property
    def runner(self) -> GraphRunner:
        """The runner of the text's passes, from when its prompt has been read."""
        runtime = self.runtime
        return GraphRunner(bool(runtime.settings.graphs), runtime.target.group.graph_capturer)

    def run_forward(self, passes: Sequence[ForwardRequest]) -> list[Tensor]:
        """Make passes as one on this rank, the first on a cache of this text."""
        return self.runner.run(passes)

    def evict_shared_graphs(self, other: OpenSequence) -> None:
        """Let go of recordings that work on another text's caches."""
        if "runner" in self.__dict__:
            self.runner.evict(level.cache for level in other.levels)

    def decoder(
        self,
        text: TokenSequence,
        sampling: Sampling,
        chance: Randomness,
        lengths: Lengths | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Decoder:
        """Return the nested decoders of this text's mode, to go on behind `text`.

        For rank 0, after prefill: `text` is the prompt and the first token. `lengths` None: the
        settings'. `clock` tells seconds.
        """
        runtime = self.runtime
        lengths = lengths or draft_lengths(runtime.settings)
        first = FIRST_DRAFT_OVER_LINK if self.uses_link else FIRST_DRAFT_ON_DEVICE
        for length in lengths:
            length.reset(first if length is lengths[0] else FIRST_INNER_DRAFT)
        verifying = [level for level in self.levels if level.model is runtime.target]
        inner: Proposer | None = None
        for level in self.levels[len(verifying) :]:
            inner = self._draft_decoder(level, text, sampling, chance)
        if ngram := runtime.requirements.ngram:
            inner = PromptLookup(
                text, ngram, runtime.target.config.vocab, self.prompt.device, inner
            )
        for level, length in reversed(list(zip(verifying, lengths, strict=False))):
            name, model, cache = level.name, level.model, level.cache
            if inner is None:
                inner = Autoregressive(name, model, cache, text, sampling, chance)
            else:
                above = Speculative(name, model, cache, inner, length, sampling, chance)
                above.clock = clock
                inner = above
        assert isinstance(inner, Decoder)
        inner.sync([])
        return inner

    def close(self) -> None:
        """End the text: nothing recorded stays, and no copy that works on its caches."""
        if self.saving is not None:
            self.saving.wait()
        self._evict_graphs()
        self.peaks["decoding"] = self.runtime.link.peak_bytes()

    def _evict_graphs(self) -> None:
        """Let no recording stay, and no copy that works on the caches."""
        self.runtime.link.drain()
        for level in self.levels:
            if isinstance(level.cache, TieredCache):
                # they hold the target's cache, which would hold them
                level.cache.observers.clear()
        self.runner.evict()

    def _save(self, logits: Tensor) -> None:
        """Begin to write what was read, unless rank 0 is busy with that or logits are no numbers.

        All ranks call it.
        """
        if self._keeper is None:
            return
        tokens, before = self.prompt.tolist(), self.saving
        is_free = before is None or not before.is_busy  # rank 0's waits for the others'
        may_save = is_free and bool(logits.isfinite().all())
        saving = self._keeper.save(self._identity, self._name, tokens, self.target, may_save)
        self.saving = saving or before

    def _finish_saving(self, kept: int, grows: bool) -> None:
        """Let what is being written not be read where a turn behind `kept` tokens changes it.

        It is given up where the turn has nearly all of it, and will be kept in its place.
        """
        saving = self.saving
        if saving is None or not (grows or kept < saving.tokens):
            return
        if is_worth_saving(saving.tokens, kept):
            saving.wait()
        else:
            saving.cancel()

    @property
    def _identity(self) -> str:
        """Return what the KV depends on, beside the tokens."""
        assert self._keeper is not None
        config = self.runtime.target.config
        return self._keeper.identity.of_text(config, self._planned, self.capacity)

    def _make_caches(self, plan: MemoryPlan) -> None:
        """Allocate what the text needs where it goes by the plan. Raises InsufficientMemoryError."""
        runtime, needs, prompt = self.runtime, self.runtime.requirements, len(self.prompt)
        self.plan = plan
        self._planned = prompt
        # that are read at once behind the text, at most; `SequenceManager` lets all ranks agree
        self.extend_chunk = extend_chunk(needs, plan, prompt, self.new)
        self.uses_link = needs.uses_link(plan)
        made = DecodingLevels(runtime, plan, prompt, self.new)
        self.target, self.levels = made.target, made.levels
        self.retrieval, self.draft = made.retrieval, made.draft

    def _reallocate(self, rooms: Sequence[int]) -> None:
        """Make caches for the text, and as many new tokens as fit, which hold what the target's do.

        Raises InsufficientMemoryError on all ranks, where none of the `rooms` fits.
        """
        group, before = self.runtime.target.group, self.target.traffic
        with group.sync_errors():
            held, tokens = self.target.copy_to_host(), self.target.length
        self._evict_graphs()
        # what was there goes before what comes, and so does the memory of recordings
        self.__dict__.pop("runner", None)
        self.levels, self.retrieval, self.draft = [], None, None
        del self.target
        plan = self._planned_for(rooms)
        with group.sync_errors():
            self._make_caches(plan)
            with Prefill(self.target, tokens) as way:
                for layer in range(len(held)):
                    way.load_blocks(layer, head_blocks(held.pop(0)))
            self.target.onload_deferred()
        self.target.traffic.add(before)
        self.extend_chunk = min(group.gather(self.extend_chunk))

    def _planned_for(self, rooms: Sequence[int]) -> MemoryPlan:
        """Return the plan for the first number of new tokens for which there is memory."""
        for room in rooms:
            self.new = room
            try:
                with self.runtime.target.group.sync_errors():
                    return self.runtime.plan(len(self.prompt), room)
            except InsufficientMemoryError:
                if room == rooms[-1]:
                    raise
        raise ValueError("no room is asked for")

    def _prefill_chunk(self, part: Tensor, progress: Progress | None) -> Tensor:
        """Read tokens (T,) behind what the target's cache holds; return the logits (1, V)."""
        model, target = self.runtime.target, self.target
        target.truncate(target.length)  # the last part is what followers choose by
        if len(part) <= self.max_tokens and target.is_block_aligned:
            logits = model(part, target, 1)
            target.advance(len(part))
            if progress:
                progress(1, 1)
            return logits
        return self._prefill(part, progress)

    def _prefill(self, tokens: Tensor, progress: Progress | None) -> Tensor:
        """Read tokens (T,) into the target's cache layer by layer; return the logits (1, V)."""
        model = self.runtime.target

        def check() -> None:
            check_cancelled(model.group, self.is_cancelled)

        with Prefill(self.target, len(tokens)) as way:
            return model.prefill(
                tokens, way, self.runtime.requirements.prefill_chunk, progress, check
            )

    def _prefill_draft(self, kept: int = 0) -> None:
        """Let the draft's cache stand behind the prompt, of which it may hold `kept` tokens."""
        model, cache = self.runtime.draft, self.draft
        if model is not None and cache is not None:
            vocab = self.runtime.target.config.vocab
            prompt = clamp_to_vocab(self.prompt, model.config.vocab, vocab)
            prefill_draft(model, cache, prompt, min(kept, cache.length))

    def _draft_decoder(
        self,
        level: Level,
        text: TokenSequence,
        sampling: Sampling,
        chance: Randomness,
    ) -> Decoder:
        """Return the draft model's own decoder, whose laws are over the target's vocabulary."""
        rows, vocab = level.model.config.vocab, self.runtime.target.config.vocab
        law = sampling if rows == vocab else sampling.padded_to(vocab)
        own = (level.name, level.model, level.cache, text, law, chance)
        return Autoregressive(*own) if rows == vocab else PaddedVocabDraft(rows, vocab, *own)
