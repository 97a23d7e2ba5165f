"""A job on a Ray cluster: here of this machine alone, with one actor for each of two machines."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer

from decoding import Settings
from decoding.app.batch import cluster_worker
from decoding.app.batch.assignment import Assignment
from decoding.app.batch.cluster import Cluster, _ClusterWorkers, _summarise
from decoding.app.batch.cluster_prompts import decode_prompts, encode_prompts
from decoding.app.batch.documents_in_progress import DocumentsInProgress
from decoding.app.batch.job import model_digest
from decoding.app.batch.report import Report
from decoding.app.batch.summarize import make_job
from decoding.app.documents.document import DocumentText, Identity
from decoding.app.documents.listing import find_documents
from decoding.app.options import Common
from decoding.app.results.destination import Destination, ResultFiles
from decoding.app.results.records import Records
from decoding.app.terminal.progress import Display
from decoding.speculation.sampling import Sampling
from decoding.text.instructions import Instructions, PromptFormat
from decoding.text.long_text import PromptBuilder
from offload.errors import TierForceError
from support.batches import answer
from support.commands import (
    DRAFT,
    GREEDY_FP32,
    MODELS,
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
    """Write `count` different documents and a broken one; return their folder."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"Chapter {number}. " + WORDS * (8 + number % 5))
    (folder / "broken.txt").write_bytes(b"\xff\xfe")
    return folder


def summarize(source: Path, output: Path) -> tuple[str, ...]:
    paths = ("--input", str(source), "--output", str(output))
    return ("summarize", *MODELS, *GREEDY_FP32, *SHORT, *paths)


def records(output: Path) -> list[dict[str, Any]]:
    if not output.exists():
        return []
    return [json.loads(line) for line in output.read_text().splitlines()]


def worker_processes(job: Job) -> list[psutil.Process]:
    """Return the processes of Ray actors."""
    actors = []
    for process in psutil.Process(job.process.pid).children(recursive=True):
        try:
            if any("ray::" in part and "ClusterWorker" in part for part in process.cmdline()):
                actors.append(process)
        except psutil.Error:
            continue
    return actors


@needs_ray
@pytest.mark.slow
def test_documents_of_lost_machine_are_retried(tmp_path: Path) -> None:
    """Each machine has two ranks, and gets two documents at a time."""
    source, output = documents(tmp_path / "in", 6), tmp_path / "out.jsonl"
    alone = tmp_path / "alone.jsonl"
    assert forked(tmp_path / "a", *summarize(source, alone)).code == 1
    options = ("--cluster", "local", "--machines", "2", "--gpus", "2", "--concurrency", "2")
    job = Job(*summarize(source, output), *options)
    job.wait_for(lambda: len(records(output)) >= 3, interval_s=0.1)
    job.wait_for(lambda: len(worker_processes(job)) == 2, interval_s=0.1)
    worker_processes(job)[0].send_signal(signal.SIGKILL)
    finished = job.finish(240)
    assert finished.code == 1
    assert "6 of 7 documents finished" in finished.err
    written = records(output)
    assert Counter(record["id"] for record in written) == Counter(
        [*(f"{number}.txt" for number in range(6)), "broken.txt"]
    )
    expected = {record["id"]: record for record in records(alone)}
    for record in written:
        for name in ("summary", "error", "kind", "digest", "prompt_tokens"):
            assert record.get(name) == expected[record["id"]].get(name)
        if "summary" in record:
            assert record["ranks"] == 2
    # Documents of the lost machine are retried one at a time.
    assert {record.get("concurrency") for record in written} >= {2}
    # A second run skips finished documents, and connects to no cluster.
    again = forked(tmp_path, *summarize(source, output), "--cluster", "nowhere")
    assert again.code == 1
    assert "already finished: 6 of 7 documents" in again.err
    assert len(records(output)) == 7


