"""The memory that activations take, from a model's dimensions; per rank."""

from __future__ import annotations

from math import ceil

from decoding.config.defaults import (
    LOGIT_TENSORS,
    MAX_PREFILL_CHUNK,
    PREFILL_ACTIVATION_BYTES,
    PREFILL_CHUNK_STEP,
    PROBS_BYTES_PER_LOGIT,
    PROBS_ROWS,
)
from decoding.planning.requirements import Requirements, noise_positions
from offload.layout import EXPANDED_TOKENS, STATE_CHUNK, STATE_TOKENS, RecurrentShape, ceil_div
from parallel.config.parameter_count import MAX_STATIC_TOKENS, head_shape, mlp_inputs
from parallel.config.weight_sizes import weight_sizes

# query tokens times heads of a block of flash-attention 2 for head dimensions of up to 128 (an RTX
# 4090 has blocks of half that size for causal attention: full multiprocessors here are full there)
ATTENTION_ROWS = 128
_ALONE = 0.78  # rate of a block that has its multiprocessor alone, measured on an H200
_SIMILAR_TIME = 0.03
# queries as projected, joined, scaled and rotated, outputs, and their sum in float32, twice
_OWN_KV_COPIES = 10
XIELU_COPIES = 12  # copies of an MLP's intermediate values, in 16 bits, while it is computed
LONG_PROMPT = 1 << 20  # tokens; the last chunk of such a prompt does not matter


