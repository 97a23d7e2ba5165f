"""The decoder agrees with transformers: any family, bias, RoPE, cache, forward size, and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from offload.memory.host_arena import HostArena
from offload.memory.link import Link
from offload.prefill.layer_major import Prefill
from offload.tiered.cache import TieredCache
from offload.tiered.shape import TieredCacheSpec
from parallel.model.loading import load_model
from parallel.model.pipeline import PrefillStep, finish
from parallel.model.prompt_logprobs import PromptScorer
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup
from support.caches import resident
from support.families import OTHERS
from support.links import make_test_link
from support.models import long_rope, random_tokens, reference_logits, rope
from support.ranks import run_ranks

TOKENS = 90
MODELS: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "gqa": {},
    "one-kv-head": {"num_key_value_heads": 1},
    "qkv-bias": {"family": "qwen2"},
    "tied": {"tie_word_embeddings": True},
    "qwen2-tied": {"family": "qwen2", "tie_word_embeddings": True},
    "head-dim": {"head_dim": 12},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "norm-eps": {"rms_norm_eps": 0.1},
    "theta": {"rope_parameters": rope("default", theta=500_000.0)},
    "linear": {"rope_parameters": rope("linear", factor=4.0)},
    "dynamic-short": {
        "rope_parameters": rope("dynamic", factor=4.0),
        "max_position_embeddings": 128,
    },
    "dynamic-long": {"rope_parameters": rope("dynamic", factor=4.0), "max_position_embeddings": 32},
    "yarn": {"rope_parameters": rope("yarn", factor=8.0, original_max_position_embeddings=64)},
    "yarn-factors": {
        "rope_parameters": rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            attention_factor=1.3,
            beta_fast=16,
            beta_slow=2,
        )
    },
    "llama3": {
        "rope_parameters": rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        )
    },
    "mistral": {"family": "mistral", "sliding_window": None},
    "mistral-head-dim": {"family": "mistral", "sliding_window": None, "head_dim": 16},
    "qwen2-yarn": {
        "family": "qwen2",
        "rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=64),
    },
    "qwen3": {"family": "qwen3"},
    "qwen3-bias": {"family": "qwen3", "attention_bias": True, "head_dim": 16},
    "smollm3": {"family": "smollm3"},
    "smollm3-list": {"family": "smollm3", "no_rope_layers": [0, 1, 0]},
    "phi3": {"family": "phi3"},
    "phi3-partial": {
        "family": "phi3",
        "rope_parameters": rope("default", partial_rotary_factor=0.5),
    },
    "phi3-short": {
        "family": "phi3",
        "rope_parameters": long_rope(8),
        "original_max_position_embeddings": 128,
    },
    "phi3-long": {
        "family": "phi3",
        "rope_parameters": long_rope(8),
        "original_max_position_embeddings": 32,
    },
    "phi3-partial-long": {
        "family": "phi3",
        "rope_parameters": long_rope(4, partial_rotary_factor=0.5),
        "original_max_position_embeddings": 32,
    },
    "olmo2": {"family": "olmo2"},
    "olmo2-bias": {"family": "olmo2", "attention_bias": True, "num_key_value_heads": 4},
    "granite": {"family": "granite"},
    "granite-bias": {"family": "granite", "attention_bias": True, "mlp_bias": True},
    "exaone4": {"family": "exaone4"},
    "exaone": {"family": "exaone"},
    "exaone-tied": {"family": "exaone", "tie_word_embeddings": True, "attention_bias": True},
    "granite4": {"family": "granitemoehybrid", "attention_bias": True},
    "granite4-nope": {"family": "granitemoehybrid", "position_embedding_type": "nope"},
    "granite4-mamba": OTHERS["granite-mamba"],
    "granite4-experts": OTHERS["granite-experts"],
    "granite4-mamba-sizes": {
        **OTHERS["granite-mamba"],
        "mamba_expand": 3,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_n_groups": 3,
        "mamba_d_conv": 2,
        "tie_word_embeddings": True,
    },
    "nemotron-h": {"family": "nemotron_h"},
    "nemotron-h-dense": {
        "family": "nemotron_h",
        "layers_block_type": ["attention", "mamba", "mlp", "mamba", "mlp", "attention"],
        "n_groups": 1,
    },
    "ministral3": {"family": "ministral3"},
    "seed-oss": {"family": "seed_oss"},
    "seed-oss-bias": {
        "family": "seed_oss",
        "attention_bias": False,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "arcee": {"family": "arcee"},
    "arcee-bias": {"family": "arcee", "mlp_bias": True, "attention_bias": True},
    "apertus": {"family": "apertus"},
    "ernie4.5": {"family": "ernie4_5"},
    "ernie4.5-moe": {"family": "ernie4_5_moe"},
    "ernie4.5-moe-last": {
        "family": "ernie4_5_moe",
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 2,
        "moe_num_shared_experts": 0,
    },
    "glm4-moe": {"family": "glm4_moe"},
    "glm4-moe-plain": {
        "family": "glm4_moe",
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "norm_topk_prob": False,
        "use_qk_norm": False,
        "attention_bias": True,
    },
    "deepseek-v2": {"family": "deepseek_v2"},
    "deepseek-v3": {"family": "deepseek_v3"},
    "deepseek-v3-halves": {"family": "deepseek_v3", "rope_interleave": False, "q_lora_rank": None},
    "deepseek-v3-wide-values": {"family": "deepseek_v3", "v_head_dim": 22},
    "glm4-moe-lite": {"family": "glm4_moe_lite", "attention_bias": True},
    "minicpm3": {"family": "minicpm3"},
    "hunyuan": {"family": "hunyuan_v1_dense"},
    "hunyuan-bias": {
        "family": "hunyuan_v1_dense",
        "attention_bias": True,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_parameters": rope("dynamic", factor=4.0),
        "max_position_embeddings": 32,
    },
    "hunyuan-yarn": {
        "family": "hunyuan_v1_dense",
        "rope_parameters": rope("yarn", factor=8.0, original_max_position_embeddings=64),
    },
    "glm": {"family": "glm"},
    "glm-whole": {
        "family": "glm",
        "attention_bias": False,
        "rope_parameters": rope("default", partial_rotary_factor=1.0),
    },
    "glm4": {"family": "glm4", "num_key_value_heads": 4},
    "qwen3-moe": {"family": "qwen3_moe"},
    "qwen3-moe-normalised": {
        "family": "qwen3_moe",
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "mixtral": {"family": "mixtral"},
    "mistral-window": {"family": "mistral", "sliding_window": 20},
    "qwen2-upper-window": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "phi3-window": {"family": "phi3", "sliding_window": 31},
    "exaone4-window": {
        "family": "exaone4",
        "sliding_window": 20,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    # a window that has no effect, but for the RoPE
    "exaone4-wide": {
        "family": "exaone4",
        "sliding_window": 1024,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "gemma3": {"family": "gemma3_text"},
    "gemma3-bias": {"family": "gemma3_text", "attention_bias": True, "num_key_value_heads": 4},
    "olmo3": {"family": "olmo3"},
    "cohere": {"family": "cohere", "attention_bias": True, "logit_scale": 0.5},
    "cohere2": {"family": "cohere2"},
    "gemma4": {"family": "gemma4_text"},
    "gemma4-experts": OTHERS["gemma4-experts"],
    "gemma4-separate-values": {
        "family": "gemma4_text",
        "attention_k_eq_v": False,
        "attention_bias": True,
        "num_key_value_heads": 2,
        "global_head_dim": 8,
        "layer_types": None,
        "final_logit_softcapping": None,
        "rope_parameters": {
            "full_attention": rope("proportional", theta=3e5, partial_rotary_factor=0.5),
            "sliding_attention": rope("default", theta=300.0),
        },
    },
    "gpt-oss": {"family": "gpt_oss"},
    "gpt-oss-clamped": {
        "family": "gpt_oss",
        "attention_bias": False,
        "num_key_value_heads": 4,
        "swiglu_limit": 0.3,
        "swiglu_alpha": 2.0,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": rope(
            "yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=8.0
        ),
    },
    "qwen3-next": {"family": "qwen3_next"},
    "qwen3-next-dense": {
        "family": "qwen3_next",
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "layer_types": None,
        "full_attention_interval": 3,
        "linear_num_value_heads": 2,
    },
    "qwen3.5": {"family": "qwen3_5_text"},
    "qwen3.5-bias": {
        "family": "qwen3_5_text",
        "attention_bias": True,
        "linear_conv_kernel_dim": 3,
        "rope_parameters": rope("default", partial_rotary_factor=0.25),
        "tie_word_embeddings": True,
    },
    "qwen3.5-moe": {"family": "qwen3_5_moe_text"},
    "olmo3-theta": {
        "family": "olmo3",
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": rope("default", theta=20_000.0),
            "sliding_attention": rope("default", theta=300.0),
        },
    },
    "sharded": {"max_shard_size": "10KB"},
}
Checkpoints = Callable[..., Path]


def run_whole(model: Transformer, tokens: Tensor) -> Tensor:
    return model(tokens, resident(model, len(tokens)), len(tokens))


def run_in_parts(
    model: Transformer, tokens: Tensor, cache: TieredCache, sizes: list[int]
) -> Tensor:
    """Return every token's logits, from token-major forwards of these sizes."""
    logits = []
    for part in tokens.split(sizes):
        logits.append(model(part, cache, len(part)))
        cache.advance(len(part))
    return torch.cat(logits)


