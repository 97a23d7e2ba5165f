"""lm-eval: a benchmark of local data, whose answers are chosen by log-likelihood, or generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.clients import MARKS, run_client
from support.commands import TARGET
from support.serving import Serving

pytestmark = MARKS
ROWS = [
    {"question": "Who was on the ship?", "choices": ["the captain", "Paris", "seven"], "answer": 0},
    {"question": "What is in the sea?", "choices": ["of the of", "the whale"], "answer": 1},
    {
        "question": "Who was proud?",
        "choices": ["Mr. Darcy", "she", "a whale"],
        "answer": 0,
    },
]
TASKS: dict[str, dict[str, Any]] = {
    "choosing": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "generating": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n", "the"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder: Path) -> None:
    """Write the tasks, in YAML that is JSON, and their data."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, fields in TASKS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            **fields,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))


@pytest.fixture(scope="module")
def loglikelihood() -> Callable[[str, str], float]:
    """Return transformers' log-probability of a continuation of a context."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)

    def score(context: str, continuation: str) -> float:
        first, tokens = (
            tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
            for text in (context, context + continuation)
        )
        with torch.inference_mode():
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)
        own = range(len(first), len(tokens))
        return sum(float(logprobs[index - 1, tokens[index]]) for index in own)

    return score


def test_answers_are_scored_and_generated(
    server: Serving, loglikelihood: Callable[[str, str], float], home: Path
) -> None:
    write_tasks(home)
    model = {
        "base_url": f"{server.url}/v1/completions",
        "model": server.model,
        "tokenizer": str(TARGET),
        "max_retries": 1,
    }
    run_client(
        "newest",
        "lm-eval",
        *("run", "--model", "local-completions", "--batch_size", "4"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
        *("--include_path", str(home), "--tasks", ",".join(TASKS)),
        *("--output_path", str(home / "out"), "--log_samples"),
        home=home,
    )
    (path,) = (home / "out").rglob("results_*.json")
    accuracy = json.loads(path.read_text())["results"]["choosing"]["acc,none"]
    chosen = []
    for sample in samples(home, "choosing"):
        pairs = [(each["arg_0"], each["arg_1"]) for each in sample["arguments"].values()]
        found = [float(response[0][0]) for response in sample["resps"]]
        expected = [loglikelihood(*pair) for pair in pairs]
        assert found == pytest.approx(expected, abs=1e-3)
        chosen.append(expected.index(max(expected)) == sample["doc"]["answer"])
    assert accuracy == pytest.approx(sum(chosen) / len(ROWS))
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    for sample in samples(home, "generating"):
        prompt = sample["arguments"]["gen_args_0"]["arg_0"]
        tokens = tokenizer(prompt, add_special_tokens=False).input_ids
        body = {"prompt": tokens, "max_tokens": 8, "stop": ["\n", "the"]}
        text = server.ask("/v1/completions", body)["choices"][0]["text"]
        assert sample["resps"] == [[text]]


def samples(home: Path, task: str) -> list[dict[str, Any]]:
    """Return what lm-eval asked for each row, and what it got."""
    (path,) = (home / "out").rglob(f"samples_{task}_*.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == len(ROWS)
    return found
