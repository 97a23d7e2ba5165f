"""DeepSpeed-ZeRO-Inference as a peer: parameters in host memory, the KV cache on the device."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.peers.base import Unavailable
from bench.peers.hugging_face import Transformers


class ZeroInference(Transformers):
    """DeepSpeed-ZeRO-Inference as released: transformers' model under ZeRO stage 3."""

    def _load(self, model: Path, rope: str | None = None) -> Any:
        if find_spec("deepspeed") is None:
            raise Unavailable("deepspeed is not installed: pip install deepspeed")
        import deepspeed  # pyright: ignore

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        # a process group of one rank, without MPI
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
            "bf16": {"enabled": self.job.dtype == "bfloat16"},
            "fp16": {"enabled": self.job.dtype == "float16"},
        }
        loaded = super()._load(model, rope)
        return deepspeed.initialize(model=loaded, config=config)[0].module.eval()
