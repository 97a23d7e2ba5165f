"""The retrieval cache attends, per head, to what its policy selects and to recent tokens."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offload.cache.static_forward import Place, StaticForward
from offload.layout import KVLayout
from offload.memory.link import Link
from offload.retrieval import selection
from offload.retrieval import shape as retrieval_shape
from offload.retrieval.selection import POLICIES, QuerySample
from offload.retrieval.shape import RetrievalCacheSpec
from offload.tiered.cache import TieredCache
from support.driving import (
    BLOCK,
    CAPACITY,
    LAYOUT,
    QKV,
    RECENT,
    cache_pair,
    concat,
    first_tokens,
    forward,
    prefill,
    random_qkv,
    speculate,
)
from support.links import every_link, make_test_link
from support.reference import ReferenceRetrieval, random_rotary
from support.slow import slow_except

ROTARY = random_rotary(LAYOUT, CAPACITY)
DRAFT = 6
SHAPE = RetrievalCacheSpec(48, 4, RECENT, BLOCK, CAPACITY, DRAFT + 1, CAPACITY)
every_policy = pytest.mark.parametrize("policy", POLICIES)
sizes = pytest.mark.parametrize("chunk", [1, 4])
both_stores = pytest.mark.parametrize("quantised", [False, True])
PLACEMENTS = [("view", 1), ("emulated", 0), ("delaying", 2), ("view", 4)]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def prefill_both(
    target: TieredCache, shape: RetrievalCacheSpec, policy: str, prompt: list[QKV], chunk: int = 32
) -> ReferenceRetrieval:
    """Prefill, and return a reference that has selected by the last prefill chunk."""
    tokens = len(prompt[0][0])
    reference = ReferenceRetrieval(shape, policy, ROTARY)
    prefill(target, prompt, chunk)
    reference.select(prompt, tokens % chunk or chunk, target.boundary)
    return reference


@both_stores
@pytest.mark.parametrize(("link", "resident"), slow_except(PLACEMENTS, 2), indirect=["link"])
@sizes
@every_policy
def test_every_forward_equals_brute_force(
    policy: str, chunk: int, link: Link, resident: int, quantised: bool
) -> None:
    shape = replace(SHAPE, chunk=chunk, quantised=quantised)
    rng = random.Random(chunk)
    target, middle = cache_pair(link, resident, shape, policy)
    sequence = random_qkv(70)
    reference = prefill_both(target, shape, policy, sequence)
    before = target.boundary
    lengths = []
    while target.length < 100:
        lengths.append(target.length)
        sequence, verified = speculate(
            target,
            middle,
            sequence,
            DRAFT,
            rng,
            lambda known, out: assert_close(out, reference.attend(known, out.shape[1])),
        )
        assert middle.length == target.length == len(sequence[0][0])
        if policy != "static":
            reference.select(verified, len(verified[0][0]) - lengths[-1], target.boundary)
    probe = random_qkv(3)
    assert_close(forward(middle, probe), reference.attend(concat(sequence, probe), 3))
    assert target.boundary - before >= 2 * BLOCK
    assert middle.selector.selections == (1 if policy == "static" else 1 + len(lengths))


@both_stores
@every_policy
@pytest.mark.parametrize(("accepted", "start"), [(DRAFT + 1, 0), (DRAFT + 1, 2), (3, 1)])
@pytest.mark.parametrize("prompt", [40, 70])
def test_tokens_are_drafted_while_the_target_selects(
    policy: str, quantised: bool, prompt: int, accepted: int, start: int
) -> None:
    """A layer keeps its selection until the target has passed it, and its tokens always."""
    shape = replace(SHAPE, quantised=quantised)
    target, middle = cache_pair(make_test_link("view"), 1, shape, policy)
    known, drafted, verified = random_qkv(prompt), random_qkv(DRAFT), random_qkv(DRAFT + 1)
    before = prefill_both(target, shape, policy, known)
    forward(middle, drafted)
    middle.advance(DRAFT)
    after, sequence = deepcopy(before), concat(known, verified)
    target.begin_forward(DRAFT + 1)
    if policy != "static":
        after.select(sequence, DRAFT + 1, target.boundary)
    ahead = random_qkv(0)
    for layer, qkv in enumerate(verified):
        if layer < start:  # nothing is drafted yet
            target.attend(layer, *qkv, target.length)
            continue
        token = random_qkv(1)
        ahead = concat(ahead, token)  # the first one is the last that the target verifies
        out = forward(middle, token)
        middle.advance(1)
        passed = after.attend(concat(sequence, [tuple(x[1:] for x in each) for each in ahead]), 1)
        others = before.attend(concat(known, drafted, ahead), 1)
        if layer > start or layer == 0:
            assert_close(out, torch.cat((passed[:layer], others[layer:])) if layer else others)
        target.attend(layer, *qkv, target.length)
    target.advance(accepted)
    probe = random_qkv(2)
    if accepted <= DRAFT:
        assert middle.length == target.length
        continued = concat(known, first_tokens(verified, accepted))
    else:
        assert middle.length == target.length + len(verified) - 1 - start
        continued = concat(sequence, [tuple(x[1:] for x in each) for each in ahead])
    assert_close(forward(middle, probe), after.attend(concat(continued, probe), 2))


@both_stores
@every_policy
def test_restored_caches_repeat_their_outputs(policy: str, quantised: bool) -> None:
    shape = replace(SHAPE, quantised=quantised)
    target, middle = cache_pair(make_test_link("view"), 2, shape, policy)
    prefill(target, random_qkv(70), 32)
    inputs = [random_qkv(7) for _ in range(8)]

    def replay() -> list[Tensor]:
        outs = []
        for tokens in inputs:
            forward(target, tokens)
            target.advance(5)
            outs.append(forward(middle, first_tokens(tokens, 2)))
        return outs

    forward(target, inputs[0])
    target.advance(7)
    start = [cache.snapshot() for cache in (target, middle)]
    first_outs = replay()
    for cache, state in zip((target, middle), start, strict=True):
        cache.restore(state)
    assert all(torch.equal(*outs) for outs in zip(first_outs, replay(), strict=True))


@both_stores
@sizes
@every_policy
# no prefix, all within the budget, hardly more, much more
@pytest.mark.parametrize("prompt", [3, 20, 48, 50, 93])
def test_the_selection_after_a_prompt(
    policy: str, chunk: int, prompt: int, quantised: bool
) -> None:
    shape = replace(SHAPE, chunk=chunk, quantised=quantised)
    target, middle = cache_pair(make_test_link("view"), 2, shape, policy)
    sequence, probe = random_qkv(prompt), random_qkv(3)
    reference = prefill_both(target, shape, policy, sequence)
    assert_close(forward(middle, probe), reference.attend(concat(sequence, probe), 3))


@both_stores
@pytest.mark.parametrize("chunk", [4, 12])
# prefixes of one chunk of 12 tokens, two, and three
@pytest.mark.parametrize("prompt", [17, 18, 29, 45])
def test_a_budget_that_is_too_small_keeps_one_chunk(
    prompt: int, chunk: int, quantised: bool
) -> None:
    shape = replace(SHAPE, budget=12, chunk=chunk, quantised=quantised)
    target, middle = cache_pair(make_test_link("view"), 2, shape)
    for tensor in middle._store.tensors:
        tensor.fill_(100)  # unwritten slots become visible
    sequence, probe = random_qkv(prompt), random_qkv(3)
    reference = prefill_both(target, shape, "attention", sequence)
    assert_close(forward(middle, probe), reference.attend(concat(sequence, probe), 3))


@both_stores
@sizes
# one head at a time, or two of three, of a prefix of 48
@pytest.mark.parametrize("tokens", [1, 70, 100])
def test_heads_processed_in_parts_are_all_selected(
    tokens: int, chunk: int, monkeypatch: pytest.MonkeyPatch, quantised: bool
) -> None:
    monkeypatch.setattr(selection, "OBSERVED_KEYS", tokens)
    shape = replace(SHAPE, chunk=chunk, budget=36, quantised=quantised)
    target, middle = cache_pair(make_test_link("view"), 2, shape)
    sequence, probe = random_qkv(62), random_qkv(3)
    reference = prefill_both(target, shape, "attention", sequence)
    assert_close(forward(middle, probe), reference.attend(concat(sequence, probe), 3))


@every_policy
@pytest.mark.parametrize("resident", [0, 2, 4])
@every_link
def test_a_budget_for_everything_equals_the_target(link: Link, resident: int, policy: str) -> None:
    for prompt in (7, 40, 93):
        target, middle = cache_pair(
            link, resident, replace(SHAPE, budget=150, chunk=1, rows=12), policy
        )
        prefill(target, random_qkv(prompt), chunk=32)
        for rows in (1, 5, 12):
            tokens = random_qkv(rows)
            assert_close(forward(middle, tokens), forward(target, tokens))
            target.advance(rows)


@every_policy
def test_a_budget_for_everything_is_bit_identical_to_a_resident_target(policy: str) -> None:
    target, middle = cache_pair(
        make_test_link("view"), LAYOUT.layers, replace(SHAPE, budget=150), policy
    )
    prefill(target, random_qkv(93), chunk=32)
    tokens = random_qkv(5)
    assert torch.equal(forward(middle, tokens), forward(target, tokens))


@both_stores
@every_policy
def test_the_targets_keys_and_values_replace_drafted_ones(policy: str, quantised: bool) -> None:
    shape = replace(SHAPE, quantised=quantised)
    target, middle = cache_pair(make_test_link("view"), 2, shape, policy)
    prompt, draft, verified, probe = random_qkv(61), random_qkv(6), random_qkv(6), random_qkv(2)
    reference = prefill_both(target, shape, policy, prompt)
    forward(middle, draft)
    middle.advance(6)
    forward(target, verified)  # the same positions, but not the values of a partial context
    target.advance(6)
    if policy != "static":
        reference.select(concat(prompt, verified), 6, target.boundary)
    assert_close(forward(middle, probe), reference.attend(concat(prompt, verified, probe), 2))


def test_rejected_tokens_only_affect_the_selection() -> None:
    target, middle = cache_pair(make_test_link("view"), 2, SHAPE)
    sequence, rejected, probe = random_qkv(70), random_qkv(7), random_qkv(3)
    reference = prefill_both(target, SHAPE, "attention", sequence)
    forward(target, rejected)
    target.advance(0)
    reference.select(concat(sequence, rejected), 7, target.boundary)
    assert_close(forward(middle, probe), reference.attend(concat(sequence, probe), 3))


@both_stores
def test_a_cache_needs_no_prefill(quantised: bool) -> None:
    shape = replace(SHAPE, quantised=quantised)
    target, middle = cache_pair(make_test_link("view"), 2, shape)
    reference = ReferenceRetrieval(shape, "attention", ROTARY)
    sequence = random_qkv(0)
    while len(sequence[0][0]) < 90:
        tokens, probe = random_qkv(7), random_qkv(2)
        forward(target, tokens)
        target.advance(7)
        sequence = concat(sequence, tokens)
        reference.select(sequence, 7, target.boundary)
        assert_close(forward(middle, probe), reference.attend(concat(sequence, probe), 2))


@pytest.mark.parametrize(
    "shorten", ["target.crop", "middle.crop", "target.set_length", "middle.set_length"]
)
def test_the_length_follows_the_target(shorten: str) -> None:
    target, middle = cache_pair(make_test_link("view"), 2, SHAPE)
    prompt, tokens, probe = random_qkv(63), random_qkv(7), random_qkv(2)
    reference = prefill_both(target, SHAPE, "attention", prompt)
    assert middle.length == 63
    forward(middle, random_qkv(6))
    middle.advance(6)  # a draft longer than the accepted part
    forward(target, tokens)
    target.advance(5)
    reference.select(concat(prompt, tokens), 7, target.boundary)
    assert middle.length == 68
    cache_name, verb = shorten.split(".")
    getattr({"target": target, "middle": middle}[cache_name], verb)(65)
    assert middle.length == 65
    assert_close(
        forward(middle, probe), reference.attend(concat(prompt, first_tokens(tokens, 2), probe), 2)
    )
    middle.set_length(68)
    assert middle.length == 68


def test_invalid_crops_and_chunks_are_errors() -> None:
    target, middle = cache_pair(make_test_link("view"), 2, SHAPE)
    prefill(target, random_qkv(61), chunk=61)
    with pytest.raises(ValueError, match="the selection covers the first 48"):
        middle.crop(47)
    with pytest.raises(ValueError, match="the selection covers the first 48"):
        target.crop(47)  # the level that drafts from the cropped tokens raises
    for chunk in (0, 49):
        with pytest.raises(ValueError, match=f"1 to budget = 48 tokens, found {chunk}"):
            replace(SHAPE, chunk=chunk)


@both_stores
def test_exactly_all_slots_can_be_used(quantised: bool) -> None:
    shape = replace(SHAPE, append_room=9, quantised=quantised)
    target, middle = cache_pair(make_test_link("view"), 2, shape, "static")
    prefill(target, random_qkv(61), chunk=61)
    # 32 selected tokens and a window of 13, of 48; in int8 the window has a buffer of its own
    room = shape.slots - (shape.budget if quantised else 32)
    for _ in range(room - 13):
        forward(middle, random_qkv(1))
        middle.advance(1)
    with pytest.raises(
        ValueError, match=f"do not fit a buffer of {room if quantised else room + 32}"
    ):
        forward(middle, random_qkv(1))


@both_stores
def test_device_and_attended_bytes(quantised: bool) -> None:
    shape = replace(SHAPE, quantised=quantised)
    target, middle = cache_pair(make_test_link("view"), 2, shape)
    prefill(target, random_qkv(61), chunk=61)
    forward(middle, random_qkv(3))
    selected = 35 // 4 * 4  # a budget of 48 less a window of 61 - 48
    # a byte per element, and a scale for a token's 8 keys or values
    token = LAYOUT.bytes(1) // 4 + LAYOUT.bytes(1) // 8 if quantised else LAYOUT.bytes(1)
    assert middle.traffic.attended == selected * token + LAYOUT.bytes(13 + 3)
    assert middle.device_bytes == shape.device_bytes(LAYOUT)
    if quantised:
        window = shape.slots + 1 - shape.budget  # with a slot for padding
        shared = LAYOUT.bytes(shape.slots, 1)
        assert middle.device_bytes == 48 * token + LAYOUT.bytes(window) + shared
    else:
        assert middle.device_bytes == LAYOUT.bytes(shape.slots + 1)
    assert (middle.traffic.link_in, middle.traffic.link_out) == (0, 0)


@sizes
def test_bfloat16_agrees_with_float32(chunk: int) -> None:
    shape = replace(SHAPE, chunk=chunk)
    outs = []
    sequences = [random_qkv(rows, replace(LAYOUT, dtype=torch.bfloat16)) for rows in (70, 7, 3)]
    for dtype in (torch.bfloat16, torch.float32):
        layout = KVLayout(LAYOUT.layers, LAYOUT.heads, LAYOUT.head_dim, dtype)
        target, middle = cache_pair(make_test_link("view"), 2, shape, layout=layout)
        middle.selector.policy.select = latest  # a selection that rounding cannot change
        prompt, tokens, probe = (
            [tuple(x.to(dtype) for x in qkv) for qkv in sequence] for sequence in sequences
        )
        prefill(target, prompt, chunk=32)
        forward(target, tokens)
        target.advance(7)
        outs.append(forward(middle, probe))
    assert outs[0].dtype == torch.bfloat16
    torch.testing.assert_close(outs[0].float(), outs[1], atol=5e-2, rtol=5e-2)


def latest(rows: QuerySample, layer: int, head: int, chunk: int, count: int) -> Tensor:
    """Return the last chunks of the prefix, in place of `SelectionPolicy.select`."""
    heads, tokens, _ = rows.keys.shape
    end = tokens // chunk
    return torch.arange(end - count, end).repeat(heads, 1)


# two of three heads at a time, or one
@pytest.mark.parametrize("heads", [2, 1])
def test_dequantising_heads_in_parts_gives_the_same_outputs(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, quantised=True)
    sequence, tokens, probe = random_qkv(70), random_qkv(7), random_qkv(3)
    head = LAYOUT.bytes(shape.slots, 1) // LAYOUT.heads
    outs, sizes = [], []
    for shared in (LAYOUT.heads * head, heads * head):
        monkeypatch.setattr(retrieval_shape, "SHARED_BYTES", shared)
        target, middle = cache_pair(make_test_link("view"), 2, shape)
        target.rotary = middle.rotary = ROTARY
        prefill(target, sequence, 32)
        forward(target, tokens)
        target.advance(7)
        outs.append(forward(middle, probe))
        static = StaticForward([middle], 3)
        static.place(0, Place.after(middle, 3))
        static.begin_forward(3)
        by_layer = [static.attend(layer, *qkv, 0)[0] for layer, qkv in enumerate(probe)]
        outs.append(torch.stack(by_layer))
        sizes.append(middle.device_bytes)
    assert_close(outs[1], outs[0])
    assert torch.equal(outs[2], outs[0])
    assert torch.equal(outs[3], outs[1])
    assert sizes[0] - sizes[1] == (LAYOUT.heads - heads) * head


def test_heads_are_dequantised_in_parts_of_about_equal_size() -> None:
    """A 7B model on one of two GPUs, and on one: 4,096 tokens, and 32,768."""
    expected = {(16, 4096): 8, (32, 4096): 11, (16, 32_768): 2, (1, 1 << 20): 1, (3, 64): 3}
    for (heads, budget), heads_at_once in expected.items():
        layout = KVLayout(32, heads, 128, torch.bfloat16)
        shape = RetrievalCacheSpec.of(budget, 8, 1 << 20, 66, 134)
        assert replace(shape, quantised=True).shared_heads(layout) == heads_at_once


@both_stores
def test_a_reset_cache_is_like_a_new_one(quantised: bool) -> None:
    """Of a sequence with another length and other rotary tables, in the same buffers."""
    shape = replace(SHAPE, quantised=quantised)
    target, used = cache_pair(make_test_link("view"), 2, shape)
    prefill(target, random_qkv(90), 32)
    forward(used, random_qkv(3))
    with torch.inference_mode():
        used.buffers(1)[0].fill_(torch.nan)
    buffer = used.buffers(1)[0].data_ptr()
    sequence, probe, outs = random_qkv(70), random_qkv(3), []
    for is_reset in (True, False):
        target, middle = cache_pair(make_test_link("view"), 2, replace(shape, context=100))
        target.rotary = middle.rotary = ROTARY
        if is_reset:
            assert used.selector.shape.has_buffers_of(middle.selector.shape)
            used.reset(middle.selector.shape, POLICIES["attention"](), ROTARY, 1)
            target.observers[:] = [used]
            middle = used
        prefill(target, sequence, 32)
        outs.append(forward(middle, probe))
        outs.append(torch.tensor(middle.traffic.attended))
        assert all(middle.buffers(layer)[0].isfinite().all() for layer in range(LAYOUT.layers))
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    assert used.buffers(1)[0].data_ptr() == buffer
    assert not used.selector.shape.has_buffers_of(replace(used.selector.shape, budget=44))


@both_stores
def test_contexts_within_the_budget_have_equal_buffers(quantised: bool) -> None:
    """So a sequence can reuse the buffers of another one that is somewhat shorter."""
    shapes = [
        replace(
            RetrievalCacheSpec.of(min(2048, tokens), 4, tokens, 7, 148),
            quantised=quantised,
            whole_step=512,
        )
        for tokens in (700, 900, 1100, 2048, 9000)
    ]
    same = [shapes[0].has_buffers_of(shape) for shape in shapes]
    assert same == [True, True, False, False, False]
    assert shapes[3].has_buffers_of(shapes[4])
    assert not shapes[0].has_buffers_of(replace(shapes[0], quantised=not quantised))
