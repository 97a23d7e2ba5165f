"""llama.cpp as a peer, through llama-cpp-python."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.peers.base import Job, Peer, Result, Unavailable
from bench.peers.gguf import dequantised_file, kernels
from parallel.config.model_config import ModelConfig
from parallel.formats.locate import is_gguf


class LlamaCpp(Peer):
    """llama.cpp on the target's GGUF file itself; its KV cache is in float16."""

    def __init__(self, job: Job):
        super().__init__(job)
        _check(job)
        from llama_cpp import Llama  # pyright: ignore

        path, threads = self._file(), torch.get_num_threads()
        self.note = f"{kernels(path)} kernels"
        self.model = Llama(
            str(path),
            n_ctx=len(job.prompt) + job.max_new_tokens,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=-1 if torch.cuda.is_available() else 0,
            flash_attn=True,
            verbose=False,
            **rope_options(job),
        )

    def _file(self) -> Path:
        return self.job.target

    def run(self) -> Result:
        sampling, tokens, first = self.job.sampling, list[int](), 0.0
        self.model.set_seed(sampling.seed)
        started = time.perf_counter()
        for token in self.model.generate(
            self.job.prompt,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=0.0,
            temp=sampling.temperature,
        ):
            first = first or time.perf_counter()
            tokens.append(token)
            if len(tokens) == self.job.max_new_tokens:
                break
        return Result(first - started, time.perf_counter() - first, tokens)


class Dequantised(LlamaCpp):
    """llama.cpp on the same weights, dequantised to the dtype of all other peers."""

    @staticmethod
    def convert(job: Job) -> None:
        _check(job)
        dequantised_file(job.target, job.dtype, job.scratch)

    def _file(self) -> Path:
        return dequantised_file(self.job.target, self.job.dtype, self.job.scratch)


def _check(job: Job) -> None:
    """Raise Unavailable if llama.cpp cannot load the target."""
    if find_spec("llama_cpp") is None:
        raise Unavailable("llama-cpp-python is not installed: pip install llama-cpp-python")
    if not is_gguf(job.target):
        raise Unavailable("llama.cpp takes a GGUF file: give one with --target")


def rope_options(job: Job) -> dict[str, Any]:
    """Return llama.cpp's arguments for the job's YaRN."""
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
