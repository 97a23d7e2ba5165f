"""One machine of a cluster: an engine on all its GPUs, which summarises what it is sent."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from decoding.app.batch.job import BatchJob, model_digest
from decoding.app.batch.summarize import Summaries
from decoding.app.options import Common
from decoding.app.terminal.progress import Display
from decoding.app.terminal.streams import silence_transformers, warn
from decoding.engine.engine import Engine
from decoding.text.prompt import Template
from offload.errors import TierForceError, one_line
from parallel.model.loading import resolve
from parallel.ranks.environment import RankLost
from parallel.ranks.process_group import TensorParallelGroup

_HELD = 5.0  # seconds that a machine in trouble keeps what others might do
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ClusterWorker:
    """An engine, made once, and called with batch after batch; an actor of Ray Data."""

    engine: Engine
    template: Template

    def __init__(self, common: Common, job: BatchJob, concurrency: int, threads: str | None = None):
        """Load the models on `common.gpus` ranks, of which this process is the first.

        `threads`: OMP_NUM_THREADS where the job was started, if it is set there. What keeps it from
        that is told when it is called: Ray would bury it in a traceback.
        """
        silence_transformers()
        self.job, self.concurrency, self.name = job, concurrency, _own_name()
        self.trouble: str | None = None
        try:
            _join(common, job, threads)
            self.engine = _engine(common, job)
            self.template = Template.summary(self.engine.tokenizer, job.instruction)
        except RankLost:
            os._exit(1)
        except Exception as error:
            name = "" if isinstance(error, TierForceError) else f"{type(error).__name__}: "
            self.trouble = f"{name}{one_line(error)}"

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Summarise the documents of a batch; return a record of each, as JSON, and its line.

        Where nothing can be done here, records are empty, and lines say why.
        """
        places = batch["place"].tolist()
        records, lines = [""] * len(places), [self.trouble] * len(places)
        if self.trouble is None:
            found = self._summaries(dict(zip(map(str, places), batch["text"], strict=True)))
            records = [json.dumps(found[str(place)][0]) for place in places]
            lines = [found[str(place)][1] for place in places]
        else:
            time.sleep(_HELD)
        names = [self.name] * len(places)
        return {"place": places, "record": records, "line": lines, "machine": names}

    def _summaries(self, texts: Mapping[str, str]) -> dict[str, tuple[dict[str, Any], str]]:
        """Return the record of each text, and what is said of it, by the same names."""
        found: dict[str, tuple[dict[str, Any], str]] = {}

        def done(record: dict[str, Any], line: str) -> None:
            found[record["id"]] = record, line

        concurrency = min(self.concurrency, len(texts))
        with open(os.devnull, "w") as nowhere:
            display = Display(len(texts), nowhere)
            summaries = Summaries(self.engine, self.template, self.job, concurrency, display, done)
            try:
                summaries.write({name: partial(str, text) for name, text in texts.items()})
            except BaseException:  # of no document: nothing here is to be trusted any more
                os._exit(1)
        return found


def _own_name() -> str:
    """Return what Ray calls this actor, however often it was started again."""
    import ray

    return ray.get_runtime_context().get_actor_id() or "no actor"


def _engine(common: Common, job: BatchJob) -> Engine:
    """Load the models on this rank. Raises TierForceError, also for another model's weights."""
    group = TensorParallelGroup.from_environment(common.device, warn)
    folder = resolve(common.model, group)
    with group.sync_errors():
        if model_digest(folder) != job.weights:
            raise TierForceError(f"--model {common.model} holds other weights there than here.")
    return Engine.from_pretrained(folder, common.draft, common.settings, group=group)


def _join(common: Common, job: BatchJob, threads: str | None) -> None:
    """Make this process the first rank of its machine, whatever it was started under."""
    for name in list(os.environ):
        if name in _LAUNCHERS or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    ranks = common.gpus or 1
    if threads is None or not threads.isdecimal():  # Ray leaves one to an actor
        threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    os.environ["OMP_NUM_THREADS"] = threads
    torch.set_num_threads(max(1, int(threads)))
    if ranks > 1:
        os.environ |= _start_others(common, job, ranks)


def _start_others(common: Common, job: BatchJob, ranks: int) -> dict[str, str]:
    """Start the other ranks of this machine; return what the first one's environment lacks.

    They end with this process, whichever way it ends: their standard input does. It ends with any
    of them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for rank in range(1, ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        other = subprocess.Popen(
            [sys.executable, "-m", "decoding.app.batch.cluster_worker"],
            env={**os.environ, **own, **place},
            stdin=subprocess.PIPE,
        )
        assert other.stdin is not None
        pickle.dump((common, job), other.stdin)
        other.stdin.flush()
        threading.Thread(target=_end_with, args=(other,), daemon=True).start()
    return {**own, "RANK": "0", "LOCAL_RANK": "0"}


def _end_with(other: subprocess.Popen[bytes]) -> None:
    """End this process when another rank has ended: a collective might wait for it for hours."""
    other.wait()
    os._exit(1)


def _follow() -> None:
    """Be another rank of a machine, until its first one is gone."""
    common, job = pickle.load(sys.stdin.buffer)  # from the process that started this one

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    silence_transformers()
    _engine(common, job).run_worker()


if __name__ == "__main__":
    _follow()
