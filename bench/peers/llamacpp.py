"""llama.cpp as a peer, through llama-cpp-python."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.peers.base import Job, Peer, Result, Unavailable
from bench.peers.gguf import dequantised, kernels
from parallel.config.model_config import ModelConfig
from parallel.formats.locate import is_gguf


class LlamaCpp(Peer):
    """llama.cpp on the very GGUF file of the target; its KV cache is in float16."""

    def __init__(self, job: Job):
        super().__init__(job)
        _check(job)
        from llama_cpp import Llama  # pyright: ignore

        path, threads = self._file(), torch.get_num_threads()
        self.note = f"{kernels(path)} kernels"
        self.model = Llama(
            str(path),
            n_ctx=len(job.prompt) + job.new,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=-1 if torch.cuda.is_available() else 0,
            flash_attn=True,
            verbose=False,
            **stretched(job),
        )

    def _file(self) -> Path:
        return self.job.target

    def run(self) -> Result:
        self.model.set_seed(self.job.sampling.seed)
        law, tokens, first = self.job.sampling, list[int](), 0.0
        started = time.perf_counter()
        for token in self.model.generate(
            self.job.prompt, top_k=law.top_k, top_p=law.top_p, min_p=0.0, temp=law.temperature
        ):
            first = first or time.perf_counter()
            tokens.append(token)
            if len(tokens) == self.job.new:
                break
        return Result(first - started, time.perf_counter() - first, tokens)


class Dequantised(LlamaCpp):
    """llama.cpp on the same weights in the dtype that all others compute in."""

    @staticmethod
    def convert(job: Job) -> None:
        _check(job)
        dequantised(job.target, job.dtype, job.scratch)

    def _file(self) -> Path:
        return dequantised(self.job.target, self.job.dtype, self.job.scratch)


def _check(job: Job) -> None:
    """Raise Unavailable where llama.cpp cannot load the target."""
    if find_spec("llama_cpp") is None:
        raise Unavailable("llama-cpp-python is not installed: pip install llama-cpp-python")
    if not is_gguf(job.target):
        raise Unavailable("llama.cpp takes a GGUF file: give one with --target")


def stretched(job: Job) -> dict[str, Any]:
    """Return how llama.cpp is asked for the job's YaRN."""
    if not job.rope:
        return {}
    rope = ModelConfig.from_pretrained(job.target).with_rope_scaling(job.rope).rope
    from llama_cpp import LLAMA_ROPE_SCALING_TYPE_YARN  # pyright: ignore

    return {
        "rope_scaling_type": LLAMA_ROPE_SCALING_TYPE_YARN,
        "rope_freq_scale": 1 / rope["factor"],
        "yarn_ext_factor": 1.0,
        "yarn_orig_ctx": rope["original_max_position_embeddings"],
    }
