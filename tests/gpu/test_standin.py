"""The stand-in for a GPU finds what it is there to find: each rule is broken here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offload.errors import InsufficientMemoryError
from offload.memory.cuda_link import CudaLink
from standin import Machine, Race, standin
from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
GPU = torch.device("cuda", 0)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with standin() as made:
        yield made


class Careless(CudaLink):
    """Copies that nothing waits for, and that wait for nothing."""

    def copy(self, pairs: Any) -> Any:
        with torch.cuda.stream(self._stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)

    def wait(self, ticket: Any) -> None:
        pass


def host_and_device(link: CudaLink) -> tuple[torch.Tensor, torch.Tensor]:
    return link.host_empty(64, torch.float32).view(2, 32).fill_(1), torch.zeros(2, 32, device=GPU)


def test_a_read_that_does_not_wait_for_its_copy_is_a_race(machine: Machine) -> None:
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


def test_a_copy_that_does_not_wait_for_compute_is_a_race(machine: Machine) -> None:
    host, device = host_and_device(link := Careless(GPU))
    device += 1
    with pytest.raises(Race, match="writes"):
        link.copy([(device, host)])
    careful = CudaLink(GPU)
    careful.copy([(device, host)])
    careful.drain()
    link.close()


def test_the_host_may_not_touch_what_a_copy_writes(machine: Machine) -> None:
    link = CudaLink(GPU)
    host, device = host_and_device(link)
    link.copy([(host, device)])
    with pytest.raises(Race, match=r"the host: .* reads registered host memory"):
        host.sum()
    link.drain()
    assert host.sum() == 0
    link.close()


def test_memory_freed_under_a_copy_is_a_fault() -> None:
    with standin() as machine:
        link = CudaLink(GPU)
        host, device = host_and_device(link)
        link.copy([(device, host)])
        del device
        link.close()
        assert "was freed before stream 2" in machine.faults.pop()
    with pytest.raises(Race, match="so it is"), standin() as machine:
        machine.faults.append("so it is")  # what nothing could be raised for before


def test_host_memory_given_back_under_a_copy_is_a_fault() -> None:
    with standin() as machine:
        link = CudaLink(GPU)
        host, device = host_and_device(link)
        link.copy([(device, host)])
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
        link.drain()
        assert "given back before stream 2" in machine.faults.pop()


def test_tensors_of_two_devices_do_not_mix(machine: Machine) -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3, device=GPU) + torch.ones(3)
    # but for a single number
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


def test_fresh_memory_holds_no_numbers(machine: Machine) -> None:
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


def recorded(work: Any, pool: Any = None) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, pool=pool or torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream(GPU)
    ):
        out = work()
    return graph, out


def test_a_graph_is_computed_when_it_is_replayed_with_numbers_of_the_host_as_they_were(
    machine: Machine,
) -> None:
    x, add = torch.zeros(3, device=GPU), 1

    def work() -> torch.Tensor:
        x.mul_(2)
        return x[1:] + add

    graph, out = recorded(work)
    assert x.tolist() == [0, 0, 0]
    assert out.isnan().all()
    add = 100
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [2 * value + 1] * 2
        assert x.tolist() == [2 * value] * 3


def test_a_host_that_waits_breaks_a_capture(machine: Machine) -> None:
    x, before = torch.ones(3, device=GPU), torch.cuda.current_stream()
    for wait in (lambda: x.sum().item(), lambda: torch.tensor([1.0]).to(GPU)):
        with pytest.raises(RuntimeError, match="during capture"):
            recorded(wait)
        assert torch.cuda.current_stream() != before  # as torch leaves it
        torch.cuda.set_stream(before)
        # and the allocator, before torch 2.13
        with pytest.raises(RuntimeError, match="captures_underway"):
            recorded(lambda: x + 1)
        torch._C._cuda_endAllocateToPool(0, (0, 1))
    recorded(lambda: x + 1)
    assert (x + 1).tolist() == [2, 2, 2]


def test_what_a_capture_does_not_permit(machine: Machine) -> None:
    x, source = torch.ones(3, device=GPU), torch.Generator(GPU)
    graph, _ = recorded(lambda: x + 1)
    for work in (lambda: x.clone().exponential_(generator=source), graph.replay):
        before = torch.cuda.current_stream()
        with pytest.raises(RuntimeError, match="during capture"):
            recorded(work)
        torch.cuda.set_stream(before)
        torch._C._cuda_endAllocateToPool(0, (0, 1))


def test_a_graph_keeps_no_memory_that_was_there_before_it(machine: Machine) -> None:
    x, others = torch.ones(3, device=GPU), [torch.zeros(3, device=GPU)]
    graph, out = recorded(lambda: (x + 1) * 2 + others[0])
    graph.replay()
    assert out.tolist() == [4, 4, 4]
    others.clear()
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()


def test_a_pool_goes_with_its_last_graph(machine: Machine) -> None:
    x, pool = torch.ones(3, device=GPU), torch.cuda.graph_pool_handle()
    kept, _ = recorded(lambda: x + 1, pool)
    recorded(lambda: x + 2, pool)
    del kept
    with pytest.raises(RuntimeError, match="use_count"):
        recorded(lambda: x + 3, pool)


def test_each_rank_has_a_gpu_of_its_own() -> None:
    with standin(gpus=2, index=1):
        for device in ("cuda:0", "cuda"):  # the second is the first where nothing else was chosen
            with pytest.raises(RuntimeError, match="cuda:1"):
                torch.zeros(3, device=device)
        torch.cuda.set_device("cuda:1")
        assert torch.zeros(3, device="cuda").device == torch.device("cuda:1")


def test_a_refused_registration_is_reported_again_by_the_next_kernel(machine: Machine) -> None:
    machine.pins = False
    buffer = torch.empty(64)
    assert torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.ones(3, device=GPU)
    with pytest.raises(InsufficientMemoryError, match="refused to pin"):
        CudaLink(GPU).host_empty(64, torch.float32)
    assert torch.ones(3, device=GPU).tolist() == [1, 1, 1]  # the link had it reported


def test_a_sum_over_ranks_is_to_be_waited_for() -> None:
    run_ranks(1, hasty)


def hasty() -> None:
    with standin() as machine:
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
        for early in (True, False):
            x = torch.ones(3, device=GPU)
            work = dist.all_reduce(x, async_op=True)
            if early:
                with pytest.raises(Race, match=r"reads .* NCCL's stream: .* writes"):
                    x + 1
            work.wait()
            assert (x + 1).tolist() == [2, 2, 2]
        assert not machine.faults


def heads(
    dtype: torch.dtype, dim: int = 8, rows: int = 4, on: torch.device | str = GPU
) -> list[torch.Tensor]:
    return [torch.ones(1, 2, each, dim, dtype=dtype, device=on) for each in (rows, 4, 4)]


def test_kernels_take_what_they_take_on_a_gpu(machine: Machine) -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    assert flash(*heads(torch.float16), 0.0, True)[1].shape == (1, 2, 4)
    for wrong in (heads(torch.float32), heads(torch.float16, dim=12), heads(torch.float16, rows=2)):
        with pytest.raises(RuntimeError):
            flash(*wrong, 0.0, True)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    assert efficient(*heads(torch.float32), None, True)[1].shape == (1, 2, 32)
    assert efficient(*heads(torch.float32), None, True)[1][..., 4:].isinf().all()
    x = torch.ones(1, 2, 2, device=GPU)
    for kernel, dtype, arguments in (
        (flash, torch.float16, (0.0, True)),
        (efficient, torch.float32, (None, True, 0.0, True)),
    ):
        for out, meta in zip(
            *(kernel(*heads(dtype, on=on), *arguments)[:2] for on in (GPU, "meta")), strict=True
        ):
            assert (out.shape, out.stride(), out.dtype) == (
                meta.shape,
                meta.stride(),
                meta.dtype,
            )
    with pytest.raises(RuntimeError, match="out_dtype"):
        torch.bmm(x, x, torch.float32)
    assert torch.bmm(x.half(), x.half(), torch.float32).dtype == torch.float32
