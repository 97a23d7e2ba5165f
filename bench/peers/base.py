"""The interface of all peers in a comparison: their inputs, and their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from decoding import Engine, Sampling


class Unavailable(Exception):
    """This peer cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Job:
    """The inputs of a run, the same for all peers. Models are folders or GGUF files."""

    target: Path
    draft: Path | None
    rope: str | None  # RoPE scaling, such as yarn:4
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    dtype: str
    retrieval_budget: int | None
    link: str
    scratch: Path  # folder for converted checkpoints, which are reused


@dataclass(frozen=True)
class Result:
    """Seconds and counts of one run; None if the peer does not report it."""

    first_s: float  # time to the first new token: prefill
    decode_s: float  # from the first to the last new token
    tokens: list[int]  # new tokens only
    tokens_per_verification: float | None = None
    acceptance: dict[str, float | None] = field(default_factory=dict)
    link_bytes_per_token: float | None = None
    reused_tokens: int | None = None  # prompt tokens reused from the previous request
    note: str | None = None

    @property
    def ms_per_token(self) -> float:
        """Mean milliseconds per token, without the first."""
        return 1e3 * self.decode_s / max(1, len(self.tokens) - 1)


def generate_with_engine(
    engine: Engine, prompt: list[int], max_new_tokens: int, sampling: Sampling
) -> Result:
    """Return the result of one generation by our engine."""
    tokens = list(engine.generate(prompt, max_new_tokens, sampling))
    stats = engine.stats
    return Result(
        stats.first_token_s,
        stats.decode_s,
        tokens,
        stats.tokens_per_verification,
        stats.acceptance,
        stats.link_bytes_per_token,
        stats.reused_tokens,
    )


class Peer(ABC):
    """One engine with one configuration, loaded and run in a process of its own."""

    note: str | None = None  # a remark for its row

    @staticmethod
    def convert(job: Job) -> None:
        """Convert checkpoints for `__init__` and save them, in a process that is not measured."""

    def __init__(self, job: Job):
        """Load the models. Raises Unavailable."""
        self.job = job

    @abstractmethod
    def run(self) -> Result:
        """Prefill the prompt and decode."""
