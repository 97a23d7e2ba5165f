"""TierForce as one of the peers, in any of its modes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from bench.peers.base import Job, Peer, Result
from decoding import Engine, Settings


class Ours(Peer):
    """TierForce in one mode."""

    choices: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, job: Job):
        super().__init__(job)
        base: dict[str, Any] = {
            "dtype": job.dtype,
            "budget": job.budget,
            "link": "view" if not torch.cuda.is_available() else "auto",
        }
        settings = Settings(**{**base, **self._chosen()})
        self.engine = Engine.from_pretrained(job.target, job.draft, settings)
        self.engine.stop_tokens = frozenset()

    def _chosen(self) -> dict[str, Any]:
        """Settings of this mode; what is offloaded goes over the job's link."""
        chosen = dict(self.choices)
        if "resident_layers" in chosen:
            chosen["link"] = self.job.link
        return chosen

    def run(self) -> Result:
        tokens = list(self.engine.generate(self.job.prompt, self.job.new, self.job.sampling))
        stats = self.engine.stats
        result = Result(
            stats.first_token_s,
            stats.decode_s,
            tokens,
            stats.tokens_per_verification,
            stats.acceptance,
        )
        result.link_bytes_per_token = stats.link_bytes_per_token
        if rounds := [each for each in stats.rounds if each.drafted]:
            link = stats.traffic["target"].link_in - stats.prefill_link_in
            passes, rate = (
                stats.levels[0].stats.passes,
                getattr(self.engine.runtime.link, "rate", None),
            )
            result.rounds = {
                "drafted": statistics.median(each.drafted for each in rounds),
                "draft ms": 1e3 * statistics.median(each.draft_s for each in rounds),
                "verification ms": 1e3 * statistics.median(each.verify_s for each in rounds),
                "link ms": 1e3 * link / passes / rate if rate else None,
            }
        return result


def ours(**choices: Any) -> type[Ours]:
    return type("Ours", (Ours,), {"choices": choices})
