"""Links and the host arena: what they refuse, in which order they copy, and that memory is asked
for once.
"""

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
def test_copies_keep_their_order(link: Link) -> None:
    target = torch.zeros(1000)
    tickets = [link.copy([(target, torch.full((1000,), float(value)))]) for value in range(1, 30)]
    link.wait(tickets[-1])
    assert (target == 29).all()


@every_link
def test_a_ticket_stands_for_all_pairs_of_its_copy(link: Link) -> None:
    source, target = torch.randn(20, 64), torch.zeros(20, 64)
    link.wait(link.copy([(target[row], source[row]) for row in range(20)]))
    assert torch.equal(target, source)


@every_link
def test_drain_leaves_nothing_under_way(link: Link) -> None:
    source, target = torch.randn(20, 64), torch.zeros(20, 64)
    for row in range(20):
        link.copy([(target[row], source[row])])
    link.drain()
    assert torch.equal(target, source)


def test_the_emulated_link_moves_contiguous_blocks_only() -> None:
    link = EmulatedLink(CPU, 1e12)
    with pytest.raises(ValueError, match="contiguous"):
        link.copy([(torch.zeros(4), torch.zeros(4, 2)[:, 0])])
    with pytest.raises(ValueError, match="contiguous"):
        link.copy([(torch.zeros(4, 2)[:, 0], torch.zeros(4))])
    with pytest.raises(ValueError, match="of one size"):
        link.copy([(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4))])
    link.close()


def test_a_closed_link_leaves_no_thread() -> None:
    before = threading.active_count()
    link = EmulatedLink(CPU, 1e12)
    assert threading.active_count() == before + 2  # a lane each way
    link.close()
    assert threading.active_count() == before


@every_link
def test_more_host_memory_than_there_is(link: Link) -> None:
    with pytest.raises(
        InsufficientMemoryError,
        match=r"needs \d+\.\d\d GB of host memory on this rank and \d+\.\d\d GB are available",
    ):
        link.host_empty(host_available(), torch.float32)
    assert link.host_empty(1001, torch.bfloat16).nbytes == 2002


@every_link
def test_an_arena_that_grew_in_a_pass_is_filled_outside_of_one(link: Link) -> None:
    """As from disk, for the next text."""
    arena = HostArena(link, torch.float32)
    with torch.inference_mode():
        arena.allocate((4, 2)).fill_(1)
    arena.allocate((4, 2)).copy_(torch.ones(4, 2))


@every_link
def test_the_arena_grows_to_the_largest_and_stays(link: Link) -> None:
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
    assert arena.allocate((7,)).shape == (7,)  # and goes on


def test_links_by_name() -> None:
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
def test_names_of_no_link(spec: str) -> None:
    with pytest.raises(TierForceError, match=f"`link` {spec} is not known: use auto"):
        make_link(spec, CPU)


def test_a_link_for_a_cpu_is_refused_on_a_gpu() -> None:
    check_device("emulated:1", "cpu")
    check_device("auto", "cuda")
    for name in ("view", "emulated:1"):
        with pytest.raises(TierForceError, match=f"`link` {name} is for a CPU: leave it out on"):
            check_device(name, "cuda")
        with pytest.raises(TierForceError, match="is for a CPU"):
            make_link(name, torch.device("cuda"))


def test_the_peak_is_what_came_and_went_since_the_last_call() -> None:
    gc.collect()  # what tests before have left would go in the middle
    assert process_peak_bytes() is not None
    rest = psutil.Process().memory_info().rss
    # Fresh pages, each touched: an allocator may hand out what earlier tests left resident.
    with mmap.mmap(-1, 1 << 28) as block:
        block[:: mmap.PAGESIZE] = bytes(len(block) // mmap.PAGESIZE)
    peaks = process_peak_bytes(), process_peak_bytes()
    assert peaks[0] is not None
    assert peaks[1] is not None
    assert peaks[0] >= rest + (250 << 20)
    assert peaks[1] < rest + (100 << 20)


def test_what_is_sent_goes_beside_what_is_copied() -> None:
    """A lane each way, each as fast: neither waits for the other, and draining is for both."""
    link = EmulatedLink(CPU, rate=1e6)
    there, back = torch.zeros(50_000), torch.zeros(25)
    copied = link.copy([(there, torch.ones(50_000))])
    sent = link.copy_out([(back, torch.full((25,), 2.0))])
    link.wait(sent)
    assert back.sum() == 50
    assert not copied.is_set()
    link.drain()
    assert copied.is_set()
    assert there.sum() == 50_000
    link.close()


@every_link
def test_what_is_sent_keeps_its_order_and_is_drained(link: Link) -> None:
    target = torch.zeros(1000)
    for value in range(1, 30):
        link.copy_out([(target, torch.full((1000,), float(value)))])
    link.drain()
    assert (target == 29).all()