def assert_close(logits: Tensor, expected: Tensor) -> None:
    assert logits.dtype == torch.float32
    assert expected.std() > 0.3  # logits that tell tokens apart
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers(checkpoint: Checkpoints, name: str) -> None:
    folder, tokens = checkpoint(**MODELS[name]), random_tokens(TOKENS)
    if name == "sharded":
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert_close(
        run_whole(load_model(folder, TensorParallelGroup()), tokens),
        reference_logits(folder, tokens),
    )


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        *product(["gqa", "qkv-bias", "yarn", "dynamic-long"], [1, 32, 90, 1000]),
        *((name, 32) for name in ("smollm3", "phi3-long", "olmo2", "granite", "qwen3-moe")),
        *product(["mistral-window", "gemma3"], [1, 7, 32, 90]),
        ("cohere2", 32),
        *product(["qwen3.5", "qwen3-next", "granite4-mamba"], [1, 7, 32, 90]),
        *(("granite4-experts", 32), ("nemotron-h", 32)),
        # up to 22 tokens of a chunk attend to latents, more to keys and values of each head
        *product(["deepseek-v2"], [7, 22, 23, 90]),
        *(("deepseek-v3", 32), ("deepseek-v3-wide-values", 90)),
        *(("glm4-moe-lite", 32), ("minicpm3", 32)),
    ],
)
def test_layer_major_prefill_matches_token_major(
    checkpoint: Checkpoints, name: str, chunk: int
) -> None:
    folder, tokens = checkpoint(**MODELS[name]), random_tokens(TOKENS)
    model, steps = load_model(folder, TensorParallelGroup()), list[PrefillStep]()
    cache, other = resident(model, TOKENS + 5), resident(model, TOKENS + 5)
    cache.rotary = other.rotary = model.rotary(TOKENS, TOKENS + 5)
    with Prefill(cache, TOKENS) as prefill:
        prefilled = model.prefill_steps(tokens, prefill, chunk)
        while not steps or steps[-1].done < steps[-1].total:
            steps.append(next(prefilled))
        last = finish(prefilled)
    all_rows = run_in_parts(model, tokens, other, [7] * 12 + [6])
    assert_close(all_rows, reference_logits(folder, tokens))
    assert_close(last, all_rows[-1:])
    more = random_tokens(5, seed=1)
    # both caches hold the same keys and values
    assert_close(model(more, cache, 5), model(more, other, 5))
    assert steps[-1] == (TOKENS * 3, TOKENS * 3, True)
    assert steps == sorted(steps)
    assert [step.done for step in steps if step.ends_layer] == [TOKENS, TOKENS * 2, TOKENS * 3]


