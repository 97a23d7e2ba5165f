"""How an engine runs: every choice in one frozen place, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.errors import TierForceError
from offload.policies import POLICY_NAMES

BUDGET = 4096  # retrieval budget where nothing is known
LONGEST = 512  # tokens of a draft: all caches have room for one
MODES = ("auto", "hierarchical", "retrieval", "speculative", "plain")


def dtype_of(name: str) -> torch.dtype:
    """Raises TierForceError for what no model is run in."""
    if name not in ("bfloat16", "float16", "float32"):
        raise TierForceError(f"--dtype {name} is not known: use bfloat16, float16 or float32.")
    return getattr(torch, name)


@dataclass(frozen=True)
class Settings:
    """Tokens unless a unit is named.

    mode: `hierarchical` (draft -> retrieval -> target), `retrieval` (retrieval -> target, no draft
    model), `speculative` (draft -> target), `plain` (target alone), or `auto`: hierarchical with a
    draft model, retrieval without. Prompt lookup proposes in front of the draft model, or in its
    place.
    """

    mode: str = "auto"
    # longest prompt and output together; the model's own limit by default
    context: int | None = None
    # retrieval budget, tokens a head; by default what pays, by past texts, BUDGET at first
    budget: int | None = None
    chunk_size: int = 8  # tokens that are selected together
    policy: str = "mass"  # what selects them
    # tokens a summary of what is not selected stands for; by default 64 or more, 0 for none
    summary_size: int | None = None
    refresh: int | None = (
        # tokens one selection serves at least; by default 1, each verification selects, over a
        # link, else 16
        None
    )
    # tokens the target verifies at once; by default what pays, by past rounds
    draft_length: int | None = None
    # tokens put before the retrieval level at once; by default what pays
    inner_length: int | None = None
    # n-gram of prompt lookup, 0 for none; by default 3 where there is no draft model, else none
    lookup: int | None = None
    # whether the draft model is split over the ranks; by default if it is large
    shard_draft: bool | None = None
    sinks: int = 16
    window: int = 256
    # target layers whose KV stays on the device; planned by default
    resident_layers: int | None = None
    # bytes the engine may use per rank, weights included; what is free by default
    device_memory: int | None = None
    link: str = "auto"
    # whether short passes are recorded as CUDA graphs; by default where trying it shows that it
    # works
    graphs: bool | None = None
    dtype: str = "auto"
    # tokens that prefill computes at once; by default as many as a bounded memory allows
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise TierForceError(f"--mode {self.mode} is not known: use {', '.join(MODES)}.")
        if self.policy not in POLICY_NAMES:
            raise TierForceError(
                f"--policy {self.policy} is not known: use {', '.join(POLICY_NAMES)}."
            )
        for name in (
            "context",
            "budget",
            "chunk_size",
            "draft_length",
            "inner_length",
            "sinks",
            "window",
            "device_memory",
            "prefill_chunk",
            "refresh",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise TierForceError(
                    f"--{name.replace('_', '-')} must be at least 1, found {value}."
                )
        if self.budget is not None and self.chunk_size > self.budget:
            raise TierForceError(
                f"--chunk-size {self.chunk_size} is larger than --budget {self.budget}: no chunk "
                "would fit."
            )
        for name in ("draft_length", "inner_length"):
            if (getattr(self, name) or 0) > LONGEST:
                raise TierForceError(
                    f"--{name.replace('_', '-')} must be at most {LONGEST}, found "
                    f"{getattr(self, name)}."
                )
        if self.lookup is not None and self.lookup < 0:
            raise TierForceError(
                f"--lookup must be 0 (off) or the n-gram's length, found {self.lookup}."
            )
        if self.summary_size is not None and self.summary_size < 0:
            raise TierForceError(
                f"--summary-size must be 0 (no summaries) or more, found {self.summary_size}."
            )
        if self.resident_layers is not None and self.resident_layers < 0:
            raise TierForceError(
                f"--resident-layers must be 0 or more, found {self.resident_layers}."
            )

    def resolved_mode(self, has_draft: bool) -> str:
        """The mode `auto` stands for. Raises TierForceError when a mode lacks its draft model."""
        if self.mode == "auto":
            return "hierarchical" if has_draft else "retrieval"
        if self.mode == "hierarchical" and not has_draft:
            raise TierForceError(
                "--mode hierarchical needs a draft model: give --draft, or use --mode retrieval."
            )
        if self.mode == "speculative" and not has_draft and not self.lookup:
            raise TierForceError(
                "--mode speculative needs a draft model or a lookup: give --draft or --lookup 3."
            )
        return self.mode
