"""Determinism: in 16 bits, too, tokens and logits depend on model, prompt and seed alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import GREEDY, Engine, Sampling, Settings
from decoding.engine.request import Request
from offload.errors import TierForceError
from offload.kernels.batch_invariant_shape import KEY_BLOCK
from parallel.ranks.process_group import TensorParallelGroup
from support.commands import TARGET, forked
from support.engines import Folders, Pair, lead
from support.families import OTHERS
from support.models import random_tokens
from support.ranks import run_ranks
from support.slow import slow_except

NEW = 28
# the output crosses the end of a block of keys
PROMPT = random_tokens(KEY_BLOCK - 12, seed=5).tolist()
SHORT = random_tokens(70).tolist()
SAMPLINGS = [GREEDY, Sampling(0.8, top_p=0.9, seed=3)]
SMALL: dict[str, Any] = {"chunk_size": 4, "window": 32, "sinks": 2}
LINK = {"link": "emulated:50"}
# modes and placements, with fixed draft lengths and with adaptive ones, which depend on timings
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "streamed": {"mode": "plain", "gpu_kv_layers": 0, **LINK},
    "viewed": {"mode": "plain", "gpu_kv_layers": 1, "link": "view"},
    "compress_offload": {"mode": "plain", "gpu_kv_layers": 1, "compress_offload": True, **LINK},
    "retrieval": {"mode": "retrieval", "gpu_kv_layers": 1, "retrieval_budget": 64, **LINK},
    "prompt_lookup": {
        "mode": "speculative",
        "prompt_lookup_ngram": 2,
        "num_draft_tokens": 11,
    },
    "speculative": {"mode": "speculative", "num_draft_tokens": 5, "gpu_kv_layers": 2, **LINK},
    "hierarchical": {"mode": "hierarchical", "retrieval_budget": 96, "gpu_kv_layers": 0, **LINK},
    "long drafts": {
        "mode": "hierarchical",
        "retrieval_budget": 64,
        "num_draft_tokens": 30,
        "num_inner_draft_tokens": 3,
    },
    "split": {"mode": "split", "gpu_kv_layers": 0, "split_kv_layers": 2, **LINK},
    "split_budget": {"mode": "split", "split_kv_layers": 2, "split_budget": 32, **LINK},
    "all": {"mode": "split-hierarchical", "split_kv_layers": 1, "split_budget": 64, **LINK},
}
Output = tuple[list[int], Tensor]  # tokens, and the logits (N, V) that they were sampled from


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> Folders:
    target = checkpoint(num_hidden_layers=3, max_position_embeddings=4096)
    return target, checkpoint(seed=1, num_hidden_layers=1, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def models(folders: Folders) -> Pair:
    return Pair(*folders, dtype="bfloat16")


def generate(engine: Engine, prompt: list[int], sampling: Sampling, new: int = NEW) -> Output:
    rows: list[Tensor] = []
    request = Request(
        prompt, new, sampling, on_logits=lambda logits, _: rows.extend(logits.clone())
    )
    tokens = list(engine.submit(request))
    return tokens, torch.stack(rows)


def generate_once(
    models: Pair, prompt: list[int], sampling: Sampling, new: int = NEW, **options: Any
) -> Output:
    with models.engine(deterministic=True, **SMALL | options) as engine:
        return generate(engine, prompt, sampling, new)


def is_same(one: Output, other: Output) -> bool:
    return one[0] == other[0] and torch.equal(one[1], other[1])


@pytest.mark.parametrize("sampling", slow_except(SAMPLINGS, 1), ids=["greedy", "sampled"])
def test_every_configuration_equals_plain_decoding(sampling: Sampling, models: Pair) -> None:
    plain = generate_once(models, PROMPT, sampling, mode="plain")
    assert len(set(plain[0])) > 2  # not one token repeated
    for name, options in CONFIGURATIONS.items():
        assert is_same(generate_once(models, PROMPT, sampling, **options), plain), name


@pytest.mark.parametrize("new", slow_except([160, 700]))
def test_long_outputs_across_offload_boundaries(new: int, models: Pair) -> None:
    prompt, sampling = PROMPT[:300], Sampling(1.0, top_p=1, seed=9)
    outputs = []
    for options in ({"mode": "plain"}, CONFIGURATIONS["retrieval"], CONFIGURATIONS["all"]):
        with models.engine(deterministic=True, **SMALL | options) as engine:
            outputs.append(generate(engine, prompt, sampling, new))
    assert all(is_same(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("name", slow_except(OTHERS, -1))
def test_every_family_equals_plain_decoding(checkpoint: Callable[..., Path], name: str) -> None:
    folder = checkpoint(**OTHERS[name])
    models = Pair(folder, folder, dtype="bfloat16")
    for sampling in SAMPLINGS:
        plain = generate_once(models, SHORT, sampling, 16, mode="plain")
        for mode in ("retrieval", "hierarchical"):
            options = CONFIGURATIONS[mode] | {"retrieval_budget": 24}
            layers = min(options["gpu_kv_layers"], models.target.config.full_layers)
            options |= {"gpu_kv_layers": layers}
            assert is_same(generate_once(models, SHORT, sampling, 16, **options), plain)


RANKED_CASES = [["retrieval", "all"], sorted(CONFIGURATIONS.keys() - {"retrieval", "all"})]


@pytest.mark.parametrize("names", slow_except(RANKED_CASES), ids=["two", "the others"])
def test_every_configuration_on_two_ranks(names: list[str], folders: Folders) -> None:
    outputs = run_ranks(2, generate_on_rank, folders, names)[0]
    assert len(outputs) == 1 + len(names)
    assert all(is_same(output, outputs[0]) for output in outputs)


def generate_on_rank(folders: Folders, names: list[str]) -> list[Output]:
    group = TensorParallelGroup.from_environment("cpu")
    models = Pair(*folders, group, dtype="bfloat16")
    outputs = []
    for options in ({"mode": "plain"}, *(CONFIGURATIONS[name] for name in names)):
        with models.engine(deterministic=True, **SMALL | options) as engine:
            outputs += lead(engine, lambda first: generate(first, PROMPT, SAMPLINGS[1]))
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "families", [["llama"], ["olmo2", "mixtral"]], ids=["llama", "olmo2 and mixtral"]
)
def test_three_ranks_all_reduce_in_one_order(
    checkpoint: Callable[..., Path], families: list[str]
) -> None:
    """The order of an all-reduce over three or more ranks could depend on a row's position."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    shape = {"max_position_embeddings": 4096, "hidden_size": 96, **heads}
    folders = [checkpoint(family, **shape) for family in families]
    outputs = run_ranks(3, generate_on_three_ranks, folders)[0]
    assert len(outputs) == len(families)
    assert all(is_same(*pair) for pair in outputs)


