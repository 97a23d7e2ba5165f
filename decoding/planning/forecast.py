"""How long things will take, from a machine's numbers and a model's config alone: pure functions,
no measurement.

    time per token = (max(link, compute) of a verification + drafting) / tokens per verification

A prediction is as good as its numbers: rates of the hardware (`profiles.json` says where each is
from) and acceptance, which depends on models and text, and which the records of finished documents
tell.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from decoding.planning.needs import COMPUTE_REFRESH, COMPUTE_TURNS, MOST, Sizes, weight_bytes
from decoding.planning.profile import Hardware
from decoding.settings import BUDGET
from offload.layout import ceil_div
from offload.memory_plan import MemoryPlan
from offload.policies import POLICY_TRAITS
from parallel.config import ModelConfig

# rejections fall with the budget to this power: 512 to 3072 tokens of bench acceptance
EXPONENT = 0.45
ACCEPTANCE = 0.9  # what the published 108 ms/token of Llama-2-7B imply, see docs/memory.md
INNER_ACCEPTANCE, INNER_LENGTH = 0.7, 2  # assumed


@dataclass(frozen=True)
class Forecast:
    """Seconds, and tokens."""

    prefill_s: float
    prefill_bound: str  # what prefill waits for: arithmetic, sums over ranks, or write-back
    step_s: float  # plain decoding, a token
    step_bound: str  # link or compute
    verification_s: float
    verification_bound: str
    link_s: float  # of a verification
    compute_s: float  # of a verification, beside the link
    retrieval_s: float  # a pass over the retrieval cache
    draft_s: float  # a pass of the draft model
    drafting_s: float  # all of a round's draft
    draft_length: int
    tokens_per_verification: float
    token_s: float  # in the mode asked for
    documents_per_hour: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def forecast(
    sizes: Sizes,
    plan: MemoryPlan,
    hardware: Hardware,
    prompt: int,
    new: int,
    acceptance: float,
    inner_acceptance: float,
) -> Forecast:
    """For one document of `prompt` + `new` tokens. Acceptance rates are those of the target and of
    the retrieval level.
    """
    target, layout = sizes.target, sizes.target.kv_layout(sizes.ranks, sizes.dtype)
    far = target.layers - plan.resident_layers if sizes.copies else 0
    kv, streamed = layout.bytes(prompt), layout.bytes(prompt, far)
    link = streamed / hardware.link_in
    # nothing hides the first slot's copy where no layer computes before it; where the link is the
    # cost, it is part of that
    first = (
        plan.slot_heads * layout.bytes(prompt, 1) / layout.heads / hardware.link_in
        if far == target.layers
        else 0.0
    )

    def walled(compute: float) -> tuple[float, str]:
        """Seconds, and what they wait for."""
        return max((link, "link"), (compute + first, "compute"))

    dtype = sizes.dtype
    step_s, step_bound = walled(pass_s(hardware, target, sizes.ranks, dtype, 1, prompt))
    budget = min(sizes.budget, prompt)
    retrieval = draft = 0.0
    if sizes.has_retrieval:
        inner = sizes.settings.inner_length or INNER_LENGTH
        rows = inner + 1 if sizes.draft is not None and sizes.has_draft else 1
        retrieval = pass_s(hardware, target, sizes.ranks, dtype, rows, budget)
    if sizes.draft is not None and sizes.has_draft:
        draft = pass_s(hardware, sizes.draft, sizes.draft_ranks, dtype, 1, sizes.window)

    def refresh(n: int) -> float:
        """Keys are read for the scores, and both for the summaries; without a link less of both."""
        if not sizes.has_retrieval or not POLICY_TRAITS[sizes.settings.policy].reselects:
            return 0.0
        every = sizes.settings.refresh or (1 if far else COMPUTE_REFRESH)
        turns = 1 if far or sizes.settings.refresh else COMPUTE_TURNS
        return min(1.0, expected_tokens(acceptance, n) / every) * choice_s(hardware, kv, turns)

    def computed(n: int) -> float:
        """Seconds of a verification of n drafted tokens, beside the link."""
        return pass_s(hardware, target, sizes.ranks, dtype, n + 1, prompt) + refresh(n)

    each = per_drafted_s(sizes, retrieval, draft, inner_acceptance)
    length, token_s = 0, step_s
    lengths = (
        range(1, MOST + 1) if sizes.settings.draft_length is None else [sizes.settings.draft_length]
    )
    if sizes.mode != "plain":
        rounds = {
            n: (walled(computed(n))[0] + n * each) / expected_tokens(acceptance, n) for n in lengths
        }
        length = min(rounds, key=rounds.__getitem__)
        token_s = rounds[length]
    verified, bound = walled(computed(length))
    late = layout.bytes(prompt, plan.late_layers)
    prefill, prefill_bound = prefill_s(sizes, hardware, prompt, streamed + late)
    prefill += late / hardware.link_in  # back to the device, behind all else
    return Forecast(
        prefill_s=prefill,
        prefill_bound=prefill_bound,
        step_s=step_s,
        step_bound=step_bound,
        verification_s=verified,
        verification_bound=bound,
        link_s=link,
        compute_s=computed(length),
        retrieval_s=retrieval,
        draft_s=draft,
        drafting_s=length * each,
        draft_length=length,
        tokens_per_verification=expected_tokens(acceptance, length),
        token_s=token_s,
        documents_per_hour=3600 / (prefill + new * token_s),
    )


def pass_s(
    hardware: Hardware,
    config: ModelConfig,
    ranks: int,
    dtype: torch.dtype,
    rows: int,
    attended: int,
) -> float:
    """A short pass of `rows` tokens that attend to so many each, on each of the ranks, and drawing
    from what it says.
    """
    kv_rate, attention = (
        hardware.kv_rate or hardware.memory_rate,
        hardware.attention or hardware.matmul,
    )
    memory = (
        read_bytes(config, ranks, dtype) / hardware.memory_rate
        + config.kv_layout(ranks, dtype).bytes(attended) / kv_rate
    )
    products = rows * matmul_flops(config) / ranks / hardware.matmul
    scores = rows * attention_flops(config) * attended / ranks / attention
    launches = config.layers * hardware.layer_s + hardware.pass_s
    drawn = rows * hardware.sample_s + hardware.draw_s
    sums = 2 * config.layers * all_reduce_s(hardware, ranks, rows * config.hidden * dtype.itemsize)
    if hardware.runs_ahead:
        return max(memory, products + scores, launches) + sums + drawn
    # kv_rate was measured with a row's arithmetic
    return memory + products + scores * (rows - 1) / rows + launches + sums + drawn


def choice_s(hardware: Hardware, kv: float, turns: int) -> float:
    """A refresh over `kv` bytes of one rank, which makes one in `turns` of the summaries anew, and
    the weights of all.
    """
    scores = hardware.score_rate or 2 * hardware.memory_rate
    weights = kv / hardware.weigh_rate if hardware.weigh_rate else 0.0
    return kv / scores + weights + kv / turns / (hardware.summary_rate or hardware.memory_rate)


def accepted_with(acceptance: float, budget: int) -> float:
    """An acceptance rate with another budget than BUDGET: rejections fall with a power of it
    (docs/memory.md).
    """
    return 1 - min(1.0, (1 - acceptance) * (budget / BUDGET) ** -EXPONENT)


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens of one verification of `length` drafted ones (Leviathan et al. 2023, arXiv 2211.17192,
    equation 1).
    """
    return length + 1 if acceptance == 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)


