"""What users would otherwise run, each behind one small interface: the same prompt, as many tokens, the same sampling."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from decoding import Engine, Sampling, Settings


class Unavailable(Exception):
    """This peer cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Job:
    """What all peers are given."""

    target: Path
    draft: Path
    prompt: list[int]
    new: int
    sampling: Sampling
    dtype: str
    budget: int | None
    link: str


@dataclass
class Result:
    """Seconds and counts of one run. `tokens` are the new ones; None where a peer does not know."""

    first_s: float  # until the first new token: prefill
    decode_s: float  # from there to the last
    tokens: list[int]
    tokens_per_verification: float | None = None
    acceptance: dict[str, float | None] = field(default_factory=dict)
    link_bytes_per_token: float | None = None


class Peer(ABC):
    """One way to continue a text. Made and run in a process of its own."""

    def __init__(self, job: Job):
        """Loads the models. Raises Unavailable."""
        self.job = job

    @abstractmethod
    def run(self) -> Result:
        """Read the prompt and decode."""


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
        result = Result(stats.first_token_s, stats.decode_s, tokens, stats.tokens_per_verification, stats.acceptance)
        result.link_bytes_per_token = stats.link_bytes_per_token
        return result


def ours(**choices: Any) -> type[Ours]:
    return type("Ours", (Ours,), {"choices": choices})


class Clock(BaseStreamer):
    """Notes when tokens come out of `generate`; what it is given first is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers(Peer):
    """transformers' generate. `extra` tells its keyword arguments, given the job."""

    extra: Callable[[Transformers], dict[str, Any]] = staticmethod(lambda peer: {})

    def __init__(self, job: Job):
        super().__init__(job)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Any = self._load(job.target)

    def _load(self, folder: Path) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, self.job.dtype))
        model = model.to(self.device)
        model.generation_config = GenerationConfig(pad_token_id=0)  # no stop token: all make as many tokens
        return model

    def run(self) -> Result:
        job, clock, law = self.job, Clock(), self.job.sampling
        torch.manual_seed(law.seed)
        warped: dict[str, Any] = {"do_sample": False}
        if law.temperature:
            warped = {"do_sample": True, "temperature": law.temperature, "top_p": law.top_p, "top_k": law.top_k}
        prompt = torch.tensor([job.prompt], device=self.device)
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=job.new,
                streamer=clock,
                **warped,
                **type(self).extra(self),
            )
        first = clock.times[1]  # the first call hands over the prompt
        return Result(first - started, time.perf_counter() - first, out[0, len(job.prompt) :].tolist())


def transformers(extra: Callable[[Transformers], dict[str, Any]]) -> type[Transformers]:
    return type("Transformers", (Transformers,), {"extra": staticmethod(extra)})


class Accelerate(Transformers):
    """accelerate's cpu_offload: weights come to the device layer by layer; the cache stays there."""

    def _load(self, folder: Path) -> Any:
        from accelerate import cpu_offload

        model = super()._load(folder).to("cpu")
        return cpu_offload(model, execution_device=self.device)


class ZeroInference(Transformers):
    """DeepSpeed-ZeRO-Inference: stage 3 with parameters in host memory. Its KV cache stays on the device: KV offload exists in its
    own fork of models alone, for the models that fork has.
    """

    def _load(self, folder: Path) -> Any:
        if find_spec("deepspeed") is None:
            raise Unavailable("deepspeed is not installed: pip install deepspeed")
        import deepspeed  # pyright: ignore

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
            "bf16": {"enabled": self.job.dtype == "bfloat16"},
        }
        engine = deepspeed.initialize(model=super()._load(folder), config=config)[0]
        engine.module.eval()
        return engine.module


class LlamaCpp(Peer):
    """llama.cpp through llama-cpp-python, with the target as GGUF beside its folder."""

    def __init__(self, job: Job):
        super().__init__(job)
        if find_spec("llama_cpp") is None:
            raise Unavailable("llama-cpp-python is not installed: pip install llama-cpp-python")
        path = job.target / "model.gguf"
        if not path.is_file():
            raise Unavailable(f"{path} is missing: convert the target with llama.cpp's convert_hf_to_gguf.py")
        from llama_cpp import Llama  # pyright: ignore

        self.model = Llama(str(path), n_ctx=len(job.prompt) + job.new, n_threads=torch.get_num_threads(), verbose=False)

    def run(self) -> Result:
        law, tokens, first, started = self.job.sampling, [], 0.0, time.perf_counter()
        for token in self.model.generate(self.job.prompt, temp=law.temperature, top_p=law.top_p, top_k=law.top_k):
            first = first or time.perf_counter()
            tokens.append(token)
            if len(tokens) == self.job.new:
                break
        return Result(first - started, time.perf_counter() - first, tokens)


def offloaded(peer: Transformers) -> dict[str, Any]:
    if peer.device.type == "cpu":
        raise Unavailable("transformers' offloaded cache needs a GPU to offload from")
    return {"cache_implementation": "offloaded"}


def assisted(peer: Transformers) -> dict[str, Any]:
    return {"assistant_model": peer._load(peer.job.draft)}


PEERS: dict[str, type[Peer]] = {
    "ours: plain": ours(mode="plain"),
    "ours: speculative": ours(mode="speculative"),
    "ours: retrieval": ours(mode="retrieval"),
    "ours: hierarchical": ours(mode="hierarchical"),
    "ours: hierarchical and lookup": ours(mode="hierarchical", lookup=3),
    "ours: plain offloaded": ours(mode="plain", resident_layers=0),
    "ours: hierarchical offloaded": ours(mode="hierarchical", resident_layers=0),
    "transformers: dynamic cache": transformers(lambda peer: {}),
    "transformers: static cache": transformers(lambda peer: {"cache_implementation": "static"}),
    "transformers: offloaded cache": transformers(offloaded),
    "transformers: assisted": transformers(assisted),
    "transformers: prompt lookup": transformers(lambda peer: {"prompt_lookup_num_tokens": 10}),
    "accelerate: cpu_offload": Accelerate,
    "DeepSpeed ZeRO-Inference": ZeroInference,
    "llama.cpp": LlamaCpp,
}
