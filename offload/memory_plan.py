"""The memory plan: what lives where, in bytes, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from offload.errors import FitError
from offload.layout import KVLayout
from offload.tiered_shape import TieredShape


@dataclass(frozen=True)
class Needs:
    """What a job asks of one rank's memory. Bytes, except where tokens are named."""

    layout: KVLayout
    context: int  # tokens the full cache must hold
    tail: int  # tokens of a host layer kept on the device until they are flushed
    retrieval: int  # device bytes of the retrieval cache
    draft: int  # device bytes of the draft's cache
    tables: int  # device bytes of rotary tables
    hidden: int  # device bytes of the prompt's hidden states, live in prefill
    passes: int = 0  # device bytes of a pass when decoding
    copies: bool = True  # whether the link copies; if not, ring and prefill stage take nothing

    @property
    def target(self) -> TieredShape:
        """The shape of the target's cache, with no resident layer."""
        return TieredShape.with_ring(
            self.layout, self.context, self.tail, block=0, rows=0, copies=self.copies
        )


@dataclass(frozen=True)
class MemoryPlan:
    """How many layers stay on the device, and what the tiers then take. All bytes are per rank."""

    resident_layers: int
    slot_heads: int
    slots: int
    device_bytes: int  # in the larger phase
    host_bytes: int
    # of the resident ones, those whose KV waits on the host until the hidden states have made room
    late_layers: int = 0


def device_tiers(
    needs: Needs, resident: int, late: int = 0
) -> tuple[dict[str, int], dict[str, int]]:
    """Device bytes by what they are for, in prefill and when decoding: hidden states are live in
    the one, `late` of the resident layers in the other.
    """
    shape = needs.target.placed(resident, late)
    fixed = {
        "retrieval cache": needs.retrieval,
        "draft cache": needs.draft,
        "rotary tables": needs.tables,
    }
    prefill = {**shape.device_tiers(True), **fixed, "hidden states": needs.hidden, "a pass": 0}
    decode = {**shape.device_tiers(False), **fixed, "hidden states": 0, "a pass": needs.passes}
    return prefill, decode


def plan_memory(
    needs: Needs, device: int, host: int, resident_layers: int | None = None
) -> MemoryPlan:
    """Keep as many layers on the device as fit in `device` bytes; the KV of the others goes to the
    host, in `host` bytes.

    As few of them come late as can be. `resident_layers` overrides the count. Raises FitError with
    what is needed and available.
    """
    layout = needs.layout

    def on_device(resident: int, late: int) -> int:
        return max(sum(tiers.values()) for tiers in device_tiers(needs, resident, late))

    def late(resident: int) -> range:
        """How many may come late. They go through the memory of the ring, which is there for far
        layers alone.
        """
        return range(resident + 1 if needs.copies and resident < layout.layers else 1)

    if resident_layers is not None and not 0 <= resident_layers <= layout.layers:
        raise FitError(
            f"--resident-layers {resident_layers} is not between 0 and the model's {layout.layers} "
            "layers."
        )
    choices = range(layout.layers, -1, -1) if resident_layers is None else [resident_layers]
    pairs = ((count, wait) for count in choices for wait in late(count))
    fitting, waiting = next((pair for pair in pairs if on_device(*pair) <= device), (None, 0))
    if fitting is None:
        least = on_device(choices[-1], late(choices[-1])[-1])
        hint = "a shorter --context, a smaller --budget or more GPUs"
        if resident_layers is not None:
            hint = "fewer --resident-layers, " + hint
        raise FitError(
            f"this job needs {least / 1e9:.3f} GB of device memory beside the weights "
            f"({needs.retrieval / 1e9:.3f} GB of it for the retrieval cache) and "
            f"{max(0, device) / 1e9:.3f} GB are available. It would take {hint}."
        )
    on_host = needs.target.placed(fitting, waiting).host_bytes
    if on_host > host:
        raise FitError(
            f"the KV cache of {needs.context} tokens needs {on_host / 1e9:.2f} GB of host memory "
            f"per rank and {host / 1e9:.2f} GB are available. It would take a shorter --context, "
            "more host memory or more device memory."
        )
    return MemoryPlan(
        fitting,
        needs.target.slot_heads,
        needs.target.slots,
        on_device(fitting, waiting),
        on_host,
        waiting,
    )


def tail_tokens(recent: int, block: int, rows: int) -> int:
    """Tokens a far layer keeps on the device: the recent ones, a block that is filling, and the
    rows of a pass.
    """
    return recent + block + rows
