"""A text longer than the context becomes prompts that fit; their answers are merged in order."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import AutoTokenizer

from decoding.text.instructions import Instructions, PromptFormat
from decoding.text.long_text import PromptBuilder, Task
from decoding.text.prompt import Template
from offload.errors import InvalidRequestError
from support.commands import TARGET
from support.prompts import passages

NEW = 20
SUMMARY = Instructions()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def text(tokenizer: Any) -> str:
    return passages(None, tokenizer, [6000])[0]


def run(
    builder: PromptBuilder,
    text: str,
    answer: str = "answer",
    instructions: Instructions = SUMMARY,
) -> tuple[list[list[Task]], list[str]]:
    """Return the tasks of each round, and the last round's content; answers are numbered."""
    rounds, sent = builder.rounds(text, instructions), list[list[Task]]()
    tasks = next(rounds)
    while True:
        sent.append(list(tasks))
        for task in tasks:
            assert len(builder.prompt(task)[0]) <= builder.max_prompt
        if tasks[0].is_last:
            assert len(tasks) == 1
            return sent, re.findall(rf"{answer} [\d.]+", tasks[0].content)
        tasks = rounds.send([f"{answer} {len(sent)}.{n}" for n in range(1, len(tasks) + 1)])


def test_text_that_fits_is_one_prompt(tokenizer: Any) -> None:
    builder = PromptBuilder(tokenizer, PromptFormat(), 1000, NEW)
    ((task,),), _ = run(builder, "Once upon a time.", instructions=Instructions(("Sum up.",)))
    expected, _ = Template.summary(tokenizer, "Sum up.").build(tokenizer, "Once upon a time.", 980)
    assert builder.prompt(task)[0].tolist() == expected
    assert (task.name, task.truncated_tokens) == ("", 0)


def test_parts_are_merged_in_one_round_where_they_fit(tokenizer: Any, text: str) -> None:
    format = PromptFormat(part="{part} of {parts}: {instruction}", merge="Merge: {instruction}")
    builder = PromptBuilder(tokenizer, format, 1000, NEW)
    (parts, (merge,)), merged = run(builder, text, instructions=Instructions(("Sum up.",)))
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
    builder = PromptBuilder(tokenizer, PromptFormat(), 240, NEW)
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
    builder = PromptBuilder(tokenizer, PromptFormat(), 400, NEW)
    tokens, parts, merges = builder.sizes(text, SUMMARY)
    rounds, _ = run(builder, text, "word " * 18)
    prompts = [len(builder.prompt(task)[0]) for task in rounds[0]]
    assert len(parts) == len(prompts)
    assert all(abs(one - two) <= 3 for one, two in zip(parts, prompts, strict=True))
    assert tokens > sum(span.tokens for span in builder.split(text, SUMMARY)) - len(parts)
    assert len(merges) >= sum(map(len, rounds[1:]))  # it assumes the longest answers
    assert max(merges) <= builder.max_prompt
    assert builder.sizes("Short.", SUMMARY) == builder.sizes("Short.", SUMMARY, splits=False)
    cut = builder.sizes(text, SUMMARY, splits=False)
    assert (cut[0], cut[1]) == (tokens, (380,))


def test_parts_with_room_for_a_question_do_not_depend_on_it(tokenizer: Any, text: str) -> None:
    def spans(question: str) -> Any:
        builder = PromptBuilder(tokenizer, PromptFormat(), 1000, NEW, 100)
        return builder.split(text, Instructions((question,)))

    assert spans("Who?") == spans("Who is the narrator, and whom does he or she love?")
    with pytest.raises(InvalidRequestError, match="leaves 100 of room for it"):
        spans("Who? " * 100)


