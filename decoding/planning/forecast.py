"""The predicted times of one request."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Forecast:
    """The predicted times of one document in seconds, and the yield of a decoding round."""

    prefill_s: float
    prefill_bound: str  # compute, all-reduce, or write-back
    verification_s: float  # one target forward; in plain mode, one token
    verification_bound: str  # link or compute
    link_s: float  # per verification
    compute_s: float  # per verification, overlapping the link
    split_s: float  # a forward over the on-device part of the target's cache
    retrieval_s: float  # a forward over the retrieval cache
    draft_s: float  # a forward of the draft model
    drafting_s: float  # all draft tokens of a round
    num_draft_tokens: int
    tokens_per_verification: float
    token_s: float
    decode_s: float  # all generated tokens
    document_s: float  # prefill and decoding
    concurrency: int = (
        1  # batched requests; times are per request, without the prefill of the others
    )

    @property
    def documents_per_hour(self) -> float:
        """Return the throughput in such documents per hour."""
        return 3600 / (self.prefill_s + self.decode_s / self.concurrency)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "documents_per_hour": self.documents_per_hour}