@pytest.mark.parametrize("name", ["gqa", "deepseek-v2", "gemma3", "qwen3.5"])
@pytest.mark.parametrize("chunk", [25, 60, 1000])
def test_scores_of_a_prompt_do_not_change_its_logits(
    checkpoint: Checkpoints, name: str, chunk: int
) -> None:
    model = load_model(checkpoint(**MODELS[name]), TensorParallelGroup(), "bfloat16")
    logits = []
    for scorer in (None, PromptScorer(2, 50)):
        cache = resident(model, TOKENS, dtype=torch.bfloat16)
        with Prefill(cache, TOKENS) as prefill:
            steps = model.prefill_steps(random_tokens(TOKENS), prefill, chunk, scorer)
            logits.append(finish(steps))
    assert torch.equal(*logits)


@pytest.mark.parametrize("link", ["view", "emulated", "delaying"], indirect=True)
# the second of 2 deferred layers is the last layer
@pytest.mark.parametrize(("layers", "deferred"), [(0, 0), (1, 0), (3, 0), (2, 1), (2, 2)])
@pytest.mark.parametrize("chunk", [25, 60])
def test_tiers_do_not_change_logits(
    checkpoint: Checkpoints, link: Link, layers: int, deferred: int, chunk: int
) -> None:
    deferred = deferred if link.copies else 0
    folder, tokens = checkpoint(num_key_value_heads=2), random_tokens(TOKENS)
    model, expected = load_model(folder, TensorParallelGroup()), reference_logits(folder, tokens)
    sizes = [1, 5, 17, 1, 2, 4]
    cache = resident(model, TOKENS, link, layers, block=20, slot_heads=1, deferred_layers=deferred)
    with Prefill(cache, 60) as prefill:
        assert_close(model.prefill(tokens[:60], prefill, chunk), expected[59:60])
    assert_close(run_in_parts(model, tokens[60:], cache, sizes), expected[60:])
    cache.crop(55)
    assert_close(run_in_parts(model, tokens[55:75], cache, [3, 17]), expected[55:75])


