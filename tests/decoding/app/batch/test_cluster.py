"""A job that machines of a cluster share: here a Ray of this machine alone, with an actor for each
of two machines.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest

from decoding import Settings
from decoding.app.batch import cluster_worker as machine
from decoding.app.batch.cluster import Cluster, _ClusterWorkers, _readable, _write
from decoding.app.batch.documents import find_documents
from decoding.app.batch.job import model_digest
from decoding.app.batch.records import Records
from decoding.app.batch.summarize import Results, job_of
from decoding.app.options import Common
from decoding.app.terminal.progress import Display
from decoding.speculation.sampling import Sampling
from support.commands import (
    DRAFT,
    MODELS,
    STEADY,
    TARGET,
    Fork,
    Job,
    Running,
    forked,
    refused,
    wait_for,
)
from support.slow import slow_except

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install 'tierforce[cluster]'"
)
SHORT = ("--max-new-tokens", "12", "--mode", "plain")
WORDS = "It was the best of times, it was the worst of times, it was the age of wisdom. "


def documents(folder: Path, count: int) -> Path:
    """A folder of texts that differ, one of them no text at all."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"Chapter {number}. " + WORDS * (8 + number % 5))
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
@pytest.mark.slow
def test_a_machine_that_is_lost_leaves_its_documents_to_others(tmp_path: Path) -> None:
    """Each machine is a group of two ranks, and is sent two documents at a time."""
    source, output = documents(tmp_path / "in", 6), tmp_path / "out.jsonl"
    alone = tmp_path / "alone.jsonl"
    assert forked(tmp_path / "a", *asked(source, alone)).code == 1
    ways = ("--cluster", "local", "--machines", "2", "--gpus", "2", "--concurrency", "2")
    job = Job(*asked(source, output), *ways)
    job.wait_for(lambda: len(records(output)) >= 3, every=0.1)
    job.wait_for(lambda: len(actors(job)) == 2, every=0.1)
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
            assert record["ranks"] == 2
    # those of the machine that was lost are written one at a time
    assert {record.get("concurrency") for record in found} >= {2}
    # what is finished is not done again, and no machine is asked
    again = forked(tmp_path, *asked(source, output), "--cluster", "nowhere")
    assert again.code == 1
    assert again.err.count("finished before, skipped") == 6
    assert len(records(output)) == 7


def listening(processes: Sequence[psutil.Process]) -> set[str]:
    """The addresses that processes listen at."""
    found = set[str]()
    for process in processes:
        with suppress(psutil.Error):
            connections = process.net_connections(kind="inet")
            found |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def kill(name: str, job: Running) -> list[psutil.Process]:
    """Kill a process of a job on a cluster of its own; return all that it had started.

    Nothing of it could be reached from another machine.
    """
    processes = psutil.Process(job.process.pid).children(recursive=True)
    addresses = listening(processes)
    if name == "job":
        job.send_signal(signal.SIGKILL)
    else:
        next(each for each in processes if each.name() == name).kill()
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    return processes


def ended_with_a_word(job: Running, code: int, processes: Sequence[psutil.Process]) -> None:
    """Fails unless a job that was killed said so, and left nothing."""
    wait_for(lambda: not any(map(is_alive, processes)))  # its guard too, which says so
    finished = job.finish()
    assert finished.code == code
    last = finished.err.splitlines()[-1]
    # the first to notice says so: the guard, or the job itself while it still can
    node = "tierforce: the Ray node of --cluster local on this machine, or this"
    assert last.startswith((node, "tierforce: the machines of --cluster local are lost"))
    assert "run the same command again" in last


@needs_ray
@pytest.mark.slow
def test_a_job_that_is_killed_says_so_and_leaves_nothing_but_records(tmp_path: Path) -> None:
    """Those that it wrote are what one machine alone writes."""
    source, output = documents(tmp_path / "in", 60), tmp_path / "out.jsonl"
    job = Fork(tmp_path, *asked(source, output), "--cluster", "local")
    job.wait_for(lambda: len(records(output)) >= 2, every=0.1)
    ended_with_a_word(job, -signal.SIGKILL, kill("job", job))
    written = {each["id"]: each.get("summary") for each in records(output)}
    assert written.pop("broken.txt") is None
    assert 1 <= len(written) < 60
    few = documents(tmp_path / "few", 0)
    for name in list(written)[:2]:
        (few / name).write_text((source / name).read_text())
    alone = tmp_path / "alone.jsonl"
    assert forked(tmp_path / "a", *asked(few, alone)).code == 1
    for each in records(alone):
        assert each.get("summary") == written.get(each["id"])


