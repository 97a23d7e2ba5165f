"""Batch summaries on many machines: documents and records go through Ray Data."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from decoding.app.batch.cluster_guard import ClusterGuard
from decoding.app.batch.documents import Document
from decoding.app.batch.job import BatchJob
from decoding.app.batch.records import Records
from decoding.app.batch.summarize import Results, due_documents, failure, job_of, listed
from decoding.app.options import Common
from decoding.app.terminal.progress import Display
from decoding.app.terminal.signals import Interrupts
from decoding.app.terminal.streams import advice_after_loss, say, silence_transformers
from offload.errors import InvalidRequestError, TierForceError, one_line
from offload.layout import ceil_div
from parallel.config.model_config import ModelConfig
from parallel.model.loading import resolve
from parallel.ranks.launch import require_open_files
from parallel.ranks.process_group import TensorParallelGroup

_TIMEOUT_S = 10.0  # seconds that a cluster of our own may take to end
_FILES = 512  # that each of Ray's processes may open at a time
_TRIES = 3  # of a document whose machine is lost
_ADVICE = advice_after_loss(["summarize"])


@dataclass(frozen=True)
class Cluster:
    """Where the machines are, and how many take part."""

    address: str  # of a Ray cluster; auto for the one that runs here, local for a new one
    machines: int | None = None  # None: all
    concurrency: int = 1  # documents that a machine is sent at a time, and writes together


def run(
    common: Common,
    source: Path,
    output: Path,
    instruction: str,
    cluster: Cluster,
    interrupts: Interrupts,
) -> None:
    """Summarise the documents of `source` into `output` on the machines of a cluster.

    Raises TierForceError for what keeps the job from starting or going on, and at its end where
    documents failed.
    """
    silence_transformers()
    documents = listed(source, output)
    folder = resolve(common.model, TensorParallelGroup())
    job = job_of(common, folder, instruction)
    limit = ModelConfig.from_name(str(folder)).with_rope_scaling(common.settings.rope).context_limit
    with Records(output) as records:
        due = due_documents(documents, records, job)
        if not due:
            say(f"all {len(documents)} documents were finished before, in {output}")
            return
        with Display(len(documents), sys.stderr) as display:
            results = Results(documents, due, records, display)
            interrupts.last_words = _ending_all(results.last_words)
            if rows := list(_readable(due, results)):
                machines = _ClusterWorkers(cluster, common, job)
                try:
                    say(f"{machines.count} machines of a Ray cluster; {len(rows)} documents")
                    _write(rows, machines, due, results)
                finally:
                    machines.close()
    results.conclude(common.settings.context or limit)


def _readable(due: Sequence[Document], results: Results) -> Iterator[dict[str, Any]]:
    """Yield the documents as rows of a dataset; those that cannot be read have failed."""
    for place, document in enumerate(due):
        try:
            yield {"place": place, "text": document.read()}
        except InvalidRequestError as error:
            results.add(*failure(document.id, error))


def _write(
    rows: Sequence[dict[str, Any]],
    machines: _ClusterWorkers,
    due: Sequence[Document],
    results: Results,
) -> None:
    """Let what is readable be summarised. Raises TierForceError."""
    left = {row["place"]: row for row in rows}
    lost: Counter[int] = Counter()  # how often a document's machine was
    first = True
    while left:
        answered = set[int]()
        # a text that ends machines is not to take others along again
        for place, record, line in machines.summaries(list(left.values()), together=first):
            answered.add(place)
            if record is not None and left.pop(place, None) is not None:
                results.add({**record, "id": due[place].id}, line)
        first = False
        lost.update(left.keys() - answered)
        for place in [place for place in left if lost[place] == _TRIES]:
            del left[place]
            error = TierForceError(
                f"the machine that had this document was lost {_TRIES} times; its memory may not "
                "do."
            )
            results.add(*failure(due[place].id, error))


def _ending_all(say_last_words: Callable[[str], None]) -> Callable[[str], None]:
    """Return last words behind which nothing is left of a cluster that was started here."""

    def say_and_end(name: str) -> None:
        say_last_words(name)
        _kill(psutil.Process().children(recursive=True))

    return say_and_end


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _check_reachable(address: str) -> None:
    """Raise OSError where nothing listens at host:port; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        where = host.rpartition("/")[2]  # behind ray://
        socket.create_connection((where, int(port)), timeout=_TIMEOUT_S).close()


