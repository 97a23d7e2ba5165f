"""The counts and seconds of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decoding.engine.session import SequenceState
from decoding.planning.plan import Plan, split_tokens
from decoding.speculation.decoders import LevelStats, Proposer, Speculative
from decoding.speculation.draft_length import RoundStats
from offload.retrieval.selection import Selector
from offload.traffic import ByteCounters


@dataclass(frozen=True)
class LevelSnapshot:
    """The counts of a level, without its caches."""

    name: str
    stats: LevelStats
    verifies: bool


@dataclass
class Stats:
    """The counts of one request, live. Bytes are those of one rank's own host link."""

    prompt_tokens: int = 0
    truncated_tokens: int = 0  # tokens dropped from the input to fit the context
    reused_tokens: int = 0  # prompt tokens whose KV was in the caches of an earlier request
    discarded_tokens: int = 0  # tokens in the caches it was given that it does not share
    loaded_tokens: int = 0  # prompt tokens loaded from the prompt cache on disk
    concurrency: int = 1  # maximum number of requests, this one included, that ran concurrently
    token_ids: list[int] = field(default_factory=list, repr=False)  # new tokens, in order
    # "stop" or "length"; None while generating, or after cancellation
    finish_reason: str | None = None
    first_token_s: float = 0.0  # from the start of the request to its first token: prefill
    decode_s: float = 0.0  # from the first token on
    plan: Plan | None = None
    levels: Sequence[Proposer | LevelSnapshot] = field(default_factory=list, repr=False)
    traffic: dict[str, ByteCounters] = field(default_factory=dict)  # per level
    prefill_link_in: int = 0
    prefill_link_out: int = 0
    selector: Selector | None = field(default=None, repr=False)  # the retrieval cache's
    last_selections: int | None = None  # `selections` when the caches were freed
    peak_bytes: dict[str, int | None] = field(default_factory=dict)  # on rank 0, by phase
    cuda_graphs: dict[str, Any] | None = None  # kinds of captured forwards, if there are any
    rounds: list[RoundStats] = field(default_factory=list, repr=False)  # rounds of the target

    def attach(self, session: SequenceState, levels: Sequence[Proposer]) -> None:
        """Start to count the levels of a sequence, after prefill; none if nothing follows it."""
        self.levels = levels
        self.traffic = {level.name: level.cache.traffic for level in session.levels}
        self.selector = session.retrieval.selector if session.retrieval else None
        self.peak_bytes = session.peaks
        self.loaded_tokens = session.stored.loaded_tokens
        self.cuda_graphs = session.slot.graphs.report
        self.prefill_link_in = session.target.traffic.link_in
        self.prefill_link_out = session.target.traffic.link_out

    @property
    def mode(self) -> str:
        """Return the mode; empty before the first token."""
        return self.plan.requirements.mode if self.plan else ""

    @property
    def new_tokens(self) -> int:
        """Return the number of new tokens."""
        return len(self.token_ids)

    @property
    def ms_per_token(self) -> float | None:
        """Return the ms/token of decoding; the first token belongs to prefill."""
        return 1e3 * self.decode_s / (self.new_tokens - 1) if self.new_tokens > 1 else None

    @property
    def tokens_per_verification(self) -> float | None:
        """Return the mean number of tokens per forward of the target."""
        return self.levels[0].stats.tokens_per_forward if self.levels else None

    @property
    def acceptance(self) -> dict[str, float | None]:
        """Return the acceptance rate of each level that verifies."""
        return {level.name: level.stats.acceptance_rate for level in self._verifying()}

    @property
    def num_draft_tokens(self) -> dict[str, float | None]:
        """Return the mean number of draft tokens per forward, for each level that verifies."""
        return {level.name: level.stats.drafted_per_forward for level in self._verifying()}

    @property
    def selections(self) -> int | None:
        """Return the number of retrieval cache selections, the one after prefill included."""
        return self.selector.selections if self.selector else self.last_selections

    @property
    def link_bytes_per_token(self) -> float | None:
        """Return the bytes streamed to the device per new token.

        The first token is excluded: it belongs to prefill.
        """
        if self.new_tokens < 2 or "target" not in self.traffic:
            return None
        return (self.traffic["target"].link_in - self.prefill_link_in) / (self.new_tokens - 1)

    def release(self) -> None:
        """Drop all references to the caches of a finished sequence, and keep its counts."""
        self.levels = [
            LevelSnapshot(level.name, level.stats, _verifies(level)) for level in self.levels
        ]
        self.traffic = {name: replace(traffic) for name, traffic in self.traffic.items()}
        self.cuda_graphs = self.cuda_graphs and dict(self.cuda_graphs)
        self.last_selections = self.selections
        self.selector = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of a record."""
        memory = self.plan.memory if self.plan else None
        # a retrieval budget was chosen if there is a retrieval cache, exact keys in split layers
        chosen = self.plan if self.selections is not None else None
        selected = split_tokens(self.plan) if self.plan else None
        has_choice = chosen is not None or bool(memory and memory.split_layers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "discarded_tokens": self.discarded_tokens,
            "loaded_tokens": self.loaded_tokens,
            "new_tokens": self.new_tokens,
            "concurrency": self.concurrency,
            "finish_reason": self.finish_reason,
            "time_to_first_token_s": round(self.first_token_s, 4),
            "decode_s": round(self.decode_s, 4),
            "ms_per_token": self.ms_per_token,
            "tokens_per_verification": self.tokens_per_verification,
            "acceptance": self.acceptance,
            "forwards": {level.name: level.stats.forwards for level in self.levels},
            "link_bytes_per_token": self.link_bytes_per_token,
            "link_bytes_prefill": self.prefill_link_in + self.prefill_link_out,
            "traffic": {name: traffic.snapshot() for name, traffic in self.traffic.items()},
            "mode": self.mode,
            "num_draft_tokens": self.num_draft_tokens,
            "retrieval_selections": self.selections,
            "gpu_kv_layers": memory.resident_layers if memory else None,
            "deferred_layers": memory.deferred_layers if memory else None,
            "split_kv_layers": memory.split_layers if memory else None,
            # a value of the process, hence of all concurrent requests
            "peak_memory_bytes": dict(self.peak_bytes) if self.concurrency == 1 else None,
            "cuda_graphs": self.cuda_graphs and dict(self.cuda_graphs),
            "retrieval_budget": chosen.requirements.strategy.budget if chosen else None,
            "split_budget": selected,
            "strategy_reason": self.plan.reason if self.plan and has_choice else None,
        }

    def _verifying(self) -> list[Proposer | LevelSnapshot]:
        return [level for level in self.levels if _verifies(level)]


def _verifies(level: Proposer | LevelSnapshot) -> bool:
    return level.verifies if isinstance(level, LevelSnapshot) else isinstance(level, Speculative)
