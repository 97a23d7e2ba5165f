"""The stand-in for a GPU detects violations: each of its rules is broken here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offload.attention.folding import merge
from offload.errors import InsufficientMemoryError
from offload.memory.cuda_link import CudaLink
from standin import Machine, Race, standin
from standin.fused import fused_kernels
from support.interpreter import require_interpreter
from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")
GPU = torch.device("cuda", 0)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with standin() as simulated:
        yield simulated


class UnorderedLink(CudaLink):
    """A link whose copies do not wait for compute, and whose tickets do not wait for copies."""

    def copy(self, pairs: Any) -> Any:
        with torch.cuda.stream(self._stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)

    def wait(self, ticket: Any) -> None:
        pass


def host_and_device(link: CudaLink) -> tuple[torch.Tensor, torch.Tensor]:
    return link.host_empty(64, torch.float32).view(2, 32).fill_(1), torch.zeros(2, 32, device=GPU)


def test_a_read_without_waiting_for_its_copy_is_a_race(machine: Machine) -> None:
    link = CudaLink(GPU)
    host, device = host_and_device(link)
    ticket = link.copy([(device[0], host[0])])
    device[1] += 1  # another part of the same memory
    with pytest.raises(
        Race, match=r"default stream: .* reads the result of .* that stream 2: .* writes"
    ):
        device.sum()
    link.wait(ticket)
    assert device.sum().item() == 64
    link.close()


def test_a_copy_without_waiting_for_compute_is_a_race(machine: Machine) -> None:
    host, device = host_and_device(link := UnorderedLink(GPU))
    device += 1
    with pytest.raises(Race, match="writes"):
        link.copy([(device, host)])
    ordered = CudaLink(GPU)
    ordered.copy([(device, host)])
    ordered.drain()
    link.close()


def test_a_host_read_during_a_copy_is_a_race(machine: Machine) -> None:
    link = CudaLink(GPU)
    host, device = host_and_device(link)
    link.copy([(host, device)])
    with pytest.raises(Race, match=r"the host: .* reads registered host memory"):
        host.sum()
    link.drain()
    assert host.sum() == 0
    link.close()


def test_freeing_device_memory_during_a_copy_is_a_fault() -> None:
    with standin() as machine:
        link = CudaLink(GPU)
        host, device = host_and_device(link)
        link.copy([(device, host)])
        del device
        link.close()
        assert "was freed before stream 2" in machine.faults.pop()
    with pytest.raises(Race, match="a fault"), standin() as machine:
        machine.faults.append("a fault")  # raised on exit


def test_unregistering_host_memory_during_a_copy_is_a_fault() -> None:
    with standin() as machine:
        link = CudaLink(GPU)
        host, device = host_and_device(link)
        link.copy([(device, host)])
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
        link.drain()
        assert "released before stream 2" in machine.faults.pop()


def test_mixing_devices_is_an_error(machine: Machine) -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3, device=GPU) + torch.ones(3)
    # scalars are accepted
    assert (torch.ones(3, device=GPU) * torch.tensor(2.0)).tolist() == [2, 2, 2]
    with pytest.raises(NotImplementedError, match="CUDA"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(torch.ones(1, 1, 4, 8, device=GPU) for _ in range(3))
        )


def test_every_wait_of_the_host_is_counted(machine: Machine) -> None:
    x = torch.ones(3, device=GPU)
    assert not machine.waits
    for wait in (
        x.sum().item,
        x.tolist,
        x.cpu,
        (x > 0).all().__bool__,
        lambda: x[x > 0],
        lambda: torch.ones(3).to(GPU),
    ):
        machine.waits.clear()
        wait()
        assert len(machine.waits) == 1
    machine.waits.clear()
    x.clone()[x > 0] = x
    assert machine.waits


def test_a_copy_to_the_host_arrives_with_its_event(machine: Machine) -> None:
    x = torch.arange(3, device=GPU)
    first = (x + 1).to("cpu", non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    second = (x + 2).to("cpu", non_blocking=True)
    assert not machine.waits
    assert max(first) < 0  # unset
    event.synchronize()  # the stream still has work
    assert not machine.waits
    assert first.tolist() == [1, 2, 3]
    assert max(second) < 0
    torch.cuda.current_stream().record_event().synchronize()
    assert len(machine.waits) == 1
    assert second.tolist() == [2, 3, 4]


def test_launches_are_counted(machine: Machine) -> None:
    x = torch.ones(4, device=GPU)
    machine.launches.clear()
    x.view(2, 2).add_(1)
    (x * 2).to("cpu", non_blocking=True)
    assert len(machine.launches) == 3
    graph, _ = capture(lambda: x.mul_(2).add_(1))
    machine.launches.clear()
    graph.replay()
    assert machine.launches == ["replay"]
    assert x.tolist() == [5] * 4


def test_fused_kernels_are_launches_that_are_ordered(machine: Machine) -> None:
    require_interpreter()
    parts = [(torch.ones(1, 2, 16, device=GPU), torch.zeros(1, 2, device=GPU)) for _ in range(2)]
    with fused_kernels(machine):
        machine.launches.clear()
        out, lse = merge(parts)
        assert machine.launches[-1] == "_merge"
        with torch.cuda.stream(torch.cuda.Stream(GPU)), pytest.raises(Race):
            out.add_(1)
    assert out.tolist() == [[[1.0] * 16] * 2]
    assert lse.tolist() == [[pytest.approx(math.log(2))] * 2]


def test_uninitialized_memory_is_poisoned(machine: Machine) -> None:
    assert torch.empty(4, device=GPU).isnan().all()
    assert torch.empty_like(torch.zeros(4, device=GPU)).isnan().all()
    assert (torch.empty(4, dtype=torch.int64, device=GPU) < 0).all()


def test_memory_is_counted_and_runs_out() -> None:
    with standin(memory=1 << 20) as machine:
        x = torch.zeros(1 << 17, device=GPU)
        y = x.view(2, -1)
        del x
        assert torch.cuda.memory_allocated() == 1 << 19
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 18, device=GPU)
        del y
        assert (torch.cuda.memory_allocated(), machine.peak) == (0, 1 << 19)


def capture(work: Any, pool: Any = None) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, pool=pool or torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream(GPU)
    ):
        out = work()
    return graph, out


def test_a_graph_computes_at_replay_with_the_host_numbers_of_its_capture(
    machine: Machine,
) -> None:
    x, add = torch.zeros(3, device=GPU), 1

    def work() -> torch.Tensor:
        x.mul_(2)
        return x[1:] + add

    graph, out = capture(work)
    assert x.tolist() == [0, 0, 0]
    assert out.isnan().all()
    add = 100
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [2 * value + 1] * 2
        assert x.tolist() == [2 * value] * 3


def test_host_waits_invalidate_a_capture(machine: Machine) -> None:
    x, stream = torch.ones(3, device=GPU), torch.cuda.current_stream()
    for wait in (lambda: x.sum().item(), lambda: torch.tensor([1.0]).to(GPU)):
        with pytest.raises(RuntimeError, match="during capture"):
            capture(wait)
        assert torch.cuda.current_stream() != stream  # torch does not restore it
        torch.cuda.set_stream(stream)
        # nor the allocator, before torch 2.13
        with pytest.raises(RuntimeError, match="captures_underway"):
            capture(lambda: x + 1)
        torch._C._cuda_endAllocateToPool(0, (0, 1))
    capture(lambda: x + 1)
    assert (x + 1).tolist() == [2, 2, 2]


def test_generators_and_replays_invalidate_a_capture(machine: Machine) -> None:
    x, source = torch.ones(3, device=GPU), torch.Generator(GPU)
    graph, _ = capture(lambda: x + 1)
    for work in (lambda: x.clone().exponential_(generator=source), graph.replay):
        stream = torch.cuda.current_stream()
        with pytest.raises(RuntimeError, match="during capture"):
            capture(work)
        torch.cuda.set_stream(stream)
        torch._C._cuda_endAllocateToPool(0, (0, 1))


def test_a_graph_does_not_keep_earlier_memory_alive(machine: Machine) -> None:
    x, others = torch.ones(3, device=GPU), [torch.zeros(3, device=GPU)]
    graph, out = capture(lambda: (x + 1) * 2 + others[0])
    graph.replay()
    assert out.tolist() == [4, 4, 4]
    others.clear()
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()


def test_a_pool_is_freed_with_its_last_graph(machine: Machine) -> None:
    x, pool = torch.ones(3, device=GPU), torch.cuda.graph_pool_handle()
    graph, _ = capture(lambda: x + 1, pool)
    capture(lambda: x + 2, pool)
    del graph
    with pytest.raises(RuntimeError, match="use_count"):
        capture(lambda: x + 3, pool)


def test_a_rank_may_use_only_its_own_gpu() -> None:
    with standin(gpus=2, index=1):
        for device in ("cuda:0", "cuda"):  # "cuda" is cuda:0 by default
            with pytest.raises(RuntimeError, match="cuda:1"):
                torch.zeros(3, device=device)
        torch.cuda.set_device("cuda:1")
        assert torch.zeros(3, device="cuda").device == torch.device("cuda:1")


def test_the_next_kernel_reports_a_failed_registration(machine: Machine) -> None:
    machine.pins = False
    buffer = torch.empty(64)
    assert torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.ones(3, device=GPU)
    with pytest.raises(InsufficientMemoryError, match="refused to pin"):
        CudaLink(GPU).host_empty(64, torch.float32)
    assert torch.ones(3, device=GPU).tolist() == [1, 1, 1]  # the link has consumed the error


def test_reading_an_all_reduce_without_waiting_is_a_race() -> None:
    run_ranks(1, read_early)


def read_early() -> None:
    with standin() as machine:
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
        for reads_early in (True, False):
            x = torch.ones(3, device=GPU)
            work = dist.all_reduce(x, async_op=True)
            if reads_early:
                with pytest.raises(Race, match=r"reads .* NCCL's stream: .* writes"):
                    x + 1
            work.wait()
            assert (x + 1).tolist() == [2, 2, 2]
        assert not machine.faults


def query_key_value(
    dtype: torch.dtype, dim: int = 8, rows: int = 4, device: torch.device | str = GPU
) -> list[torch.Tensor]:
    return [torch.ones(1, 2, size, dim, dtype=dtype, device=device) for size in (rows, 4, 4)]


def test_kernels_accept_the_same_arguments_as_on_a_gpu(machine: Machine) -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    assert flash(*query_key_value(torch.float16), 0.0, True)[1].shape == (1, 2, 4)
    for wrong in (
        query_key_value(torch.float32),
        query_key_value(torch.float16, dim=12),
        query_key_value(torch.float16, rows=5),  # more than keys
    ):
        with pytest.raises(RuntimeError):
            flash(*wrong, 0.0, True)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    assert efficient(*query_key_value(torch.float32), None, True)[1].shape == (1, 2, 32)
    assert efficient(*query_key_value(torch.float32), None, True)[1][..., 4:].isinf().all()
    x = torch.ones(1, 2, 2, device=GPU)
    for kernel, dtype, arguments in (
        (flash, torch.float16, (0.0, True)),
        (efficient, torch.float32, (None, True, 0.0, True)),
    ):
        for out, meta in zip(
            *(
                kernel(*query_key_value(dtype, device=device), *arguments)[:2]
                for device in (GPU, "meta")
            ),
            strict=True,
        ):
            assert (out.shape, out.stride(), out.dtype) == (
                meta.shape,
                meta.stride(),
                meta.dtype,
            )
    with pytest.raises(RuntimeError, match="out_dtype"):
        torch.bmm(x, x, torch.float32)
    assert torch.bmm(x.half(), x.half(), torch.float32).dtype == torch.float32
