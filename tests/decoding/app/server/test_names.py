"""Names of a server's prompts in the prompt cache: first words, without control characters."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from decoding.app.server.worker.names import prompt_name
from support.commands import TARGET

BOOK = "It was the best of times,\nit was the worst of times. " * 30


@pytest.fixture(scope="module")
def tokenizer() -> AutoTokenizer:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def chatml(*messages: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (BOOK, "It was the best of times, it was the worst of times. It was "),
        (
            chatml(("system", "You are helpful."), ("user", BOOK), ("assistant", "Yes.")),
            "It was the best of times, it was the worst of times. It was ",
        ),
        (chatml(("user", "Who?")), "Who?"),
        ("user", "user"),
        ("a\x1b[2J\u202eb \x9b", "a\\x1b[2J\\u202eb \\x9b"),
        ("", ""),
    ],
)
def test_a_prompt_is_named_after_its_longest_message(
    text: str, name: str, tokenizer: AutoTokenizer
) -> None:
    assert prompt_name(tokenizer, tokenizer(text).input_ids) == name
