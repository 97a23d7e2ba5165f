"""What a text cost, in counts and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decoding.engine.session import Session
from decoding.planning.memory_plan import MemoryPlan
from decoding.planning.strategy_selector import WayChoice
from decoding.speculation.decoders import Decoder, LevelStats, Proposer, Speculative
from decoding.speculation.draft_length import RoundStats
from offload.retrieval.cache import RetrievalCache
from offload.traffic import Traffic


@dataclass(frozen=True)
class Counted:
    """What is kept of a level whose text is over: no caches."""

    name: str
    stats: LevelStats
    verifies: bool


@dataclass
class Stats:
    """The counts of one text, as they grow. Bytes are those of one rank's own link."""

    prompt_tokens: int = 0
    dropped_tokens: int = 0  # of a longer text: from its beginning, to fit the context
    reused_tokens: int = 0  # of the prompt: what the caches held from the turn before
    # that the caches held from the turn before and that this prompt could not go on from
    discarded_tokens: int = 0
    loaded_tokens: int = 0  # of the prompt: what came from disk
    texts_at_once: int = 1  # that this one shared memory and passes with, itself among them
    token_ids: list[int] = field(default_factory=list, repr=False)  # new tokens, in order
    # "stop" or "length"; None while generating, or when it was given up
    finish_reason: str | None = None
    first_token_s: float = 0.0  # from the text's turn to the first token: prefill
    decode_s: float = 0.0  # from the first token on
    plan: MemoryPlan | None = None
    mode: str = ""
    choice: WayChoice | None = None  # of mode and retrieval budget
    levels: Sequence[Proposer | Counted] = field(default_factory=list, repr=False)
    traffic: dict[str, Traffic] = field(default_factory=dict)  # per level
    prefill_link_in: int = 0
    prefill_link_out: int = 0
    retrieval: RetrievalCache | None = field(default=None, repr=False)
    last_refreshes: int | None = None  # what `refreshes` was when the text let go of its caches
    # rank 0's memory in use at most, bytes, by phase
    peaks: dict[str, int | None] = field(default_factory=dict)
    fixed_shapes: dict[str, Any] | None = None  # kinds of short passes, where these are replayed
    rounds: list[RoundStats] = field(default_factory=list, repr=False)  # of the target

    def watch(self, session: Session, decoder: Decoder) -> None:
        """Count from here on what the levels of a text do; its prompt was read."""
        self.levels = levels = decoder.levels()
        self.traffic = {
            level.name: level.cache.traffic for level in levels if isinstance(level, Decoder)
        }
        self.retrieval, self.peaks = session.retrieval, session.peaks
        self.loaded_tokens = session.loaded_tokens
        self.fixed_shapes = session.runner.report
        self.prefill_link_in = session.target.traffic.link_in
        self.prefill_link_out = session.target.traffic.link_out

    @property
    def new_tokens(self) -> int:
        """Return the number of new tokens."""
        return len(self.token_ids)

    @property
    def ms_per_token(self) -> float | None:
        """Return the milliseconds a token of decoding; the first token is prefill's."""
        return 1e3 * self.decode_s / (self.new_tokens - 1) if self.new_tokens > 1 else None

    @property
    def tokens_per_verification(self) -> float | None:
        """Return the tokens that one pass of the target makes, on average."""
        return self.levels[0].stats.tokens_per_pass if self.levels else None

    @property
    def acceptance(self) -> dict[str, float | None]:
        """Return the acceptance rate at each level that verifies."""
        return {level.name: level.stats.acceptance_rate for level in self._verifying()}

    @property
    def draft_lengths(self) -> dict[str, float | None]:
        """Return the tokens put before each level that verifies, on average over its passes."""
        return {level.name: level.stats.proposed_per_pass for level in self._verifying()}

    @property
    def refreshes(self) -> int | None:
        """Return how often the retrieval cache was chosen, the first time behind the prompt."""
        return self.retrieval.selector.selections if self.retrieval else self.last_refreshes

    @property
    def link_bytes_per_token(self) -> float | None:
        """Return the bytes streamed to the device per new token.

        The first token does not count: it needed none.
        """
        if self.new_tokens < 2 or "target" not in self.traffic:
            return None
        return (self.traffic["target"].link_in - self.prefill_link_in) / (self.new_tokens - 1)

    def let_go(self) -> None:
        """Keep the counts of a text that is over, and none of its caches: others need the room."""
        self.levels = [Counted(level.name, level.stats, _verifies(level)) for level in self.levels]
        self.traffic = {name: replace(traffic) for name, traffic in self.traffic.items()}
        self.fixed_shapes = self.fixed_shapes and dict(self.fixed_shapes)
        self.last_refreshes = self.refreshes
        self.retrieval = None

    def as_dict(self) -> dict[str, Any]:
        """Return what a record keeps of a text."""
        choice = self.choice if self.refreshes is not None else None  # of a budget
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "discarded_tokens": self.discarded_tokens,
            "loaded_tokens": self.loaded_tokens,
            "new_tokens": self.new_tokens,
            "texts_at_once": self.texts_at_once,
            "finish_reason": self.finish_reason,
            "time_to_first_token_s": round(self.first_token_s, 4),
            "decode_s": round(self.decode_s, 4),
            "ms_per_token": self.ms_per_token,
            "tokens_per_verification": self.tokens_per_verification,
            "acceptance": self.acceptance,
            "passes": {level.name: level.stats.passes for level in self.levels},
            "link_bytes_per_token": self.link_bytes_per_token,
            "link_bytes_prefill": self.prefill_link_in + self.prefill_link_out,
            "traffic": {name: traffic.snapshot() for name, traffic in self.traffic.items()},
            "mode": self.mode,
            "draft_lengths": self.draft_lengths,
            "retrieval_refreshes": self.refreshes,
            "resident_layers": self.plan.resident_layers if self.plan else None,
            "late_layers": self.plan.late_layers if self.plan else None,
            "sliced_layers": self.plan.sliced_layers if self.plan else None,
            # of a process, so of all texts together
            "peak_memory_bytes": dict(self.peaks) if self.texts_at_once == 1 else None,
            "fixed_shapes": self.fixed_shapes and dict(self.fixed_shapes),
            "budget": choice.way.budget if choice else None,
            "budget_because": choice.why if choice else None,
        }

    def _verifying(self) -> list[Proposer | Counted]:
        return [level for level in self.levels if _verifies(level)]


def _verifies(level: Proposer | Counted) -> bool:
    return level.verifies if isinstance(level, Counted) else isinstance(level, Speculative)
