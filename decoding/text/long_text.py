"""A text longer than the context: prompts for its parts, and prompts that merge their answers."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from decoding.text.encoding import plain_tokens
from decoding.text.instructions import Instructions, PromptFormat
from decoding.text.prompt import JOIN_TOKENS, Template, check_system
from decoding.text.splitting import Span, split_text
from offload.errors import InvalidRequestError
from offload.layout import ceil_div, shares

_LABEL_TOKENS = 16  # at most, for a heading such as "Parts 10 to 19:" and the blank lines
_MIN_SHARE = 8  # at least that fraction of a prompt is for the part itself


def merge_sizes(count: int, max_answers: int) -> list[int]:
    """Return how many of `count` answers each prompt merges, round after round until one is left.

    `max_answers`: what a prompt has room for, 2 or more.
    """
    sizes: list[int] = []
    while count > 1:
        groups = ceil_div(count, max_answers)
        sizes += [size for size in shares(count, groups) if size > 1]
        count = groups
    return sizes


@dataclass(frozen=True)
class Task:
    """A prompt about a text, a part of it, or the answers about parts, for one request."""

    content: str  # empty if its tokens are known
    instruction: str
    name: str = ""  # such as "part 3 of 9"; empty for a whole text and its only instruction
    index: int = 0  # index of its instruction
    characters: tuple[int, int] | None = None  # [start, end) of a part
    parts: tuple[int, int] | None = None  # numbers of the first and last part of a merge
    is_last: bool = False  # its answer is that to the instruction
    # tokens by which later prompts that begin alike are longer, at most; None if there are none
    room: int | None = None
    tail: int = 0  # about as many tokens follow the content
    is_cut: bool = False  # the end of the content may be dropped
    prompt: array[int] | None = None  # (T,) tokens, if they are known
    truncated_tokens: int = 0  # those of `prompt`, or else of the longest one that begins alike

    def name_in(self, document: str) -> str:
        """Return its name beside those of other documents' tasks."""
        return f"{document}, {self.name}" if self.name else document

    def shared(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of its prompt begin the later ones, too."""
        return 0 if self.room is None else max(0, len(prompt) - self.tail - JOIN_TOKENS)


@dataclass(frozen=True)
class _Answer:
    """The answer about consecutive parts of a text."""

    parts: tuple[int, int]  # numbers of the first and last one
    answer: str

    @property
    def labelled(self) -> str:
        first, last = self.parts
        label = f"Part {first}" if first == last else f"Parts {first} to {last}"
        return f"{label}:\n{self.answer}"


# yields the tasks of a round, which do not depend on each other, and is sent their answers
Rounds = Generator[Sequence[Task], Sequence[str], None]

# tokens of a text as one prompt, of its parts' prompts, and of those that merge answers
Sizes = tuple[int, tuple[int, ...], tuple[int, ...]]


class PromptBuilder:
    """Turns a text of any length, and instructions, into prompts.

    A text that fits the context is one prompt for each instruction. Otherwise its parts are, and
    the answers about them are merged, in as many rounds as it takes until one is left (Wu et al.
    2021, "Recursively Summarizing Books with Human Feedback", section 2.1). Prompts that begin with
    the same text follow each other.
    """

    def __init__(
        self,
        tokenizer: Any,
        format: PromptFormat,
        context: int,
        max_new_tokens: int,
        question_tokens: int | None = None,
    ):
        """Prepare prompts.

        Raises TierForceError if the tokenizer's chat template is broken, or knows no system
        message.

        Args:
            tokenizer: the model's.
            format: how prompts are made.
            context: the maximum number of tokens of a prompt and its answer together.
            max_new_tokens: the maximum number of tokens of an answer.
            question_tokens: room kept for the instructions, so that parts do not depend on them;
                by default what they need.
        """
        self.tokenizer, self.format = tokenizer, format
        self.max_prompt, self.max_new_tokens = context - max_new_tokens, max_new_tokens
        self._question_tokens = question_tokens
        check_system(tokenizer, format.system)
        # all but the instruction, before and after a text; raises
        before, after = Template.summary(tokenizer, "a", format).around(tokenizer)
        self._template = 0, 0
        own = self._around("a")
        self._template = len(before) - own[0], len(after) - own[1]

    def rounds(self, text: str, instructions: Instructions, splits: bool = True) -> Rounds:
        """Yield the tasks for a text, round by round, until each instruction's last one.

        With `splits` a text that is too long is split, else its end is dropped. Raises
        InvalidRequestError if the context has no room for it, for parts, or for two answers to
        merge.
        """
        if whole := self._whole_tasks(text, instructions, splits):
            del text  # the tasks hold what they need
            yield whole
            return
        tasks = self._part_tasks(text, instructions)
        del text  # the tasks hold all of it
        answers = yield tasks
        del tasks
        count = len(instructions.strings)
        blocks = [
            [
                _Answer((number, number), each)
                for number, each in enumerate(answers[index::count], 1)
            ]
            for index in range(count)
        ]
        while any(len(own) > 1 for own in blocks):
            groups = [
                _groups(self.tokenizer, own, self._merge_room(instructions, index))
                for index, own in enumerate(blocks)
            ]
            merges = [
                _merge(self.format, instructions, index, group, len(own) == 1)
                for index, own in enumerate(groups)
                for group in own
                if len(group) > 1
            ]
            merged = iter((yield merges))
            blocks = [
                [
                    _Answer(_range(group), next(merged)) if len(group) > 1 else group[0]
                    for group in own
                ]
                for own in groups
            ]

    def split(self, text: str, instructions: Instructions) -> list[Span]:
        """Return the parts of a text that is too long. Raises InvalidRequestError as `rounds`."""
        self._check_merges(instructions)
        last = [self.format.for_part(each, 999, 999) for each in instructions.strings]
        longest, own = self._longest(last)
        if self._question_tokens is not None:
            self.check_question(longest)
            own = sum(self._around("")) + self._question_tokens
        room = self.max_prompt - own
        if room < self.max_prompt // _MIN_SHARE:
            raise InvalidRequestError(
                f"the context leaves room for {max(0, room):,} tokens of a part of the document: "
                f"the instruction for parts takes {own:,} of {self.max_prompt:,}. Shorten it "
                "(`part_instruction`), or use a longer `context`."
            )
        # two, even if one would fit because the instruction for parts is shorter
        return split_text(
            self.tokenizer,
            text,
            room,
            fits=lambda part: not self._is_too_long(*self._build(part, longest), instructions),
            min_count=2,
        )

    def check_question(self, question: str) -> None:
        """Raise InvalidRequestError for a question that the room kept for it is too short for."""
        needed = sum(self._around(question)) - sum(self._around(""))
        if self._question_tokens is not None and needed > self._question_tokens:
            raise InvalidRequestError(
                f"the question has {needed:,} tokens, and the context leaves "
                f"{self._question_tokens:,} of room for it: shorten it, or use a longer `context`."
            )

    def prompt(self, task: Task) -> tuple[array[int], int]:
        """Return the tokens (T,) of a task, and how many tokens of its text are dropped.

        Raises InvalidRequestError if they do not fit.
        """
        if task.prompt is not None:
            return task.prompt, task.truncated_tokens
        prompt, truncated = self._build(task.content, task.instruction)
        if truncated and not task.is_cut:
            raise InvalidRequestError(
                f"{task.name} is {truncated} tokens too long for the context: use a longer "
                "`context`."
            )
        return prompt, truncated

    def sizes(self, text: str, instructions: Instructions, splits: bool = True) -> Sizes:
        """Return the tokens of a text as one prompt, of each part's prompt, and, if every answer is
        as long as it may be, of each prompt that merges answers; for the longest instruction.

        Raises InvalidRequestError as `rounds`.
        """
        longest, _ = self._longest([self.format.for_answer(each) for each in instructions.strings])
        prompt, truncated = self._build(text, longest)
        if not (splits and self._is_too_long(prompt, truncated, instructions)):
            return len(prompt) + truncated, (len(prompt),), ()
        _, own = self._longest([self.format.for_part(each, 1, 1) for each in instructions.strings])
        parts = tuple(own + span.tokens for span in self.split(text, instructions))
        answer, room = self.max_new_tokens + _LABEL_TOKENS, self._merge_room(instructions)
        own, sizes = self.max_prompt - room, merge_sizes(len(parts), room // answer)
        merges = tuple(own + size * answer for size in sizes)
        return len(prompt) + truncated, parts, merges

    def _whole_tasks(self, text: str, instructions: Instructions, splits: bool) -> list[Task]:
        """Return the tasks for a whole text; none if it is to be split."""
        own = [self.format.for_answer(each) for each in instructions.strings]
        longest, _ = self._longest(own)
        prompt, truncated = self._build(text, longest)
        if splits and self._is_too_long(prompt, truncated, instructions):
            return []
        if len(own) == 1:
            task = Task("", longest, is_last=True, prompt=prompt, truncated_tokens=truncated)
            return [task]
        rooms, tails = self._rooms(own)
        return [
            Task(
                text,
                each,
                _name(instructions, index),
                index,
                is_last=True,
                room=rooms[index],
                tail=tails[index],
                is_cut=not splits,
                truncated_tokens=truncated,
            )
            for index, each in enumerate(own)
        ]

    def _part_tasks(self, text: str, instructions: Instructions) -> list[Task]:
        spans = self.split(text, instructions)
        tasks, count, previous = list[Task](), len(spans), list[str]()
        for number, span in enumerate(spans, 1):
            part = text[span.start : span.end]
            own = [self.format.for_part(each, number, count) for each in instructions.strings]
            if own != previous:
                previous, (rooms, tails) = own, self._rooms(own)
            tasks += [
                Task(
                    part,
                    instruction,
                    _name(instructions, index, f"part {number} of {count}"),
                    index,
                    (span.start, span.end),
                    room=rooms[index],
                    tail=tails[index],
                )
                for index, instruction in enumerate(own)
            ]
        return tasks

    def _rooms(self, instructions: Sequence[str]) -> tuple[Sequence[int | None], list[int]]:
        """Return `Task.room` and `Task.tail` for each of these instructions about one text."""
        around = [self._around(each) for each in instructions]
        rooms: Sequence[int | None] = [None] * len(around)
        if self.format.shares_document:
            rooms = rooms_for_later(list(map(sum, around)))
        return rooms, [after for _, after in around]

    def _is_too_long(self, prompt: array[int], truncated: int, instructions: Instructions) -> bool:
        """Return whether a text does not fit, by its prompt with the longest instruction."""
        # others change a few tokens where they meet the text
        margin = JOIN_TOKENS if len(instructions.strings) > 1 else 0
        return truncated > 0 or len(prompt) + margin > self.max_prompt

    def _build(self, text: str, instruction: str) -> tuple[array[int], int]:
        """Return the tokens of a prompt, and how many of the text's tokens were dropped."""
        template = Template.summary(self.tokenizer, instruction, self.format)
        prompt, truncated = template.build(self.tokenizer, text, self.max_prompt)
        return array("i", prompt), truncated

    def _around(self, instruction: str) -> tuple[int, int]:
        """Return the tokens of a prompt before and after a text; a few may be missing where strings
        are joined.

        The chat template, which takes milliseconds, is not rendered for it: there may be thousands.
        """
        own = self.format.around(instruction, not self.tokenizer.chat_template)
        before, after = (len(plain_tokens(self.tokenizer, each)) for each in own)
        return self._template[0] + before, self._template[1] + after

    def _longest(self, instructions: Sequence[str]) -> tuple[str, int]:
        """Return the instruction of most tokens, and those of a prompt around a text with it."""
        sizes = [sum(self._around(each)) for each in instructions]
        tokens = max(sizes)
        return instructions[sizes.index(tokens)], tokens

    def _merge_room(self, instructions: Instructions, index: int | None = None) -> int:
        """Return how many tokens of answers the prompt for an instruction has room for, or any."""
        indices = range(len(instructions.strings)) if index is None else [index]
        merges = [self.format.for_merge(instructions, each, is_last=True) for each in indices]
        return self.max_prompt - self._longest(merges)[1] - JOIN_TOKENS

    def _check_merges(self, instructions: Instructions) -> None:
        """Raise InvalidRequestError if there is no room for two answers."""
        missing = 2 * (self.max_new_tokens + _LABEL_TOKENS) - self._merge_room(instructions)
        if missing > 0:
            context = self.max_prompt + self.max_new_tokens
            raise InvalidRequestError(
                f"the document is longer than the context of {context:,} tokens, which is too "
                f"short to merge two answers of {self.max_new_tokens:,} tokens about its parts: "
                f"use a `context` of {context + missing:,} or more, fewer `max_new_tokens`, or "
                "`long` cut, which drops its end."
            )


def _merge(
    format: PromptFormat,
    instructions: Instructions,
    index: int,
    group: Sequence[_Answer],
    is_last: bool,
) -> Task:
    """Return a task that merges consecutive answers to an instruction."""
    first, last = _range(group)
    return Task(
        "\n\n".join(each.labelled for each in group),
        format.for_merge(instructions, index, is_last),
        _name(instructions, index, f"merge of parts {first} to {last}"),
        index,
        parts=(first, last),
        is_last=is_last,
    )


def _groups(tokenizer: Any, answers: Sequence[_Answer], room: int) -> list[Sequence[_Answer]]:
    """Return groups of consecutive answers of at most `room` tokens each: as few as possible, and
    of nearly equally many answers where that fits.

    Raises InvalidRequestError if no two answers fit, or one does not.
    """
    if len(answers) == 1:
        return [answers]
    sizes = [len(plain_tokens(tokenizer, f"{each.labelled}\n\n")) for each in answers]
    for count in range(max(1, ceil_div(sum(sizes), max(1, room))), len(answers)):
        bounds = [index * len(answers) // count for index in range(count + 1)]
        if all(sum(sizes[first:end]) <= room for first, end in pairwise(bounds)):
            return [answers[first:end] for first, end in pairwise(bounds)]
    bounds = [0]
    for index, size in enumerate(sizes):
        if index > bounds[-1] and sum(sizes[bounds[-1] : index]) + size > room:
            bounds.append(index)
    if len(bounds) < len(answers) and max(sizes) <= room:
        return [answers[first:end] for first, end in pairwise([*bounds, len(answers)])]
    raise InvalidRequestError(
        "the answers about the parts of the document are too long to merge two of them in this "
        "context: use a longer `context`, or fewer `max_new_tokens`."
    )


def rooms_for_later(sizes: Sequence[int]) -> list[int | None]:
    """Return `Task.room` for prompts that begin alike and have these sizes, in order."""
    rooms, longest = list[int | None]([None]), sizes[-1]
    for size in reversed(sizes[:-1]):
        rooms.append(max(0, longest - size) + JOIN_TOKENS)
        longest = max(longest, size)
    return rooms[::-1]


def _name(instructions: Instructions, index: int, what: str = "") -> str:
    """Return the name of a task about a part, or a merge, or the whole text."""
    if (count := len(instructions.strings)) == 1:
        return what
    question = f"question {index + 1} of {count}"
    return f"{what}, {question}" if what else question


def _range(answers: Sequence[_Answer]) -> tuple[int, int]:
    return answers[0].parts[0], answers[-1].parts[1]
