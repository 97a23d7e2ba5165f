"""DeepSpeed-ZeRO-Inference as a peer: as it is released, and with its KV cache in host memory."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.harness.ranks import free_port
from bench.peers.base import Job, Peer, Result, Unavailable
from bench.peers.gguf import hugging_face_folder
from bench.peers.hugging_face import Transformers, warped
from bench.peers.zero_kv import initialized


class ZeroInference(Transformers):
    """DeepSpeed-ZeRO-Inference as released: parameters in host memory, KV cache on the device."""

    def _load(self, model: Path, rope: str | None = None) -> Any:
        if find_spec("deepspeed") is None:
            raise Unavailable("deepspeed is not installed: pip install deepspeed")
        return initialized(super()._load(model, rope), self.job.dtype, free_port())


class OffloadingZeroInference(Peer):
    """DeepSpeed-ZeRO-Inference with its KV cache in host memory.

    It is run by the python that TIERFORCE_ZERO_PYTHON names.
    """

    script = Path(__file__).with_name("zero_kv.py")
    convert = staticmethod(Transformers.convert)

    def __init__(self, job: Job):
        super().__init__(job)
        self.python = os.environ.get("TIERFORCE_ZERO_PYTHON", "")
        if not self.python:
            raise Unavailable(
                "KV offload takes an environment with DeepSpeed's fork: name its python in "
                "TIERFORCE_ZERO_PYTHON"
            )
        if job.rope:
            raise Unavailable(f"the fork's transformers of 2023 has no {job.rope}")

    def run(self) -> Result:
        folder = hugging_face_folder(self.job.target, self.job.dtype, self.job.scratch)
        job = {
            "target": str(folder),
            "prompt": self.job.prompt,
            "new": self.job.new,
            "dtype": self.job.dtype,
            "seed": self.job.sampling.seed,
            "law": warped(self.job.sampling),
            "port": free_port(),
            "threads": torch.get_num_threads(),
        }
        command = [self.python, str(self.script)]
        done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(said[-1])
        answer = json.loads(done.stdout.splitlines()[-1])
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        return Result(**answer)
