"""How an engine runs: every choice in one frozen place, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from offload import POLICIES, TierForceError

LINK_LENGTH, COMPUTE_LENGTH = (
    16,
    6,
)  # draft lengths where a verification costs link time, flat in its rows, and where it costs compute
MODES = ("auto", "hierarchical", "retrieval", "speculative", "plain")


@dataclass(frozen=True)
class Settings:
    """Tokens unless a unit is named.

    mode: `hierarchical` (draft -> retrieval -> target), `retrieval` (retrieval -> target, no draft model), `speculative`
    (draft -> target), `plain` (target alone), or `auto`: hierarchical with a draft model, retrieval without.
    """

    mode: str = "auto"
    context: int | None = None  # longest prompt and output together; the model's own limit by default
    budget: int = 4096  # retrieval budget, tokens a head
    chunk_size: int = 8  # retrieval chunk
    policy: str = "mean-key"
    draft_length: int | None = None  # tokens the target verifies at once; by default 16 over a link, else 6
    inner_length: int = 2  # tokens the draft model proposes to the retrieval level
    sinks: int = 16
    window: int = 256
    resident_layers: int | None = None  # target layers whose KV stays on the device; planned by default
    device_memory: int | None = None  # bytes the engine may use per rank, weights included; what is free by default
    link: str = "auto"
    dtype: str = "auto"
    prefill_chunk: int = 2048

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise TierForceError(f"--mode {self.mode} is not known: use {', '.join(MODES)}.")
        if self.policy not in POLICIES:
            raise TierForceError(f"--policy {self.policy} is not known: use {', '.join(POLICIES)}.")
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
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise TierForceError(f"--{name.replace('_', '-')} must be at least 1, found {value}.")
        if self.chunk_size > self.budget:
            raise TierForceError(f"--chunk-size {self.chunk_size} is larger than --budget {self.budget}: no chunk would fit.")
        if self.resident_layers is not None and self.resident_layers < 0:
            raise TierForceError(f"--resident-layers must be 0 or more, found {self.resident_layers}.")

    def resolved_mode(self, has_draft: bool) -> str:
        """The mode `auto` stands for. Raises TierForceError when a mode lacks its draft model."""
        if self.mode == "auto":
            return "hierarchical" if has_draft else "retrieval"
        if self.mode in ("hierarchical", "speculative") and not has_draft:
            raise TierForceError(f"--mode {self.mode} needs a draft model: give --draft, or use --mode retrieval.")
        return self.mode
