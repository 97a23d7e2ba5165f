"""One machine of a cluster: an engine on all its GPUs, which summarises what it is sent."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decoding.app.job import Job
from decoding.app.options import Common
from decoding.app.summarize import Summaries
from decoding.app.terminal import silence_transformers
from decoding.engine import Engine
from decoding.planning.fit import Sharing
from decoding.prompt import Template
from decoding.stats import Stats
from offload.errors import TierForceError
from parallel.environment import RankLost
from parallel.group import Group
from parallel.loading import resolve

NOWHERE = -1  # in place of a document's


@dataclass(frozen=True)
class Sent:
    """A document whose text has come over the network."""

    id: str
    text: str

    def read(self) -> str:
        """Return the text."""
        return self.text


class Collected:
    """What `Summaries` writes and shows, kept to be sent back."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self.lines: dict[str, list[str]] = {}

    def append(self, record: dict[str, Any]) -> None:
        """Keep a record."""
        self.records[record["id"]] = record

    def end(self, name: str, line: str) -> None:
        """Keep what is said of a document that is done."""
        self.lines.setdefault(name, []).append(line)

    def warn(self, line: str) -> None:
        """Leave it out: the record says as much."""

    def begin(self, name: str) -> None:
        """Show nothing here."""

    def prefill(self, name: str, done: int, total: int) -> None:
        """Show nothing here."""

    def decode(self, name: str, most: int, stats: Stats) -> None:
        """Show nothing here."""


class Machine:
    """An engine, made once, and called with batch after batch; an actor of Ray Data."""

    engine: Engine
    template: Template

    def __init__(self, common: Common, job: Job, at_once: int):
        """Load the models on `common.gpus` ranks, of which this process is the first.

        What keeps it from that is told when it is called: Ray would bury it in a traceback.
        """
        silence_transformers()
        self.job, self.at_once = job, at_once
        self.trouble: str | None = None
        ranks = common.gpus or 1
        if ranks > 1:
            os.environ |= _start_others(common, ranks)
        try:
            self.engine = _engine(common)
            self.template = Template.summary(self.engine.tokenizer, job.instruction)
        except TierForceError as error:
            self.trouble = str(error)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Summarise the documents of a batch; return a record of each, as JSON, and its line.

        Where nothing can be done here, it is one line alone, of no document.
        """
        if self.trouble is not None:
            return {"place": [NOWHERE], "record": ["{}"], "line": [self.trouble]}
        places = batch["place"].tolist()
        documents = [
            Sent(str(place), text) for place, text in zip(places, batch["text"], strict=True)
        ]
        found = Collected()
        sharing = Sharing(min(self.at_once, len(documents)))
        summaries = Summaries(self.engine, found, self.template, self.job, found, sharing)
        try:
            summaries.write(documents)
        except RankLost:  # this process cannot go on: another begins anew, with what it had
            os._exit(1)
        ids = [document.id for document in documents]
        return {
            "place": places,
            "record": [json.dumps(found.records[id]) for id in ids],
            "line": [found.lines[id][-1] for id in ids],
        }


def _engine(common: Common) -> Engine:
    group = Group.from_environment(common.device)
    folder = resolve(common.model, group)
    return Engine.from_pretrained(folder, common.draft, common.settings, group=group)


def _start_others(common: Common, ranks: int) -> dict[str, str]:
    """Start the other ranks of this machine; return what the first one's environment lacks.

    They end with this process, whichever way it ends: their standard input does.
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
            [sys.executable, "-m", "decoding.app.machine"],
            env={**os.environ, **own, **place},
            stdin=subprocess.PIPE,
        )
        assert other.stdin is not None
        pickle.dump(common, other.stdin)
        other.stdin.flush()
        _others.append(other)
    return {**own, "RANK": "0", "LOCAL_RANK": "0"}


_others: list[subprocess.Popen[bytes]] = []  # whose pipes stay open as long as this process


def _follow() -> None:
    """Be another rank of a machine, until its first one is gone."""
    common = pickle.load(sys.stdin.buffer)  # from the process that started this one

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    silence_transformers()
    _engine(common).follow()


if __name__ == "__main__":
    _follow()