def test_a_context_too_short_to_merge_is_an_error(tokenizer: Any, text: str) -> None:
    builder = PromptBuilder(tokenizer, PromptFormat(), 120, NEW)
    with pytest.raises(InvalidRequestError, match="too short to merge two answers of 20") as error:
        next(builder.rounds(text, SUMMARY))
    (needed,) = re.findall(r"`context` of (\d+) or more", str(error.value))
    next(PromptBuilder(tokenizer, PromptFormat(), int(needed), NEW).rounds(text, SUMMARY))


def test_answers_that_are_longer_than_expected_are_an_error(tokenizer: Any, text: str) -> None:
    """Decoded and tokenized again, an answer may have more tokens."""
    rounds = PromptBuilder(tokenizer, PromptFormat(), 240, NEW).rounds(text, SUMMARY)
    count = len(next(rounds))
    with pytest.raises(InvalidRequestError, match="too long to merge two of them"):
        rounds.send(["\u2603" * 150] * count)


def test_long_answers_are_merged_with_short_neighbours(tokenizer: Any, text: str) -> None:
    """Groups of equally many answers would not fit."""
    builder = PromptBuilder(tokenizer, PromptFormat(), 500, NEW)
    rounds = builder.rounds(text, SUMMARY)
    count = len(next(rounds))
    long = "\u2603" * 100
    tasks = rounds.send([*["answer"] * (count - 1), long])
    assert all(len(builder.prompt(task)[0]) <= builder.max_prompt for task in tasks)


def test_every_instruction_has_its_own_answers_merged(tokenizer: Any, text: str) -> None:
    questions = Instructions(("Who?", "What became of the first one, and why?", "Why?"), True)
    builder = PromptBuilder(tokenizer, PromptFormat(), 500, NEW)
    rounds = builder.rounds(text, questions)
    tasks, sent = list(next(rounds)), list[list[Task]]()
    final = dict[int, str]()
    while tasks:
        sent.append(tasks)
        for task in tasks:
            assert len(builder.prompt(task)[0]) <= builder.max_prompt
            assert questions.strings[task.index] in task.instruction
            if task.parts is not None:
                other = [f"({index})" for index in range(3) if index != task.index]
                assert f"({task.index})" in task.content
                assert not any(each in task.content for each in other)
        # answers of the last question are longer: they take more rounds
        answers = [f"({task.index}) " + "word " * (task.index * 15) for task in tasks]
        final |= {task.index: task.name for task in tasks if task.is_last}
        try:
            tasks = list(rounds.send(answers))
        except StopIteration:
            break
    first = sent[0]
    assert "".join(task.content for task in first if task.index == 0) == text
    for group in (first[index : index + 3] for index in range(0, len(first), 3)):
        assert [task.index for task in group] == [0, 1, 2]
        assert len({task.characters for task in group}) == 1
        assert group[0].room is not None
        sizes = [len(builder.prompt(task)[0]) for task in group]
        assert group[0].room >= sizes[1] - sizes[0] > 0
        assert [task.room is None for task in group] == [False, False, True]
    assert len(sent) > 2
    assert set(final) == {0, 1, 2}


def test_questions_about_a_text_that_fits_are_a_round(tokenizer: Any) -> None:
    questions = Instructions(("Who?", "Why?"), True)
    builder = PromptBuilder(tokenizer, PromptFormat(), 180 + NEW, NEW)
    tasks = next(builder.rounds("It was the best of times.", questions))
    assert [task.name for task in tasks] == ["question 1 of 2", "question 2 of 2"]
    for task, question in zip(tasks, questions.strings, strict=True):
        expected, _ = Template.summary(tokenizer, question).build(tokenizer, task.content, 180)
        assert builder.prompt(task)[0].tolist() == expected
    # near the limit, it must fit with any of them
    text = "It was. " * 100
    for end in range(300, len(text)):
        tasks = next(builder.rounds(text[:end], questions, splits=True))
        if tasks[0].characters is not None:
            break
        assert all(len(builder.prompt(task)[0]) <= 180 for task in tasks)
    else:
        raise AssertionError("it was never split")
