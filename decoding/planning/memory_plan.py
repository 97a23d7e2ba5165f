"""The memory plan: the place and size of every tier, computed before any allocation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from offload.codec.format import compression_saves
from offload.errors import InsufficientMemoryError
from offload.tiered.shape import TieredCacheSpec


@dataclass(frozen=True)
class MemoryRequirements:
    """The memory one rank needs, in device bytes unless noted otherwise."""

    target: TieredCacheSpec  # without a placement, which the plan decides
    retrieval: int  # retrieval cache and selection scratch
    draft: int  # draft cache
    tables: int  # rotary tables
    hidden: int  # the prompt's hidden states, live during prefill
    forwards: int = 0  # scratch of a decoding forward
    captured: int = 0  # the part of it that CUDA graphs keep during prefill
    splitting: bool = False  # whether offloaded layers keep high bytes on the device if they fit
    # if only streamed layers have retrieval: bytes per layer, of their buffer, and of a selection's
    # scratch memory
    streamed_retrieval: tuple[int, int, int] = (0, 0, 0)
    # selected keys: bytes per split layer, and scratch memory of a selection beside `retrieval`
    split_selection: tuple[int, int] = (0, 0)
    states: int = 0  # recurrent states of drafting levels


@dataclass(frozen=True)
class MemoryPlan:
    """The placement of layers and the resulting tier sizes. All bytes are per rank."""

    resident_layers: int
    slot_heads: int
    slots: int
    device_bytes: int  # in the larger of prefill and decoding
    host_bytes: int
    # layers whose KV or high bytes stay on the host until the hidden states are freed: resident
    # layers first, then split layers
    deferred_layers: int = 0
    split_layers: int = 0  # host layers with their high bytes on the device

    @property
    def placement(self) -> tuple[int, int, int]:
        """Return the numbers of resident, split and deferred layers."""
        return self.resident_layers, self.split_layers, self.deferred_layers


Phases = tuple[dict[str, int], dict[str, int]]  # bytes by tier, in prefill and in decoding


def device_breakdown(
    requirements: MemoryRequirements, resident: int, deferred: int = 0, split: int = 0
) -> Phases:
    """Return the device bytes by tier, during prefill and during decoding.

    Hidden states are live only in prefill, and `deferred` of the `resident` and `split` layers only
    in decoding.
    """
    shape = requirements.target.with_placement(resident, deferred, split)
    return _tiers(requirements, shape, True), _tiers(requirements, shape, False)


def _tiers(
    requirements: MemoryRequirements, shape: TieredCacheSpec, prefill: bool
) -> dict[str, int]:
    """Return the device bytes by tier, in prefill or when decoding."""
    retrieval, scratch = requirements.retrieval, 0
    if shape.streamed_layers:
        layer, shared, scratch = requirements.streamed_retrieval
        retrieval += shape.streamed_layers * layer + shared
    if shape.split_layers:
        layer, selection = requirements.split_selection
        retrieval += shape.split_layers * layer
        scratch = max(scratch, selection)  # one layer selects at a time
    retrieval += scratch
    return {
        **shape.device_breakdown(prefill),
        "retrieval cache": retrieval,
        "draft cache": requirements.draft,
        "rotary tables": requirements.tables,
        "states of drafting levels": requirements.states,
        "splitting buffers": shape.buffers.splitting_bytes,
        "hidden states": requirements.hidden if prefill else 0,
        "forward": requirements.captured if prefill else requirements.forwards,
    }


def plan_memory(
    requirements: MemoryRequirements,
    device: int,
    host: int,
    resident_layers: int | None = None,
    split_kv_layers: int | None = None,
) -> MemoryPlan:
    """Plan as many layers on the device as fit in `device` bytes, and the others in `host` bytes.

    With split layers, as many layers as possible keep their high bytes on the device before any is
    resident: a high byte saves more link traffic than a byte of a whole element (in bfloat16). As
    few layers as possible are deferred. `resident_layers` and `split_kv_layers` override the
    counts. Raises InsufficientMemoryError, stating the required and the available memory.
    """
    layers = requirements.target.layout.full_layers
    if resident_layers is None:
        counts: Sequence[int] = range(layers, -1, -1)
    elif 0 <= resident_layers <= layers:
        counts = [resident_layers]
    else:
        raise InsufficientMemoryError(
            f"`gpu_kv_layers` {resident_layers} is not between 0 and the model's {layers} layers "
            "with full attention."
        )
    placements = list(_placements(requirements, counts, split_kv_layers))
    for placement in placements:
        shape = _with_min_deferred(requirements, placement, device)
        if shape is not None:
            _check_host(shape, host)
            return _plan(requirements, shape)
    smallest = _smallest(requirements, placements)
    raise _insufficient_memory(requirements, smallest, device, resident_layers, split_kv_layers)


def _placements(
    requirements: MemoryRequirements, counts: Sequence[int], split_kv_layers: int | None
) -> Iterator[TieredCacheSpec]:
    """Yield the placements with these counts of resident layers, in order of preference."""
    target = requirements.target
    layers = target.layout.full_layers
    count = 0
    for count in counts:
        split = 0
        if requirements.splitting:
            split = layers - count if split_kv_layers is None else split_kv_layers
        if count + split <= layers:
            yield target.with_placement(count, 0, split)
    if requirements.splitting and split_kv_layers is None:
        for split in range(layers - count - 1, -1, -1):
            yield target.with_placement(count, 0, split)


def _with_min_deferred(
    requirements: MemoryRequirements, placement: TieredCacheSpec, device: int
) -> TieredCacheSpec | None:
    """Return the placement with the fewest deferred layers that fits; None if none does.

    Deferring layers does not reduce the memory of decoding.
    """
    shape = replace(placement, deferred_layers=0)
    if _phase_bytes(requirements, shape, prefill=False) > device:
        return None
    counts = range(placement.resident_layers + placement.split_layers + 1)
    for shape in _with_deferred_layers(placement, counts):
        if all(_phase_bytes(requirements, shape, each) <= device for each in (True, False)):
            return shape
    return None


def _smallest(
    requirements: MemoryRequirements, placements: Iterable[TieredCacheSpec]
) -> TieredCacheSpec:
    """Return the placement, with any number of deferred layers, that needs least device memory."""
    shapes: list[TieredCacheSpec] = []
    for placement in placements:
        # Deferred high bytes need larger staging buffers, of the same size for any number of them.
        resident, split = placement.resident_layers, placement.split_layers
        counts = 0, resident, resident + split
        shapes += _with_deferred_layers(placement, counts)
    return min(shapes, key=lambda shape: _device_bytes(requirements, shape))


def _with_deferred_layers(
    placement: TieredCacheSpec, counts: Iterable[int]
) -> Iterator[TieredCacheSpec]:
    """Yield the placement with these counts of deferred layers.

    Deferred layers are onloaded through the ring, which exists only if layers are offloaded.
    """
    for deferred in counts:
        if placement.streams or not deferred:
            yield replace(placement, deferred_layers=deferred)


def _device_bytes(requirements: MemoryRequirements, shape: TieredCacheSpec) -> int:
    """Return the device bytes of the larger phase."""
    return max(_phase_bytes(requirements, shape, prefill) for prefill in (False, True))


def _phase_bytes(requirements: MemoryRequirements, shape: TieredCacheSpec, prefill: bool) -> int:
    return sum(_tiers(requirements, shape, prefill).values())


def _plan(requirements: MemoryRequirements, shape: TieredCacheSpec) -> MemoryPlan:
    return MemoryPlan(
        resident_layers=shape.resident_layers,
        slot_heads=shape.slot_heads,
        slots=shape.slots,
        device_bytes=_device_bytes(requirements, shape),
        host_bytes=shape.host_bytes,
        deferred_layers=shape.deferred_layers,
        split_layers=shape.split_layers,
    )


def _check_host(shape: TieredCacheSpec, host: int) -> None:
    """Raise InsufficientMemoryError if the offloaded layers exceed host memory."""
    lacking = shape.host_bytes - host
    if lacking > 0:
        saves = shape.copies and not shape.compressed and compression_saves(shape.layout.dtype)
        hint = "`compress_offload`, " if saves and shape.streamed_layers else ""
        more = "more host memory or more device memory"
        if not shape.offloaded_layers:  # the windows of some layers at some positions
            more = "more host memory"
        raise InsufficientMemoryError(
            f"the KV cache of {shape.capacity} tokens needs {shape.host_bytes / 1e9:.2f} GB of "
            f"host memory per rank and {host / 1e9:.2f} GB are available. Use {hint}a shorter "
            f"`context`, {more}.",
            lacking,
        )


def _insufficient_memory(
    requirements: MemoryRequirements,
    smallest: TieredCacheSpec,
    device: int,
    resident_layers: int | None,
    split_kv_layers: int | None,
) -> InsufficientMemoryError:
    """Return the error that states the memory of the smallest placement."""
    hint = "a shorter `context`, a smaller `retrieval_budget` or more GPUs"
    if smallest.split_layers and any(requirements.split_selection):
        hint = "a smaller `split_budget`, " + hint
    if split_kv_layers:
        hint = "fewer `split_kv_layers`, " + hint
    if resident_layers:
        hint = "fewer `gpu_kv_layers`, " + hint
    _, tiers = device_breakdown(
        requirements, smallest.resident_layers, smallest.deferred_layers, smallest.split_layers
    )
    return InsufficientMemoryError(
        f"this job needs {_device_bytes(requirements, smallest) / 1e9:.3f} GB of device memory "
        f"beside the weights ({tiers['retrieval cache'] / 1e9:.3f} GB of it for the retrieval "
        f"cache) and {max(0, device) / 1e9:.3f} GB are available. Use {hint}."
    )
