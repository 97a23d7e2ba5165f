"""What users would otherwise run, each behind one small interface: the same prompt, as many tokens, the same sampling."""

from __future__ import annotations

import json
import os
import subprocess
import time
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from bench.ours import ours
from bench.peer import Job, Peer, Result, Unavailable
from bench.ranks import free_port
from bench.to_gguf import to_gguf
from bench.zero_kv import initialized
from decoding import Sampling


class Clock(BaseStreamer):
    """Notes when tokens come out of `generate`; what it is given first is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def warped(law: Sampling) -> dict[str, Any]:
    """The keyword arguments by which `generate` draws from that law."""
    if law.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": law.temperature, "top_p": law.top_p, "top_k": law.top_k}


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
    """DeepSpeed-ZeRO-Inference as it is released: stage 3 with parameters in host memory, and its KV cache on the device."""

    def _load(self, folder: Path) -> Any:
        if find_spec("deepspeed") is None:
            raise Unavailable("deepspeed is not installed: pip install deepspeed")
        return initialized(super()._load(folder), self.job.dtype, free_port())


class OffloadingZeroInference(Peer):
    """DeepSpeed-ZeRO-Inference with its KV cache in host memory, by the python that TIERFORCE_ZERO_PYTHON names."""

    script = Path(__file__).with_name("zero_kv.py")

    def __init__(self, job: Job):
        super().__init__(job)
        self.python = os.environ.get("TIERFORCE_ZERO_PYTHON", "")
        if not self.python:
            raise Unavailable("KV offload takes an environment with DeepSpeed's fork: name its python in TIERFORCE_ZERO_PYTHON")

    def run(self) -> Result:
        job = {"target": str(self.job.target), "prompt": self.job.prompt, "new": self.job.new, "dtype": self.job.dtype}
        job |= {"seed": self.job.sampling.seed, "law": warped(self.job.sampling), "port": free_port()}
        job["threads"] = torch.get_num_threads()
        done = subprocess.run([self.python, str(self.script)], input=json.dumps(job), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}")
        found = json.loads(done.stdout.splitlines()[-1])
        if "unavailable" in found:
            raise Unavailable(found["unavailable"])
        return Result(**found)


class LlamaCpp(Peer):
    """llama.cpp through llama-cpp-python, with the target converted to GGUF once; its KV cache is in float16, as it likes it."""

    def __init__(self, job: Job):
        super().__init__(job)
        if find_spec("llama_cpp") is None:
            raise Unavailable("llama-cpp-python is not installed: pip install llama-cpp-python")
        if find_spec("gguf") is None:
            raise Unavailable("gguf, which converts the model, is not installed: pip install gguf")
        config = job.target.resolve() / "config.json"
        identity = zlib.crc32(f"{config} {config.stat().st_mtime}".encode())
        path = job.scratch / f"{config.parent.name}-{job.dtype}-{identity:08x}.gguf"
        if not path.is_file():
            to_gguf(job.target, path, getattr(torch, job.dtype))
        from llama_cpp import Llama  # pyright: ignore

        threads, tokens = torch.get_num_threads(), len(job.prompt) + job.new
        gpu = -1 if torch.cuda.is_available() else 0
        self.model = Llama(
            str(path), n_ctx=tokens, n_threads=threads, n_threads_batch=threads, n_gpu_layers=gpu, flash_attn=True, verbose=False
        )

    def run(self) -> Result:
        self.model.set_seed(self.job.sampling.seed)
        law, tokens, first, started = self.job.sampling, [], 0.0, time.perf_counter()
        for token in self.model.generate(self.job.prompt, top_k=law.top_k, top_p=law.top_p, min_p=0.0, temp=law.temperature):
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
    "transformers: static cache": transformers(lambda peer: {"cache_implementation": "static", "prefill_chunk_size": 2048}),
    "transformers: offloaded cache": transformers(offloaded),
    "transformers: assisted": transformers(assisted),
    "transformers: prompt lookup": transformers(lambda peer: {"prompt_lookup_num_tokens": 10}),
    "accelerate: cpu_offload": Accelerate,
    "DeepSpeed ZeRO-Inference": ZeroInference,
    "DeepSpeed ZeRO-Inference with KV offloaded": OffloadingZeroInference,
    "llama.cpp": LlamaCpp,
}
