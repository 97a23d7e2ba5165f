"""The selection policies by name, and what a plan needs to know of each: no torch, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from offload.layout import KVLayout


@dataclass(frozen=True)
class PolicySpec:
    """How a policy selects: how often, by how many rows, and with what memory of its own."""

    reselects: bool = True  # at later verifications too, or only once, behind the prompt
    query_rows: int = 8  # of a pass that have a say
    keeps_scores: bool = False  # one float32 for each chunk of each head

    def state_bytes(self, layout: KVLayout, context: int, chunk: int) -> int:
        """Return the device memory the policy takes beside the retrieval cache.

        `context`: tokens of the whole text.
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