class _ClusterWorkers:
    """Actors of a Ray cluster, one for each machine."""

    def __init__(self, cluster: Cluster, common: Common, job: BatchJob):
        """Join the cluster. Raises TierForceError where there is none, or no Ray."""
        self._threads = os.environ.get("OMP_NUM_THREADS")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anyone
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # it prints stacks
        if cluster.address == "local":
            # as Ray does on other systems than Linux: all its ports are on the loopback then
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            require_open_files(_FILES, "--cluster local")
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise TierForceError(
                "--cluster needs Ray: pip install 'tierforce[cluster]', on every machine."
            ) from error
        self._ray, self._cluster, self._common, self._job = ray, cluster, common, job
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
        """Join the cluster, and count its machines. Raises TierForceError."""
        ray, cluster, common = self._ray, self._cluster, self._common
        new = {}
        if cluster.address == "local":
            processors = max(os.cpu_count() or 1, cluster.machines or 1)
            new = {"include_dashboard": False, "num_cpus": processors}
        try:
            _check_reachable(cluster.address)
            ray.init(
                address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, **new
            )
        except (OSError, OverflowError, ValueError, RuntimeError) as error:
            raise TierForceError(
                f"--cluster {cluster.address}: no Ray cluster answers ({one_line(error)}). Start "
                "one with `ray start --head`, or say --cluster local."
            ) from error
        # Ray Data has a log of its own on the terminal, with a traceback of each machine lost
        for name in ("ray", "ray.data"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        gpus, alive = common.gpus or 1, [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._on_gpus = common.device != "cpu" and any(node.get("GPU", 0) for node in alive)
        kind, needed = ("GPU", gpus) if self._on_gpus else ("CPU", 1)
        places = [int(node.get(kind, 0)) // needed for node in alive]
        most = sum(places)
        self.count = cluster.machines or sum(each > 0 for each in places)
        if self.count > most or not most:
            what = f"{gpus} GPUs" if self._on_gpus else "a processor"
            raise TierForceError(
                f"--cluster {cluster.address} has {most} machines with {what} each, and "
                f"{self.count} are asked for: say fewer --machines, or other --gpus."
            )

    def summaries(
        self, rows: Sequence[dict[str, Any]], together: bool
    ) -> Iterator[tuple[int, dict[str, Any] | None, str]]:
        """Yield the place of each document, its record and what is said of it.

        The record is None where a machine could not do anything. What was on a machine that is lost
        is not yielded. `together`: a machine is sent as many at a time as it writes at once. Raises
        TierForceError where no machine can do anything, and where the cluster is lost.
        """
        from decoding.app.batch.cluster_worker import ClusterWorker

        data = self._ray.data
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        # what an actor is told beside its GPUs will be told otherwise from 2.64 on, which setup.py
        # leaves out
        warnings.filterwarnings("ignore", message=".*ray_remote_args")
        context.max_errored_blocks = -1  # what is missing is sent again
        context.execution_no_progress_timeout_s = -1  # a document may take as long as it takes
        concurrency = self._cluster.concurrency if together else 1
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
        useless, is_done = set[str](), False
        try:
            for batch in dataset.iter_batches(batch_size=None, prefetch_batches=0):
                for place, record, line, machine in zip(
                    batch["place"].tolist(),
                    batch["record"],
                    batch["line"],
                    batch["machine"],
                    strict=True,
                ):
                    if record:
                        is_done = True
                        yield place, json.loads(record), line
                        continue
                    yield place, None, line
                    useless.add(machine)
                    if len(useless) == size and not is_done:
                        raise TierForceError(f"no machine can do the work: {line}")
        except self._ray.exceptions.RayError as error:
            raise TierForceError(
                f"the machines of --cluster {self._cluster.address} are lost "
                f"({type(error).__name__}). {_ADVICE}"
            ) from error

    def close(self) -> None:
        """Leave the cluster, and wait for the end of one that was started here."""
        guard = self._guard.process.pid
        ours = [each for each in psutil.Process().children(recursive=True) if each.pid != guard]
        try:
            self._ray.shutdown()
            _, left = psutil.wait_procs(ours, timeout=_TIMEOUT_S)
            _kill(left)
        finally:
            self._guard.dismiss()
