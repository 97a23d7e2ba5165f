"""transformers' `generate` as a peer, also with accelerate's offloading."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from bench.peers.base import Job, Peer, Result, Unavailable
from bench.peers.gguf import hugging_face_folder, kernels
from decoding import Sampling
from parallel.config.model_config import ModelConfig
from parallel.formats.locate import is_gguf


class Clock(BaseStreamer):
    """A streamer that records when `generate` emits tokens; the first call has the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of `generate` for this sampling."""
    if sampling.temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }


def load_transformers(
    model: Path, dtype: str, scratch: Path, rope: str | None = None, **options: Any
) -> Any:
    """Return transformers' model of a folder or a GGUF file, with RoPE scaling.

    A converted GGUF file is saved in `scratch`. The model generates without stop tokens, so that
    all outputs have the same length. `options` are passed to `from_pretrained`.
    """
    if rope:
        config = ModelConfig.from_pretrained(model).with_rope_scaling(rope)
        options["rope_parameters"] = dict(config.rope)
        options["max_position_embeddings"] = config.max_positions
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        hugging_face_folder(model, dtype, scratch),
        dtype=getattr(torch, dtype),
        trust_remote_code=False,
        **options,
    )
    loaded.generation_config = GenerationConfig(pad_token_id=0)
    return loaded.eval()


def timed_generate(
    model: Any,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling,
    device: torch.device,
    **extra: Any,
) -> Result:
    """Return the result of one `generate`; `extra` are further arguments of it."""
    clock, batch = Clock(), torch.tensor([prompt], device=device)
    torch.manual_seed(sampling.seed)
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=max_new_tokens,
            streamer=clock,
            **sampling_options(sampling),
            **extra,
        )
    first = clock.times[1]  # after the prompt, which the first call has
    tokens = out[0, len(prompt) :].tolist()
    return Result(first - started, time.perf_counter() - first, tokens)


class Transformers(Peer):
    """transformers' `generate`. `extra` returns further arguments of it, given the peer."""

    extra: Callable[[Transformers], dict[str, Any]] = staticmethod(lambda peer: {})

    @staticmethod
    def convert(job: Job) -> None:
        for model in (job.target, job.draft):
            if model is not None:
                hugging_face_folder(model, job.dtype, job.scratch)

    def __init__(self, job: Job):
        super().__init__(job)
        if is_gguf(job.target):
            self.note = f"{kernels(job.target)} weights, dequantised before: the same numbers"
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Any = self._load(job.target, job.rope)

    def _load(self, model: Path, rope: str | None = None) -> Any:
        return load_transformers(model, self.job.dtype, self.job.scratch, rope).to(self.device)

    def run(self) -> Result:
        job = self.job
        extra = type(self).extra(self)  # may load a model
        return timed_generate(
            self.model, job.prompt, job.max_new_tokens, job.sampling, self.device, **extra
        )


def transformers(extra: Callable[[Transformers], dict[str, Any]]) -> type[Transformers]:
    """Return a peer with further arguments of `generate`."""
    return type("Transformers", (Transformers,), {"extra": staticmethod(extra)})


class Accelerate(Transformers):
    """accelerate's cpu_offload: weights are onloaded per layer; the cache stays on the device."""

    def _load(self, model: Path, rope: str | None = None) -> Any:
        from accelerate import cpu_offload

        return cpu_offload(super()._load(model, rope).to("cpu"), execution_device=self.device)


def offloaded_cache(peer: Transformers) -> dict[str, Any]:
    """Return the arguments for a cache in host memory. Raises Unavailable without a GPU."""
    if peer.device.type == "cpu":
        raise Unavailable("transformers' offloaded cache needs a GPU to offload from")
    return {"cache_implementation": "offloaded"}


def assistant_model(peer: Transformers) -> dict[str, Any]:
    """Return the arguments for drafts by the draft model. Raises Unavailable without one."""
    if peer.job.draft is None:
        raise Unavailable("it needs a draft model: give --draft")
    return {"assistant_model": peer._load(peer.job.draft)}
