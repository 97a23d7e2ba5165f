"""The decoder of all levels: target, middle and draft.

Levels differ only in the cache that attention uses.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, ModuleList

from offload.attention.expanded_latents import LatentHeads
from offload.attention.folding import Partial
from offload.kernels.batch_invariant_shape import ROW_BLOCK
from offload.recurrent.recurrence import RecurrentInputs
from offload.rotary import Rotary
from parallel.batch_invariant import batch_invariant, map_blocks
from parallel.config.model_config import ModelConfig
from parallel.config.parameter_count import (
    has_experts,
    has_mlp,
    has_window,
    head_rows,
    head_shape,
    is_recurrent,
    kv_projections,
    layer_name,
    mixer_name,
)
from parallel.formats.checkpoint import Checkpoint
from parallel.model.delta_net import DeltaNet
from parallel.model.latent_attention import LatentAttention
from parallel.model.layers import (
    ColumnParallelLinear,
    HeadNorms,
    RotatedHeadNorms,
    RowParallelLinear,
    SinkLogits,
    VocabParallelEmbedding,
    WidthNorms,
    make_norm,
    unweighted_norm,
)
from parallel.model.mamba import Mamba2
from parallel.model.moe import MlpAndExperts, SparseMoE
from parallel.model.pipeline import (
    Chunk,
    LayerSteps,
    PrefillStep,
    PrefillSteps,
    finish,
    in_chunks,
    pipelined,
)
from parallel.model.prompt_logprobs import PromptScorer
from parallel.model.residual import Branch, Mlp, sigmoid_gated
from parallel.ranks.process_group import AsyncSum, TensorParallelGroup
from parallel.weights.matrix import Scratch, empty_parameter


class Attends(Protocol):
    """The interface that a layer needs of a cache, or of a prefill into one."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial: ...

    def recur(self, layer: int, inputs: RecurrentInputs, start: int) -> Tensor: ...


class KVCacheLike(Attends, Protocol):
    """The interface that a model needs of a cache."""

    length: int
    is_batch_invariant: bool  # whether rows are computed in blocks at fixed positions

    def begin_forward(self, rows: int) -> None: ...

    def keep_hidden_states(self, states: Tensor, rows: int) -> None: ...


class PrefillCacheLike(Attends, Protocol):
    """The interface that layer-major prefill needs of a prefill into a cache."""

    @property
    def output_rows(self) -> int:
        """The last tokens of which the last layer's output is needed."""

    def store(self, layer: int, k: Tensor, v: Tensor, start: int) -> None: ...

    def attend_latents(
        self, layer: int, q: Tensor, latents: Tensor, heads: LatentHeads, start: int
    ) -> Partial: ...

    def keep_hidden_states(self, states: Tensor) -> None: ...


class PaddedCache:
    """A cache in a forward whose query tokens are padded to whole blocks."""

    is_batch_invariant = True

    def __init__(self, cache: KVCacheLike, own: slice):
        """`own`: the rows of the forward that are tokens, not padding."""
        self._cache, self._own = cache, own
        self.length = cache.length

    def begin_forward(self, rows: int) -> None:
        self._cache.begin_forward(self._own.stop - self._own.start)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Partial:
        """Call `Cache.attend` with the token rows; padding rows get zeros."""
        own = self._own
        out, lse = self._cache.attend(layer, q[own], k[own], v[own], start)
        after = len(q) - own.stop
        return F.pad(out, (0, 0, 0, 0, own.start, after)), F.pad(lse, (0, 0, own.start, after))

    def recur(self, layer: int, inputs: RecurrentInputs, start: int) -> Tensor:
        """Call `Cache.recur` with the token rows; padding rows get zeros."""
        own, rows = self._own, len(inputs.channels)
        out = self._cache.recur(layer, inputs.rows(own), start)
        return F.pad(out, (0, 0, 0, 0, own.start, rows - own.stop))

    def keep_hidden_states(self, states: Tensor, rows: int) -> None:
        """Call `Cache.keep_hidden_states` with the token rows."""
        self._cache.keep_hidden_states(states[self._own], rows)


