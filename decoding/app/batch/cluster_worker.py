"""One machine of a cluster: an engine on its GPUs that summarises batches of documents."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from decoding.app.batch.cluster_prompts import decode_prompts
from decoding.app.batch.documents_in_progress import description
from decoding.app.batch.job import BatchJob, model_digest
from decoding.app.batch.summarize import answer_of
from decoding.app.options import Common
from decoding.app.terminal.streams import silence_transformers, warn
from decoding.engine.engine import Engine
from decoding.engine.request import Request
from decoding.text.long_text import rooms_for_later
from decoding.text.prompt import JOIN_TOKENS
from offload.errors import TierForceError, one_line
from parallel.model.loading import resolve
from parallel.ranks.environment import RankLost
from parallel.ranks.process_group import TensorParallelGroup
from parallel.ranks.python_module import module_arguments

_FAILURE_DELAY_S = 5.0  # a failed machine answers slowly, which leaves documents to the others
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class ClusterWorker:
    """A Ray Data actor: an engine, loaded once and called with batches."""

    engine: Engine

    def __init__(self, common: Common, job: BatchJob, concurrency: int, threads: str | None = None):
        """Load the models on `common.gpus` ranks, of which this process is the first.

        `threads` is OMP_NUM_THREADS of the driver, if set there. Errors are reported by the first
        call: Ray would bury them in a traceback.
        """
        silence_transformers()
        self.job, self.concurrency, self.actor_id = job, concurrency, _actor_id()
        self.startup_error: str | None = None
        try:
            _start_ranks(common, job, threads)
            self.engine = _load_engine(common, job)
            self.engine.grammars.compile_optional(job.grammar)
        except RankLost:
            os._exit(1)
        except Exception as error:
            kind = "" if isinstance(error, TierForceError) else f"{type(error).__name__}: "
            self.startup_error = f"{kind}{one_line(error)}"

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Process a batch of rows; return the JSON list of answers to each row's prompts.

        An answer may be an error. If the models failed to load, lists are empty strings.
        """
        indices = batch["index"].tolist()
        answers = [""] * len(indices)
        if self.startup_error is None:
            pairs = zip(batch["prompts"], batch["is_last"].tolist(), strict=True)
            groups = [self._requests(encoded, is_last) for encoded, is_last in pairs]
            answers = [json.dumps(each) for each in self._answers(groups)]
        else:
            time.sleep(_FAILURE_DELAY_S)
        return {
            "index": indices,
            "answers": answers,
            "error": [self.startup_error or ""] * len(indices),
            "machine": [self.actor_id] * len(indices),
        }

    def _requests(self, encoded: str, is_last: bool) -> list[Request]:
        """Return requests for prompts that begin alike; `is_last`: for final answers."""
        prompts, common = decode_prompts(encoded)
        shared = max(0, common - JOIN_TOKENS) if len(prompts) > 1 else 0
        rooms = rooms_for_later([len(each) for each in prompts])
        options = self.job.max_new_tokens, self.job.sampling
        grammar = self.engine.grammars.compile_optional(self.job.grammar if is_last else None)
        return [
            Request(prompt, *options, room=room, shared=shared, grammar=grammar)
            for prompt, room in zip(prompts, rooms, strict=True)
        ]

    def _answers(self, groups: Sequence[Sequence[Request]]) -> list[list[dict[str, Any]]]:
        """Return the answers to the requests of each group."""
        requests = [each for group in groups for each in group]
        answers = dict[int, dict[str, Any]]()
        try:
            concurrency = min(self.concurrency, len(requests))
            for state in self.engine.generate_batch(requests, concurrency):
                if state.error is None:
                    answer = answer_of(self.engine, state)
                else:
                    kind, reason = description(state.error)
                    answer = {"kind": kind, "error": reason}
                answers[id(state.request)] = answer
        except BaseException:  # not an error of one request: the state is unknown
            os._exit(1)
        return [[answers[id(each)] for each in group] for group in groups]


def _actor_id() -> str:
    """Return Ray's id of this actor, which survives restarts."""
    import ray

    return ray.get_runtime_context().get_actor_id() or "no actor"


def _load_engine(common: Common, job: BatchJob) -> Engine:
    """Load the models on this rank. Raises TierForceError, also if weights differ."""
    group = TensorParallelGroup.from_environment(common.device, warn)
    folder = resolve(common.model, group)
    with group.sync_errors():
        if model_digest(folder) != job.weights:
            raise TierForceError(
                f"--model {common.model} has different weights on this machine than on the driver."
            )
    return Engine.from_pretrained(folder, common.draft, common.settings, group=group)


def _start_ranks(common: Common, job: BatchJob, threads: str | None) -> None:
    """Make this process rank 0 of its machine, whatever started it, and start the other ranks."""
    for name in list(os.environ):
        if name in _LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    ranks = common.gpus or 1
    if threads is None or not threads.isdecimal():  # Ray gives actors one
        threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    os.environ["OMP_NUM_THREADS"] = threads
    torch.set_num_threads(max(1, int(threads)))
    if ranks > 1:
        os.environ |= _start_other_ranks(common, job, ranks)


def _start_other_ranks(common: Common, job: BatchJob, ranks: int) -> dict[str, str]:
    """Start the other ranks of this machine; return the environment variables of rank 0.

    They exit with this process, however it ends, since their standard input closes. It exits if any
    of them does.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    variables = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for rank in range(1, ranks):
        rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = subprocess.Popen(
            [sys.executable, *module_arguments("decoding.app.batch.cluster_worker")],
            env={**os.environ, **variables, **rank_variables},
            stdin=subprocess.PIPE,
        )
        assert process.stdin is not None
        pickle.dump((common, job), process.stdin)
        process.stdin.flush()
        threading.Thread(target=_exit_with, args=(process,), daemon=True).start()
    return {**variables, "RANK": "0", "LOCAL_RANK": "0"}


def _exit_with(process: subprocess.Popen[bytes]) -> None:
    """Exit when another rank exits: a collective could wait for it for hours."""
    process.wait()
    os._exit(1)


def _run_worker() -> None:
    """Run a rank other than 0 until rank 0 exits."""
    common, job = pickle.load(sys.stdin.buffer)  # from rank 0

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    silence_transformers()
    _load_engine(common, job).run_worker()


if __name__ == "__main__":
    _run_worker()
