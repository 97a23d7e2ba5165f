"""The selection policies by name, as a plan needs them: no torch, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from offload.layout import KVLayout


@dataclass(frozen=True)
class PolicySpec:
    """How often a policy selects, by how many query tokens, and with what memory of its own."""

    reselects: bool = True  # at later verifications too, not only once after the prompt
    query_rows: int = 8  # query tokens of a forward that are sampled
    keeps_scores: bool = False  # one float32 per chunk and head

    def state_bytes(self, layout: KVLayout, context: int, chunk: int) -> int:
        """Return the device memory of the policy itself, beside the retrieval cache's.

        `context` is the number of tokens of the whole sequence.
        """
        if not self.keeps_scores:
            return 0
        chunks = context // chunk
        return 4 * layout.layers * layout.heads * chunks


POLICY_SPECS = {
    "attention": PolicySpec(keeps_scores=True),
    "static": PolicySpec(reselects=False, query_rows=1),
}
POLICY_NAMES = tuple(POLICY_SPECS)
