"""The state of one sequence on one rank: its memory plan, its caches, and what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decoding.engine.draft_prefill import prefill_draft
from decoding.engine.levels import DecodingLevels, SequenceSlot
from decoding.models.runtime import Runtime
from decoding.planning.activations import prefill_chunk
from decoding.planning.plan import Plan
from decoding.planning.request_spec import RequestSpec
from decoding.prefix_cache.manager import PrefixCacheManager
from decoding.prefix_cache.store import is_worth_saving
from decoding.prefix_cache.writer import BackgroundWriter
from decoding.speculation.draft_vocabulary import clamp_to_vocab
from offload.errors import InsufficientMemoryError
from offload.layout import ceil_div, shares
from offload.tiered.cache import TieredCache
from offload.tiered.kv_file import head_blocks, read_layer
from offload.tiered.prefill import Prefill
from parallel.execution.cuda_graphs import GraphRunner
from parallel.model.pipeline import PrefillStep, PrefillSteps, part_of_prefill, run_steps


class SequenceState:
    """The caches of one sequence on this rank.

    `levels` are those of its mode (`DecodingLevels`). With a prompt cache, a prefix of the prompt
    may be loaded from disk, and the prompt's KV is saved in the background of decoding.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt: list[int],
        max_new_tokens: int,
        plan: Plan | None = None,
        prefix_cache: PrefixCacheManager | None = None,
        name: str = "",
        slot: SequenceSlot | None = None,
    ):
        """Allocate everything that the sequence needs. Raises InsufficientMemoryError.

        Args:
            runtime: models and settings.
            prompt: token ids.
            max_new_tokens: maximum number of new tokens.
            plan: its mode and budget, and where the KV is placed on this rank; by default the
                runtime's, placed in all free memory.
            prefix_cache: prompts cached on disk.
            name: display name in the prompt cache.
            slot: its place; by default one of its own, with the runtime's arena.
        """
        self.runtime = runtime
        group, captures = runtime.target.group, bool(runtime.settings.graphs)
        self.slot = slot or SequenceSlot(runtime.arena, GraphRunner(captures, group.graph_capturer))
        runtime.link.peak_bytes()
        self.peaks: dict[str, int | None] = {}  # peak memory by phase (`Link.peak_bytes`)
        self.prompt = torch.tensor(prompt, device=runtime.target.group.device)
        self.max_tokens = runtime.requirements.max_forward_tokens
        self._make_caches(plan or runtime.plan(len(prompt), max_new_tokens))
        self._prefix_cache, self._name = prefix_cache, name
        self.saving: BackgroundWriter | None = None  # saves the last prefilled prompt
        self.loaded_tokens = 0  # prompt tokens loaded from disk

    def prefill(self) -> Tensor:
        """Prefill the prompt at once (`prefill_steps`); return the logits (1, V)."""
        self.capture_graphs()
        return run_steps(self.prefill_steps())

    def prefill_steps(self) -> PrefillSteps:
        """Load the cached prefix, and prefill the rest of the prompt in steps.

        All ranks run them. Raises InsufficientMemoryError on all ranks.
        """
        if self._prefix_cache is not None and not self.target.length:
            prompt = self.prompt.tolist()
            self.loaded_tokens = self._prefix_cache.load(self._identity, prompt, self.target)
        cached, tokens = self.target.length, len(self.prompt)
        steps = self._prefill(self.prompt[cached:])
        logits = yield from part_of_prefill(steps, cached, tokens - cached, tokens)
        with self.runtime.target.group.sync_errors():
            self.target.onload_deferred()
        self._prefill_draft()
        self._save(logits)
        self.peaks["prefill"] = self.runtime.link.peak_bytes()
        return logits

    @torch.inference_mode()
    def extend_steps(
        self, tokens: Sequence[int], cached: int, reserve: Sequence[int] = ()
    ) -> PrefillSteps:
        """Replace the sequence by `tokens`, and prefill those after the first `cached` of them.

        The two share these `cached` tokens, fewer than all of `tokens`. The missing ones are
        prefilled in parts of `extend_chunk`, each layer by layer, or in a decoding forward if one
        has room for it. With `reserve` the first step reallocates the caches, for the first of
        these numbers of new tokens that fits, and raises InsufficientMemoryError on all ranks if
        none fits; the state is unusable then. All ranks run the steps.
        """
        self.peaks["decoding"] = self.runtime.link.peak_bytes()
        self.peaks = {}
        self.loaded_tokens = 0
        self._finish_saving(cached, bool(reserve))
        self.prompt = torch.tensor(tokens, device=self.prompt.device)
        for level in self.levels:
            level.cache.traffic.reset()
        self.target.truncate(cached)
        if reserve:
            self._reallocate(reserve)
        rest = self.prompt[self.target.length :]
        yield PrefillStep(0, len(rest), ends_layer=True)
        sizes = shares(len(rest), ceil_div(len(rest), self.extend_chunk))
        done = 0
        for part in rest.split(sizes):
            steps = self._prefill_chunk(part)
            logits = yield from part_of_prefill(steps, done, len(part), len(rest))
            done += len(part)
        self._prefill_draft(cached)
        self._save(logits)
        self.peaks["prefill"] = self.runtime.link.peak_bytes()
        return logits

    @property
    def capacity(self) -> int:
        """Return the number of tokens that the caches were allocated for."""
        return self.target.shape.capacity

    def same_rope_as(self, prompt_tokens: int, max_new_tokens: int) -> bool:
        """Return whether a sequence of this size would have the same rotary angles."""
        rope_key = self.runtime.target.config.rope_key
        own = rope_key(self.plan.spec.prompt, self.capacity)
        return own == rope_key(prompt_tokens, prompt_tokens + max_new_tokens)

    def capture_graphs(self) -> None:
        """Capture short forwards as CUDA graphs; before prefill. All ranks call it."""
        self.slot.capture(self.levels)

    def close(self) -> None:
        """End the sequence: wait for saving and copies."""
        if self.saving is not None:
            self.saving.wait()
        self._detach()
        self.slot.vacate()
        self.peaks["decoding"] = self.runtime.link.peak_bytes()

    def _detach(self) -> None:
        """Wait for copies that use the caches, so that these can be freed or reused."""
        self.runtime.link.drain()
        for level in self.levels:
            if isinstance(level.cache, TieredCache):
                # breaks a reference cycle: observers reference the target's cache
                level.cache.observers.clear()

    def _save(self, logits: Tensor) -> None:
        """Start to save the prompt, unless rank 0 is still saving or logits are not finite.

        All ranks call it.
        """
        if self._prefix_cache is None:
            return
        tokens = self.prompt.tolist()
        previous = self.saving
        is_free = previous is None or not previous.is_busy  # rank 0's waits for the others'
        may_save = is_free and bool(logits.isfinite().all())
        saving = self._prefix_cache.save(self._identity, self._name, tokens, self.target, may_save)
        self.saving = saving or previous

    def _finish_saving(self, cached: int, is_reallocated: bool) -> None:
        """Finish saving before a turn after `cached` tokens changes the KV that is being read.

        It is cancelled if the turn shares nearly all of it, and will be saved in its place.
        """
        saving = self.saving
        if saving is None or not (is_reallocated or cached < saving.tokens):
            return
        if is_worth_saving(saving.tokens, cached):
            saving.wait()
        else:
            saving.cancel()

    @property
    def _identity(self) -> str:
        """Return a digest of all that the KV depends on, except for the tokens."""
        assert self._prefix_cache is not None
        config = self.runtime.target.config
        return self._prefix_cache.fingerprint.kv_identity(
            config, self.plan.spec.prompt, self.capacity
        )

    def _make_caches(self, plan: Plan) -> None:
        """Allocate the caches as planned. Raises InsufficientMemoryError."""
        self.plan = plan
        # maximum tokens that `extend` prefills at once; `SequenceManager` takes the ranks' minimum
        self.extend_chunk = plan.extend_chunk
        levels = DecodingLevels(self.runtime, plan, self.slot)
        self.target, self.levels = levels.target, levels.levels
        self.retrieval, self.draft = levels.retrieval, levels.draft

    def _reallocate(self, reserve: Sequence[int]) -> None:
        """Reallocate the caches for as many new tokens as fit, and copy the target's KV.

        Raises InsufficientMemoryError on all ranks if none of `reserve` fits.
        """
        group, traffic = self.runtime.target.group, self.target.traffic
        with group.sync_errors():
            layout, tokens = self.target.layout, self.target.length
            # a reader holds its layer's memory: none of them may live longer
            layers = [read_layer(read, layout, tokens) for read in self.target.host_readers()]
        self._detach()
        self.slot.vacate()
        # frees the old caches before new ones are allocated
        self.levels, self.retrieval, self.draft = [], None, None
        del self.target
        plan = self._plan_first(reserve)
        with group.sync_errors():
            self._make_caches(plan)
        self.capture_graphs()
        with group.sync_errors():
            with Prefill(self.target, tokens) as prefill:
                for layer in range(len(layers)):
                    prefill.load_blocks(layer, head_blocks(layers.pop(0)))
            self.target.onload_deferred()
        self.target.traffic.add(traffic)
        self.extend_chunk = min(group.gather(self.extend_chunk))

    def _plan_first(self, reserve: Sequence[int]) -> Plan:
        """Return the plan for the first of these numbers of new tokens that fits."""
        plan, prompt = self.plan, len(self.prompt)
        for max_new_tokens in reserve:
            try:
                with self.runtime.target.group.sync_errors():
                    spec = RequestSpec(plan.requirements, prompt, max_new_tokens)
                    memory = self.slot.share or self.runtime.memory(self.slot.device_bytes)
                    return replace(Plan.place(spec, memory), reason=plan.reason)
            except InsufficientMemoryError:
                if max_new_tokens == reserve[-1]:
                    raise
        raise ValueError("`reserve` is empty")

    def _prefill_chunk(self, part: Tensor) -> PrefillSteps:
        """Append tokens (T,) to the target's cache in steps."""
        model, target = self.runtime.target, self.target
        target.truncate(target.length)  # observers select by the last part alone
        if len(part) > self.max_tokens or not target.is_block_aligned:
            return (yield from self._prefill(part))
        logits = model(part, target, 1)
        target.advance(len(part))
        yield PrefillStep(1, 1, ends_layer=True)
        return logits

    def _prefill(self, tokens: Tensor) -> PrefillSteps:
        """Prefill tokens (T,) into the target's cache layer by layer, in steps."""
        runtime = self.runtime
        with Prefill(self.target, len(tokens)) as prefill:
            chunk = prefill_chunk(self.plan.requirements)
            return (yield from runtime.target.prefill_steps(tokens, prefill, chunk))

    def _prefill_draft(self, cached: int = 0) -> None:
        """Advance the draft cache to the end of the prompt, after at most `cached` tokens."""
        model, cache = self.runtime.draft, self.draft
        if model is not None and cache is not None:
            vocab = self.runtime.target.config.vocab
            prompt = clamp_to_vocab(self.prompt, model.config.vocab, vocab)
            prefill_draft(model, cache, prompt, min(cached, cache.length))
