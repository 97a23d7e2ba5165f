"""llama.cpp as a peer, through llama-cpp-python."""

from __future__ import annotations

import time
import zlib
from importlib.util import find_spec

import torch

from bench.peers.base import Job, Peer, Result, Unavailable
from bench.peers.gguf import to_gguf


class LlamaCpp(Peer):
    """llama.cpp, with the target converted to GGUF once; its KV cache is in float16."""

    def __init__(self, job: Job):
        super().__init__(job)
        if find_spec("llama_cpp") is None:
            raise Unavailable("llama-cpp-python is not installed: pip install llama-cpp-python")
        config = job.target.resolve() / "config.json"
        identity = zlib.crc32(f"{config} {config.stat().st_mtime}".encode())
        path = job.scratch / f"{config.parent.name}-{job.dtype}-{identity:08x}.gguf"
        if not path.is_file():
            to_gguf(job.target, path, getattr(torch, job.dtype))
        from llama_cpp import Llama  # pyright: ignore

        threads = torch.get_num_threads()
        self.model = Llama(
            str(path),
            n_ctx=len(job.prompt) + job.new,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=-1 if torch.cuda.is_available() else 0,
            flash_attn=True,
            verbose=False,
        )

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
