"""transformers' own generate as a peer, and accelerate's offloading."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from bench.peers.base import Job, Peer, Result, Unavailable
from decoding import Sampling


class Clock(BaseStreamer):
    """A streamer that notes when tokens come out of `generate`; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def warped(law: Sampling) -> dict[str, Any]:
    """Return the keyword arguments by which `generate` draws from that law."""
    if law.temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": law.temperature,
        "top_p": law.top_p,
        "top_k": law.top_k,
    }


def load_transformers(name: str | Path, dtype: str, **config: Any) -> Any:
    """Return transformers' model of a folder; `config` takes the place of fields of its config."""
    kind = getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(
        name, dtype=kind, trust_remote_code=False, **config
    ).eval()


class Transformers(Peer):
    """transformers' generate. `extra` tells further arguments of it, given the peer."""

    extra: Callable[[Transformers], dict[str, Any]] = staticmethod(lambda peer: {})

    def __init__(self, job: Job):
        super().__init__(job)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Any = self._load(job.target)

    def _load(self, folder: Path) -> Any:
        model = load_transformers(folder, self.job.dtype).to(self.device)
        # no stop token: all make as many tokens
        model.generation_config = GenerationConfig(pad_token_id=0)
        return model

    def run(self) -> Result:
        job, clock, law = self.job, Clock(), self.job.sampling
        torch.manual_seed(law.seed)
        prompt = torch.tensor([job.prompt], device=self.device)
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=job.new,
                streamer=clock,
                **warped(law),
                **type(self).extra(self),
            )
        first = clock.times[1]  # the first call hands over the prompt
        tokens = out[0, len(job.prompt) :].tolist()
        return Result(first - started, time.perf_counter() - first, tokens)


def transformers(extra: Callable[[Transformers], dict[str, Any]]) -> type[Transformers]:
    """Return the peer with these further arguments of `generate`."""
    return type("Transformers", (Transformers,), {"extra": staticmethod(extra)})


class Accelerate(Transformers):
    """accelerate's cpu_offload: weights come layer by layer; the cache stays on the device."""

    def _load(self, folder: Path) -> Any:
        from accelerate import cpu_offload

        model = super()._load(folder).to("cpu")
        return cpu_offload(model, execution_device=self.device)


def offloaded(peer: Transformers) -> dict[str, Any]:
    """Return what asks for a cache in host memory. Raises Unavailable without a GPU."""
    if peer.device.type == "cpu":
        raise Unavailable("transformers' offloaded cache needs a GPU to offload from")
    return {"cache_implementation": "offloaded"}


def assisted(peer: Transformers) -> dict[str, Any]:
    """Return what asks for drafts by the draft model."""
    return {"assistant_model": peer._load(peer.job.draft)}