def test_logits_are_returned_for_the_last_rows(checkpoint: Checkpoints) -> None:
    model, tokens = load_model(checkpoint(), TensorParallelGroup()), random_tokens(20)
    all_logits = run_whole(model, tokens)
    for rows in (1, 7):
        assert_close(model(tokens, resident(model, 20), rows), all_logits[-rows:])


def test_bfloat16_is_as_accurate_as_transformers(checkpoint: Checkpoints) -> None:
    folder, tokens = checkpoint(dtype=torch.bfloat16), random_tokens(TOKENS)
    model = load_model(folder, TensorParallelGroup())
    assert model.embed.weight.dtype == torch.bfloat16
    layout = model.config.kv_layout(1, torch.bfloat16)
    rotary = model.rotary(TOKENS, TOKENS)
    link = make_test_link("view")
    shape = TieredCacheSpec(layout, TOKENS, 1, copies=link.copies)
    cache = TieredCache(shape, link, rotary, HostArena(link, torch.bfloat16))
    exact = reference_logits(folder, tokens)
    ours = (model(tokens, cache, TOKENS) - exact).abs().mean()
    theirs = (reference_logits(folder, tokens, torch.bfloat16) - exact).abs().mean()
    # about as close to the float32 logits as transformers in the same dtype
    assert ours < 1.5 * theirs


def run_rank(folders: list[Path], tokens: Tensor) -> list[dict[str, Tensor]]:
    group = TensorParallelGroup.from_environment("cpu")
    results = []
    for folder in folders:
        model = load_model(folder, group)
        link = make_test_link("delaying")
        cache = resident(model, len(tokens), link, 1, block=8)
        with Prefill(cache, 60) as prefill:
            last = model.prefill(tokens[:60], prefill, 25)
        rest = run_in_parts(model, tokens[60:], cache, [8, 1, 8, 8, 5])
        sizes = torch.tensor(
            [sum(parameter.numel() for parameter in model.parameters()), cache.layout.heads]
        )
        results.append(
            {"whole": run_whole(model, tokens), "last": last, "rest": rest, "sizes": sizes}
        )
        link.close()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1, 2])
