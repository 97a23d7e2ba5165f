"""The memory plan: what lives where, in bytes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from offload.errors import InsufficientMemoryError
from offload.tiered.shape import TieredCacheSpec


@dataclass(frozen=True)
class MemoryRequirements:
    """What a job asks of one rank's memory, in bytes of the device where nothing else is said."""

    target: (
        TieredCacheSpec  # of the target's cache; how many layers are resident is for a plan to say
    )
    retrieval: int  # the retrieval cache, and what a selection takes
    draft: int  # the draft's cache
    tables: int  # rotary tables
    hidden: int  # the prompt's hidden states, live in prefill
    forwards: int = 0  # a pass when decoding
    splitting: bool = False  # whether far layers have their codes on the device, where these fit
    # where streamed layers alone have retrieval: for each of them, and what a selection takes
    streamed_retrieval: int = 0
    selection: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """How many layers stay on the device, and what the tiers then take. All bytes are per rank."""

    resident_layers: int
    slot_heads: int
    slots: int
    device_bytes: int  # in the larger phase
    host_bytes: int
    # those whose KV or codes wait on the host until the hidden states have made room: of the
    # resident ones, then of the split ones
    deferred_layers: int = 0
    split_layers: int = 0  # of those on the host, the ones with codes on the device


def device_breakdown(
    needs: MemoryRequirements, resident: int, deferred: int = 0, split: int = 0
) -> tuple[dict[str, int], dict[str, int]]:
    """Return device bytes by what they are for, in prefill and when decoding.

    Hidden states are live in the one, `late` of the `resident` and `split` layers in the other.
    """
    shape = needs.target.with_placement(resident, deferred, split)
    retrieval = needs.retrieval
    if shape.streamed_layers:
        retrieval += needs.selection + shape.streamed_layers * needs.streamed_retrieval
    fixed = {
        "retrieval cache": retrieval,
        "draft cache": needs.draft,
        "rotary tables": needs.tables,
        "cutting slices": shape.splitting_bytes,
    }
    prefill = {**shape.device_breakdown(True), **fixed, "hidden states": needs.hidden, "a pass": 0}
    decode = {
        **shape.device_breakdown(False),
        **fixed,
        "hidden states": 0,
        "a pass": needs.forwards,
    }
    return prefill, decode


def plan_memory(
    needs: MemoryRequirements,
    device: int,
    host: int,
    resident_layers: int | None = None,
    split_kv_layers: int | None = None,
) -> MemoryPlan:
    """Keep as many layers on the device as fit in `device` bytes, and the others in `host` bytes.

    Where there are slices, as many layers as can be have their codes on the device before any is
    resident: a byte of codes saves more of the link than one of whole elements (of bfloat16). As
    few layers come late as can be. `gpu_kv_layers` and `split_kv_layers` override the counts.
    Raises InsufficientMemoryError with what is needed and available.
    """
    layers = needs.target.layout.layers
    if resident_layers is None:
        counts: Sequence[int] = range(layers, -1, -1)
    elif 0 <= resident_layers <= layers:
        counts = [resident_layers]
    else:
        raise InsufficientMemoryError(
            f"`gpu_kv_layers` {resident_layers} is not between 0 and the model's {layers} layers."
        )
    placements = list(_placements(needs, counts, split_kv_layers))
    for placed in placements:
        shape = _fitting(needs, placed, device)
        if shape is not None:
            _check_host(shape, host)
            return _plan(needs, shape)
    least = _smallest(needs, placements)
    raise _insufficient_memory(needs, least, device, resident_layers, split_kv_layers)


def _placements(
    needs: MemoryRequirements, counts: Sequence[int], split_kv_layers: int | None
) -> Iterator[TieredCacheSpec]:
    """Yield the shapes with so many resident layers, those that are to be preferred first."""
    target = needs.target
    layers = target.layout.layers
    count = 0
    for count in counts:
        split = 0
        if needs.splitting:
            split = layers - count if split_kv_layers is None else split_kv_layers
        if count + split <= layers:
            yield target.with_placement(count, 0, split)
    if needs.splitting and split_kv_layers is None:
        for split in range(layers - count - 1, -1, -1):
            yield target.with_placement(count, 0, split)


