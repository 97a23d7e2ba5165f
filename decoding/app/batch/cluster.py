"""Batch summaries on many machines, through Ray Data."""

from __future__ import annotations

import json
import logging
import os
import socket
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, groupby, islice
from typing import Any

import psutil

from decoding.app.batch.assignment import Assignment
from decoding.app.batch.cluster_guard import ClusterGuard
from decoding.app.batch.cluster_prompts import encode_prompts
from decoding.app.batch.documents_in_progress import DocumentsInProgress, Work
from decoding.app.batch.job import BatchJob
from decoding.app.batch.report import Report, conclude_finished
from decoding.app.batch.summarize import (
    Source,
    begin,
    begin_request,
    due_documents,
    list_documents,
    make_display,
    make_job,
    report_answer,
    say_assignment,
)
from decoding.app.options import Common
from decoding.app.results.destination import Destination, ResultFiles
from decoding.app.terminal.pace import Pace
from decoding.app.terminal.progress import Display
from decoding.app.terminal.signals import Interrupts
from decoding.app.terminal.streams import advice_after_loss, say, silence_transformers
from decoding.models.loading import load_tokenizer
from decoding.text.long_text import PromptBuilder
from offload.errors import TierForceError, one_line
from offload.layout import ceil_div
from parallel.config.model_config import ModelConfig
from parallel.model.loading import resolve
from parallel.ranks.launch import require_open_files
from parallel.ranks.process_group import TensorParallelGroup