def listening(processes: Sequence[psutil.Process]) -> set[str]:
    """Return the addresses that processes listen on."""
    addresses = set[str]()
    for process in processes:
        with suppress(psutil.Error):
            connections = process.net_connections(kind="inet")
            addresses |= {
                connection.laddr.ip
                for connection in connections
                if connection.status == psutil.CONN_LISTEN
            }
    return addresses


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def kill(name: str, job: Running) -> list[psutil.Process]:
    """Kill a process of a job with a local cluster; return the processes that the job had started.

    Fail if one of them could be reached from another machine.
    """
    processes = psutil.Process(job.process.pid).children(recursive=True)
    addresses = listening(processes)
    if name == "job":
        job.send_signal(signal.SIGKILL)
    else:
        next(process for process in processes if process.name() == name).kill()
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    return processes


def check_killed_job(job: Running, code: int, processes: Sequence[psutil.Process]) -> None:
    """Fail unless a killed job reported that, and left no processes."""
    wait_for(lambda: not any(map(is_alive, processes)))  # including the guard, which reports it
    finished = job.finish()
    assert finished.code == code
    last = finished.err.splitlines()[-1]
    # The first to notice reports it: the guard, or the job itself while it still runs.
    node = "tierforce: the Ray node of --cluster local on this machine, or this"
    assert last.startswith((node, "tierforce: the machines of --cluster local are lost"))
    assert "run the same command again" in last


@needs_ray
@pytest.mark.slow
def test_killed_job_reports_it_and_leaves_only_records(tmp_path: Path) -> None:
    """Its records equal those of a run without a cluster."""
    source, output = documents(tmp_path / "in", 60), tmp_path / "out.jsonl"
    job = Fork(tmp_path, *summarize(source, output), "--cluster", "local")
    job.wait_for(lambda: len(records(output)) >= 2, interval_s=0.1)
    check_killed_job(job, -signal.SIGKILL, kill("job", job))
    written = {record["id"]: record.get("summary") for record in records(output)}
    assert written.pop("broken.txt") is None
    assert 1 <= len(written) < 60
    subset = documents(tmp_path / "subset", 0)
    for name in list(written)[:2]:
        (subset / name).write_text((source / name).read_text())
    alone = tmp_path / "alone.jsonl"
    assert forked(tmp_path / "a", *summarize(subset, alone)).code == 1
    for record in records(alone):
        assert record.get("summary") == written.get(record["id"])


@needs_ray
@pytest.mark.slow
def test_job_with_killed_ray_reports_it_and_leaves_no_processes(tmp_path: Path) -> None:
    job = Job(
        *summarize(documents(tmp_path / "in", 2), tmp_path / "out.jsonl"),
        *("--max-new-tokens", "100000", "--cluster", "local"),
    )
    job.wait_for(lambda: worker_processes(job), interval_s=0.1)
    check_killed_job(job, 1, kill("raylet", job))


def common() -> Common:
    settings = Settings(dtype="float32", mode="plain")
    return Common(
        model=str(TARGET),
        draft=str(DRAFT),
        device="cpu",
        max_new_tokens=12,
        settings=settings,
        sampling=Sampling(0.0),
    )


class ScriptedWorkers:
    """Machines that are lost or cannot start, by a script."""

    def __init__(self, *rounds: dict[int, Any]):
        # summaries by index; an error, "busy" if not started, None if lost
        self.rounds = list(rounds)
        self.sent: list[tuple[list[int], bool]] = []

    def answers(
        self, rows: Sequence[dict[str, Any]], batched: bool
    ) -> Iterator[tuple[int, dict[str, Any] | None]]:
        self.sent.append(([row["index"] for row in rows], batched))
        for index, summary in self.rounds.pop(0).items():
            if summary == "busy":
                yield index, None
            elif isinstance(summary, dict):
                yield index, [summary]
            elif summary is not None:
                yield index, [answer(summary)]
                yield index, [answer("again")]


