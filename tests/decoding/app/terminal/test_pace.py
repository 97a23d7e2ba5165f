"""The pace of a batch: tokens per second, and an estimate of the time that is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from decoding.app.terminal.pace import Pace, Size, duration, rough_duration

READ, WRITTEN = 1000.0, 10.0  # characters and tokens per second of the machine
CHARACTERS = 4  # per token
NEW = 50  # tokens of an answer, of at most 100


class Machine:
    """A machine that answers one request after another, with a clock of its own."""

    def __init__(self, sizes: dict[str, Size], is_live: bool = True):
        self.now, self.is_live = 0.0, is_live
        self.pace = Pace(sizes, 100, is_live, clock=lambda: self.now)
        self.lefts: list[tuple[float, float]] = []  # the time, and what was left by the estimate

    def note(self) -> None:
        if (left := self.pace.seconds_left) is not None:
            self.lefts.append((self.now, left))

    def answer(self, document: str, characters: int, name: str = "", reads: bool = True) -> None:
        """Process a request; its counts are noted at ten times."""
        name, tokens = name or document, characters // CHARACTERS
        reused = 0 if reads else tokens
        self.pace.request(name, document, tokens, reads)
        read_s = characters / READ if reads else 0.0
        for step in range(1, 6):
            self.now += read_s / 5
            if self.is_live:
                self.pace.prefill(name, step / 5)
                self.note()
        for step in range(1, 6):
            self.now += NEW / WRITTEN / 5
            if self.is_live:
                self.pace.decode(name, step * NEW // 5)
                self.note()
        counts = {"reused_tokens": reused, "loaded_tokens": 0, "new_tokens": NEW}
        self.pace.finish(
            name, {**counts, "time_to_first_token_s": read_s, "decode_s": NEW / WRITTEN}
        )

    def summarise(self, documents: Iterable[tuple[str, int]]) -> None:
        for name, characters in documents:
            self.pace.begin(name, characters)
            self.pace.update(name, 0, 1, 1)
            self.answer(name, characters)
            self.pace.end(name)
            self.note()

    def errors(self, first: int = 0) -> Iterator[float]:
        """Yield the error of each estimate from number `first` on, as a share of what was left."""
        for now, left in self.lefts[first:]:
            actual = self.now - now
            yield abs(left - actual) / max(actual, 1.0)


def sizes(documents: dict[str, int], kind: str = "text") -> dict[str, Size]:
    return {name: Size(nbytes, kind, kind == "text") for name, nbytes in documents.items()}


LENGTHS = {"a": 20_000, "b": 3_000, "c": 60_000, "d": 10_000, "e": 30_000}


def test_time_that_is_left_is_exact_at_constant_speed() -> None:
    machine = Machine(sizes(LENGTHS))
    machine.summarise(LENGTHS.items())
    assert next(machine.errors()) < 0.3  # answers count as long as they may be
    assert max(machine.errors(first=10)) < 0.03
    assert machine.pace.seconds_left == 0


def test_nothing_is_known_before_the_first_tokens_are_written() -> None:
    machine = Machine(sizes(LENGTHS))
    assert (machine.pace.seconds_left, str(machine.pace)) == (None, "")
    machine.pace.begin("a", 20_000)
    machine.pace.request("a", "a", 5_000, reads=True)
    machine.now += 10
    machine.pace.prefill("a", 0.5)
    assert machine.pace.seconds_left is None
    assert str(machine.pace) == "250 tokens/s read"
    machine.now += 2
    machine.pace.decode("a", 20)
    # the rest of a, of up to 100 tokens, and the other documents
    left = 10 + 8 + (123_000 - 20_000) / READ + 4 * 10
    assert machine.pace.seconds_left == pytest.approx(left)
    assert str(machine.pace) == "about 3 min left, 250 tokens/s read, 10.0 written"


def test_length_of_other_kinds_follows_from_those_that_were_read() -> None:
    pictures = sizes({name: 40 * length for name, length in LENGTHS.items()}, "pdf")
    machine = Machine(pictures)
    machine.summarise(LENGTHS.items())
    assert max(machine.errors(first=11)) < 0.03


def test_a_kind_that_was_not_read_yet_is_as_long_as_others() -> None:
    machine = Machine(sizes({"a": 20_000}) | sizes({"b": 9_000_000}, "pdf"))
    machine.summarise([("a", 20_000)])
    assert machine.pace.seconds_left == pytest.approx(20 + 5)


def test_parts_are_read_once_and_merged() -> None:
    machine = Machine(sizes({"long": 60_000, "next": 60_000}))
    for name in ("long", "next"):
        machine.pace.begin(name, 60_000)
        for part in range(3):
            machine.pace.update(name, part, 3, 3)
            machine.answer(name, 20_000, f"{name}, part {part}")
        machine.pace.update(name, 0, 1, 1)
        machine.answer(name, 800, f"{name}, merge")
        machine.pace.end(name)
    assert max(machine.errors(first=10)) < 0.15  # reading of merges is not expected


def test_questions_read_their_document_once() -> None:
    machine = Machine(sizes({"a": 40_000, "b": 40_000}))
    for name in ("a", "b"):
        machine.pace.begin(name, 40_000)
        for question in range(5):
            machine.pace.update(name, question, 5, 1)
            machine.answer(name, 40_000, f"{name}, {question}", reads=question == 0)
        machine.pace.end(name)
    assert max(machine.errors(first=10)) < 0.1


def test_documents_that_fail_or_were_finished_in_parts_leave_no_work() -> None:
    machine = Machine(sizes(LENGTHS))
    machine.summarise([("a", LENGTHS["a"])])
    for name in ("b", "c"):
        machine.pace.end(name)  # not read
    machine.pace.begin("d", 10_000)
    machine.pace.update("d", 0, 5, 5)
    machine.pace.update("d", 4, 5, 5)  # answers on disk
    machine.pace.request("d, part 5", "d", 500, reads=True)
    machine.pace.end("e")
    # a fifth of d, its last part and a merge
    assert machine.pace.seconds_left == pytest.approx(2 + 2 * 5)


def test_a_cluster_works_in_parallel() -> None:
    """Answers come from two machines at the same time, with their own times."""
    documents = {f"{number}": 20_000 for number in range(8)}
    now = [1000.0]
    pace = Pace(sizes(documents), 100, is_live=False, clock=lambda: now[0])
    counts: dict[str, Any] = {"reused_tokens": 0, "loaded_tokens": 0, "new_tokens": NEW}
    counts |= {"time_to_first_token_s": 20.0, "decode_s": 5.0}
    for name in documents:
        pace.begin(name, 20_000)
        pace.update(name, 0, 1, 1)
        pace.request(name, name, 5_000, reads=True)
    now[0] += 300  # loading models
    for number in range(4):
        now[0] += 25 if number % 2 == 0 else 0
        pace.finish(f"{number}", counts)
        pace.end(f"{number}")
    assert pace.seconds_left == pytest.approx(50)
    assert str(pace) == "about 50 s left"


def test_many_documents_are_not_counted_at_every_token() -> None:
    machine = Machine(sizes({f"{number}": 1_000 for number in range(20_000)}))
    machine.summarise([("0", 1_000)])
    before = machine.pace._unread._total
    machine.summarise([("1", 1_000)])
    assert machine.pace._unread._total is not before  # 6 s later
    before = machine.pace._unread._total
    for _ in range(10):
        machine.note()
    assert machine.pace._unread._total is before


@pytest.mark.parametrize(
    ("seconds", "exact", "rough"),
    [
        (0.0, "0 s", "10 s"),
        (0.412, "0.41 s", "10 s"),
        (14.0, "14 s", "10 s"),
        (54.0, "54 s", "50 s"),
        (112.0, "1 min 52 s", "2 min"),
        (3570.0, "59 min 30 s", "1 h 0 min"),
        (7500.0, "2 h 5 min", "2 h 5 min"),
    ],
)
def test_durations(seconds: float, exact: str, rough: str) -> None:
    assert (duration(seconds), rough_duration(seconds)) == (exact, rough)
