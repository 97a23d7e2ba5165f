"""TierForce as a peer, in any of its modes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from bench.peers.base import Job, Peer, Result, Unavailable, generate_with_engine
from decoding import Engine, Settings
from offload.errors import TierForceError
from parallel.config.model_config import ModelConfig


class Ours(Peer):
    """TierForce with one set of settings."""

    overrides: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, job: Job):
        super().__init__(job)
        link = "auto" if torch.cuda.is_available() else "view"
        base: dict[str, Any] = {
            "dtype": job.dtype,
            "rope": job.rope,
            "retrieval_budget": job.retrieval_budget,
        }
        settings = Settings(**base | {"link": link} | self._overrides())
        try:
            settings.resolved_mode(job.draft is not None)
        except TierForceError as error:
            raise Unavailable("it needs a draft model: give --draft") from error
        if settings.weights == "packed":
            config = ModelConfig.from_pretrained(job.target, packed=True)
            if not config.kept_types:
                raise Unavailable("the target's weights are not quantised")
        self.engine = Engine.from_pretrained(job.target, job.draft, settings)
        self.engine.scheduler.stop_tokens = frozenset()

    def _overrides(self) -> dict[str, Any]:
        """Return the settings of this peer; an offloaded cache uses the job's link."""
        overrides = dict(self.overrides)
        if "gpu_kv_layers" in overrides:
            overrides["link"] = self.job.link
        return overrides

    def run(self) -> Result:
        job = self.job
        return generate_with_engine(self.engine, job.prompt, job.max_new_tokens, job.sampling)


def ours(**overrides: Any) -> type[Ours]:
    """Return a peer with these settings."""
    return type("Ours", (Ours,), {"overrides": overrides})
