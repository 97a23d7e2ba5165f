"""Answers under grammars and penalties: the same in every mode, and valid."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM

from decoding import GREEDY, Engine, Sampling, Settings
from decoding.engine.request import Request
from decoding.grammars.grammar import Grammar, GrammarCompiler
from decoding.models.loading import load_tokenizer
from offload.errors import InvalidRequestError
from parallel.ranks.process_group import TensorParallelGroup
from support.channels import MARKERS, make_tokenizer
from support.distributions import LIKELY, p_value
from support.engines import DEMO, EVERY_LEVEL, MODES, Pair, lead
from support.padded_drafts import draft_of
from support.prompts import prompt
from support.ranks import run_ranks
from support.slow import slow_except

NEW, STOP = 60, 0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kinds": {"type": "array", "items": {"enum": ["class", "function"]}, "maxItems": 3},
        "count": {"type": "integer", "minimum": -5, "maximum": 2000},
    },
    "required": ["name", "kinds", "count"],
    "additionalProperties": False,
}
RULES: dict[str, tuple[dict[str, Any], Grammar | None]] = {
    "schema": ({}, Grammar.json_schema(SCHEMA)),
    "penalties": ({"repetition_penalty": 1.4, "presence_penalty": 0.5, "min_p": 0.02}, None),
    "penalties and a grammar": (
        {"frequency_penalty": 0.7, "logit_bias": {11: 3.0}},
        Grammar.regex("[a-z ]{20,}(, [a-z]+){3}"),
    ),
}
PROMPT = prompt("typing")[:300]


@pytest.fixture(scope="module")
def pairs() -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(dtype: str) -> Pair:
        if dtype not in made:
            made[dtype] = Pair(DEMO / "target", DEMO / "draft", dtype=dtype)
        return made[dtype]

    return pair


@contextmanager
def open_engine(pair: Pair, mode: str, **options: Any) -> Iterator[Engine]:
    """Yield an engine that ends answers at a stop token, and knows the demo's tokenizer."""
    own = {name: value for name, value in EVERY_LEVEL.items() if name != "dtype"}
    with pair.engine(mode, [STOP], **{**own, **options}) as engine:
        engine.tokenizer = load_tokenizer(DEMO / "target")
        vocab = engine.runtime.target.config.vocab
        engine.grammars = GrammarCompiler(engine.tokenizer, vocab, {STOP})
        yield engine


def answer(engine: Engine, rules: str, **sampling: Any) -> list[int]:
    options, grammar = RULES[rules]
    return list(engine.generate(PROMPT, NEW, Sampling(**sampling, **options), grammar=grammar))


@pytest.mark.parametrize("rules", slow_except(RULES))
@pytest.mark.parametrize("mode", slow_except([*MODES[1:], "split-hierarchical"], 2))
def test_greedy_answers_are_those_of_plain_decoding(
    mode: str, rules: str, pairs: Callable[[str], Pair]
) -> None:
    pair = pairs("bfloat16" if "split" in mode else "float32")
    outputs = []
    for each, options in (("plain", {}), (mode, {"prompt_lookup_ngram": 2})):
        is_deterministic = pair.dtype == "bfloat16"
        if is_deterministic:
            each = each.removeprefix("split-")
        with open_engine(pair, each, deterministic=is_deterministic, **options) as engine:
            outputs.append(answer(engine, rules, temperature=0))
            stats = engine.stats
    assert outputs[0] == outputs[1]
    assert sum(level.stats.accepted or 0 for level in stats.levels) > 0


@pytest.mark.parametrize("rules", slow_except(RULES, -1))
@pytest.mark.parametrize("mode", slow_except(["speculative", "hierarchical"], 1))
def test_deterministic_samples_are_those_of_plain_decoding(
    mode: str, rules: str, pairs: Callable[[str], Pair]
) -> None:
    outputs = []
    for each in ("plain", mode):
        with open_engine(pairs("bfloat16"), each, deterministic=True) as engine:
            outputs.append([answer(engine, rules, temperature=0.8, seed=seed) for seed in (1, 2)])
    assert outputs[0] == outputs[1]
    assert outputs[0][0] != outputs[0][1]


def test_greedy_answers_with_a_repetition_penalty_are_those_of_transformers(
    pairs: Callable[[str], Pair],
) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    expected = model.generate(
        ids, max_new_tokens=NEW, do_sample=False, repetition_penalty=1.4, eos_token_id=STOP
    )[0, len(PROMPT) :].tolist()
    with open_engine(pairs("float32"), "hierarchical") as engine:
        sampling = Sampling(temperature=0, repetition_penalty=1.4)
        output = list(engine.generate(PROMPT, NEW, sampling))
    assert output == [token for token in expected if token != STOP]


