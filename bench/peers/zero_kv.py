"""DeepSpeed-ZeRO-Inference with its KV cache in host memory, run by a python that has it.

KV offload was never merged: it lives in a fork of transformers of 2023
(github.com/tjruwase/transformers, branch kvcache-offload-cpu), which cannot share an environment
with ours. So this file imports nothing of this project, which may import it: a job comes as JSON on
standard input, what became of it goes as one line of JSON to standard output. Not yet run with the
fork.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import redirect_stdout
from typing import Any


def initialized(model: Any, dtype: str, port: int) -> Any:
    """Put a model under ZeRO stage 3 with parameters in host memory.

    It gets a group of its own on this port, without an MPI to ask.
    """
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import deepspeed  # pyright: ignore

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16"},
    }
    return deepspeed.initialize(model=model, config=config)[0].module.eval()


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Return seconds and tokens, or why there are none.

    A job has: target, prompt, new, dtype, seed, threads, port, and generate's `law`.
    """
    import torch

    torch.set_num_threads(job["threads"])
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        job["target"], torch_dtype=getattr(torch, job["dtype"]), trust_remote_code=False
    )
    if not hasattr(model, "set_kv_cache_offload"):
        reason = "has no KV offload: it takes DeepSpeed's fork"
        return {"unavailable": f"the transformers of {sys.executable} {reason}"}
    model = initialized(model, job["dtype"], job["port"])
    cuda = torch.cuda.is_available()
    model.set_kv_cache_offload(True, job["new"], cuda, cuda)  # pinned, and copied behind compute
    model.generation_config = GenerationConfig(pad_token_id=0)
    times: list[float] = []

    class Clock:
        def put(self, value: Any) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    torch.manual_seed(job["seed"])
    prompt = torch.tensor([job["prompt"]], device="cuda" if cuda else "cpu")
    started = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=job["new"],
            streamer=Clock(),
            **job["law"],
        )
    tokens = out[0, len(job["prompt"]) :].tolist()
    return {
        "first_s": times[1] - started,
        "decode_s": time.perf_counter() - times[1],
        "tokens": tokens,
    }


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # DeepSpeed says much
        answer = generate(json.load(sys.stdin))
    print(json.dumps(answer))
