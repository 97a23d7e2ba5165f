"""A text longer than the context becomes prompts that fit; their answers are merged in order."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoding.text.instructions import Instructions
from decoding.text.long_text import PromptBuilder, Task
from decoding.text.prompt import Template
from offload.errors import InvalidRequestError
from support.commands import TARGET
from support.prompts import passages

NEW = 20


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def text(tokenizer: Any) -> str:
    return passages(None, tokenizer, [6000])[0]


def run(
    builder: PromptBuilder, text: str, answer: str = "answer"
) -> tuple[list[list[Task]], list[str]]:
    """Return the tasks of each round, and the last round's content; answers are numbered."""
    rounds, sent = builder.rounds(text), list[list[Task]]()
    tasks = next(rounds)
    while True:
        sent.append(list(tasks))
        for task in tasks:
            assert len(builder.prompt(task)) <= builder.max_prompt
        if tasks[0].is_last:
            assert len(tasks) == 1
            return sent, re.findall(rf"{answer} [\d.]+", tasks[0].content)
        tasks = rounds.send([f"{answer} {len(sent)}.{n}" for n in range(1, len(tasks) + 1)])


def test_text_that_fits_is_one_prompt(tokenizer: Any) -> None:
    builder = PromptBuilder(tokenizer, Instructions("Sum up."), 1000, NEW)
    ((task,),), _ = run(builder, "Once upon a time.")
    expected, _ = Template.summary(tokenizer, "Sum up.").build(tokenizer, "Once upon a time.", 980)
    assert builder.prompt(task).tolist() == expected
    assert (task.name, task.truncated_tokens) == ("", 0)


def test_parts_are_merged_in_one_round_where_they_fit(tokenizer: Any, text: str) -> None:
    instructions = Instructions(
        "Sum up.", "{part} of {parts}: {instruction}", "Merge: {instruction}"
    )
    builder = PromptBuilder(tokenizer, instructions, 1000, NEW)
    (parts, (merge,)), merged = run(builder, text)
    assert "".join(part.content for part in parts) == text
    spans = [part.characters for part in parts]
    assert [text[start:end] for start, end in filter(None, spans)] == [p.content for p in parts]
    assert [part.instruction for part in parts] == [
        f"{number} of {len(parts)}: Sum up." for number in range(1, len(parts) + 1)
    ]
    assert merge.instruction == "Merge: Sum up."
    assert merge.parts == (1, len(parts))
    assert merged == [f"answer 1.{number}" for number in range(1, len(parts) + 1)]
    labels = re.findall(r"^Part (\d+):$", merge.content, re.MULTILINE)
    assert labels == [f"{number}" for number in range(1, len(parts) + 1)]


def test_answers_are_merged_in_as_many_rounds_as_it_takes(tokenizer: Any, text: str) -> None:
    builder = PromptBuilder(tokenizer, Instructions(), 240, NEW)
    rounds, _merged = run(builder, text, "word " * 10 + "answer")
    counts = list(map(len, rounds))
    assert len(counts) >= 4, counts
    assert counts == sorted(counts, reverse=True)
    blocks = [(number, number) for number in range(1, counts[0] + 1)]
    for merges in rounds[1:]:
        for first, last in (task.parts for task in merges if task.parts is not None):
            group = [block for block in blocks if first <= block[0] and block[1] <= last]
            assert len(group) > 1
            place = blocks.index(group[0])
            assert blocks[place : place + len(group)] == group
            blocks[place : place + len(group)] = [(first, last)]
    assert blocks == [(1, counts[0])]


def test_sizes_are_those_of_the_prompts(tokenizer: Any, text: str) -> None:
    builder = PromptBuilder(tokenizer, Instructions(), 400, NEW)
    tokens, parts, merges = builder.sizes(text)
    rounds, _ = run(builder, text, "word " * 18)
    prompts = [len(builder.prompt(task)) for task in rounds[0]]
    assert len(parts) == len(prompts)
    assert all(abs(one - two) <= 3 for one, two in zip(parts, prompts, strict=True))
    assert tokens > sum(span.tokens for span in builder.split(text)) - len(parts)
    assert len(merges) >= sum(map(len, rounds[1:]))  # it assumes the longest answers
    assert max(merges) <= builder.max_prompt
    assert builder.sizes("Short.") == (*builder.cut_size("Short.")[:2], ())
    cut = builder.cut_size(text)
    assert (cut[0], cut[1]) == (tokens, (380,))


def test_parts_with_room_for_a_question_do_not_depend_on_it(tokenizer: Any, text: str) -> None:
    def spans(question: str) -> Any:
        return PromptBuilder(tokenizer, Instructions(question), 1000, NEW, 100).split(text)

    assert spans("Who?") == spans("Who is the narrator, and whom does he or she love?")
    with pytest.raises(InvalidRequestError, match="leaves 100 of room for it"):
        spans("Who? " * 100)


def test_a_context_too_short_to_merge_is_an_error(tokenizer: Any, text: str) -> None:
    builder = PromptBuilder(tokenizer, Instructions(), 120, NEW)
    with pytest.raises(InvalidRequestError, match="too short to merge two answers of 20") as error:
        next(builder.rounds(text))
    (needed,) = re.findall(r"`context` of (\d+) or more", str(error.value))
    next(PromptBuilder(tokenizer, Instructions(), int(needed), NEW).rounds(text))


def test_answers_that_are_longer_than_expected_are_an_error(tokenizer: Any, text: str) -> None:
    """Decoded and tokenized again, an answer may have more tokens."""
    rounds = PromptBuilder(tokenizer, Instructions(), 240, NEW).rounds(text)
    count = len(next(rounds))
    with pytest.raises(InvalidRequestError, match="too long to merge two of them"):
        rounds.send(["\u2603" * 150] * count)


def test_long_answers_are_merged_with_short_neighbours(tokenizer: Any, text: str) -> None:
    """Groups of equally many answers would not fit."""
    builder = PromptBuilder(tokenizer, Instructions(), 500, NEW)
    rounds = builder.rounds(text)
    count = len(next(rounds))
    long = "\u2603" * 100
    tasks = rounds.send([*["answer"] * (count - 1), long])
    assert all(len(builder.prompt(task)) <= builder.max_prompt for task in tasks)