@pytest.mark.parametrize("mode", slow_except(["plain", "hierarchical"]))
def test_answers_of_requests_that_share_forwards_are_valid(
    mode: str, pairs: Callable[[str], Pair]
) -> None:
    with open_engine(pairs("float32"), mode) as engine:
        compiled = engine.grammars.compile(Grammar.json_schema(SCHEMA))
        word = engine.grammars.compile(Grammar.choice(["one", 'two "quoted"']))
        requests = [
            Request(PROMPT[seed:], new, Sampling(1.0, top_p=1, seed=seed), grammar=grammar)
            for seed, (grammar, new) in enumerate([(compiled, 300), (word, 300), (None, 60)] * 4)
        ]
        found = {id(state.request): state for state in engine.generate_batch(requests, 3)}
        states = [found[id(request)] for request in requests]
        strings = [engine.tokenizer.decode(state.tokens) for state in states]
    for index, state in enumerate(states):
        assert state.error is None
        if index % 3 == 0:
            assert state.stats.finish_reason == "stop"
            jsonschema.validate(json.loads(strings[index]), SCHEMA)
        elif index % 3 == 1:
            assert strings[index] in ("one", 'two "quoted"')
    assert len({strings[index] for index in range(0, 12, 3)}) > 1


@pytest.mark.slow
def test_first_tokens_follow_the_restricted_distribution(pairs: Callable[[str], Pair]) -> None:
    """Over the real vocabulary: restricted to the tokens that begin one of the strings."""
    options = ["self", "super", "return", "raise", "None"]
    with open_engine(pairs("float32"), "speculative") as engine:
        grammar = Grammar.choice(options)
        logits = list[torch.Tensor]()
        (plain,) = engine.generate_batch(
            [Request(PROMPT, 1, GREEDY, on_logits=lambda rows, _: logits.extend(rows.clone()))], 1
        )
        assert plain.error is None
        strings = [engine.tokenizer.decode([token]) for token in range(len(logits[0]))]
        is_allowed = torch.tensor(
            [bool(text) and any(each.startswith(text) for each in options) for text in strings]
        )
        counts = torch.zeros(len(strings))
        with engine.conversation():
            for seed in range(300):
                sampling = Sampling(2.0, top_p=1, seed=seed)
                counts[next(engine.generate(PROMPT, 2, sampling, grammar=grammar))] += 1
    probs = (logits[0] / 2.0).masked_fill(~is_allowed, -torch.inf).softmax(0)
    assert p_value(counts, probs) > LIKELY


def on_rank(tokens: list[int]) -> list[list[int]]:
    group = TensorParallelGroup.from_environment("cpu")
    settings = Settings(mode="hierarchical", **EVERY_LEVEL)
    engine = Engine.from_pretrained(DEMO / "target", DEMO / "draft", settings, group=group)
    options, grammar = RULES["penalties and a grammar"]
    sampling = Sampling(temperature=0, **options)
    return lead(engine, lambda first: list(first.generate(tokens, NEW, sampling, grammar=grammar)))


@pytest.mark.slow
def test_two_ranks_give_the_answer_of_one() -> None:
    (alone,) = on_rank(PROMPT)
    assert run_ranks(2, on_rank, PROMPT) == [[alone], []]


def test_a_bias_outside_the_vocabulary_fails_the_request(pairs: Callable[[str], Pair]) -> None:
    with open_engine(pairs("float32"), "plain") as engine:
        with pytest.raises(InvalidRequestError, match="token 99999"):
            list(engine.generate(PROMPT, NEW, Sampling(logit_bias={99_999: 1.0})))
        assert len(list(engine.generate(PROMPT, 2, GREEDY))) == 2


def test_grammars_need_a_fast_tokenizer() -> None:
    compiler = GrammarCompiler(make_tokenizer(MARKERS), 10, {1})
    with pytest.raises(InvalidRequestError, match="this model's tokenizer"):
        compiler.compile(Grammar.json_object())


def test_draft_models_that_lack_all_allowed_tokens_draft_others(
    tmp_path: Path, pairs: Callable[[str], Pair]
) -> None:
    grammar = Grammar.choice(["return None", "raise"])
    outputs = []
    with open_engine(pairs("float32"), "plain") as engine:
        outputs.append(list(engine.generate(PROMPT, 8, Sampling(0), grammar=grammar)))
    pair = Pair(DEMO / "target", draft_of(40, tmp_path / "draft"))
    with open_engine(pair, "speculative") as engine:
        outputs.append(list(engine.generate(PROMPT, 8, Sampling(0), grammar=grammar)))
    assert outputs[0] == outputs[1]