def test_lost_documents_are_sent_three_times_and_unstarted_ones_until_done(
    tmp_path: Path,
) -> None:
    source = documents(tmp_path / "in", 4)
    due = find_documents(source).documents  # 0 to 3, and the broken one
    job = make_job(common(), TARGET, Assignment())
    builder = PromptBuilder(AutoTokenizer.from_pretrained(TARGET), job.format, 4096, 12)
    destination = Destination(tmp_path / "out.jsonl")
    with ResultFiles(destination, []) as files, Display(5, sys.stderr) as display:
        report = Report(due, due, files, display)
        progress = DocumentsInProgress(builder, job, files.records.parts, report.add)
        for document in due[:4]:
            progress.begin(document.id, document.read())
        workers = ScriptedWorkers(
            {0: "a", 1: None, 2: None, 3: "busy"},
            {1: "b", 2: None, 3: "busy"},
            {2: None, 3: "busy"},
            {3: "d"},
        )
        _summarise(progress, workers, display)  # type: ignore[arg-type]
    assert workers.sent == [
        ([0, 1, 2, 3], True),
        ([1, 2, 3], False),
        ([2, 3], False),
        ([3], True),
    ]
    written = {record["id"]: record for record in records(tmp_path / "out.jsonl")}
    assert len(records(tmp_path / "out.jsonl")) == len(written) == 4
    summaries = {id: record["summary"] for id, record in written.items() if "summary" in record}
    assert summaries == {"0.txt": "a", "1.txt": "b", "3.txt": "d"}
    assert "was lost 3 times" in written["2.txt"]["error"]
    assert report.failed == 1


def test_parts_are_rows_of_their_own_and_one_that_fails_ends_its_document(tmp_path: Path) -> None:
    """Their answers are merged in the next round; those of the other document are dropped."""
    job = make_job(common(), TARGET, Assignment())
    builder = PromptBuilder(AutoTokenizer.from_pretrained(TARGET), job.format, 512, 12)
    with Records(tmp_path / "out.jsonl") as output, Display(2, sys.stderr) as display:
        counts = dict[str, int]()
        progress = DocumentsInProgress(
            builder,
            job,
            output.parts,
            output.append,
            lambda id, number, finished, count, passages: counts.setdefault(id, count),
        )
        for id in ("a", "b"):
            progress.begin(id, DocumentText(WORDS * 40, {}, Identity(id)))
        (first, second), count = counts.values(), 2
        assert first == second > 1
        error = {"kind": "InsufficientMemoryError", "error": "no room"}
        workers = ScriptedWorkers(
            {index: str(index) for index in range(first + 1)} | {first + 1: error},
            {count * first: "all of a"},
        )
        _summarise(progress, workers, display)  # type: ignore[arg-type]
    assert [len(indices) for indices, _ in workers.sent] == [2 * first, 1]
    written = {record["id"]: record for record in records(tmp_path / "out.jsonl")}
    assert written["a"]["summary"] == "all of a"
    assert [part["summary"] for part in written["a"]["parts"]] == [str(i) for i in range(first)]
    assert written["b"]["error"] == f"part 2 of {first}: no room"
    assert written["b"]["kind"] == "InsufficientMemoryError"


def test_answers_on_disk_that_end_a_document_leave_nothing_to_send(tmp_path: Path) -> None:
    """Those too long to be merged end it with an error, on a cluster and when it is resumed."""
    job = make_job(common(), TARGET, Assignment())
    builder = PromptBuilder(AutoTokenizer.from_pretrained(TARGET), job.format, 512, 12)
    counts = list[int]()

    def on_progress(id: str, number: int, finished: int, count: int, passages: int) -> None:
        counts.append(count)

    for sent in (1, 0):
        with Records(tmp_path / "out.jsonl") as output, Display(1, sys.stderr) as display:
            progress = DocumentsInProgress(builder, job, output.parts, output.append, on_progress)
            progress.begin("a", DocumentText(WORDS * 40, {}, Identity("a")))
            workers = ScriptedWorkers(dict.fromkeys(range(counts[0]), "\u2603" * 300))
            _summarise(progress, workers, display)  # type: ignore[arg-type]
            assert len(workers.sent) == sent
        (record,) = records(tmp_path / "out.jsonl")
        assert "too long to merge two of them" in record["error"]