def activation_elements(requirements: Requirements, own_kv: bool = False) -> int:
    """Return the peak activation elements per token of a layer's prefill.

    They cover one chunk being computed and two with all-reduces in flight. With `own_kv` heads
    attend to latents through keys and values of their own, and add up what they return in float32.
    """
    target, ranks = requirements.target, requirements.ranks
    # projections, their normed and rotated copies, and the output
    shapes = (head_shape(target, windowed) for windowed in (False, True))
    gates = 2 if target.has_output_gates else 0  # and the gated output
    attention = max(each.dim * each.heads * ((5 + gates) * each.groups + 4) for each in shapes)
    if own_kv and target.latent is not None:
        heads = ranks * ceil_div(target.heads, ranks)
        attention = _OWN_KV_COPIES * heads * target.latent.own_dim
    if (states := target.recurrent) is not None:
        # outputs twice, and their gates; Mamba-2 multiplies and squares them in float32
        copies = 6 if states.is_mamba else 4
        outputs = states.value_heads * states.value_dim
        attention = max(attention, 2 * states.channels + copies * outputs)
    copies = XIELU_COPIES if target.activation == "xielu" else 4
    widest = max(copies * target.intermediate, attention) // ranks
    if target.experts is not None:  # the sum, and one expert's inputs and outputs
        widest = max(widest, 3 * target.hidden + 4 * target.experts.intermediate // ranks)
    return 8 * target.hidden + widest


def has_own_kv(requirements: Requirements, rows: int) -> bool:
    """Return whether heads attend to latents through keys and values of their own in a chunk."""
    latent = requirements.target.latent
    return latent is not None and latent.has_own_kv(rows)


def expanded_bytes(requirements: Requirements, tokens: int, rows: int) -> int:
    """Return the bytes of heads' own keys and values in chunks of so many rows of a prompt."""
    shape = requirements.target.latent
    if shape is None or not shape.has_own_kv(rows):
        return 0
    # beside these, the projections that they are made of
    per_head = 2 * shape.own_dim + shape.plain_dim
    per_head += shape.value_dim if shape.value_dim < shape.own_dim else 0
    heads = ceil_div(requirements.target.heads, requirements.ranks)
    held = min(tokens, EXPANDED_TOKENS + rows)
    return held * heads * per_head * requirements.dtype.itemsize


def sampling_bytes(requirements: Requirements, rows: int) -> int:
    """Return the bytes of logits and distributions while drafts are made and verified.

    `rows`: logits of the target's largest forward.
    """
    settings = requirements.settings
    outer = settings.draft_length_range(requirements.mode)[-1]
    inner = settings.inner_draft_length_range[-1] + 2
    # While an inner level verifies, the levels above hold what it has drafted for them so far.
    levels = requirements.has_split + requirements.has_retrieval
    held = max(LOGIT_TENSORS * rows, outer + (levels - 1 + LOGIT_TENSORS) * inner)
    if requirements.drafts_ahead:
        held += outer
    block = PROBS_BYTES_PER_LOGIT * min(rows, PROBS_ROWS)
    logprobs = 4 * rows
    noise = 8 * noise_positions(requirements)  # float64
    return requirements.target.vocab * (4 * held + max(block, logprobs) + noise)


def recurrence_bytes(requirements: Requirements, tokens: int) -> int:
    """Return the scratch bytes of a recurrent layer for some tokens, nearly all in float32."""
    if (states := requirements.layout.recurrent) is None:
        return 0
    # channels before and after the convolution; of each head, queries and keys with what they
    # become, values with theirs and the outputs, and scores with other tokens of a chunk
    head = 6 * states.key_dim + 6 * states.value_dim + 4 * STATE_CHUNK
    numbers = 4 * states.channels + states.value_heads * head
    chunk = 4 * min(tokens, STATE_TOKENS) * numbers
    layer = 2 * states.state_bytes(requirements.dtype.itemsize)
    rows = requirements.max_forward_tokens
    own = _advance_bytes(states, rows)
    if requirements.has_draft and requirements.draft is not None:
        draft = requirements.draft.kv_layout(requirements.draft_ranks, requirements.dtype)
        if draft.recurrent is not None:
            own = max(own, _advance_bytes(draft.recurrent, 3 * rows))
    return layer + max(chunk, own)


def _advance_bytes(states: RecurrentShape, rows: int) -> int:
    """Return the bytes of what all layers' states advance by, past so many tokens."""
    head = 2 * states.key_dim + states.value_dim
    return 4 * len(states.layers) * rows * states.value_heads * head


def moe_scratch_bytes(requirements: Requirements) -> int:
    """Return the scratch bytes of a static-shape MoE in the largest forward.

    They hold every expert's output for every token, or the weights gathered for a few tokens. If
    experts are packed, they hold the outputs of each token's own, with the sums of two splits.
    Where some are not, or have no kernels, the weights of a few are gathered.
    """
    experts, item = requirements.target.experts, requirements.dtype.itemsize
    if experts is None:
        return 0
    hidden = requirements.target.hidden
    columns = ceil_div(experts.intermediate, requirements.ranks)
    tokens = min(requirements.max_forward_tokens, MAX_STATIC_TOKENS)
    sizes = weight_sizes(requirements.target, requirements.ranks, item)
    if not sizes.whole_experts and item == 2:
        return experts.per_token * tokens * (columns * (3 * item + 16) + 8 * hidden)
    matrices = mlp_inputs(requirements.target) + 1
    outputs = experts.count * tokens * (matrices * columns * item + 8 * hidden)
    return max(outputs, experts.count // 3 * matrices * columns * hidden * item)


def unpacked_expert_bytes(requirements: Requirements) -> int:
    """Return the bytes of one packed expert while a prefill chunk is computed with it."""
    config, item = requirements.target, requirements.dtype.itemsize
    sizes = weight_sizes(config, requirements.ranks, item)
    if config.experts is None or not sizes.kept_experts:
        return 0
    columns = ceil_div(config.experts.intermediate, requirements.ranks)
    return mlp_inputs(config) * columns * config.hidden * item


def prefill_chunk(requirements: Requirements, prompt: int = LONG_PROMPT) -> int:
    """Return the tokens per prefill chunk: enough for efficient matmuls in bounded memory.

    On a GPU it is the size, of the larger half of those, with which the prompt's attention leaves
    fewest multiprocessors idle; the same on all ranks. Memory is planned for chunks of this size,
    so a prompt whose beginning is cached has the same.
    """
    if requirements.settings.prefill_chunk:
        return requirements.settings.prefill_chunk
    step = PREFILL_CHUNK_STEP
    own_kv = has_own_kv(requirements, MAX_PREFILL_CHUNK)
    token_bytes = activation_elements(requirements, own_kv) * requirements.dtype.itemsize
    max_tokens = PREFILL_ACTIVATION_BYTES // token_bytes
    largest = max(step, min(MAX_PREFILL_CHUNK, max_tokens // step * step))
    if (multiprocessors := requirements.multiprocessors) is None or prompt <= largest:
        return largest
    layout = requirements.target.kv_layout(requirements.ranks, requirements.dtype)
    heads = layout.heads * layout.groups

    def attention_s(tokens: int) -> float:
        """Return the time of the prompt's chunks in seconds of a GPU that does a row in one."""
        whole, rest = divmod(prompt, tokens)
        rows = [(whole, tokens * heads), (1, rest * heads)]
        return sum(n * m / attention_utilisation(m, multiprocessors) for n, m in rows if m)

    sizes = range(largest, max(step, largest // 2) - 1, -step)
    times = {tokens: attention_s(tokens) for tokens in sizes}
    enough = min(times.values()) * (1 + _SIMILAR_TIME)
    return next(tokens for tokens, seconds in times.items() if seconds <= enough)


def attention_utilisation(rows: int, multiprocessors: float) -> float:
    """Return the share of a GPU's rate at which attention of so many rows of heads runs.

    A kernel has a block for `ATTENTION_ROWS` of them, and each multiprocessor an equal number of
    blocks, which it computes together; in the end some have one less. One alone does not hide its
    own latencies. Within 8% this is what an H200 takes for 7 sizes and 4 numbers of heads
    (docs/results/gpu.md, part chunks).
    """
    blocks = rows / (ATTENTION_ROWS * multiprocessors)
    return blocks / ceil(blocks) * (_ALONE if blocks <= 1 else 1.0)
