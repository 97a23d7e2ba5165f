"""A job that machines of a cluster share: here a Ray of this machine alone, with an actor for each
of two machines.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.commands import MODELS, STEADY, Job, forked, refused

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install 'tierforce[cluster]'"
)
SHORT = ("--max-new-tokens", "12", "--mode", "plain")
WORDS = "It was the best of times, it was the worst of times, it was the age of wisdom. "


def documents(folder: Path, count: int) -> Path:
    """A folder of texts that differ, one of them no text at all."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"Chapter {number}. " + WORDS * (20 + number))
    (folder / "broken.txt").write_bytes(b"\xff\xfe")
    return folder


def asked(source: Path, output: Path) -> tuple[str, ...]:
    paths = ("--input", str(source), "--output", str(output))
    return ("summarize", *MODELS, *STEADY, *SHORT, *paths)


def records(output: Path) -> list[dict[str, Any]]:
    if not output.exists():
        return []
    return [json.loads(line) for line in output.read_text().splitlines()]


def actors(job: Job) -> list[psutil.Process]:
    """The processes of machines, as Ray calls them."""
    found = []
    for process in psutil.Process(job.process.pid).children(recursive=True):
        try:
            if any("ray::" in part and "Machine" in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@needs_ray
def test_a_machine_that_is_lost_leaves_its_documents_to_others(tmp_path: Path) -> None:
    """Each machine is a group of two ranks, and is sent two documents at a time."""
    source, output = documents(tmp_path / "in", 6), tmp_path / "out.jsonl"
    alone = tmp_path / "alone.jsonl"
    assert forked(tmp_path / "a", *asked(source, alone)).code == 1
    ways = ("--cluster", "local", "--machines", "2", "--gpus", "2", "--texts-at-once", "2")
    job = Job(*asked(source, output), *ways)
    job.wait_for(lambda: len(actors(job)) == 2 and len(records(output)) >= 3)
    actors(job)[0].send_signal(signal.SIGKILL)
    finished = job.finish(240)
    assert finished.code == 1
    assert "6 of 7 documents summarised" in finished.err
    found = records(output)
    assert Counter(record["id"] for record in found) == Counter(
        [*(f"{number}.txt" for number in range(6)), "broken.txt"]
    )
    wanted = {record["id"]: record for record in records(alone)}
    for record in found:
        for name in ("summary", "error", "kind", "digest", "prompt_tokens"):
            assert record.get(name) == wanted[record["id"]].get(name)
        if "summary" in record:
            assert (record["ranks"], record["texts_at_once"]) == (2, 2)
    # what is finished is not done again, and no machine is asked
    again = forked(tmp_path, *asked(source, output), "--cluster", "nowhere")
    assert again.code == 1
    assert again.err.count("finished before, skipped") == 6
    assert len(records(output)) == 7


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_a_cluster_that_is_not_there(address: str, tmp_path: Path) -> None:
    source = documents(tmp_path / "in", 1)
    (source / "broken.txt").unlink()
    result = forked(tmp_path, *asked(source, tmp_path / "out.jsonl"), "--cluster", address)
    assert f"--cluster {address}: no Ray cluster answers" in refused(result)
    assert not (tmp_path / "out.jsonl").exists()


def _no_ray() -> None:
    sys.modules["ray"] = None  # type: ignore[assignment]


def test_where_ray_is_missing_a_line_says_how_to_get_it(tmp_path: Path) -> None:
    source = documents(tmp_path / "in", 1)
    (source / "broken.txt").unlink()
    ways = ("--cluster", "local")
    result = forked(tmp_path, *asked(source, tmp_path / "out.jsonl"), *ways, before=_no_ray)
    assert "pip install 'tierforce[cluster]'" in refused(result)
    assert not (tmp_path / "out.jsonl").exists()


def test_machines_are_those_of_a_cluster(tmp_path: Path) -> None:
    source = documents(tmp_path / "in", 1)
    result = forked(tmp_path, *asked(source, tmp_path / "out.jsonl"), "--machines", "2")
    assert "--machines is for --cluster" in refused(result)
