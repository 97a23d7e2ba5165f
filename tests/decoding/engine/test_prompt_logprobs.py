"""Log-probabilities of a prompt's tokens are those of transformers' forward of all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from decoding import GREEDY, Engine, Sampling
from decoding.engine.request import MAX_PROMPT_LOGPROBS, Request
from decoding.prefix_cache.store import MIN_TOKENS
from offload.errors import InvalidRequestError
from parallel.model.prompt_logprobs import PromptLogprobs
from parallel.model.transformer import Transformer
from parallel.ranks.process_group import TensorParallelGroup
from support import engines
from support.engines import MODES, Folders, Pair, lead
from support.families import OTHERS
from support.models import random_tokens, reference_logits
from support.ranks import run_ranks
from support.slow import slow_except

NEW, TOP = 8, 5
PROMPT = random_tokens(300, seed=3).tolist()
OTHER = random_tokens(90, seed=4).tolist()
LINK = {"link": "emulated:50"}
# modes and placements; a prefill of several chunks each
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode, "gpu_kv_layers": 1, **LINK} for mode in MODES},
    "offloaded": {"mode": "plain", "gpu_kv_layers": 0, **LINK},
    "viewed": {"mode": "hierarchical", "gpu_kv_layers": 1, "link": "view"},
    "on device": {"mode": "speculative"},
}
IN_16_BITS: dict[str, dict[str, Any]] = {
    **CONFIGURATIONS,
    "compressed": {"mode": "plain", "gpu_kv_layers": 0, "compress_offload": True, **LINK},
    "split": {"mode": "split-hierarchical", "gpu_kv_layers": 0, "split_kv_layers": 1, **LINK},
}
SMALL = {**engines.SMALL, "prefill_chunk": 70}


def score(engine: Engine, prompt: list[int], new: int = 0, top: int = TOP) -> PromptLogprobs:
    """Return the log-probabilities of a prompt."""
    return score_all(engine, [(prompt, new)], 1, top)[0]


def score_all(
    engine: Engine, cases: list[tuple[list[int], int]], concurrency: int, top: int = TOP
) -> list[PromptLogprobs]:
    """Return the log-probabilities of prompts, each with a number of new tokens, in their order."""
    found: list[list[PromptLogprobs]] = [[] for _ in cases]
    requests = [
        Request(
            prompt, new, GREEDY, num_prompt_logprobs=top, on_prompt_logprobs=found[index].append
        )
        for index, (prompt, new) in enumerate(cases)
    ]
    for state in engine.generate_batch(requests, concurrency):
        assert state.error is None
        assert len(state.tokens) == state.request.max_new_tokens
        assert state.stats.finish_reason == "length"
        assert state.stats.prompt_tokens == len(state.request.prompt)
    return [each for (each,) in found]  # one report of each


def expected_logprobs(folder: Path, prompt: list[int]) -> Tensor:
    """Return transformers' (N - 1, V)."""
    return reference_logits(folder, torch.tensor(prompt))[:-1].log_softmax(-1)


def check(found: PromptLogprobs, folder: Path, prompt: list[int], top: int = TOP) -> None:
    expected, following = expected_logprobs(folder, prompt), torch.tensor(prompt[1:])[:, None]
    own = expected.gather(1, following).squeeze(1)
    assert torch.allclose(found.logprobs, own, atol=1e-4, rtol=0)
    best = expected.topk(top).values
    assert found.top_logprobs.shape == found.top_tokens.shape == best.shape
    assert torch.allclose(found.top_logprobs, best, atol=1e-4, rtol=0)
    of_tokens = expected.gather(1, found.top_tokens.long())
    assert torch.allclose(found.top_logprobs, of_tokens, atol=1e-4, rtol=0)


def is_same(one: PromptLogprobs, other: PromptLogprobs) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in vars(one))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_configuration_equals_transformers(name: str, models: Pair, folders: Folders) -> None:
    with models.engine(**{**SMALL, **CONFIGURATIONS[name]}) as engine:
        for new in (0, 1, NEW):
            check(score(engine, PROMPT, new), folders[0], PROMPT)


@pytest.mark.parametrize("name", slow_except(OTHERS, 2, 3, 6))
def test_every_family_equals_transformers(checkpoint: Callable[..., Path], name: str) -> None:
    """Also those whose logits are scaled or capped, with windows and with recurrent layers."""
    folder = checkpoint(**OTHERS[name])
    pair = Pair(folder, folder)
    layers = min(1, pair.target.config.full_layers)
    options = {"prefill_chunk": 40, "gpu_kv_layers": layers, **LINK}
    for mode in ("plain", "hierarchical"):
        with pair.engine(mode, **{**SMALL, **options}) as engine:
            check(score(engine, OTHER), folder, OTHER)


@pytest.mark.parametrize("length", [1, 2, 69, 71])
def test_prompts_of_any_length(length: int, models: Pair, folders: Folders) -> None:
    with models.engine("plain", **SMALL) as engine:
        found = score(engine, PROMPT[:length])
        assert len(found.logprobs) == length - 1
        check(found, folders[0], PROMPT[:length])


@pytest.mark.parametrize("top", [0, 1, MAX_PROMPT_LOGPROBS])
def test_the_number_of_top_log_probabilities(top: int, models: Pair, folders: Folders) -> None:
    with models.engine("plain", **SMALL) as engine:
        check(score(engine, OTHER, top=top), folders[0], OTHER, top)


def test_a_prompt_as_long_as_the_context(models: Pair, folders: Folders) -> None:
    with models.engine("retrieval", context=len(PROMPT), **SMALL) as engine:
        check(score(engine, PROMPT), folders[0], PROMPT)