@needs_ray
@pytest.mark.slow
def test_a_job_whose_ray_is_killed_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    job = Job(
        *asked(documents(tmp_path / "in", 2), tmp_path / "out.jsonl"),
        *("--max-new-tokens", "100000", "--cluster", "local"),
    )
    job.wait_for(lambda: actors(job), every=0.1)
    ended_with_a_word(job, 1, kill("raylet", job))


class Scripted:
    """Machines that are lost, or cannot do anything, by places."""

    def __init__(self, *passes: dict[int, str | None]):
        self.passes = list(passes)  # what becomes of a place: a summary; None where it is lost
        self.sent: list[tuple[list[int], bool]] = []

    def summaries(
        self, rows: Sequence[dict[str, Any]], together: bool
    ) -> Iterator[tuple[int, dict[str, Any] | None, str]]:
        self.sent.append(([row["place"] for row in rows], together))
        for place, summary in self.passes.pop(0).items():
            if summary == "busy":
                yield place, None, "no room"
            elif summary is not None:
                yield place, {"id": str(place), "summary": summary, "versions": {}}, "read"
                yield place, {"id": str(place), "summary": "again", "versions": {}}, "read"


def test_what_is_lost_is_sent_again_three_times_and_what_found_no_room_until_it_does(
    tmp_path: Path,
) -> None:
    source = documents(tmp_path / "in", 4)
    due = find_documents(source).documents  # 0 to 3, and the broken one
    with Records(tmp_path / "out.jsonl") as kept, Display(5, sys.stderr) as display:
        results = Results(due, due, kept, display)
        rows = list(_readable(due, results))
        machines = Scripted(
            {0: "a", 1: None, 2: None, 3: "busy"},
            {1: "b", 2: None, 3: "busy"},
            {2: None, 3: "busy"},
            {3: "d"},
        )
        _write(rows, machines, due, results)  # type: ignore[arg-type]
    assert machines.sent == [
        ([0, 1, 2, 3], True),
        ([1, 2, 3], False),
        ([2, 3], False),
        ([3], False),
    ]
    found = {record["id"]: record for record in records(tmp_path / "out.jsonl")}
    assert len(records(tmp_path / "out.jsonl")) == len(found) == 5
    summaries = {id: record["summary"] for id, record in found.items() if "summary" in record}
    assert summaries == {"0.txt": "a", "1.txt": "b", "3.txt": "d"}
    assert "was lost 3 times" in found["2.txt"]["error"]
    assert "not UTF-8" in found["broken.txt"]["error"]
    assert results.failed == 2


def test_a_machine_writes_what_the_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_join", lambda *_: None)
    monkeypatch.setattr(machine, "_own_name", lambda: "first")
    source, output = documents(tmp_path / "in", 3), tmp_path / "out.jsonl"
    (source / "broken.txt").unlink()
    assert forked(tmp_path / "a", *asked(source, output), "--instruction", "Sum up.").code == 0
    common = Common(
        model=str(TARGET),
        draft=str(DRAFT),
        device="cpu",
        max_new_tokens=12,
        settings=Settings(dtype="float32", mode="plain"),
        sampling=Sampling(0.0),
    )
    texts = [(source / f"{number}.txt").read_text() for number in range(3)]
    one = machine.ClusterWorker(common, job_of(common, TARGET, "Sum up."), 2)
    answer = one({"place": np.array([4, 7, 5]), "text": np.array(texts, dtype=object)})
    assert answer["place"] == [4, 7, 5]
    assert answer["machine"] == ["first"] * 3
    written = [json.loads(record) for record in answer["record"]]
    assert [each["id"] for each in written] == ["4", "7", "5"]
    assert {each["concurrency"] for each in written} >= {2}
    wanted = {each["id"]: each for each in records(output)}
    for number, each in enumerate(written):
        for name in ("summary", "kind", "digest", "prompt_tokens"):
            assert each.get(name) == wanted[f"{number}.txt"].get(name)


