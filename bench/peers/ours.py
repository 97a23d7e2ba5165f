"""TierForce as one of the peers, in any of its modes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from bench.peers.base import Job, Peer, Result, Unavailable, continued
from decoding import Engine, Settings
from offload.errors import TierForceError


class Ours(Peer):
    """TierForce in one mode."""

    choices: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, job: Job):
        super().__init__(job)
        link = "auto" if torch.cuda.is_available() else "view"
        base: dict[str, Any] = {
            "dtype": job.dtype,
            "rope": job.rope,
            "retrieval_budget": job.retrieval_budget,
        }
        settings = Settings(**base | {"link": link} | self._chosen())
        try:
            settings.resolved_mode(job.draft is not None)
        except TierForceError as error:
            raise Unavailable("it needs a draft model: give --draft") from error
        self.engine = Engine.from_pretrained(job.target, job.draft, settings)
        self.engine.stop_tokens = frozenset()

    def _chosen(self) -> dict[str, Any]:
        """Return the settings of this mode; what is offloaded goes over the job's link."""
        chosen = dict(self.choices)
        if "gpu_kv_layers" in chosen:
            chosen["link"] = self.job.link
        return chosen

    def run(self) -> Result:
        return continued(self.engine, self.job.prompt, self.job.new, self.job.sampling)


def ours(**choices: Any) -> type[Ours]:
    """Return the peer with these settings."""
    return type("Ours", (Ours,), {"choices": choices})
