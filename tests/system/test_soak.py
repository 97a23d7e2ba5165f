"""A long job on two ranks: the memory, files and threads of a rank between documents do not grow.

Every tenth document is special: empty, binary, converted by a child process (Latin-1), or longer
than the context. The largest resident size during documents is recorded too, but not asserted: it
depends on their budgets and draft lengths. In full: 500 documents, half an hour.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from support.commands import MODELS, TARGET, Fork, lines, records
from support.prompts import passages

SPECIAL = ("empty", "binary", "Latin-1", "too long")


@dataclass(frozen=True)
class Size:
    """The size of a job: memory is stable after `early` documents, `longest` is in tokens, and
    `growth` is the largest ratio of memory in the end to memory before document `early`.
    """

    documents: int
    early: int
    longest: int
    max_new_tokens: int
    growth: float


# a short job ends before memory is stable
SHORT = Size(documents=40, early=20, longest=400, max_new_tokens=8, growth=1.25)
FULL = Size(documents=500, early=50, longest=8192, max_new_tokens=32, growth=1.02)


def write_documents(folder: Path, count: int, passages: list[str], too_long: str) -> Counter[str]:
    """Write documents of which every tenth is special; return the number of each kind."""
    kinds: Counter[str] = Counter()
    for number in range(1, count + 1):
        text = passages[number % len(passages)]
        kind = SPECIAL[number // 10 % len(SPECIAL)] if number % 10 == 0 else "whole"
        kinds[kind] += 1
        contents = {
            "whole": text.encode(),
            "empty": b"",
            "binary": b"\x00\x01" + text[:1000].encode(),
            "Latin-1": "Müller, ".encode("latin1") + text[:1000].encode(),
            "too long": too_long.encode(),
        }
        (folder / f"{number:05}.txt").write_bytes(contents[kind])
    return kinds


def sample_usage(job: Fork, output: Path, size: Size) -> dict[int, dict[str, float]]:
    """Sample both ranks until the job ends: in the ten documents before `early`, and the last ten.

    Returns, by rank, the smallest and largest resident size, and the median numbers of open files
    and threads: unlike the maximum, the median ignores files that are open for a moment.
    """
    samples_by_rank: dict[tuple[int, str], list[tuple[int, int, int]]] = {}
    job.wait_for(lambda: job.rank(0) and job.rank(1))
    ranks = {number: job.rank(number) for number in (0, 1)}
    while not job.has_ended():
        done = lines(output)
        phase = {size.early // 10 - 1: "early", size.documents // 10 - 1: "late"}.get(done // 10)
        for rank, process in ranks.items() if phase and done < size.documents else ():
            with suppress(psutil.Error):
                sample = (process.memory_info().rss, process.num_fds(), process.num_threads())
                if sample[0]:  # 0 once the process has ended
                    samples_by_rank.setdefault((rank, phase), []).append(sample)
        time.sleep(0.02)
    usage: dict[int, dict[str, float]] = {0: {}, 1: {}}
    for (rank, phase), samples in samples_by_rank.items():
        memory, files, threads = zip(*samples, strict=True)
        usage[rank] |= {
            f"{phase}_mb": min(memory) / 1e6,
            f"{phase}_most_mb": max(memory) / 1e6,
            f"{phase}_files": median_high(files),
            f"{phase}_threads": median_high(threads),
        }
    return usage


@pytest.mark.slow
def test_usage_of_ranks_does_not_grow_during_a_job(
    tmp_path: Path, full: bool, text: Path | None, record: Callable[..., None]
) -> None:
    pytest.importorskip("charset_normalizer")
    size = FULL if full else SHORT
    folder, output = tmp_path / "documents", tmp_path / "out.jsonl"
    folder.mkdir()
    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET, trust_remote_code=False)
    lengths = [size.longest * step // 9 for step in range(1, 10)]  # ten documents cover all of them
    *parts, too_long = passages(text, tokenizer, [*lengths, 2 * size.longest])
    kinds = write_documents(folder, size.documents, parts, too_long)
    job = Fork(
        tmp_path / "job",
        *("summarize", *MODELS, "--gpus", "2", "--input", str(folder), "--output", str(output)),
        *("--context", str(size.longest * 5 // 4), "--max-new-tokens", str(size.max_new_tokens)),
    )
    try:
        usage = sample_usage(job, output, size)
    finally:
        finished = job.finish()
    rows = [{"rank": rank, **each} for rank, each in usage.items()]
    record("soak", f"{size.documents} documents", rows, kinds=kinds)

    assert finished.code == 1, finished.err  # some documents fail
    written = records(output)
    assert len({each["id"] for each in written}) == len(written) == size.documents
    broken = kinds["empty"] + kinds["binary"]
    assert sum("error" in each for each in written) == broken
    assert sum("parts" in each for each in written) == kinds["too long"]
    for row in rows:
        assert 100 < row["early_mb"] <= row["early_most_mb"]
        assert 100 < row["late_mb"] <= row["late_most_mb"]
        assert row["late_mb"] <= size.growth * row["early_mb"]
        # while a document is in parts, their answers are in a file
        assert row["late_files"] <= row["early_files"] + 1
        assert row["late_threads"] <= row["early_threads"]