class RayOfFailures:
    """Ray Data, of which one of two machines answers, and cannot start."""

    def __init__(self, answers: int = 0):
        self.answers = answers  # rounds that have answers, which are the first ones
        self.exceptions = SimpleNamespace(RayError=KeyError)
        self.data = self
        self.DataContext = SimpleNamespace(get_current=SimpleNamespace)
        self.ActorPoolStrategy = dict

    def from_items(self, rows: list[dict[str, Any]], **_: Any) -> RayOfFailures:
        self.rows = rows
        return self

    def map_batches(self, *_: Any, **__: Any) -> RayOfFailures:
        return self

    def iter_batches(self, **_: Any) -> Iterator[dict[str, Any]]:
        self.answers -= 1
        indices = np.array([row["index"] for row in self.rows])
        answer = {"kind": "TierForceError", "error": "read"}
        several = len(indices)
        yield {
            "index": indices,
            "answers": [json.dumps([answer]) if self.answers >= 0 else ""] * several,
            "error": ["no GPU"] * several,
            "machine": ["first"] * several,
        }


@pytest.mark.parametrize("answered", [0, 1])
def test_machines_that_cannot_start_end_the_job_after_some_rounds(answered: int) -> None:
    workers = object.__new__(_ClusterWorkers)
    workers._ray, workers._cluster, workers._common = (
        RayOfFailures(answered),
        Cluster("auto"),
        common(),
    )
    workers._job = make_job(common(), TARGET, Assignment())
    workers._threads, workers._on_gpus, workers.count = None, False, 2
    workers._has_answered, workers._rounds_without_answer = False, 0
    rows = [{"index": index, "prompts": "", "is_last": True} for index in range(2)]
    for _ in range(answered + 2):
        assert len(list(workers.answers(rows, batched=False))) == 2
    with pytest.raises(TierForceError, match="no machine can process documents: no GPU"):
        list(workers.answers(rows, batched=False))


def test_worker_and_command_write_the_same_summaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_worker, "_start_ranks", lambda *_: None)
    monkeypatch.setattr(cluster_worker, "_actor_id", lambda: "first")
    source, output = documents(tmp_path / "in", 3), tmp_path / "out.jsonl"
    (source / "broken.txt").unlink()
    assert forked(tmp_path / "a", *summarize(source, output), "--instruction", "Sum up.").code == 0
    contents = [(source / f"{number}.txt").read_text() for number in range(3)]
    job = make_job(common(), TARGET, Assignment(Instructions(("Sum up.",))))
    worker = cluster_worker.ClusterWorker(common(), job, 2)
    builder = PromptBuilder(worker.engine.tokenizer, job.format, 4096, 12)
    tasks = [next(builder.rounds(text, job.instructions)) for text in contents]
    rows = [encode_prompts([builder.prompt(task)[0]]) for (task,) in tasks]
    columns = {"index": [4, 7, 5], "prompts": rows, "is_last": [True] * 3}
    batch = worker({name: np.array(column) for name, column in columns.items()})
    assert batch["index"] == [4, 7, 5]
    assert batch["machine"] == ["first"] * 3
    written = [each for answers in batch["answers"] for each in json.loads(answers)]
    assert {answer["concurrency"] for answer in written} >= {2}
    expected = {record["id"]: record for record in records(output)}
    for number, record in enumerate(written):
        for name in ("summary", "prompt_tokens", "dtype", "device", "ranks"):
            assert record[name] == expected[f"{number}.txt"][name]