def test_a_machine_that_can_do_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_HELD", 0.0)
    monkeypatch.setattr(machine, "_join", lambda *_: None)
    monkeypatch.setattr(machine, "_own_name", lambda: "first")
    common = Common(
        model=str(TARGET),
        device="cpu",
        settings=Settings(context=999_999),
        sampling=Sampling(),
    )
    batch = {"place": np.array([4, 7]), "text": np.array(["one", "two"], dtype=object)}
    for weights, why in (
        (model_digest(TARGET), "`context` 999999 is more"),
        ("0" * 8, "other weights"),
    ):
        job = job_of(common, TARGET, "Summarise.")
        answer = machine.ClusterWorker(common, replace(job, weights=weights), 1)(batch)
        assert answer["place"] == [4, 7]
        assert answer["record"] == ["", ""]
        assert answer["machine"] == ["first", "first"]
        assert all(why in line for line in answer["line"])


@needs_ray
@pytest.mark.parametrize("address", slow_except(["127.0.0.1:1", "auto"]))
def test_a_cluster_that_is_not_there(address: str, tmp_path: Path) -> None:
    source = documents(tmp_path / "in", 1)
    (source / "broken.txt").unlink()
    result = forked(tmp_path, *asked(source, tmp_path / "out.jsonl"), "--cluster", address)
    assert f"--cluster {address}: no Ray cluster answers" in refused(result)
    assert not (tmp_path / "out.jsonl").exists()


class Guard:
    """A guard that counts how often it was dismissed."""

    dismissed = 0
    process = psutil.Process()

    def __init__(self, last_words: str):
        Guard.dismissed = 0

    def dismiss(self) -> None:
        Guard.dismissed += 1


def _fails(*_: Any, **__: Any) -> None:
    raise KeyError("anything")


@pytest.mark.parametrize("failing", ["init", "nodes", "shutdown"])
def test_a_guard_is_dismissed_whatever_ray_raises(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would say that this job was killed."""
    node = {"Alive": True, "Resources": {"CPU": 1}}
    parts = {"init": lambda **_: None, "nodes": lambda: [node], "shutdown": lambda: None}
    ray = ModuleType("ray")
    ray.data = ModuleType("ray.data")  # type: ignore[attr-defined]
    for name, part in {**parts, failing: _fails}.items():
        setattr(ray, name, part)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", ray.data)  # type: ignore[attr-defined]
    monkeypatch.setattr("decoding.app.batch.cluster.ClusterGuard", Guard)
    monkeypatch.setattr("psutil.wait_procs", lambda *_, **__: ([], []))
    common = Common(model=str(TARGET), device="cpu", settings=Settings(), sampling=Sampling())
    job = job_of(common, TARGET, "Summarise.")
    # it sets variables for Ray
    with patch.dict(os.environ), pytest.raises(KeyError, match="anything"):
        _ClusterWorkers(Cluster("auto"), common, job).close()
    assert Guard.dismissed == 1


@pytest.mark.slow
def test_a_job_that_died_before_its_guard_was_up_leaves_nothing(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, "TIERFORCE_CLUSTER_JOB": str(gone.pid)}
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
    command = [
        sys.executable,
        "-m",
        "decoding.app.batch.cluster_guard",
        str(gone.pid),
        "it was killed",
    ]
    guard = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (guard.returncode, guard.stderr) == (0, "it was killed\n")
    assert left.wait() == -signal.SIGKILL


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
    assert "--machines needs --cluster" in refused(result)


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))


def test_too_few_open_files_for_ray_are_told(tmp_path: Path) -> None:
    source = documents(tmp_path / "in", 1)
    ways = ("--cluster", "local")
    result = forked(tmp_path, *asked(source, tmp_path / "out.jsonl"), *ways, before=_few_files)
    lines = result.err.splitlines()
    assert result.code == 1
    assert (
        "--cluster local needs 512 open files at a time, and `ulimit -Hn` allows 100" in lines[-1]
    )