def per_drafted_s(
    sizes: Sizes, retrieval_s: float, draft_s: float, inner_acceptance: float
) -> float:
    """Seconds a token put before the target takes."""
    if not sizes.has_retrieval:
        return draft_s
    if not draft_s:
        return retrieval_s
    inner = sizes.settings.inner_length or INNER_LENGTH
    return (retrieval_s + inner * draft_s) / expected_tokens(inner_acceptance, inner)


def all_reduce_s(hardware: Hardware, ranks: int, nbytes: int) -> float:
    return 0.0 if ranks == 1 else hardware.all_reduce_s + nbytes / hardware.all_reduce_rate


def prefill_s(sizes: Sizes, hardware: Hardware, tokens: int, written: int) -> tuple[float, str]:
    """Seconds of a layer-major prefill, and what bounds it: the three overlap. `written`: bytes of
    a rank's KV for the host.
    """
    config = sizes.target
    sums = (
        2
        * (config.layers - 1)
        * all_reduce_s(hardware, sizes.ranks, tokens * config.hidden * sizes.dtype.itemsize)
    )
    products, scores = prefill_flops(config, tokens)
    arithmetic = products / hardware.matmul + scores / (
        hardware.prefill_attention or hardware.matmul
    )
    times = {
        "arithmetic": arithmetic / sizes.ranks,
        "sums over ranks": sums,
        "write-back": written / hardware.link_out,
    }
    bound = max(times, key=times.__getitem__)
    return times[bound], bound


def read_bytes(config: ModelConfig, ranks: int, dtype: torch.dtype) -> int:
    """Weights that a pass reads: all but the embedding, of which it takes a row, unless that is the
    head too.
    """
    embedding = 0 if config.tied else ceil_div(config.vocab, ranks) * config.hidden * dtype.itemsize
    return weight_bytes(config, ranks, dtype) - embedding


def matmul_flops(config: ModelConfig) -> float:
    """Operations of all layers' products a token: two a weight."""
    attention = config.hidden * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    return 2.0 * config.layers * (attention + 3 * config.hidden * config.intermediate)


def attention_flops(config: ModelConfig) -> float:
    """Operations of a row's attention a token that it sees, in all layers: two for QK^T and two for
    PV a dimension.
    """
    return 4.0 * config.layers * config.heads * config.head_dim


def prefill_flops(config: ModelConfig, tokens: int) -> tuple[float, float]:
    """Operations of a prefill: products, and attention of each pair of tokens. Of the last layer
    only keys and values are made.
    """
    whole, last = (
        (config.layers - 1) / config.layers,
        4.0 * config.hidden * config.kv_heads * config.head_dim,
    )
    return (whole * matmul_flops(config) + last) * tokens, whole * attention_flops(
        config
    ) * tokens * (tokens + 1) / 2
