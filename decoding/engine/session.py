"""The state of one sequence on one rank: its memory plan, its caches, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from decoding.engine.levels import DecodingLevels, SequenceSlot, graph_runner
from decoding.models.draft_prefill import prefill_draft, prefill_predictor
from decoding.models.runtime import Runtime
from decoding.planning.activations import prefill_chunk
from decoding.planning.plan import Plan
from decoding.prefix_cache.stored_prompt import StoredPrompt
from decoding.speculation.draft_vocabulary import clamp_to_vocab
from offload.cache.prediction import PredictionCache
from offload.cache.streaming import StreamingCache
from offload.layout import ceil_div, shares
from offload.prefill.host_copy import HostCopy
from offload.prefill.layer_major import Prefill, copy_prefix
from offload.retrieval.cache import RetrievalCache
from parallel.execution.executor import CopiedPrefix, Level
from parallel.model.pipeline import PrefillStep, PrefillSteps, finish, part_of_prefill
from parallel.model.prompt_logprobs import PromptScorer


class SwappedSequence:
    """The KV of a sequence on this rank, from which others copy their beginning.

    Its "prefill" copies the KV of the sequence's caches, which may be freed after it.
    """

    copied: CopiedPrefix | None = None  # its source is not closed before all is copied

    def __init__(self, source: SequenceState, tokens: int):
        """Start to copy the first tokens of a sequence."""
        self.runtime, self.rope_key = source.runtime, source.rope_key
        self.levels: list[Level] = []  # it cannot be decoded on
        self.target = HostCopy(source.target.layout, tokens)
        self._layers = self.target.fill(source.target)

    def prefill_steps(self) -> PrefillSteps:
        """Copy the KV in steps, one for each layer; there are no logits.

        All ranks run them. Raises InsufficientMemoryError on all ranks.
        """
        layers = self.target.layout.layers
        for done in range(1, layers + 1):
            with self.runtime.target.group.sync_errors():
                next(self._layers)
            if done < layers:
                yield PrefillStep(done, layers, ends_layer=True)
        self._layers.close()  # it refers to the caches
        return torch.empty(0)

    def close(self) -> None:
        """Free the memory."""
        self._layers.close()
        self.target.free()


class SequenceState:
    """The caches of one sequence on this rank.

    `levels` are those of its mode (`DecodingLevels`). The beginning of the prompt may be copied
    from another sequence, or loaded from the prompt cache, where the prompt's KV is saved in the
    background of decoding.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt: list[int],
        max_new_tokens: int,
        plan: Plan | None = None,
        stored: StoredPrompt | None = None,
        slot: SequenceSlot | None = None,
    ):
        """Allocate everything that the sequence needs. Raises InsufficientMemoryError.

        Args:
            runtime: models and settings.
            prompt: token ids.
            max_new_tokens: maximum number of new tokens.
            plan: its mode and budget, and where the KV is placed on this rank; by default the
                runtime's, placed in all free memory.
            stored: its prompt in the prompt cache.
            slot: its place; by default one of its own, with the runtime's arena.
        """
        self.runtime = runtime
        self.slot = slot or SequenceSlot(runtime.arena, graph_runner(runtime))
        runtime.link.peak_bytes()
        self.peaks: dict[str, int | None] = {}  # peak memory by phase (`Link.peak_bytes`)
        self.prompt = torch.tensor(prompt, device=runtime.target.group.device)
        self.plan = plan or runtime.plan(len(prompt), max_new_tokens)
        # maximum tokens that `extend` prefills at once; `SequenceManager` takes the ranks' minimum
        self.extend_chunk = self.plan.extend_chunk
        levels = DecodingLevels(runtime, self.plan, self.slot)
        self.target, self.levels = levels.target, levels.levels
        self.stored = stored or StoredPrompt()
        self.copied: CopiedPrefix | None = None  # the beginning of the prompt

    def copy(self, source: SequenceState | SwappedSequence, tokens: int) -> None:
        """Let prefill copy the first tokens of a source, which is not closed before it has.

        Raises InsufficientMemoryError, and is closed.
        """
        try:
            steps = copy_prefix(source.target, self.target, tokens)
        except BaseException:
            self.close()
            raise
        self.copied = CopiedPrefix(source, tokens, steps)

    def prefill(self) -> Tensor:
        """Prefill the prompt at once (`prefill_steps`); return the logits (1, V)."""
        self.capture_graphs()
        return finish(self.prefill_steps())

    def prefill_steps(self, scorer: PromptScorer | None = None) -> PrefillSteps:
        """Copy or load a prefix, and prefill the rest of the prompt in steps.

        All ranks run them. With a scorer there is no prefix: it needs the hidden states of all
        tokens. Raises InsufficientMemoryError on all ranks.
        """
        tokens, layers = len(self.prompt), self.target.layout.layers
        prefix = self._prefix_steps() if scorer is None else ()
        for done, count in enumerate(prefix, 1):
            yield PrefillStep(count * min(done, layers), tokens * layers, ends_layer=True)
        cached = self.target.length
        steps = self._prefill(self.prompt[cached:], scorer)
        logits = yield from part_of_prefill(steps, cached, tokens - cached, tokens)
        with self.runtime.target.group.sync_errors():
            self.target.onload_deferred()
        self._prefill_draft()
        self.stored.save(self.rope_key, self.prompt, self.target, logits)
        self.peaks["prefill"] = self.runtime.link.peak_bytes()
        return logits

    @torch.inference_mode()
    def extend_steps(self, tokens: Sequence[int], cached: int) -> PrefillSteps:
        """Replace the sequence by `tokens`, and prefill those after the first `cached` of them.

        The two share these `cached` tokens, fewer than all of `tokens`. The missing ones are
        prefilled in parts of `extend_chunk`, each layer by layer, or in a decoding forward if one
        has room for it. All ranks run the steps.
        """
        self.peaks["decoding"] = self.runtime.link.peak_bytes()
        self.peaks = {}
        self.stored.replace(cached)
        self.prompt = torch.tensor(tokens, device=self.prompt.device)
        for level in self.levels:
            level.cache.traffic.reset()
        self.target.truncate(cached)
        if (states := self.target.hidden_states) is not None:
            states.crop(self.target.length)
        rest = self.prompt[self.target.length :]
        yield PrefillStep(0, len(rest), ends_layer=True)
        sizes = shares(len(rest), ceil_div(len(rest), self.extend_chunk))
        done = 0
        for part in rest.split(sizes):
            steps = self._prefill_chunk(part)
            logits = yield from part_of_prefill(steps, done, len(part), len(rest))
            done += len(part)
        self._prefill_draft(cached)
        self.stored.save(self.rope_key, self.prompt, self.target, logits)
        self.peaks["prefill"] = self.runtime.link.peak_bytes()
        return logits

    @property
    def capacity(self) -> int:
        """Return the number of tokens that the caches were allocated for."""
        return self.target.shape.capacity

    @property
    def retrieval(self) -> RetrievalCache | None:
        """Return the cache that selects from the target's, if its mode has one."""
        caches = [each for each in self.target.observers if isinstance(each, RetrievalCache)]
        return caches[0] if caches else None

    @property
    def rope_key(self) -> bytes:
        """Return a key that is the same for sequences with the same rotary angles."""
        return self.runtime.target.config.rope_key(self.plan.spec.prompt, self.capacity)

    def swap_out(self, cached: int) -> SwappedSequence:
        """Return a sequence whose prefill copies this one's KV to host memory.

        A turn after `cached` of its tokens goes on from these; 0: another sequence needs the room.
        """
        if cached:
            self.stored.replace(cached, is_freed=True)
        return SwappedSequence(self, cached or self.target.length)

    def capture_graphs(self) -> None:
        """Capture short forwards as CUDA graphs; before prefill. All ranks call it."""
        self.slot.capture(self.levels)

    def close(self) -> None:
        """End the sequence: wait for saving and copies."""
        self.stored.wait()
        self.copied = None
        self.runtime.link.drain()
        # breaks a reference cycle: observers reference the target's cache
        self.target.observers.clear()
        self.slot.vacate()
        self.peaks["decoding"] = self.runtime.link.peak_bytes()

    def _prefix_steps(self) -> Iterator[int]:
        """Copy or load a prefix of the prompt, layer by layer; yield its length in each step."""
        if self.copied is None:
            yield from self.stored.load(self.rope_key, self.prompt, self.target)
            return
        tokens, layers = self.copied.tokens, self.copied.layers
        for is_last in [*[False] * self.target.layout.layers, True]:
            with self.runtime.target.group.sync_errors():
                next(layers, None)
            if is_last:
                self.copied = None
            yield tokens

    def _prefill_chunk(self, part: Tensor) -> PrefillSteps:
        """Append tokens (T,) to the target's cache in steps."""
        model, target = self.runtime.target, self.target
        target.truncate(target.length)  # observers select by the last part alone
        if len(part) > self.plan.requirements.max_forward_tokens or not target.is_block_aligned:
            return (yield from self._prefill(part))
        logits = model(part, target, 1)
        target.advance(len(part))
        yield PrefillStep(1, 1, ends_layer=True)
        return logits

    def _prefill(self, tokens: Tensor, scorer: PromptScorer | None = None) -> PrefillSteps:
        """Prefill tokens (T,) into the target's cache layer by layer, in steps."""
        runtime = self.runtime
        with Prefill(self.target, len(tokens)) as prefill:
            chunk = prefill_chunk(self.plan.requirements, self.plan.spec.prompt)
            return (yield from runtime.target.prefill_steps(tokens, prefill, chunk, scorer))

    def _prefill_draft(self, cached: int = 0) -> None:
        """Advance the draft cache to the end of the prompt, after at most `cached` tokens."""
        model, config = self.runtime.draft, self.runtime.target.config
        for level in self.levels:
            cache = level.cache
            if level.model is not model:
                continue
            held = min(cached, cache.length)
            if isinstance(cache, PredictionCache):
                prefill_predictor(model, cache, self.prompt, held)
            elif isinstance(cache, StreamingCache):
                prompt = clamp_to_vocab(self.prompt, model.config.vocab, config.vocab)
                prefill_draft(model, cache, prompt, held)
