"""The transfer ring on a slow link: a chunk is complete and unchanged until the next is taken."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor

from offload.memory.cuda_link import CudaLink
from offload.memory.link import Link
from offload.memory.transfer_ring import TransferRing
from standin import Machine
from support.links import CPU, CountingLink, every_link, make_test_link

HEADS, CAPACITY, DIM = 4, 48, 8


def host_chunks(count: int, rng: random.Random, host: Tensor | None = None) -> list[Tensor]:
    """Return chunks (2, heads, tokens, D) of a head-major store, contiguous per head only, with
    random numbers of heads and tokens.
    """
    if host is None:
        host = torch.randn(64, 2, HEADS, CAPACITY, DIM)
    picks = (host[rng.randrange(len(host))] for _ in range(count))
    return [pick[:, : rng.randint(1, HEADS), : rng.randint(1, CAPACITY)] for pick in picks]


def consume(ring: TransferRing, chunks: list[Tensor], rng: random.Random) -> None:
    for expected in chunks:
        chunk = ring.next_chunk()
        assert torch.equal(chunk, expected)
        if rng.random() < 0.3:
            time.sleep(rng.random() * 5e-4)
        assert torch.equal(chunk, expected), "the slot was refilled while its chunk was held"


@every_link
@pytest.mark.parametrize("slots", [2, 3, 5])
def test_chunks_are_complete_and_in_order(link: Link, slots: int) -> None:
    rng = random.Random(slots)
    ring = TransferRing(link, slots, 2 * HEADS * CAPACITY * DIM, torch.float32)
    for count in [0, 1, slots - 1, slots, slots + 1, *(rng.randint(1, 20) for _ in range(10))]:
        chunks = host_chunks(count, rng)
        ring.start(chunks)
        consume(ring, chunks, rng)
        with pytest.raises(IndexError):
            ring.next_chunk()


@every_link
@pytest.mark.parametrize("slots", [2, 3])
def test_abandoned_forward_does_not_affect_the_next(link: Link, slots: int) -> None:
    rng = random.Random(slots)
    ring = TransferRing(link, slots, 2 * HEADS * CAPACITY * DIM, torch.float32)
    for _ in range(40):
        chunks = host_chunks(rng.randint(1, 12), rng)
        ring.start(chunks)
        consume(ring, chunks[: rng.randint(0, len(chunks))], rng)


def test_zero_copy_link_returns_views() -> None:
    chunks = host_chunks(3, random.Random(0))
    ring = TransferRing(make_test_link("view"), 3, 2 * HEADS * CAPACITY * DIM, torch.float32)
    ring.start(chunks)
    assert ring.nbytes == 0
    assert [ring.next_chunk().data_ptr() for _ in chunks] == [chunk.data_ptr() for chunk in chunks]


def test_ring_uses_only_the_memory_of_its_slots() -> None:
    link = make_test_link("emulated")
    ring = TransferRing(link, 3, 2 * HEADS * CAPACITY * DIM, torch.float32)
    chunks = host_chunks(20, random.Random(0))
    ring.start(chunks)
    assert ring.nbytes == 3 * 2 * HEADS * CAPACITY * DIM * 4
    assert len({ring.next_chunk().data_ptr() for _ in chunks}) == 3
    link.close()


def test_slots_fill_ahead_of_the_consumer() -> None:
    link = CountingLink(CPU, rate=1e12)
    ring = TransferRing(link, 3, 2 * HEADS * CAPACITY * DIM, torch.float32)
    ring.start(host_chunks(5, random.Random(0)))
    counts = [link.copies_made]
    for _ in range(5):
        ring.next_chunk()
        counts.append(link.copies_made)
    # All slots are filled at the start, then one for each chunk that has been read; those that this
    # forward does not need get chunks of the next one.
    assert counts == [3, 3, 4, 5, 6, 7]
    ring.release()
    ring.release()
    assert link.copies_made == 8
    link.close()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_next_forward_copies_only_what_is_new(count: int) -> None:
    """What the slots hold has been copied before it begins, but for tokens that were added."""
    link, slots = CountingLink(CPU, rate=1e12), 3
    ring = TransferRing(link, slots, 2 * HEADS * CAPACITY * DIM, torch.float32)
    host = torch.randn(count, 2, HEADS, CAPACITY, DIM)
    old, new = 20, 24
    ahead = min(count, slots)
    for tokens in (old, new, new):
        chunks = list(host[..., :tokens, :])
        before = link.copied_bytes
        ring.start(chunks, unchanged=old)
        consume(ring, chunks, random.Random(0))
        ring.release()
        copied = link.copied_bytes - before
        token_bytes = host[0, :, :, 0].nbytes
        # the others of this forward, the first of the next, and what was added to this one's first
        added = 0 if tokens == old else min(count, slots) * (new - old)
        first = count if tokens == old else count - ahead
        assert copied == token_bytes * (first * tokens + ahead * tokens + added)
    link.close()


@every_link
def test_chunks_that_change_between_forwards_are_copied_again(link: Link) -> None:
    """They grow and shrink, and tokens that were cut are replaced by others."""
    rng = random.Random(1)
    ring = TransferRing(link, 3, 2 * HEADS * CAPACITY * DIM, torch.float32)
    host = torch.randn(5, 2, HEADS, CAPACITY, DIM)
    tokens = 20
    for _ in range(60):
        unchanged = rng.randint(1, tokens)
        link.drain()  # the host's tokens do not change while they are copied
        host[..., unchanged:, :].normal_()
        tokens = rng.randint(unchanged, CAPACITY)
        order = list(host) if rng.random() < 0.8 else rng.sample(list(host), 4)
        chunks = [kv[..., :tokens, :] for kv in order]
        ring.start(chunks, unchanged)
        consume(ring, chunks if rng.random() < 0.8 else chunks[:2], rng)
        if rng.random() < 0.5:
            ring.release()
        if link.copies and rng.random() < 0.2:
            ring.borrow((7,)).zero_()


def test_ring_needs_two_slots() -> None:
    link = make_test_link("emulated")
    with pytest.raises(ValueError, match="at least 2 slots"):
        TransferRing(link, 1, 2, torch.float32)
    link.close()


@pytest.mark.cuda
def test_cuda_copies_and_compute_wait_for_each_other(gpu: Machine | None) -> None:
    device = torch.device("cuda")
    rng = random.Random(0)
    link = CudaLink(device)
    shape = (16, 2, HEADS, 8192, 128)
    host = link.host_empty(torch.Size(shape).numel(), torch.float16).view(shape).normal_()
    ring = TransferRing(link, 3, torch.Size(shape[1:]).numel(), torch.float16)
    size = 2048 if gpu is None else 64  # the stand-in detects races without real delays
    busy = torch.randn(size, size, device=device)
    for _ in range(20):
        chunks = host_chunks(rng.randint(1, 12), rng, host)
        expected = chunks[: rng.randint(0, len(chunks))]  # the rest is abandoned
        ring.start(chunks)
        actual = []
        for _ in expected:
            chunk = ring.next_chunk()
            for _ in range(rng.randint(0, 4)):
                # delays the read below: a refill that did not wait would be visible
                busy = (busy @ busy).tanh_()
            actual.append(chunk.clone())
        for chunk, source in zip(actual, expected, strict=True):
            assert torch.equal(chunk.cpu(), source)
    link.close()


@pytest.mark.cuda
def test_cuda_chunks_that_grow_are_complete(gpu: Machine | None) -> None:
    """Tokens that are added are copied after what came ahead, into slots that nothing reads."""
    device = torch.device("cuda")
    link = CudaLink(device)
    shape = (5, 2, HEADS, 512, 128)
    host = link.host_empty(torch.Size(shape).numel(), torch.float16).view(shape)
    ring = TransferRing(link, 3, torch.Size(shape[1:]).numel(), torch.float16)
    old = 0
    for new in (100, 100, 164, 512):
        link.drain()
        host[..., old:new, :].normal_()
        chunks = list(host[..., :new, :])
        ring.start(chunks, unchanged=old)
        actual = []
        for _ in chunks:
            actual.append(ring.next_chunk().clone())
            ring.release()
        for chunk, source in zip(actual, chunks, strict=True):
            assert torch.equal(chunk.cpu(), source)
        old = new
    link.close()