def test_two_ranks_match_one_rank(part: int, checkpoint: Checkpoints) -> None:
    """Tests every third model: two ranks start once for all of them."""
    names = ["mha", "gqa", "tied", "qkv-bias", "attention-bias", "mlp-bias", "head-dim", "sharded"]
    names += ["qwen3", "smollm3", "phi3-partial-long", "olmo2-bias", "granite-bias", "mixtral"]
    names += ["qwen3-next", "qwen3.5", "qwen3.5-moe", "granite4-mamba", "granite4-experts"]
    names += ["nemotron-h", "nemotron-h-dense"]
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    odd: list[dict[str, Any]] = [
        {"intermediate_size": 49},
        {"family": "qwen3_moe", "moe_intermediate_size": 21},
        {**OTHERS["granite-mamba"], "mamba_expand": 3, "mamba_n_heads": 3},
        MODELS["granite4-mamba-sizes"],
        *({"family": family, **heads} for family in ("llama", "olmo2", "phi3")),
    ]
    models = [*map(MODELS.get, names), *odd][part::3]
    folders = [checkpoint(**arguments) for arguments in models]
    tokens = random_tokens(TOKENS)
    by_rank = run_ranks(2, run_rank, folders, tokens)
    for index, folder in enumerate(folders):
        model = load_model(folder, TensorParallelGroup())
        expected = reference_logits(folder, tokens)
        assert_close(run_whole(model, tokens), expected)
        for rank in range(2):
            result = by_rank[rank][index]
            assert_close(result["whole"], expected)
            assert_close(result["last"], expected[59:60])
            assert_close(result["rest"], expected[60:])
        shares = sum(by_rank[rank][index]["sizes"] for rank in range(2))
        whole = sum(parameter.numel() for parameter in model.parameters())
        assert whole < shares[0] < 1.15 * whole  # all split except norms, biases and padding
        assert shares[1] == model.config.kv_heads


class RecordingGroup(TensorParallelGroup):
    """A group that records when an all-reduce starts, and when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []
        self.sums = 0

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        number, self.sums = self.sums, self.sums + 1
        self.events.append(("start", number))

        def wait() -> Tensor:
            self.events.append(("wait", number))
            return x

        return wait


def test_all_reduces_overlap_the_next_chunk(checkpoint: Checkpoints) -> None:
    group = RecordingGroup()
    model = load_model(checkpoint(num_hidden_layers=2), group, "float32")
    cache = resident(model, TOKENS)
    with Prefill(cache, TOKENS) as prefill:
        model.prefill(random_tokens(TOKENS), prefill, TOKENS // 5)
    events, chunks = group.events, 5
    assert group.sums == 2 * chunks + 2  # in the last layer, only for the last rows
    overlapped = [
        number
        for number in range(2 * chunks)
        if events.index(("wait", number)) > events.index(("start", number)) + 1
    ]
    assert len(overlapped) >= 2 * chunks - 2  # all but the last chunk's


@pytest.mark.parametrize(("chunk", "rows"), [(1000, 32), (45, 32), (30, 30), (7, 7)])
def test_prefill_computes_only_the_last_rows_in_the_last_layer(
    checkpoint: Checkpoints, chunk: int, rows: int
) -> None:
    model = load_model(checkpoint(), TensorParallelGroup(), "float32")
    cache, attended = resident(model, TOKENS), Counter()
    with Prefill(cache, TOKENS) as prefill:
        attend = prefill.attend

        def count_rows(layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
            attended[layer] += len(q)
            return attend(layer, q, k, v, start)

        with patch.object(prefill, "attend", count_rows):
            model.prefill(random_tokens(TOKENS), prefill, chunk)
    assert attended == {0: TOKENS, 1: TOKENS, 2: rows}
