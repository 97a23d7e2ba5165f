"""The stand-in for a GPU finds what it is there to find: each rule broken once, beside the same done right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from standin import Machine, Race, standin

from offload.link import CudaLink

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
    with pytest.raises(Race, match=r"default stream: .* reads the result of .* that stream 2: .* writes"):
        device.sum()
    link.wait(ticket)
    assert device.sum().item() == 64
    link.close()


def test_a_copy_that_does_not_wait_for_compute_is_a_race(machine: Machine) -> None:
    host, device = host_and_device(link := Careless(GPU))
    device += 1
    with pytest.raises(Race, match="writes"):
        link.copy([(device, host)])
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
    assert (torch.ones(3, device=GPU) * torch.tensor(2.0)).tolist() == [2, 2, 2]  # but for a single number
    with pytest.raises(NotImplementedError, match="CUDA"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*(torch.ones(1, 1, 4, 8, device=GPU) for _ in range(3)))


def test_every_wait_of_the_host_is_counted(machine: Machine) -> None:
    x = torch.ones(3, device=GPU)
    assert not machine.waits
    for wait in (x.sum().item, x.tolist, x.cpu, (x > 0).all().__bool__, lambda: x[x > 0], lambda: torch.ones(3).to(GPU)):
        machine.waits.clear()
        wait()
        assert len(machine.waits) == 1


def test_fresh_memory_holds_no_numbers(machine: Machine) -> None:
    assert torch.empty(4, device=GPU).isnan().all()
    assert torch.empty_like(torch.zeros(4, device=GPU)).isnan().all()


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


def recorded(work: Any) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream(GPU)):
        out = work()
    return graph, out


def test_a_graph_is_computed_when_it_is_replayed_with_numbers_of_the_host_as_they_were(machine: Machine) -> None:
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
    assert (x + 1).tolist() == [2, 2, 2]