_TIMEOUT_S = 10.0  # limit until a cluster started here has stopped
_OPEN_FILES = 512  # open at the same time in each of Ray's processes
_MAX_GROUP = 64  # questions about one text that a machine answers before the answers are on disk
_MAX_ATTEMPTS = 3  # machines lost per document, and rounds in which none starts
_ADVICE = advice_after_loss(["summarize"])


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster, and how much of it to use."""

    address: str  # host:port, auto for the cluster running here, or local for a new one
    machines: int | None = None  # None: all
    concurrency: int = 1  # concurrent documents per machine, sent as one batch


def run(
    common: Common,
    source: Source,
    destination: Destination,
    assignment: Assignment,
    cluster: Cluster,
    interrupts: Interrupts,
) -> None:
    """Summarise the documents of `source` into `destination` on the machines of a cluster.

    Raises TierForceError if the job cannot start or continue, and at the end if documents failed.
    """
    silence_transformers()
    documents = list_documents(source, destination)
    say_assignment(assignment, common)
    folder = resolve(common.model, TensorParallelGroup())
    job = make_job(common, folder, assignment)
    limit = ModelConfig.from_name(str(folder)).with_rope_scaling(common.settings.rope).context_limit
    context = common.settings.context or limit
    tokenizer = load_tokenizer(folder)
    builder = PromptBuilder(tokenizer, job.format, context, job.max_new_tokens)
    with ResultFiles(destination, [document.id for document in documents]) as results:
        due = due_documents(documents, results.records, job)
        if not due:
            conclude_finished(documents, results)
            return
        results.start()
        with make_display(documents, due, job, is_live=False) as display:
            report = Report(documents, due, results, display)
            interrupts.on_exit = _with_cleanup(report.interrupt)
            progress = DocumentsInProgress(
                builder, job, results.records.parts, report.add, report.progress
            )
            for document in due:
                begin(progress, document.id, document.read, context, display)
            if progress:
                workers = _ClusterWorkers(cluster, common, job)
                try:
                    begun = sum(document.id in progress for document in due)
                    say(f"{workers.count} machines of a Ray cluster; {begun} documents")
                    _summarise(progress, workers, display)
                finally:
                    workers.close()
        report.conclude(context)


def _summarise(progress: DocumentsInProgress, workers: _ClusterWorkers, display: Display) -> None:
    """Process all tasks of the documents in progress, in rounds. Raises TierForceError."""
    remaining = dict[int, _Group]()  # keys are numbers
    losses: Counter[int] = Counter()  # machines lost, by that number
    numbers = count()
    while progress:
        for group in _groups(progress.work(), display.pace):
            remaining[next(numbers)] = group
        if not remaining:  # answers on disk have ended the last document
            continue
        rows = [
            {"index": index, "prompts": group.prompts, "is_last": group.works[0].task.is_last}
            for index, group in remaining.items()
        ]
        reported = set[int]()
        # Lost tasks go alone: one that crashes machines fails no others.
        for index, answers in workers.answers(rows, batched=not losses.keys() & remaining.keys()):
            reported.add(index)
            if answers is not None and index in remaining:
                for work, answer in zip(remaining.pop(index).works, answers, strict=True):
                    _finish(progress, work, answer, display)
        losses.update(remaining.keys() - reported)
        for index, group in list(remaining.items()):
            if losses[index] == _MAX_ATTEMPTS:
                reason = (
                    f"the machine processing this document was lost {_MAX_ATTEMPTS} times: it may "
                    "have run out of memory."
                )
                progress.fail(group.works[0], TierForceError.__name__, reason)
            if group.works[0].document not in progress:
                del remaining[index]


@dataclass(frozen=True)
class _Group:
    """Tasks about one text, which one machine processes, and their prompts."""

    works: Sequence[Work]  # without their prompts, which take memory
    prompts: str  # encoded


def _groups(works: Iterable[Work], pace: Pace) -> Iterator[_Group]:
    """Yield consecutive tasks about one text as groups."""
    for _, group in groupby(works, lambda work: (work.document, work.task.content)):
        while own := list(islice(group, _MAX_GROUP)):
            for work in own:
                begin_request(pace, work)
            prompts = encode_prompts([work.prompt for work in own])
            yield _Group([replace(work, prompt=array("i")) for work in own], prompts)


def _finish(
    progress: DocumentsInProgress, work: Work, answer: dict[str, Any], display: Display
) -> None:
    """Take the answer to a task, or its error."""
    if "error" in answer:
        progress.fail(work, answer["kind"], answer["error"])
        return
    report_answer(work.name, answer, display, is_part=bool(work.task.name))
    display.pace.finish(work.document, work.name, answer)
    progress.finish(work, answer)


def _with_cleanup(report_interrupt: Callable[[str], None]) -> Callable[[str], None]:
    """Return an exit handler that also kills the processes of a cluster started here."""

    def report_and_kill(name: str) -> None:
        report_interrupt(name)
        _kill(psutil.Process().children(recursive=True))

    return report_and_kill


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at host:port: Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        where = host.rpartition("/")[2]  # without ray://
        socket.create_connection((where, int(port)), timeout=_TIMEOUT_S).close()


class _ClusterWorkers:
    """Actors of a Ray cluster, one for each machine."""

    def __init__(self, cluster: Cluster, common: Common, job: BatchJob):
        """Connect to the cluster. Raises TierForceError if it does not answer or Ray is missing."""
        self._threads = os.environ.get("OMP_NUM_THREADS")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # sends no usage data
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # prints stacks
        if cluster.address == "local":
            # Binds all ports to the loopback interface, as Ray does on systems other than Linux.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            require_open_files(_OPEN_FILES, "--cluster local")
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise TierForceError(
                "--cluster needs Ray: pip install 'tierforce[cluster]', on every machine."
            ) from error
        self._ray, self._cluster, self._common, self._job = ray, cluster, common, job
        self._has_answered = False  # any machine
        self._rounds_without_answer = 0  # consecutive ones
        self._guard = ClusterGuard(
            f"tierforce: the Ray node of --cluster {cluster.address} on this machine, or this job "
            f"itself, was killed (out of memory?). {_ADVICE}"
        )
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        """Connect to the cluster, and count its machines. Raises TierForceError."""
        ray, cluster, common = self._ray, self._cluster, self._common
        options = {}
        if cluster.address == "local":
            processors = max(os.cpu_count() or 1, cluster.machines or 1)
            options = {"include_dashboard": False, "num_cpus": processors}
        try:
            _check_reachable(cluster.address)
            ray.init(
                address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, **options
            )
        except (OSError, OverflowError, ValueError, RuntimeError) as error:
            raise TierForceError(
                f"--cluster {cluster.address}: no Ray cluster answers ({one_line(error)}). Start "
                "one with `ray start --head`, or pass --cluster local."
            ) from error
        # Ray Data logs to the terminal itself, with a traceback for each lost machine.
        for name in ("ray", "ray.data"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        gpus, alive = common.gpus or 1, [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._on_gpus = common.device != "cpu" and any(node.get("GPU", 0) for node in alive)
        kind, needed = ("GPU", gpus) if self._on_gpus else ("CPU", 1)
        slots = [int(node.get(kind, 0)) // needed for node in alive]
        max_count = sum(slots)
        self.count = cluster.machines or sum(count > 0 for count in slots)
        if self.count > max_count or not max_count:
            what = f"{gpus} GPUs" if self._on_gpus else "a CPU"
            raise TierForceError(
                f"--cluster {cluster.address} has {max_count} machines with {what} each, but "
                f"{self.count} are requested: lower --machines or --gpus."
            )

    def answers(
        self, rows: Sequence[dict[str, Any]], batched: bool
    ) -> Iterator[tuple[int, list[dict[str, Any]] | None]]:
        """Yield the index of each row and its answers: their fields, or `error` and its `kind`.

        The answers are None if their machine could not start. Rows of a lost machine are not
        yielded. With `batched`, machines get batches of `concurrency` rows, else one at a time.
        Raises TierForceError if no machine can start, or those that are chosen cannot several times
        in a row, and if the cluster is lost.
        """
        from decoding.app.batch.cluster_worker import ClusterWorker

        data = self._ray.data
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        # deprecated only from Ray 2.64 on, which setup.py excludes
        warnings.filterwarnings("ignore", message=".*ray_remote_args")
        context.max_errored_blocks = -1  # missing documents are sent again
        context.execution_no_progress_timeout_s = -1  # no time limit per document
        concurrency = self._cluster.concurrency if batched else 1
        blocks = ceil_div(len(rows), concurrency)
        size = min(self.count, blocks)
        gpus = self._common.gpus or 1
        dataset = data.from_items(list(rows), override_num_blocks=blocks).map_batches(
            ClusterWorker,
            fn_constructor_args=(self._common, self._job, concurrency, self._threads),
            batch_size=concurrency,
            compute=data.ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=1),
            num_gpus=gpus if self._on_gpus else None,
            scheduling_strategy="SPREAD",
            max_restarts=-1,
            max_task_retries=0,
        )
        failing, reason = set[str](), ""
        self._rounds_without_answer += 1  # until the first answer
        try:
            for batch in dataset.iter_batches(batch_size=None, prefetch_batches=0):
                for index, answers, error, machine in zip(
                    batch["index"].tolist(),
                    batch["answers"],
                    batch["error"],
                    batch["machine"],
                    strict=True,
                ):
                    if answers:
                        self._has_answered, self._rounds_without_answer = True, 0
                        yield index, json.loads(answers)
                        continue
                    reason = error
                    yield index, None
                    failing.add(machine)
                    is_last_try = self._rounds_without_answer >= _MAX_ATTEMPTS
                    if len(failing) == size and (is_last_try or not self._has_answered):
                        raise TierForceError(f"no machine can process documents: {error}")
            if failing and self._rounds_without_answer >= _MAX_ATTEMPTS:
                raise TierForceError(f"no machine can process documents: {reason}")
        except self._ray.exceptions.RayError as error:
            raise TierForceError(
                f"the machines of --cluster {self._cluster.address} are lost "
                f"({type(error).__name__}). {_ADVICE}"
            ) from error

    def close(self) -> None:
        """Disconnect, and wait for a cluster started here to stop."""
        guard = self._guard.process.pid
        ours = [
            process for process in psutil.Process().children(recursive=True) if process.pid != guard
        ]
        try:
            self._ray.shutdown()
            _, remaining = psutil.wait_procs(ours, timeout=_TIMEOUT_S)
            _kill(remaining)
        finally:
            self._guard.dismiss()