def _fitting(
    needs: MemoryRequirements, placed: TieredCacheSpec, device: int
) -> TieredCacheSpec | None:
    """Return the shape with the fewest late layers that fits; None where none does.

    They take no less when decoding.
    """
    _, decode = device_breakdown(needs, placed.resident_layers, 0, placed.split_layers)
    if sum(decode.values()) > device:
        return None
    counts = range(placed.on_device_layers + 1)
    for shape in _with_deferred_layers(placed, counts):
        if _device_bytes(needs, shape) <= device:
            return shape
    return None


def _smallest(needs: MemoryRequirements, placements: Iterable[TieredCacheSpec]) -> TieredCacheSpec:
    """Return the shape of all these, with any late layers, that takes least of the device."""
    shapes: list[TieredCacheSpec] = []
    for placed in placements:
        # codes that come late take larger buffers to leave from, all of them alike
        counts = 0, placed.resident_layers, placed.on_device_layers
        shapes += _with_deferred_layers(placed, counts)
    return min(shapes, key=lambda shape: _device_bytes(needs, shape))


def _with_deferred_layers(
    placed: TieredCacheSpec, counts: Iterable[int]
) -> Iterator[TieredCacheSpec]:
    """Yield the shape with so many late layers.

    They go through the memory of the ring, which is there for far layers alone.
    """
    for deferred in counts:
        if placed.streams or not deferred:
            yield replace(placed, deferred_layers=deferred)


def _device_bytes(needs: MemoryRequirements, shape: TieredCacheSpec) -> int:
    """Return the device bytes in the larger phase."""
    phases = device_breakdown(
        needs, shape.resident_layers, shape.deferred_layers, shape.split_layers
    )
    return max(sum(tiers.values()) for tiers in phases)


def _plan(needs: MemoryRequirements, shape: TieredCacheSpec) -> MemoryPlan:
    return MemoryPlan(
        resident_layers=shape.resident_layers,
        slot_heads=shape.slot_heads,
        slots=shape.slots,
        device_bytes=_device_bytes(needs, shape),
        host_bytes=shape.host_bytes,
        deferred_layers=shape.deferred_layers,
        split_layers=shape.split_layers,
    )


def _check_host(shape: TieredCacheSpec, host: int) -> None:
    """Raise InsufficientMemoryError where host memory does not hold what goes there."""
    lacking = shape.host_bytes - host
    if lacking > 0:
        hint = "`compress_offload`, " if shape.may_be_compressed else ""
        raise InsufficientMemoryError(
            f"the KV cache of {shape.capacity} tokens needs {shape.host_bytes / 1e9:.2f} GB of "
            f"host memory per rank and {host / 1e9:.2f} GB are available. It would take {hint}a "
            "shorter `context`, more host memory or more device memory.",
            lacking,
        )


def _insufficient_memory(
    needs: MemoryRequirements,
    least: TieredCacheSpec,
    device: int,
    resident_layers: int | None,
    split_kv_layers: int | None,
) -> InsufficientMemoryError:
    """Return the error that says what the smallest of all placements would take."""
    hint = "a shorter `context`, a smaller `retrieval_budget` or more GPUs"
    if split_kv_layers:
        hint = "fewer `split_kv_layers`, " + hint
    if resident_layers:
        hint = "fewer `gpu_kv_layers`, " + hint
    _, tiers = device_breakdown(
        needs, least.resident_layers, least.deferred_layers, least.split_layers
    )
    return InsufficientMemoryError(
        f"this job needs {_device_bytes(needs, least) / 1e9:.3f} GB of device memory beside the "
        f"weights ({tiers['retrieval cache'] / 1e9:.3f} GB of it for the retrieval cache) and "
        f"{max(0, device) / 1e9:.3f} GB are available. It would take {hint}."
    )
