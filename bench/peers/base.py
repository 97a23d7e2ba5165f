"""What all peers of a comparison are given, and what they answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from decoding import Engine, Sampling


class Unavailable(Exception):
    """This peer cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Job:
    """What all peers are given. Models are folders or GGUF files."""

    target: Path
    draft: Path | None
    rope: str | None  # how positions are stretched, such as yarn:4
    prompt: list[int]
    new: int
    sampling: Sampling
    dtype: str
    retrieval_budget: int | None
    link: str
    scratch: Path  # a folder for what a peer makes once and keeps


@dataclass(frozen=True)
class Result:
    """Seconds and counts of one run; None where a peer does not know."""

    first_s: float  # until the first new token: prefill
    decode_s: float  # from there to the last
    tokens: list[int]  # the new ones
    tokens_per_verification: float | None = None
    acceptance: dict[str, float | None] = field(default_factory=dict)
    link_bytes_per_token: float | None = None
    reused_tokens: int | None = None  # of the prompt, from the text before
    note: str | None = None

    @property
    def ms_per_token(self) -> float:
        """Milliseconds of each token but the first."""
        return 1e3 * self.decode_s / max(1, len(self.tokens) - 1)


def continued(engine: Engine, prompt: list[int], new: int, law: Sampling) -> Result:
    """Return what an engine of ours writes behind a prompt."""
    tokens, stats = list(engine.generate(prompt, new, law)), engine.stats
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
    """One way to continue a text. Made and run in a process of its own."""

    note: str | None = None  # what a reader of its row should know

    @staticmethod
    def convert(job: Job) -> None:
        """Make what loading needs and keep it, in a process that is not measured."""

    def __init__(self, job: Job):
        """Load the models. Raises Unavailable."""
        self.job = job

    @abstractmethod
    def run(self) -> Result:
        """Read the prompt and decode."""
