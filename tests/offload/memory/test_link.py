"""Links and the host arena: order of copies, checks, and reuse of memory."""

from __future__ import annotations

import gc
import mmap
import threading

import psutil
import pytest
import torch

from offload.errors import InsufficientMemoryError, TierForceError
from offload.memory.cpu_link import EmulatedLink, ZeroCopyLink
from offload.memory.host import host_available, process_peak_bytes
from offload.memory.host_arena import HostArena
from offload.memory.link import Link
from offload.memory.link_spec import check_device, make_link
from support.links import CPU, every_link, make_test_link


@every_link
def test_copies_run_in_order(link: Link) -> None:
    target = torch.zeros(1000)
    tickets = [link.copy([(target, torch.full((1000,), float(value)))]) for value in range(1, 30)]
    link.wait(tickets[-1])
    assert (target == 29).all()


@every_link
def test_ticket_covers_all_pairs_of_a_copy(link: Link) -> None:
    source, target = torch.randn(20, 64), torch.zeros(20, 64)
    link.wait(link.copy([(target[row], source[row]) for row in range(20)]))
    assert torch.equal(target, source)


@every_link
def test_drain_waits_for_all_copies(link: Link) -> None:
    source, target = torch.randn(20, 64), torch.zeros(20, 64)
    for row in range(20):
        link.copy([(target[row], source[row])])
    link.drain()
    assert torch.equal(target, source)


def test_emulated_link_only_copies_contiguous_blocks_of_equal_size() -> None:
    link = EmulatedLink(CPU, 1e12)
    with pytest.raises(ValueError, match="contiguous"):
        link.copy([(torch.zeros(4), torch.zeros(4, 2)[:, 0])])
    with pytest.raises(ValueError, match="contiguous"):
        link.copy([(torch.zeros(4, 2)[:, 0], torch.zeros(4))])
    with pytest.raises(ValueError, match="of equal size"):
        link.copy([(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4))])
    link.close()


def test_close_ends_all_threads() -> None:
    before = threading.active_count()
    link = EmulatedLink(CPU, 1e12)
    assert threading.active_count() == before + 2  # one per direction
    link.close()
    assert threading.active_count() == before


@every_link
def test_allocating_more_host_memory_than_available_fails(link: Link) -> None:
    with pytest.raises(
        InsufficientMemoryError,
        match=r"needs \d+\.\d\d GB of host memory on this rank and \d+\.\d\d GB are available",
    ):
        link.host_empty(host_available(), torch.float32)
    assert link.host_empty(1001, torch.bfloat16).nbytes == 2002


@every_link
def test_arena_grown_in_inference_mode_can_be_written_outside_of_it(link: Link) -> None:
    """The next request may be loaded from disk."""
    arena = HostArena(link, torch.float32)
    with torch.inference_mode():
        arena.allocate((4, 2)).fill_(1)
    arena.allocate((4, 2)).copy_(torch.ones(4, 2))


@every_link
def test_arena_grows_to_the_largest_request(link: Link) -> None:
    arena = HostArena(link, torch.float32)
    assert arena.allocate((0, 5)).numel() == 0
    first = arena.allocate((4, 25))
    assert arena.nbytes == 400
    assert arena.allocate((2, 3, 4)).data_ptr() == first.data_ptr()
    assert arena.nbytes == 400
    assert arena.allocate((101,)).shape == (101,)
    assert arena.nbytes == 404
    with pytest.raises(InsufficientMemoryError):
        arena.allocate((host_available(),))
    assert arena.allocate((7,)).shape == (7,)  # still usable after the error


def test_make_link_by_name() -> None:
    assert isinstance(make_link("auto", CPU), ZeroCopyLink)
    assert isinstance(make_link("view", CPU), ZeroCopyLink)
    link = make_link("emulated:0.5", CPU)
    assert isinstance(link, EmulatedLink)
    assert link.rate == 5e8
    link.close()
    assert make_test_link("view").device_available() > 0


@pytest.mark.parametrize(
    "spec",
    [
        *("", "auto:1", "view:2", "emulated", "emulated:", "emulated:fast", "pcie"),
        *("emulated:0", "emulated:-1", "emulated:nan", "emulated:1e-6"),
    ],
)
def test_unknown_link_names_are_errors(spec: str) -> None:
    with pytest.raises(TierForceError, match=f"`link` {spec} is not known: use auto"):
        make_link(spec, CPU)


def test_cpu_links_are_errors_on_a_gpu() -> None:
    check_device("emulated:1", "cpu")
    check_device("auto", "cuda")
    for name in ("view", "emulated:1"):
        with pytest.raises(TierForceError, match=f"`link` {name} is for a CPU: leave it out on"):
            check_device(name, "cuda")
        with pytest.raises(TierForceError, match="is for a CPU"):
            make_link(name, torch.device("cuda"))


def test_peak_is_since_the_last_call() -> None:
    gc.collect()  # garbage of earlier tests would be freed meanwhile
    assert process_peak_bytes() is not None
    rss = psutil.Process().memory_info().rss
    # a fresh mapping: an allocator may return pages that earlier tests left resident
    with mmap.mmap(-1, 1 << 28) as block:
        block[:: mmap.PAGESIZE] = bytes(len(block) // mmap.PAGESIZE)
    peaks = process_peak_bytes(), process_peak_bytes()
    assert peaks[0] is not None
    assert peaks[1] is not None
    assert peaks[0] >= rss + (250 << 20)
    assert peaks[1] < rss + (100 << 20)


def test_directions_do_not_wait_for_each_other() -> None:
    """The link is full duplex, and `drain` waits for both directions."""
    link = EmulatedLink(CPU, rate=1e6)
    device, host = torch.zeros(50_000), torch.zeros(25)
    ticket = link.copy([(device, torch.ones(50_000))])
    link.wait(link.copy_out([(host, torch.full((25,), 2.0))]))
    assert host.sum() == 50
    assert not ticket.is_set()
    link.drain()
    assert ticket.is_set()
    assert device.sum() == 50_000
    link.close()


@every_link
def test_copies_out_run_in_order_and_are_drained(link: Link) -> None:
    target = torch.zeros(1000)
    for value in range(1, 30):
        link.copy_out([(target, torch.full((1000,), float(value)))])
    link.drain()
    assert (target == 29).all()