class Attention(Branch):
    """A layer's attention, over this rank's heads."""

    def __init__(self, config: ModelConfig, group: TensorParallelGroup, layer: int):
        super().__init__(config, config.norms.attention, mixer_name(config, layer))
        self.layer = layer
        windowed = has_window(config, layer)
        shape = head_shape(config, windowed)
        self.head_dim = shape.dim
        # dimensions of a head whose rows the checkpoint interleaves
        self.interleaved = config.rotary_dim if config.interleaved_rope else 0
        self.query_multiplier = config.query_multiplier
        own_queries, own_keys = units = head_rows(shape)
        queries, keys = shape.heads * own_queries, shape.heads * own_keys
        count = kv_projections(config, windowed)
        names = ["q_proj", "k_proj", "v_proj"][: 1 + count]
        self.names = ["qkv_proj"] if config.fused_qkv else names
        per_head = 2 if config.has_output_gates else 1  # a head's gates follow its queries
        outputs = [per_head * queries] + count * [keys]
        row_units = [per_head * own_queries] + count * [own_keys]
        by_unit = config.grouped_qkv
        self.qkv = ColumnParallelLinear(
            group, config.hidden, outputs, config.qkv_bias, row_units, by_unit
        )
        self.qk_norm: HeadNorms | WidthNorms | None = None
        if config.qk_norm == "head":
            # Gemma 4's attention has no scale of its own
            scale = shape.dim**0.5 if config.is_gemma4 else 1.0
            kind = config.float32_norms, config.offset_norms
            self.qk_norm = HeadNorms(shape.dim, config.norm_eps, *kind, scale)
        elif config.qk_norm == "rotated":
            self.qk_norm = RotatedHeadNorms(shape.dim, config.norm_eps)
        elif config.qk_norm == "width":
            self.qk_norm = WidthNorms(group, [queries, keys], units, config.norm_eps)
        self.value_norm_eps = config.norm_eps if config.is_gemma4 else None
        self.o = RowParallelLinear(group, queries, config.hidden, config.o_bias, own_queries)
        self.sinks: SinkLogits | None = None
        if config.has_sinks:
            self.sinks = SinkLogits(group, config.heads, shape.groups)

    def forward(self, x: Tensor, cache: Attends, start: int) -> AsyncSum:
        """Attend with x (T, hidden), the tokens from position `start` on.

        Returns a pending all-reduce (T, hidden), which alone holds memory until it is waited for.
        """
        parts = self.qkv(self.pre(x))
        gates = self._output_gates(parts)
        q, k, v = self._heads(parts)
        if self.query_multiplier != 1.0:
            q = q * self.query_multiplier
        # Flattened by a function: a variable would keep (T, H, D) alive beside a copy.
        attended = self._flattened(cache.attend(self.layer, q, k, v, start))
        if gates is not None:
            attended = map_blocks(sigmoid_gated, attended, gates)
        return self.post(self.o(attended))

    def store_kv(self, x: Tensor, cache: PrefillCacheLike, start: int) -> None:
        """Store the keys and values of x (T, hidden), if its attention output is not needed."""
        k, v = self._heads(self.qkv(self.pre(x), first=1), first=1)
        cache.store(self.layer, k, v, start)

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.load_norms(checkpoint, prefix)
        attention = f"{prefix}.{self.name}"
        self.qkv.load(checkpoint, [f"{attention}.{name}" for name in self.names])
        if self.interleaved:
            self.qkv.deinterleave(2, self.head_dim, self.interleaved)
        if self.qk_norm is not None:
            self.qk_norm.load(checkpoint, [f"{attention}.{name}_norm" for name in "qk"])
        self.o.load(checkpoint, f"{attention}.o_proj")
        if self.sinks is not None:
            self.sinks.load(checkpoint, f"{attention}.sinks")

    def _flattened(self, attended: Partial) -> Tensor:
        """Return the attention output (T, H * D), with the heads' sinks if they have any."""
        out, lse = attended
        return (out if self.sinks is None else self.sinks(out, lse)).flatten(1)

    def _output_gates(self, parts: list[Tensor]) -> Tensor | None:
        """Return the gates (T, H * D) of outputs, and leave queries in the first part.

        They follow each head's queries there, if there are any; None if there are none.
        """
        if self.qkv.outputs[0] == self.o.inputs:
            return None
        both = parts[0].unflatten(-1, (-1, 2, self.head_dim))
        parts[0] = both[:, :, 0].flatten(1)
        return both[:, :, 1].flatten(1)

    def _heads(self, parts: list[Tensor], first: int = 0) -> list[Tensor]:
        """Return queries, keys and values (T, H, D), or those from `first`, from projections."""
        v = parts[-1]
        if len(self.qkv.outputs) == 3:  # else it is the keys
            parts = parts[:-1]
        if self.qk_norm is not None:
            parts = self.qk_norm(parts, first)
        if self.value_norm_eps is not None:
            v = unweighted_norm(v, self.head_dim, self.value_norm_eps)
        return [part.unflatten(-1, (-1, self.head_dim)) for part in (*parts, v)]


