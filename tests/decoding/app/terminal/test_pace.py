"""The pace of a batch: tokens per second, and an estimate of the time that is left."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from decoding.app.terminal.pace import Pace, Size, duration, rough_duration

READ, WRITTEN = 1000.0, 10.0  # characters and tokens per second of the machine
CHARACTERS = 4  # per token
NEW = 50  # tokens of an answer, of at most 100


class Machine:
    """A machine that answers one request after another, with a clock of its own."""

    def __init__(self, sizes: dict[str, Size]):
        self.now = 0.0
        self.pace = Pace(sizes, 100, clock=lambda: self.now)
        self.lefts: list[tuple[float, float]] = []  # the time, and what was left by the estimate
        self.lines: list[str] = []

    def note(self) -> None:
        self.lines.append(str(self.pace))
        if (left := self.pace.seconds_left()) is not None:
            self.lefts.append((self.now, left))

    def answer(
        self, document: str, characters: int, name: str = "", cached: float = 0.0, **more: Any
    ) -> None:
        """Process a request, a share of whose prompt is cached; note the estimates ten times."""
        name, tokens = name or document, characters // CHARACTERS
        self.pace.request(document, name, tokens, **{"reads": True, **more})
        hits = int(cached * tokens)
        for step in range(1, 6):
            self.now += (1 - cached) * characters / READ / 5
            self.pace.prefill(document, name, step / 5)
            self.note()
        for step in range(1, 6):
            self.now += NEW / WRITTEN / 5
            self.pace.decode(document, name, step * NEW // 5, hits)
            self.note()
        counts = {"reused_tokens": hits, "loaded_tokens": 0, "new_tokens": NEW}
        self.pace.finish(document, name, counts)

    def summarise(self, documents: Iterable[tuple[str, int]], cached: float = 0.0) -> None:
        for name, characters in documents:
            self.pace.begin(name, characters)
            self.pace.update(name, 1, 0, 1, 1)
            self.answer(name, characters, cached=cached)
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
    assert machine.pace.seconds_left() == 0


def test_nothing_is_known_before_the_first_tokens_are_written() -> None:
    machine = Machine(sizes(LENGTHS))
    assert (machine.pace.seconds_left(), str(machine.pace)) == (None, "")
    machine.pace.begin("a", 20_000)
    machine.pace.request("a", "a", 5_000, reads=True)
    machine.now += 10
    machine.pace.prefill("a", "a", 1.0)
    assert machine.pace.seconds_left() is None
    assert str(machine.pace) == "reading 500 tokens/s"
    machine.now += 2
    machine.pace.decode("a", "a", 20, 2_500)  # as it turns out, half of it was in a cache
    # the other documents, and the rest of the answer about a, of up to 100 tokens
    left = (123_000 - 20_000) / READ + 4 * 10 + 8
    assert machine.pace.seconds_left() == pytest.approx(left)
    assert str(machine.pace) == "about 3 min left; reading 250, writing 10.0 tokens/s"


def test_length_of_other_kinds_follows_from_those_that_were_read() -> None:
    pictures = sizes({name: 40 * length for name, length in LENGTHS.items()}, "pdf")
    machine = Machine(pictures)
    machine.summarise(LENGTHS.items())
    assert max(machine.errors(first=11)) < 0.03


def test_a_kind_that_was_not_read_yet_is_as_long_as_others() -> None:
    machine = Machine(sizes({"a": 20_000}) | sizes({"b": 9_000_000}, "pdf"))
    machine.summarise([("a", 20_000)])
    assert machine.pace.seconds_left() == pytest.approx(20 + 5)


def test_parts_are_read_once_and_merged() -> None:
    machine = Machine(sizes({"long": 60_000, "next": 60_000}))
    for name in ("long", "next"):
        machine.pace.begin(name, 60_000)
        for part in range(3):
            machine.pace.update(name, 1, part, 3, 3)
            machine.answer(name, 20_000, f"{name}, part {part}")
        machine.pace.update(name, 2, 0, 1, 1)
        machine.answer(name, 800, f"{name}, merge")
        machine.pace.end(name)
    assert max(machine.errors(first=10)) < 0.15  # reading of merges is not expected


def test_answers_on_disk_are_no_work() -> None:
    """All parts but the last one of a document were answered by a job that was killed."""
    machine = Machine(sizes({"long": 100_000, "next": 20_000}))
    machine.pace.begin("long", 100_000)
    for finished in range(10):
        machine.pace.update("long", 1, finished, 10, 10)
    machine.answer("long", 10_000, "long, part 10")
    machine.pace.update("long", 1, 10, 10, 10)
    machine.pace.update("long", 2, 0, 1, 1)
    machine.answer("long", 400, "long, merge")
    machine.pace.end("long")
    machine.pace.begin("next", 20_000)
    machine.pace.update("next", 1, 0, 2, 2)
    for part in range(2):
        machine.pace.update("next", 1, part, 2, 2)
        machine.answer("next", 10_000, f"next, part {part}")
    machine.pace.update("next", 2, 0, 1, 1)
    machine.answer("next", 400, "next, merge")
    machine.pace.end("next")
    assert max(machine.errors(first=10)) < 0.15


def test_questions_read_their_document_once() -> None:
    machine = Machine(sizes({"a": 40_000, "b": 40_000}))
    for name in ("a", "b"):
        machine.pace.begin(name, 40_000)
        for question in range(5):
            machine.pace.update(name, 1, question, 5, 1)
            is_first = question == 0
            machine.answer(
                name, 40_000, f"{name}, {question}", cached=0.0 if is_first else 1.0, reads=is_first
            )
        machine.pace.end(name)
    assert max(machine.errors(first=10)) < 0.1
    rates = {re.findall(r"reading (\d+)", line)[0] for line in machine.lines if "reading" in line}
    assert rates == {"250"}


def test_what_is_in_a_cache_does_not_make_the_rest_look_fast() -> None:
    machine = Machine(sizes({"kept": 40_000, "a": 40_000, "b": 40_000}))
    machine.summarise([("kept", 40_000)], cached=0.99)
    machine.summarise([("a", 40_000), ("b", 40_000)])
    assert max(machine.errors(first=6)) < 0.1


def test_what_is_cut_is_not_read() -> None:
    machine = Machine(sizes({"a": 400_000, "b": 300_000, "c": 10_000}))
    for name, length, truncated in (("a", 40_000, 90_000), ("b", 40_000, 65_000), ("c", 10_000, 0)):
        machine.pace.begin(name, length + truncated * CHARACTERS)
        machine.pace.update(name, 1, 0, 1, 1)
        machine.answer(name, length, truncated=truncated)
        machine.pace.end(name)
    assert max(machine.errors(first=11)) < 0.1


def test_documents_that_fail_leave_no_work() -> None:
    machine = Machine(sizes(LENGTHS))
    machine.summarise([("a", LENGTHS["a"])])
    for name in ("b", "c", "e"):
        machine.pace.end(name)  # not read
    machine.pace.begin("d", 10_000)
    machine.pace.update("d", 1, 0, 5, 5)
    assert machine.pace.seconds_left() == pytest.approx(10 + 6 * 5)
    machine.pace.request("d", "d, part 1", 500, reads=True)
    machine.pace.end("d")
    assert machine.pace.seconds_left() == 0
    machine.pace.prefill("d", "d, part 1", 0.5)
    machine.pace.decode("d", "d, part 1", 3, 0)
    machine.pace.finish("d", "d, part 1", {})
    assert machine.pace.seconds_left() == 0


@pytest.mark.parametrize("decode_s", [5.0, 0.0])
def test_a_cluster_works_in_parallel(decode_s: float) -> None:
    """Answers come from two machines at the same time, with their own times."""
    documents = {f"{number}": 20_000 for number in range(8)}
    now = [1000.0]
    pace = Pace(sizes(documents), 100, is_live=False, clock=lambda: now[0])
    counts: dict[str, Any] = {"reused_tokens": 0, "loaded_tokens": 0, "new_tokens": NEW}
    counts |= {"time_to_first_token_s": 20.0, "decode_s": decode_s}
    for name in documents:
        pace.begin(name, 20_000)
        pace.update(name, 1, 0, 1, 1)
        pace.request(name, name, 5_000, reads=True)
    now[0] += 300  # loading models
    for number in range(4):
        now[0] += 20 + decode_s if number % 2 == 0 else 0
        pace.finish(f"{number}", f"{number}", counts)
        pace.end(f"{number}")
    assert pace.seconds_left() == pytest.approx(40 + 2 * decode_s)
    assert str(pace) == f"about {rough_duration(40 + 2 * decode_s)} left"


def test_the_rest_is_not_estimated_at_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(sizes({f"{number}": 1_000 for number in range(20_000)}))
    machine.summarise([("0", 1_000)])
    calls = list[None]()
    monkeypatch.setattr(Pace, "_describe", lambda _: calls.append(None) or "")
    machine.now += 100
    for _ in range(10):
        machine.pace.prefill("1", "1", 0.5)
        str(machine.pace)
    assert len(calls) == 1
    machine.now += 3
    str(machine.pace)
    assert len(calls) == 1
    machine.now += 3
    str(machine.pace)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("seconds", "exact", "rough"),
    [
        (0.0, "0 s", "10 s"),
        (0.412, "0.41 s", "10 s"),
        (14.0, "14 s", "10 s"),
        (54.0, "54 s", "50 s"),
        (91.0, "1 min 31 s", "90 s"),
        (112.0, "1 min 52 s", "2 min"),
        (3570.0, "59 min 30 s", "1 h 0 min"),
        (7500.0, "2 h 5 min", "2 h 5 min"),
        (1e-5, "0 s", "10 s"),
        (400_000.0, "111 h 6 min", "4 days 15 h"),
    ],
)
def test_durations(seconds: float, exact: str, rough: str) -> None:
    assert (duration(seconds), rough_duration(seconds)) == (exact, rough)