def generate_on_three_ranks(folders: list[Path]) -> list[list[Output]]:
    """Return each model's outputs in two configurations."""
    group = TensorParallelGroup.from_environment("cpu")
    outputs = []
    for folder in folders:
        models, pair = Pair(folder, folder, group, dtype="bfloat16"), list[Output]()
        for name in ("viewed", "retrieval"):
            with models.engine(deterministic=True, **SMALL | CONFIGURATIONS[name]) as engine:
                pair += lead(engine, lambda first: generate(first, PROMPT[:100], SAMPLINGS[1], 20))
        outputs.append(pair)
    return outputs


@pytest.mark.slow
def test_several_threads(checkpoint: Callable[..., Path]) -> None:
    """With weights so large that matrix products are split over threads."""
    large = {"hidden_size": 1024, "intermediate_size": 1024, "max_position_embeddings": 4096}
    (outputs,) = run_ranks(1, generate_with_threads, checkpoint(num_hidden_layers=2, **large))
    assert all(is_same(output, outputs[0]) for output in outputs)


def generate_with_threads(folder: Path) -> list[Output]:
    models = Pair(folder, folder, TensorParallelGroup.from_environment("cpu"), dtype="bfloat16")
    torch.set_num_threads(3)
    outputs = []
    names = ("retrieval", "prompt_lookup", "split")
    for options in ({"mode": "plain"}, *(CONFIGURATIONS[name] for name in names)):
        with models.engine(deterministic=True, **SMALL | options) as engine:
            outputs.append(generate(engine, PROMPT[:150], SAMPLINGS[1], 12))
    return outputs


def test_turns_equal_one_long_prompt(models: Pair) -> None:
    with models.engine(mode="hierarchical", deterministic=True, **SMALL) as engine:
        with engine.conversation(room=500):
            first, _ = generate(engine, SHORT, SAMPLINGS[1])
            longer = [*SHORT, *first, 7, 8]
            output = generate(engine, longer, SAMPLINGS[1])
        assert is_same(output, generate(engine, longer, SAMPLINGS[1]))


def test_batches_run_one_request_at_a_time(models: Pair) -> None:
    with models.engine(
        mode="retrieval", deterministic=True, **SMALL | {"retrieval_budget": 64}
    ) as engine:
        requests = [Request(SHORT[:count], NEW, SAMPLINGS[1]) for count in (70, 40, 55)]
        assert engine.max_concurrency(70, NEW, 8) == 1
        outputs = [each.tokens for each in engine.generate_batch(requests, 1)]
        assert outputs == [list(engine.submit(each)) for each in requests]
        with pytest.raises(TierForceError, match="cannot be combined with `deterministic`"):
            list(engine.generate_batch(requests, 2))


@pytest.mark.parametrize(
    "field", [{"prompt_cache": "cache"}, {"graphs": True}, {"prefill_chunk": 64}]
)
def test_settings_that_change_the_output_raise(field: dict[str, Any]) -> None:
    with pytest.raises(TierForceError, match="cannot be combined with `deterministic`"):
        Settings(deterministic=True, **field)


def test_the_command_line(tmp_path: Path) -> None:
    command = ("generate", "--model", str(TARGET), "--device", "cpu", "--prompt", "It was the best")
    outputs = set()
    for mode in (("plain",), ("retrieval", "--num-draft-tokens", "7"), ("retrieval",)):
        options = (
            "--dtype",
            "bfloat16",
            "--max-new-tokens",
            "40",
            "--seed",
            "4",
            "--deterministic",
        )
        finished = forked(tmp_path, *command, *options, "--mode", *mode)
        assert finished.code == 0, finished.err
        outputs.add(finished.out)
    assert len(outputs) == 1