class DecoderLayer(Module):
    """y = x + attention(x), then y + mlp(y): two all-reduces per layer, or one without an MLP.

    In Cohere's models both have the same input: y = x + attention(x) + mlp(x). In Gemma 4 a layer's
    output is multiplied by a number of its own.
    """

    def __init__(self, config: ModelConfig, group: TensorParallelGroup, index: int):
        super().__init__()
        mixer: type[Attention | DeltaNet | LatentAttention | Mamba2] = Attention
        if config.recurrent is not None and is_recurrent(config, index):
            mixer = Mamba2 if config.recurrent.is_mamba else DeltaNet
        elif config.latent is not None:
            mixer = LatentAttention
        self.attention = mixer(config, group, index)
        self.mlp: Mlp | SparseMoE | MlpAndExperts | None = None
        if config.experts is not None and has_experts(config, index):
            kind = MlpAndExperts if config.experts.is_gemma4 else SparseMoE
            self.mlp = kind(config, group)
        elif has_mlp(config, index):
            self.mlp = Mlp(config, group)
        self.is_parallel = config.is_cohere
        self.scalar = empty_parameter(1) if config.is_gemma4 else None

    def forward(self, x: Tensor, cache: Attends, start: int) -> Tensor:
        """Transform x (T, hidden), the tokens from position `start` on, to the same shape."""
        attended = x + self.attention(x, cache, start)()
        if self.mlp is None:
            return self._scaled(attended)
        return self._scaled(attended + self.mlp(x if self.is_parallel else attended)())

    def run_pipelined(self, chunks: Iterable[Chunk], cache: PrefillCacheLike) -> Iterator[Chunk]:
        """Transform chunks of a prompt; yield each when it is done.

        The all-reduces of a chunk overlap the compute of newer ones.
        """
        mixer = self.attention
        mix = mixer.prefill if isinstance(mixer, LatentAttention) else mixer

        def attend(chunk: Chunk) -> None:
            chunk.start_sum(mix(chunk.x, cache, chunk.start))

        def transform(chunk: Chunk) -> None:
            before = chunk.x
            attended = chunk.finish_sum()
            assert self.mlp is not None
            chunk.start_sum(self.mlp(before if self.is_parallel else attended))

        def finish(chunk: Chunk) -> None:
            chunk.x = self._scaled(chunk.finish_sum())

        stages = [attend, finish] if self.mlp is None else [attend, transform, finish]
        return pipelined(chunks, stages)

    def run_last(self, chunks: Sequence[Chunk], cache: PrefillCacheLike) -> Tensor:
        """Store the keys and values of a whole prompt, in the last layer.

        Returns the output (T, hidden) of the cache's `output_rows`, or of the last chunk.
        """
        before, last = _last_rows(chunks, cache.output_rows)
        for chunk in before:
            self.attention.store_kv(chunk.x, cache, chunk.start)
        return self(last.x, cache, last.start)

    def run_last_whole(self, chunks: Sequence[Chunk], cache: PrefillCacheLike) -> Iterator[Chunk]:
        """Transform a whole prompt in the last layer; yield each chunk.

        The last one has the rows that `run_last` returns, computed as there.
        """
        before, last = _last_rows(chunks, cache.output_rows)
        yield from self.run_pipelined(before, cache)
        yield Chunk(self(last.x, cache, last.start), last.start)

    def load(self, checkpoint: Checkpoint, prefix: str, mlp_prefix: str) -> None:
        """Read the mixer of layer PREFIX, and the MLP of layer MLP_PREFIX if there is one."""
        self.attention.load(checkpoint, prefix)
        if self.mlp is not None:
            self.mlp.load(checkpoint, mlp_prefix)
        if self.scalar is not None:
            self.scalar.copy_(checkpoint.tensor(f"{prefix}.layer_scalar", (1,))[:])

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scalar is None else x * self.scalar