def test_questions_about_a_document_go_to_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their row has the document once, and it is prefilled once."""
    monkeypatch.setattr(cluster_worker, "_start_ranks", lambda *_: None)
    monkeypatch.setattr(cluster_worker, "_actor_id", lambda: "first")
    questions = Instructions(("Who?", "Where was it, and when?", "Why?"), are_questions=True)
    job = make_job(common(), TARGET, Assignment(questions))
    worker = cluster_worker.ClusterWorker(common(), job, 1)
    builder = PromptBuilder(worker.engine.tokenizer, job.format, 4096, 12)
    sizes = list[int]()

    class Workers:
        def answers(self, rows: list[dict[str, Any]], batched: bool) -> Iterator[tuple[int, Any]]:
            assert batched
            sizes.extend(len(row["prompts"]) for row in rows)
            columns = {name: [row[name] for row in rows] for name in rows[0]}
            batch = worker({name: np.array(column) for name, column in columns.items()})
            answers = [json.loads(each) for each in batch["answers"]]
            yield from zip(batch["index"], answers, strict=True)

    with Records(tmp_path / "out.jsonl") as output, Display(2, sys.stderr) as display:
        progress = DocumentsInProgress(builder, job, output.parts, output.append)
        for id in ("a", "b"):
            progress.begin(id, DocumentText(id + WORDS * 40, {}, Identity(id)))
        _summarise(progress, Workers(), display)  # type: ignore[arg-type]
    a, b = records(tmp_path / "out.jsonl")
    for record in (a, b):
        first, *others = record["answers"]
        assert first["reused_tokens"] == 0
        assert all(each["prompt_tokens"] - each["reused_tokens"] < 40 for each in others)
        assert [each["question"] for each in record["answers"]] == list(questions.strings)
    alone = len(encode_prompts([array("i", range(a["answers"][0]["prompt_tokens"]))]))
    assert len(sizes) == 2
    assert max(sizes) < 1.5 * alone


def test_machines_give_final_answers_under_the_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_worker, "_start_ranks", lambda *_: None)
    monkeypatch.setattr(cluster_worker, "_actor_id", lambda: "first")
    schema = '{"enum": ["yes", "no"]}'
    job = make_job(common(), TARGET, Assignment(format=PromptFormat(schema=schema)))
    worker = cluster_worker.ClusterWorker(common(), job, 1)
    rows = [encode_prompts([array("i", range(40))])] * 2
    columns = {"index": [0, 1], "prompts": rows, "is_last": [True, False]}
    batch = worker({name: np.array(column) for name, column in columns.items()})
    (final,), (part,) = (json.loads(each) for each in batch["answers"])
    assert final["summary"] in ('"yes"', '"no"')
    assert part["summary"] not in ('"yes"', '"no"')


@pytest.mark.parametrize(
    "prompts", [[[1, 2, 3]], [[1, 2, 3], [1, 2, 4, 5], [1, 2]], [[7], [8, 9]], [[5], [5]]]
)
def test_encoded_prompts_are_decoded(prompts: list[list[int]]) -> None:
    decoded, shared = decode_prompts(encode_prompts([array("i", each) for each in prompts]))
    assert decoded == prompts
    assert len({tuple(each[:shared]) for each in prompts}) == 1


@needs_ray
@pytest.mark.slow
def test_questions_are_answered_by_a_cluster(tmp_path: Path) -> None:
    source, output = documents(tmp_path / "in", 3), tmp_path / "out.jsonl"
    (source / "broken.txt").unlink()
    path = tmp_path / "questions.txt"
    path.write_text("Who?\nWhy?")
    options = ("--questions", str(path), "--context", "250")  # some documents have parts
    alone = tmp_path / "alone.jsonl"
    assert forked(tmp_path / "a", *summarize(source, alone), *options).code == 0
    cluster = ("--cluster", "local", "--machines", "2")
    result = forked(tmp_path / "b", *summarize(source, output), *options, *cluster)
    assert result.code == 0, result.err

    def answers(path: Path) -> dict[str, list[str]]:
        return {each["id"]: [own["answer"] for own in each["answers"]] for each in records(path)}

    assert answers(output) == answers(alone)
    written = [own for record in records(output) for own in record["answers"]]
    assert {"parts" in own for own in written} == {True, False}


def test_worker_that_cannot_start_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_worker, "_FAILURE_DELAY_S", 0.0)
    monkeypatch.setattr(cluster_worker, "_start_ranks", lambda *_: None)
    monkeypatch.setattr(cluster_worker, "_actor_id", lambda: "first")
    too_long = replace(common(), settings=Settings(context=999_999))
    batch = {"index": np.array([4, 7]), "prompts": np.array(["", ""], dtype=object)}
    for weights, reason in (
        (model_digest(TARGET), "`context` 999999 is more"),
        ("0" * 8, "different weights"),
    ):
        job = make_job(too_long, TARGET, Assignment())
        result = cluster_worker.ClusterWorker(too_long, replace(job, weights=weights), 1)(batch)
        assert result["index"] == [4, 7]
        assert result["answers"] == ["", ""]
        assert result["machine"] == ["first", "first"]
        assert all(reason in error for error in result["error"])


@needs_ray
@pytest.mark.parametrize("address", slow_except(["127.0.0.1:1", "auto"]))
def test_missing_cluster_is_an_error(address: str, tmp_path: Path) -> None:
    source = documents(tmp_path / "in", 1)
    (source / "broken.txt").unlink()
    result = forked(tmp_path, *summarize(source, tmp_path / "out.jsonl"), "--cluster", address)
    assert f"--cluster {address}: no Ray cluster answers" in refused(result)
    assert not (tmp_path / "out.jsonl").exists()


class CountingGuard:
    """A guard that counts calls of `dismiss`."""

    dismissed = 0
    process = psutil.Process()

    def __init__(self, message: str):
        CountingGuard.dismissed = 0

    def dismiss(self) -> None:
        CountingGuard.dismissed += 1


def _raise(*_: Any, **__: Any) -> None:
    raise KeyError("anything")


@pytest.mark.parametrize("failing_call", ["init", "nodes", "shutdown"])
def test_guard_is_dismissed_if_ray_raises(
    failing_call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would report that this job was killed."""
    node = {"Alive": True, "Resources": {"CPU": 1}}
    functions = {"init": lambda **_: None, "nodes": lambda: [node], "shutdown": lambda: None}
    ray = ModuleType("ray")
    ray.data = ModuleType("ray.data")  # type: ignore[attr-defined]
    for name, function in {**functions, failing_call: _raise}.items():
        setattr(ray, name, function)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", ray.data)  # type: ignore[attr-defined]
    monkeypatch.setattr("decoding.app.batch.cluster.ClusterGuard", CountingGuard)
    monkeypatch.setattr("psutil.wait_procs", lambda *_, **__: ([], []))
    job = make_job(common(), TARGET, Assignment())
    # _ClusterWorkers sets variables for Ray
    with patch.dict(os.environ), pytest.raises(KeyError, match="anything"):
        _ClusterWorkers(Cluster("auto"), common(), job).close()
    assert CountingGuard.dismissed == 1


