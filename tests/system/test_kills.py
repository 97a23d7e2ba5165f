"""A job on two ranks that is killed repeatedly: in the end every document has one record.

The launcher, rank 0 or rank 1 gets SIGKILL, SIGTERM or SIGINT during prefill, during decoding, or
the moment a record reaches the file; then the same command resumes the job. In full: 60 kills, some
10 minutes.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from support.commands import GREEDY_FP32, MODELS, TARGET, Fork, forked, records, wait_for
from support.prompts import passages

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
VICTIMS = ("launcher", "rank 0", "rank 1")
MOMENTS = ("prefill", "decode", "record")
STARTED = re.compile(r"context [\d,]+")  # in the line printed at startup
EXIT_TIMEOUT_S = 90.0
Kind = tuple[signal.Signals, str, str]


@dataclass(frozen=True)
class Batch:
    """The command, and the content of its records in an undisturbed job."""

    arguments: list[str]
    folder: Path
    summaries: dict[str, str]
    prefill_s: float
    decode_s: float

    @classmethod
    def run(cls, arguments: list[str], folder: Path) -> Batch:
        """Run the command once without interruption."""
        output = folder / "whole.jsonl"
        result = forked(folder / "whole", *arguments, "--output", str(output))
        assert result.code == 0, result.err
        written = records(output)
        return cls(
            arguments,
            folder,
            {record["id"]: record["summary"] for record in written},
            min(record["time_to_first_token_s"] for record in written),
            min(record["decode_s"] for record in written),
        )

    def start(self, output: Path) -> Fork:
        """Start the job, or resume it."""
        return Fork(self.folder / "job", *self.arguments, "--output", str(output))

    def finished(self, output: Path) -> set[str]:
        """Return the documents with a record; each must have one, with the expected content."""
        *lines, _ = output.read_bytes().split(b"\n") if output.exists() else [b""]
        written = [json.loads(line) for line in lines]
        summaries = {record["id"]: record.get("summary") for record in written}
        assert len(summaries) == len(written), "a document has two records"
        assert summaries.items() <= self.summaries.items(), written
        return set(summaries)


def send_kill(job: Fork, batch: Batch, output: Path, kind: Kind, rng: random.Random) -> bool:
    """Send the signal at its moment; return False if the job has ended before."""
    number, victim, moment = kind
    log = job.folder / "err"
    wait_for(lambda: job.has_ended() or (log.exists() and STARTED.search(log.read_text())))
    if moment == "record":
        before = _size(output)
        while _size(output) == before and not job.has_ended():
            time.sleep(0.0005)
    elif moment == "prefill":
        time.sleep(rng.uniform(0, batch.prefill_s))
    else:
        time.sleep(batch.prefill_s + rng.uniform(0, batch.decode_s))
    with suppress(psutil.Error):
        launcher = psutil.Process(job.process.pid)
        process = launcher if victim == "launcher" else job.rank(int(victim[-1]))
        if process is not None and not job.has_ended():
            process.send_signal(number)
            return True
    return False


def kill_once(batch: Batch, output: Path, kind: Kind, rng: random.Random) -> dict[str, Any]:
    """Start or resume a job and kill it; return the outcome, {} if the job has ended before."""
    # also checked before the start, which repairs the file
    before = batch.finished(output)
    job = batch.start(output)
    try:
        was_killed = send_kill(job, batch, output, kind, rng)
        before |= batch.finished(output)
        started = time.monotonic()
        result = job.wait(EXIT_TIMEOUT_S)
        wait_for(lambda: not job.processes())
    finally:
        for process in job.processes():
            process.kill()
    seconds = time.monotonic() - started
    assert "Traceback" not in result.err
    lost = before - batch.finished(output)
    assert not lost, f"{kind}: records of {lost} are lost"
    if not was_killed:
        assert result.code == 0, result.err
        return {}
    return {
        "signal": kind[0].name,
        "victim": kind[1],
        "exit_code": result.code,
        "s_to_end": seconds,
    }


def by_kind(kills: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per signal and victim."""
    rows = []
    for kind in sorted({(kill["signal"], kill["victim"]) for kill in kills}):
        same = [kill for kill in kills if (kill["signal"], kill["victim"]) == kind]
        row = {
            "signal": kind[0],
            "victim": kind[1],
            "kills": len(same),
            "exit_codes": ", ".join(sorted({str(kill["exit_code"]) for kill in same})),
            "max_s_to_end": max(kill["s_to_end"] for kill in same),
        }
        rows.append(row)
    return rows


@pytest.mark.slow
def test_every_document_has_one_record_after_any_kill(
    tmp_path: Path, full: bool, text: Path | None, record: Callable[..., None]
) -> None:
    min_kills, documents, tokens, max_new_tokens = (60, 4, 4096, 96) if full else (2, 2, 1000, 32)
    rng = random.Random(0)
    kinds = list(product(SIGNALS, VICTIMS, MOMENTS))
    rng.shuffle(kinds)
    folder = tmp_path / "documents"
    folder.mkdir()
    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET, trust_remote_code=False)
    for number, passage in enumerate(passages(text, tokenizer, [tokens] * documents)):
        (folder / f"{number}.txt").write_text(passage, encoding="utf-8")
    batch = Batch.run(
        [
            *("summarize", *MODELS, *GREEDY_FP32, "--gpus", "2"),
            *("--max-new-tokens", str(max_new_tokens), "--input", str(folder)),
        ],
        tmp_path,
    )
    kills, jobs = list[dict[str, Any]](), 0
    while len(kills) < min_kills:
        output = tmp_path / f"{jobs}.jsonl"
        if kill := kill_once(batch, output, kinds[len(kills) % len(kinds)], rng):
            kills.append(kill)
        jobs += len(batch.finished(output)) == documents
    batch.start(tmp_path / f"{jobs}.jsonl").finish()
    for number in range(jobs + 1):
        assert batch.finished(tmp_path / f"{number}.jsonl") == batch.summaries.keys()
    record("kills", f"{len(kills)} kills over {jobs + 1} jobs", by_kind(kills))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