def _last_rows(chunks: Sequence[Chunk], rows: int) -> tuple[Iterator[Chunk], Chunk]:
    """Return a prompt's chunks up to its last `rows`, and these; no more than the last chunk.

    The former are made one by one, so that none keeps its output.
    """
    last = chunks[-1]
    tail = max(last.start, last.end - rows)
    before = (
        Chunk(each.x[: tail - each.start], each.start) for each in chunks if each.start < tail
    )
    return before, Chunk(last.x[tail - last.start :], tail)


class Transformer(Module):
    """A decoder-only transformer of any supported family, sharded over `group`.

    It is stateless: the sequence is in the cache.
    """

    def __init__(self, config: ModelConfig, group: TensorParallelGroup):
        super().__init__()
        self.config = config
        self.group = group
        self.embed = VocabParallelEmbedding(group, config.vocab, config.hidden)
        self.layers = ModuleList(
            DecoderLayer(config, group, index) for index in range(config.layers)
        )
        self.norm = make_norm(config)
        self.head = self.embed
        if not config.tied:
            self.head = VocabParallelEmbedding(group, config.vocab, config.hidden)
        self.scratch = Scratch()

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: KVCacheLike, rows: int) -> Tensor:
        """Run tokens (T,) after the cache's content.

        Returns logits (rows, V) float32 that follow each of the last `rows` tokens, which may be
        none. The tokens' KV is written, but they count only once the caller advances the cache.
        """
        return finish(self.forward_steps(tokens, cache, rows))

    def forward_steps(self, tokens: Tensor, cache: KVCacheLike, rows: int) -> LayerSteps[Tensor]:
        """Run `forward` in steps, in inference mode; return its logits."""
        if cache.is_batch_invariant:
            return (yield from self._batch_invariant_steps(tokens, cache, rows))
        x = yield from self.hidden_state_steps(tokens, cache)
        cache.keep_hidden_states(x, rows)
        return self.logits(x[len(x) - rows :])

    def _batch_invariant_steps(
        self, tokens: Tensor, cache: KVCacheLike, rows: int
    ) -> LayerSteps[Tensor]:
        """Run `forward_steps` in blocks of rows that start at fixed positions of the sequence."""
        lead = cache.length % ROW_BLOCK
        end = lead + len(tokens)
        padded = F.pad(tokens, (lead, -end % ROW_BLOCK))
        first = (end - rows) // ROW_BLOCK * ROW_BLOCK  # start of the blocks that need logits
        padded_cache = PaddedCache(cache, slice(lead, end))
        x = yield from self.hidden_state_steps(padded, padded_cache)
        with batch_invariant():
            logits = self.logits(x[first:])
        padded_cache.keep_hidden_states(x, rows)
        return logits[end - rows - first : end - first]

    def hidden_state_steps(self, tokens: Tensor, cache: KVCacheLike) -> LayerSteps[Tensor]:
        """Run tokens (T,) like `forward_steps`; return hidden states (T, hidden), normalized."""
        # entered in every step, and left before others run
        blocks = batch_invariant if cache.is_batch_invariant else nullcontext
        with blocks():
            cache.begin_forward(len(tokens))
            x = self._inputs(tokens, cache)
        for index, layer in enumerate(self.layers):
            yield index
            with blocks():
                x = layer(x, cache, cache.length)
        with blocks():
            return cast(Tensor, self.norm(x))

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Return logits (T, V) float32 of hidden states x (T, hidden) after the final norm."""
        if not len(x):
            return x.new_empty(0, self.config.vocab, dtype=torch.float32)
        logits = self.head.logits(x)
        scaling, cap = self.config.logits_scaling, self.config.logits_cap
        logits = logits if scaling == 1.0 else logits / scaling
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def rotary(self, tokens: int, length: int) -> Rotary:
        """Return the tables of `ModelConfig.rotary`, with the weights of rotated queries if any."""
        weight = self.embed.weight
        rotary = self.config.rotary(tokens, length, weight.dtype, weight.device)
        if self.config.qk_norm == "rotated":
            norms = (each for each in self.modules() if isinstance(each, RotatedHeadNorms))
            rotary.weight_queries(torch.stack([each.query_weight for each in norms]))
        return rotary

    def prefill(self, tokens: Tensor, cache: PrefillCacheLike, max_chunk: int) -> Tensor:
        """Prefill a prompt at once (`prefill_steps`); return the logits (1, V)."""
        return finish(self.prefill_steps(tokens, cache, max_chunk))

    @torch.inference_mode()
    def prefill_steps(
        self,
        tokens: Tensor,
        cache: PrefillCacheLike,
        max_chunk: int,
        scorer: PromptScorer | None = None,
    ) -> PrefillSteps:
        """Prefill a prompt, tokens (T,), layer by layer: all chunks in one before the next layer.

        Holds the hidden states of the whole prompt, while the cache holds one layer's KV at a time.
        The last layer only computes the KV, and the output of the last few tokens, or with a scorer
        of all. Run inside the cache's `Prefill` context, with the object that it yields.

        Args:
            tokens: the prompt.
            cache: the prefill into a cache.
            max_chunk: largest number of tokens computed at once.
            scorer: scores the tokens of a prompt that begins with them.

        Returns:
            Steps, each a chunk of a layer, with the logits (1, V) that follow the last token.
        """
        x = tokens.new_empty(len(tokens), self.config.hidden, dtype=self.embed.weight.dtype)
        for chunk in in_chunks(tokens, max_chunk):
            x[chunk.start : chunk.end] = self._embed(chunk.x)  # (T, hidden)
        *others, last = (cast(DecoderLayer, layer) for layer in self.layers)
        units = len(x) * len(self.layers)
        for index, layer in enumerate(others):
            for chunk in layer.run_pipelined(in_chunks(x, max_chunk), cache):
                x[chunk.start : chunk.end] = chunk.x
                done = index * len(x) + chunk.end
                yield PrefillStep(done, units, ends_layer=chunk.end == len(x))
        if scorer is None:
            x = self.norm(last.run_last(list(in_chunks(x, max_chunk)), cache))
        else:
            outputs = last.run_last_whole(list(in_chunks(x, max_chunk)), cache)
            x = yield from self._score(outputs, tokens, scorer)
        cache.keep_hidden_states(x)
        yield PrefillStep(units, units, ends_layer=True)
        return self.logits(x[-1:])

    def _score(
        self, chunks: Iterator[Chunk], tokens: Tensor, scorer: PromptScorer
    ) -> Generator[PrefillStep, None, Tensor]:
        """Score tokens (T,), given chunks of the last layer's output, in steps.

        Returns the hidden states (T, hidden) of the last chunk, after the final norm.
        """
        units, previous = len(tokens) * len(self.layers), len(tokens) * (len(self.layers) - 1)
        for chunk in chunks:
            x = self.norm(chunk.x)
            following = tokens[chunk.start + 1 : chunk.end + 1]
            scorer.add(self.logits, x[: len(following)], following)
            if chunk.end < len(tokens):
                yield PrefillStep(previous + chunk.end, units, ends_layer=False)
        return x

    def load(self, checkpoint: Checkpoint) -> None:
        """Fill every parameter from the checkpoint, reading this rank's slices only.

        Raises CheckpointError.
        """
        self.load_layers(checkpoint)
        self.embed.load(checkpoint, "model.embed_tokens")
        self.norm.load(checkpoint, "model.norm")
        if not self.config.tied:
            self.head.load(checkpoint, "lm_head")
        first, count = self.config.layers, self.config.unused_layers
        others = tuple(f"model.layers.{layer}." for layer in range(first, first + count))
        checkpoint.check_unused(self.config.tied, self.config.wrapper is not None, others)

    def load_layers(self, checkpoint: Checkpoint) -> None:
        """Fill the parameters of all layers, as `load`."""
        for index, layer in enumerate(self.layers):
            names = (layer_name(self.config, index, of_mlp) for of_mlp in (False, True))
            cast(DecoderLayer, layer).load(checkpoint, *names)

    def reserve_scratch(self) -> None:
        """Allocate the memory in which a layer's packed matrices are unpacked."""
        for layer in self.layers:
            self.scratch.reserve_all(layer)

    def _inputs(self, tokens: Tensor, cache: KVCacheLike) -> Tensor:
        """Return the hidden states (T, hidden) of a forward's tokens (T,) at the first layer."""
        return self._embed(tokens)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return the hidden states (T, hidden) of tokens (T,) at the first layer."""
        x = self.embed(tokens)
        multiplier = self.config.embedding_multiplier
        if self.config.is_gemma:
            multiplier = torch.tensor(multiplier, dtype=x.dtype).item()
        return x if multiplier == 1.0 else x * multiplier
