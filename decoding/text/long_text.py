"""A text longer than the context: prompts for its parts, and prompts that merge their answers."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from decoding.text.encoding import plain_tokens
from decoding.text.instructions import Instructions
from decoding.text.prompt import Template
from decoding.text.splitting import Span, split_text
from offload.errors import InvalidRequestError
from offload.layout import ceil_div, shares

_LABEL_TOKENS = 16  # at most, for a heading such as "Parts 10 to 19:" and the blank lines
_MIN_SHARE = 8  # at least that fraction of a prompt is for the part itself
_MARGIN = 8  # tokens that may be added where strings are joined


@dataclass(frozen=True)
class Task:
    """A prompt about a text, a part of it, or the answers about parts, for one request."""

    content: str  # empty if its tokens are known
    instruction: str
    name: str = ""  # such as "part 3 of 9"; empty for a whole text
    characters: tuple[int, int] | None = None  # [start, end) of a part
    parts: tuple[int, int] | None = None  # numbers of the first and last part of a merge
    is_last: bool = False  # its answer is the text's
    prompt: array[int] | None = None  # (T,) tokens, if they are known
    truncated_tokens: int = 0

    def name_in(self, document: str) -> str:
        """Return its name beside those of other documents' tasks."""
        return f"{document}, {self.name}" if self.name else document


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
    """Turns a text of any length into prompts.

    A text that fits the context is one prompt. Otherwise its parts are, and their answers are
    merged, in as many rounds as it takes until one is left (Wu et al. 2021, "Recursively
    Summarizing Books with Human Feedback", section 2.1).
    """

    def __init__(
        self,
        tokenizer: Any,
        instructions: Instructions,
        context: int,
        max_new_tokens: int,
        question_tokens: int | None = None,
    ):
        """Prepare prompts. Raises TierForceError if the tokenizer's chat template is broken.

        Args:
            tokenizer: the model's.
            instructions: what to do with a text.
            context: the maximum number of tokens of a prompt and its answer together.
            max_new_tokens: the maximum number of tokens of an answer.
            question_tokens: room kept for the instructions, so that parts do not depend on them;
                by default what they need.
        """
        self.tokenizer, self.instructions = tokenizer, instructions
        self.max_prompt, self.max_new_tokens = context - max_new_tokens, max_new_tokens
        self._question_tokens = question_tokens
        self._template_tokens(instructions.text)  # raises

    def cut(self, text: str) -> Task:
        """Return the prompt of a text, whose end is dropped if it is too long.

        Raises InvalidRequestError if the context has no room for it.
        """
        return self._whole(text, self.instructions.text)

    def rounds(self, text: str) -> Rounds:
        """Yield the tasks for a text, round by round; the answer to the last one is the text's.

        Raises InvalidRequestError if the context has no room for parts, or for two answers to
        merge.
        """
        whole = self.cut(text)
        if not whole.truncated_tokens:
            del text  # its tokens are enough
            yield [whole]
            return
        spans = self.split(text)
        count = len(spans)
        tasks = [
            Task(
                text[span.start : span.end],
                self.instructions.for_part(number, count),
                f"part {number} of {count}",
                (span.start, span.end),
            )
            for number, span in enumerate(spans, 1)
        ]
        del text, whole  # the tasks hold all of it
        answers = yield tasks
        del tasks
        blocks = [_Answer((number, number), each) for number, each in enumerate(answers, 1)]
        while len(blocks) > 1:
            groups = self._groups(blocks)
            merges = [self._merge(group, len(groups) == 1) for group in groups if len(group) > 1]
            merged = iter((yield merges))
            blocks = [
                _Answer(_range(group), next(merged)) if len(group) > 1 else group[0]
                for group in groups
            ]

    def split(self, text: str) -> list[Span]:
        """Return the parts of a text that is too long. Raises InvalidRequestError as `rounds`."""
        self._check_merges()
        last = self.instructions.for_part(999, 999)
        own = self._template_tokens(last)
        if (kept := self._question_tokens) is not None:
            own, needed = self._template_tokens("") + kept, own - self._template_tokens("")
            if needed > kept:
                raise InvalidRequestError(
                    f"the question has {needed:,} tokens, and the context leaves {kept:,} of room "
                    "for it: shorten it, or use a longer `context`."
                )
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
            fits=lambda part: not self._whole(part, last).truncated_tokens,
            min_count=2,
        )

    def prompt(self, task: Task) -> array[int]:
        """Return the tokens (T,) of a task. Raises InvalidRequestError if they do not fit."""
        if task.prompt is not None:
            return task.prompt
        built = self._whole(task.content, task.instruction)
        assert built.prompt is not None
        if built.truncated_tokens:
            raise InvalidRequestError(
                f"{task.name} is {built.truncated_tokens} tokens too long for the context: use a "
                "longer `context`."
            )
        return built.prompt

    def sizes(self, text: str) -> Sizes:
        """Return the tokens of a text as one prompt, of each part's prompt, and, if every answer is
        as long as it may be, of each prompt that merges answers.

        Raises InvalidRequestError as `rounds`.
        """
        tokens, parts, _ = self.cut_size(text)
        if tokens == parts[0]:
            return tokens, parts, ()
        own = self._template_tokens(self.instructions.for_part(1, 1))
        parts = tuple(own + span.tokens for span in self.split(text))
        answer, room = self.max_new_tokens + _LABEL_TOKENS, self._merge_room()
        own, merges, count = self.max_prompt - room, list[int](), len(parts)
        while count > 1:
            groups = ceil_div(count * answer, room // answer * answer)
            merges += [own + size * answer for size in shares(count, groups) if size > 1]
            count = groups
        return tokens, parts, tuple(merges)

    def cut_size(self, text: str) -> Sizes:
        """Return the same for a text whose end is dropped. Raises InvalidRequestError as `cut`."""
        whole = self.cut(text)
        tokens = len(self.prompt(whole))
        return tokens + whole.truncated_tokens, (tokens,), ()

    def _whole(self, text: str, instruction: str) -> Task:
        template = Template.summary(self.tokenizer, instruction)
        prompt, truncated = template.build(self.tokenizer, text, self.max_prompt)
        tokens = array("i", prompt)
        return Task("", instruction, is_last=True, prompt=tokens, truncated_tokens=truncated)

    def _template_tokens(self, instruction: str) -> int:
        around = Template.summary(self.tokenizer, instruction).around(self.tokenizer)
        return sum(map(len, around))

    def _merge_room(self) -> int:
        """Return how many tokens of answers one prompt has room for."""
        return self.max_prompt - self._template_tokens(self.instructions.for_merge()) - _MARGIN

    def _check_merges(self) -> None:
        """Raise InvalidRequestError if there is no room for two answers."""
        missing = 2 * (self.max_new_tokens + _LABEL_TOKENS) - self._merge_room()
        if missing > 0:
            context = self.max_prompt + self.max_new_tokens
            raise InvalidRequestError(
                f"the document is longer than the context of {context:,} tokens, which is too "
                f"short to merge two answers of {self.max_new_tokens:,} tokens about its parts: "
                f"use a `context` of {context + missing:,} or more, fewer `max_new_tokens`, or "
                "`long` cut, which drops its end."
            )

    def _merge(self, group: Sequence[_Answer], is_last: bool) -> Task:
        """Return a task that merges consecutive answers."""
        first, last = _range(group)
        return Task(
            "\n\n".join(each.labelled for each in group),
            self.instructions.for_merge(),
            f"merge of parts {first} to {last}",
            parts=(first, last),
            is_last=is_last,
        )

    def _groups(self, answers: Sequence[_Answer]) -> list[Sequence[_Answer]]:
        """Return groups of consecutive answers that fit a prompt each: as few as possible, and of
        nearly equally many answers where that fits.

        Raises InvalidRequestError if no two answers fit, or one does not.
        """
        room = self._merge_room()
        sizes = [len(plain_tokens(self.tokenizer, f"{each.labelled}\n\n")) for each in answers]
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


def _range(answers: Sequence[_Answer]) -> tuple[int, int]:
    return answers[0].parts[0], answers[-1].parts[1]
