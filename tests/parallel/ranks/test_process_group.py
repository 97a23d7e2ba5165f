"""The process group: correct collectives, shared errors, detection of lost ranks."""

from __future__ import annotations

import errno
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch

from offload.errors import InsufficientMemoryError, TierForceError
from parallel.errors import CheckpointError
from parallel.ranks.environment import RankLost
from parallel.ranks.process_group import TensorParallelGroup, _check_distinct_gpus
from standin import standin
from support.ranks import run_ranks


def collectives() -> dict[str, Any]:
    group = TensorParallelGroup.from_environment("cpu")
    rank, x = group.rank, torch.arange(6.0).view(2, 3)
    errors = []
    for raised in (
        {},
        {1: InsufficientMemoryError("one")},
        {0: CheckpointError("zero"), 1: InsufficientMemoryError("one")},
    ):
        try:
            with group.sync_errors():
                if rank in raised:
                    raise raised[rank]
            errors.append(None)
        except TierForceError as error:
            errors.append((type(error), str(error)))
    return {
        "reduced": group.all_reduce(x * (rank + 1)),
        "halves": group.all_reduce(x.bfloat16() * (rank + 1)),
        "gathered": group.all_gather(x + 10 * rank),
        "columns": group.all_gather((x + 10 * rank).t()),  # not contiguous
        "value": group.broadcast({"text": "from 0"} if rank == 0 else None),
        "numbers": group.broadcast_ints([3, -1, 2**40] if rank == 0 else [], 3),
        "errors": errors,
    }


def test_collectives() -> None:
    x = torch.arange(6.0).view(2, 3)
    for results in run_ranks(2, collectives):
        assert torch.equal(results["reduced"], x * 3)
        assert torch.equal(results["halves"], x.bfloat16() * 3)
        assert torch.equal(results["gathered"], torch.cat((x, x + 10), dim=1))
        assert torch.equal(
            results["columns"], torch.cat((x, x + 10)).t().unflatten(1, (2, 2)).flatten(1)
        )
        assert results["value"] == {"text": "from 0"}
        assert results["numbers"] == [3, -1, 2**40]
        assert results["errors"] == [
            None,
            (InsufficientMemoryError, "one"),
            (CheckpointError, "zero"),
        ]


def leave_or_wait() -> str:
    group = TensorParallelGroup.from_environment("cpu")
    group.all_reduce(torch.zeros(1))
    if group.rank == 1:
        return "left"  # its connections close
    try:
        while True:
            group.all_reduce(torch.zeros(1))
    except RankLost as error:
        return str(error)


def test_a_lost_rank_is_detected() -> None:
    waited, left = run_ranks(2, leave_or_wait)
    assert left == "left"
    assert "another rank ended unexpectedly" in waited


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("[pair.cc:534] Connection closed by peer [127.0.0.1]:2", "another rank ended"),
        ("NCCL error, ncclRemoteError: remote process exited", "another rank ended"),
        ("NCCL error: no space left in /dev/shm", r"any more \(NCCL error: no space left"),
    ],
)
def test_failed_collectives_report_the_reason(reason: str, message: str) -> None:
    """A closed connection is reported as a lost rank instead."""
    with pytest.raises(RankLost, match=message), TensorParallelGroup()._guarded():
        raise RuntimeError(reason)


def test_enomem_becomes_insufficient_memory_error() -> None:
    with (
        pytest.raises(InsufficientMemoryError, match="rank 0: out of memory"),
        TensorParallelGroup().sync_errors(),
    ):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    with pytest.raises(FileNotFoundError), TensorParallelGroup().sync_errors():
        raise FileNotFoundError(errno.ENOENT, "none")


@pytest.mark.parametrize("total", [0, 1, 7, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_a_partition(total: int, size: int) -> None:
    shares = [TensorParallelGroup(rank, size).share(total) for rank in range(size)]
    assert [index for share in shares for index in range(total)[share]] == list(range(total))
    lengths = [share.stop - share.start for share in shares]
    assert max(lengths) - min(lengths) <= 1


def test_collectives_of_one_rank_are_no_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    group, x = TensorParallelGroup.from_environment("cpu"), torch.randn(2, 3)
    assert (group.rank, group.size, group.device.type) == (0, 1, "cpu")
    assert torch.get_num_threads() == 1  # unchanged
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.broadcast("text") == "text"
    assert group.broadcast_ints([1, 2], 2) == [1, 2]
    with pytest.raises(InsufficientMemoryError, match="mine"), group.sync_errors():
        raise InsufficientMemoryError("mine")
    group.close()


def test_unavailable_devices() -> None:
    with pytest.raises(TierForceError, match="`device` tpu is not known: use auto, cpu or cuda"):
        TensorParallelGroup.from_environment("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(TierForceError, match="`device` cuda, but torch sees no GPU"):
            TensorParallelGroup.from_environment("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a stand-in")
def test_one_rank_does_not_change_nccl_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with standin(), patch.dict(os.environ):
        os.environ.pop("NCCL_P2P_DISABLE", None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce RTX 4090")
        assert TensorParallelGroup.from_environment("cuda").device.type == "cuda"
        assert "NCCL_P2P_DISABLE" not in os.environ


class _GroupOnHosts(TensorParallelGroup):
    """A group of one rank per host in `hosts`, all with the same GPU address."""

    def __init__(self, *hosts: str):
        super().__init__(size=len(hosts))
        self.hosts = hosts

    def gather(self, value: Any) -> list[Any]:
        return [(host, value[1]) for host in self.hosts]


def test_gpus_of_different_hosts_may_have_the_same_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.ranks.process_group.gpu_address", lambda _: "0000:01:00.0")
    _check_distinct_gpus(_GroupOnHosts("a", "b"))
    with pytest.raises(TierForceError, match=r"ranks 0 and 2 .*0000:01:00.0 of a\): use `gpus` 1,"):
        _check_distinct_gpus(_GroupOnHosts("a", "b", "a"))