def test_logits_are_computed_of_a_few_tokens_at_a_time(models: Pair) -> None:
    rows: list[int] = []
    own = Transformer.logits

    def logits(model: Transformer, x: Tensor) -> Tensor:
        rows.append(len(x))
        return own(model, x)

    with models.engine("plain", **{**SMALL, "prefill_chunk": 200}) as engine:
        limit = engine.runtime.requirements.max_forward_tokens
        with patch.object(Transformer, "logits", logits):
            score(engine, PROMPT)
    assert sum(rows) == len(PROMPT)
    assert max(rows) == limit < 200


def test_the_answer_is_that_of_a_prompt_without_scores(models: Pair) -> None:
    for sampling in (GREEDY, Sampling(1.0, top_p=1, seed=3)):
        with models.engine("hierarchical", **SMALL) as engine:
            expected = list(engine.generate(PROMPT, NEW, sampling))
            request = Request(PROMPT, NEW, sampling, num_prompt_logprobs=TOP)
            assert list(engine.submit(request)) == expected


def test_concurrent_requests(models: Pair, folders: Folders) -> None:
    cases = [(PROMPT, 0), (OTHER, 1), (PROMPT[:200], 2), (OTHER[:50], 0)]
    with models.engine("plain", **SMALL) as engine:
        found = score_all(engine, cases, concurrency=3)
    for (prompt, _), each in zip(cases, found, strict=True):
        check(each, folders[0], prompt)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_nothing_of_a_scored_prompt_is_reused(
    concurrency: int, models: Pair, folders: Folders
) -> None:
    """Its caches are kept for later requests that are not scored."""
    long = random_tokens(MIN_TOKENS + 100, seed=6).tolist()
    with (
        models.engine("plain", **SMALL) as engine,
        engine.conversation(concurrency=concurrency),
    ):
        expected = list(engine.generate(long, NEW, GREEDY))
        found = list[PromptLogprobs]()
        for new in (0, 2):
            request = Request(
                long, new, GREEDY, num_prompt_logprobs=TOP, on_prompt_logprobs=found.append
            )
            assert len(list(engine.submit(request))) == new
            assert engine.stats.reused_tokens == 0
        for each in found:
            check(each, folders[0], long)
        assert len(found) == 2
        turn = [*long, *expected]
        list(engine.generate(turn, NEW, GREEDY))
        assert engine.stats.reused_tokens >= len(long)


def test_nothing_of_a_scored_prompt_is_loaded_from_disk(
    models: Pair, folders: Folders, cache_folder: str
) -> None:
    long = random_tokens(MIN_TOKENS + 100, seed=6).tolist()
    for _ in range(2):
        with models.engine("plain", prompt_cache=cache_folder, **SMALL) as engine:
            check(score(engine, long, 1), folders[0], long)
            assert engine.stats.loaded_tokens == 0
    with models.engine("plain", prompt_cache=cache_folder, **SMALL) as engine:
        list(engine.generate([*long, *OTHER], NEW, GREEDY))
        assert engine.stats.loaded_tokens > 0


def test_deterministic_log_probabilities_are_identical_in_16_bits(folders: Folders) -> None:
    """They depend on the prompt alone: not on mode, placement or what ran before."""
    pair, found = Pair(*folders, dtype="bfloat16"), []
    for options in IN_16_BITS.values():
        with pair.engine(deterministic=True, **{**engines.SMALL, **options}) as engine:
            first, _, last = score_all(engine, [(PROMPT, 0), (OTHER, 2), (PROMPT, NEW)], 1)
            found += [first, last]
    assert all(is_same(each, found[0]) for each in found)


def test_invalid_requests(models: Pair) -> None:
    cases = {
        "no room left to generate": Request(PROMPT, 0, GREEDY),
        "-1 new tokens": Request(PROMPT, -1, GREEDY, num_prompt_logprobs=1),
        "from 0 to 20, found 21": Request(PROMPT, 1, GREEDY, num_prompt_logprobs=21),
        "found -1": Request(PROMPT, 1, GREEDY, num_prompt_logprobs=-1),
    }
    with models.engine("plain", **SMALL) as engine:
        for message, request in cases.items():
            with pytest.raises(InvalidRequestError, match=message):
                list(engine.submit(request))


def test_overflow_is_reported(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    pair = Pair(folder, folder)
    pair.target.norm.weight.fill_(torch.nan)
    with pair.engine("plain", **SMALL) as engine:
        request = Request(OTHER, 0, GREEDY, num_prompt_logprobs=1)
        with pytest.raises(InvalidRequestError, match="NaN in the logits"):
            list(engine.submit(request))


def score_on_rank(folders: Folders) -> list[list[PromptLogprobs]]:
    pair, found = Pair(*folders, TensorParallelGroup.from_environment("cpu")), []
    for options in CONFIGURATIONS.values():
        with pair.engine(**{**SMALL, **options}) as engine:
            found += lead(engine, score_prompts)
    return found


def score_prompts(engine: Engine) -> list[PromptLogprobs]:
    return score_all(engine, [(PROMPT, 0), (OTHER, NEW), (PROMPT, 1)], concurrency=2)


@pytest.mark.slow
def test_two_ranks_equal_transformers(folders: Folders) -> None:
    found, others = run_ranks(2, score_on_rank, folders)
    assert len(found) == len(CONFIGURATIONS)
    assert others == []
    for each in found:
        for prompt, logprobs in zip((PROMPT, OTHER, PROMPT), each, strict=True):
            check(logprobs, folders[0], prompt)
