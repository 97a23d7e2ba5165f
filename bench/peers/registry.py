"""The peers of a comparison; all get the same prompt, number of new tokens and sampling."""

from __future__ import annotations

from bench.peers.base import Peer
from bench.peers.hugging_face import Accelerate, assistant_model, offloaded_cache, transformers
from bench.peers.llamacpp import Dequantised, LlamaCpp
from bench.peers.ours import ours
from bench.peers.zero import ZeroInference

PEERS: dict[str, type[Peer]] = {
    "ours: plain": ours(mode="plain"),
    "ours: packed, plain": ours(mode="plain", weights="packed"),
    "ours: speculative": ours(mode="speculative"),
    "ours: retrieval": ours(mode="retrieval"),
    "ours: hierarchical": ours(mode="hierarchical"),
    "ours: hierarchical and lookup": ours(mode="hierarchical", prompt_lookup_ngram=3),
    "ours: plain offloaded": ours(mode="plain", gpu_kv_layers=0),
    "ours: retrieval offloaded": ours(mode="retrieval", gpu_kv_layers=0),
    "ours: hierarchical offloaded": ours(mode="hierarchical", gpu_kv_layers=0),
    "ours: packed, retrieval offloaded": ours(mode="retrieval", weights="packed", gpu_kv_layers=0),
    "transformers: dynamic cache": transformers(lambda peer: {}),
    "transformers: static cache": transformers(
        lambda peer: {"cache_implementation": "static", "prefill_chunk_size": 2048}
    ),
    "transformers: offloaded cache": transformers(offloaded_cache),
    "transformers: assisted": transformers(assistant_model),
    "transformers: prompt lookup": transformers(lambda peer: {"prompt_lookup_num_tokens": 10}),
    "accelerate: cpu_offload": Accelerate,
    "DeepSpeed ZeRO-Inference": ZeroInference,
    "llama.cpp": LlamaCpp,
    "llama.cpp: dequantised": Dequantised,
}