@pytest.mark.slow
def test_guard_kills_children_of_a_job_that_died_first(tmp_path: Path) -> None:
    job = subprocess.Popen([sys.executable, "-c", ""])
    job.wait()
    environment = {**os.environ, "TIERFORCE_CLUSTER_JOB": str(job.pid)}
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=environment
    )
    command = [
        sys.executable,
        "-m",
        "decoding.app.batch.cluster_guard",
        str(job.pid),
        "it was killed",
    ]
    guard = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (guard.returncode, guard.stderr) == (0, "it was killed\n")
    assert child.wait() == -signal.SIGKILL


def _hide_ray() -> None:
    sys.modules["ray"] = None  # type: ignore[assignment]


def test_missing_ray_error_has_the_install_command(tmp_path: Path) -> None:
    source = documents(tmp_path / "in", 1)
    (source / "broken.txt").unlink()
    options = ("--cluster", "local")
    result = forked(
        tmp_path, *summarize(source, tmp_path / "out.jsonl"), *options, before=_hide_ray
    )
    assert "pip install 'tierforce[cluster]'" in refused(result)
    assert not (tmp_path / "out.jsonl").exists()


def test_machines_option_needs_cluster(tmp_path: Path) -> None:
    source = documents(tmp_path / "in", 1)
    result = forked(tmp_path, *summarize(source, tmp_path / "out.jsonl"), "--machines", "2")
    assert "--machines needs --cluster" in refused(result)


def _limit_open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))


def test_open_file_limit_for_ray_is_an_error(tmp_path: Path) -> None:
    source = documents(tmp_path / "in", 1)
    options = ("--cluster", "local")
    result = forked(
        tmp_path, *summarize(source, tmp_path / "out.jsonl"), *options, before=_limit_open_files
    )
    lines = result.err.splitlines()
    assert result.code == 1
    assert (
        "--cluster local needs 512 open files at a time, and `ulimit -Hn` allows 100" in lines[-1]
    )
