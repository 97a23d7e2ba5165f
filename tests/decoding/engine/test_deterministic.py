"""In 16 bits, too, a text is a function of model, prompt and seed: bit for bit, logits included."""

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
# the end of a block of keys is crossed in the middle of the text
PROMPT = random_tokens(KEY_BLOCK - 12, seed=5).tolist()
SHORT = random_tokens(70).tolist()
SAMPLINGS = [GREEDY, Sampling(0.8, top_p=0.9, seed=3)]
SMALL: dict[str, Any] = {"chunk_size": 4, "window": 32, "sinks": 2}
LINK = {"link": "emulated:50"}
# modes, and where the KV lives; lengths that are fixed, and others that go by the clock
WAYS: dict[str, dict[str, Any]] = {
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
    "all": {"mode": "split-hierarchical", "gpu_kv_layers": 0, "split_kv_layers": 1, **LINK},
}
Text = tuple[list[int], Tensor]  # tokens, and the logits (N, V) that they were drawn from


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> Folders:
    target = checkpoint(num_hidden_layers=3, max_position_embeddings=4096)
    return target, checkpoint(seed=1, num_hidden_layers=1, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def models(folders: Folders) -> Pair:
    return Pair(*folders, dtype="bfloat16")


def written(engine: Engine, prompt: list[int], sampling: Sampling, new: int = NEW) -> Text:
    rows: list[Tensor] = []
    request = Request(prompt, new, sampling, on_logits=lambda logits: rows.extend(logits.clone()))
    tokens = list(engine.submit(request))
    return tokens, torch.stack(rows)


def text(models: Pair, prompt: list[int], sampling: Sampling, new: int = NEW, **way: Any) -> Text:
    with models.engine(deterministic=True, **SMALL | way) as engine:
        return written(engine, prompt, sampling, new)


def same(one: Text, other: Text) -> bool:
    return one[0] == other[0] and torch.equal(one[1], other[1])


@pytest.mark.parametrize("sampling", slow_except(SAMPLINGS, 1), ids=["greedy", "sampled"])
def test_every_way_writes_what_plain_decoding_writes(sampling: Sampling, models: Pair) -> None:
    plain = text(models, PROMPT, sampling, mode="plain")
    assert len(set(plain[0])) > 2  # not one word again and again
    for name, way in WAYS.items():
        assert same(text(models, PROMPT, sampling, **way), plain), name


@pytest.mark.parametrize("new", slow_except([160, 700]))
def test_a_long_text_in_which_the_boundary_moves(new: int, models: Pair) -> None:
    prompt, law = PROMPT[:300], Sampling(1.0, top_p=1, seed=9)
    found = []
    for way in ({"mode": "plain"}, WAYS["retrieval"], WAYS["all"]):
        with models.engine(deterministic=True, **SMALL | way) as engine:
            found.append(written(engine, prompt, law, new))
    assert all(same(each, found[0]) for each in found)


@pytest.mark.parametrize("name", slow_except(OTHERS, -1))
def test_so_it_is_in_every_family(checkpoint: Callable[..., Path], name: str) -> None:
    folder = checkpoint(**OTHERS[name])
    models = Pair(folder, folder, dtype="bfloat16")
    for sampling in SAMPLINGS:
        plain = text(models, SHORT, sampling, 16, mode="plain")
        for way in ("retrieval", "hierarchical"):
            found = text(models, SHORT, sampling, 16, **WAYS[way] | {"retrieval_budget": 24})
            assert same(found, plain)


RANKED = [["retrieval", "all"], sorted(WAYS.keys() - {"retrieval", "all"})]


@pytest.mark.parametrize("names", slow_except(RANKED), ids=["two ways", "the others"])
def test_two_ranks_write_alike_in_every_way(names: list[str], folders: Folders) -> None:
    found = run_ranks(2, on_a_rank, folders, names)[0]
    assert len(found) == 1 + len(names)
    assert all(same(each, found[0]) for each in found)


def on_a_rank(folders: Folders, names: list[str]) -> list[Text]:
    group = TensorParallelGroup.from_environment("cpu")
    models = Pair(*folders, group, dtype="bfloat16")
    found = []
    for way in ({"mode": "plain"}, *(WAYS[name] for name in names)):
        with models.engine(deterministic=True, **SMALL | way) as engine:
            found += lead(engine, lambda first: written(first, PROMPT, SAMPLINGS[1]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "families", [["llama"], ["olmo2", "mixtral"]], ids=["llama", "olmo2 and mixtral"]
)
def test_three_ranks_sum_up_in_one_order(
    checkpoint: Callable[..., Path], families: list[str]
) -> None:
    """Which goes, of three or more, by the place of a row in what is summed."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    shape = {"max_position_embeddings": 4096, "hidden_size": 96, **heads}
    folders = [checkpoint(family, **shape) for family in families]
    found = run_ranks(3, on_one_of_three, folders)[0]
    assert len(found) == len(families)
    assert all(same(*each) for each in found)


def on_one_of_three(folders: list[Path]) -> list[list[Text]]:
    """What each model writes in two ways."""
    group = TensorParallelGroup.from_environment("cpu")
    found = []
    for folder in folders:
        models, texts = Pair(folder, folder, group, dtype="bfloat16"), list[Text]()
        for name in ("viewed", "retrieval"):
            with models.engine(deterministic=True, **SMALL | WAYS[name]) as engine:
                texts += lead(engine, lambda first: written(first, PROMPT[:100], SAMPLINGS[1], 20))
        found.append(texts)
    return found


@pytest.mark.slow
def test_several_threads_write_alike(checkpoint: Callable[..., Path]) -> None:
    """With weights so large that products are shared out."""
    large = {"hidden_size": 1024, "intermediate_size": 1024, "max_position_embeddings": 4096}
    (found,) = run_ranks(1, on_threads, checkpoint(num_hidden_layers=2, **large))
    assert all(same(each, found[0]) for each in found)


def on_threads(folder: Path) -> list[Text]:
    models = Pair(folder, folder, TensorParallelGroup.from_environment("cpu"), dtype="bfloat16")
    torch.set_num_threads(3)
    found = []
    for way in ({"mode": "plain"}, WAYS["retrieval"], WAYS["prompt_lookup"], WAYS["split"]):
        with models.engine(deterministic=True, **SMALL | way) as engine:
            found.append(written(engine, PROMPT[:150], SAMPLINGS[1], 12))
    return found


def test_a_turn_of_a_conversation_is_read_as_one_long_prompt(models: Pair) -> None:
    with models.engine(mode="hierarchical", deterministic=True, **SMALL) as engine:
        with engine.conversation(room=500):
            first, _ = written(engine, SHORT, SAMPLINGS[1])
            longer = [*SHORT, *first, 7, 8]
            found = written(engine, longer, SAMPLINGS[1])
        assert same(found, written(engine, longer, SAMPLINGS[1]))


def test_documents_are_written_as_alone(models: Pair) -> None:
    with models.engine(
        mode="retrieval", deterministic=True, **SMALL | {"retrieval_budget": 64}
    ) as engine:
        requests = [Request(SHORT[:count], NEW, SAMPLINGS[1]) for count in (70, 40, 55)]
        assert engine.max_concurrency(70, NEW, 8) == 1
        found = [each.tokens for each in engine.generate_batch(requests, 1)]
        assert found == [list(engine.submit(each)) for each in requests]
        with pytest.raises(TierForceError, match="`deterministic` texts share no passes"):
            list(engine.generate_batch(requests, 2))


@pytest.mark.parametrize(
    "field", [{"prompt_cache": "kept"}, {"graphs": True}, {"prefill_chunk": 64}]
)
def test_what_would_change_a_text_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(TierForceError, match="cannot be combined with `deterministic`"):
        Settings(deterministic=True, **field)


def test_the_command_line_writes_alike(tmp_path: Path) -> None:
    command = ("generate", "--model", str(TARGET), "--device", "cpu", "--prompt", "It was the best")
    said = set()
    for way in (("plain",), ("retrieval", "--num-draft-tokens", "7"), ("retrieval",)):
        options = (
            "--dtype",
            "bfloat16",
            "--max-new-tokens",
            "40",
            "--seed",
            "4",
            "--deterministic",
        )
        found = forked(tmp_path, *command, *options, "--mode", *way)
        assert found.code == 0, found.err
        said.add(found.out)
    assert len(said) == 1
