"""The plan of one request on one rank, in the memory there is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from decoding.config.defaults import (
    SELECTION_INTERVAL_ON_DEVICE,
    SELECTION_INTERVAL_OVER_LINK,
    USABLE_SHARE,
)
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.memory_plan import MemoryPlan, Phases, device_breakdown, plan_memory
from decoding.planning.request_spec import RequestSpec, max_ahead
from decoding.planning.requirements import Requirements
from offload.codec.format import split_format
from offload.errors import InsufficientMemoryError
from offload.layout import ceil_div
from offload.tiered.shape import OFFLOADED, RECURRENT, SPLIT, TieredCacheSpec


@dataclass(frozen=True)
class Memory:
    """The bytes available to one request on one rank, without the weights."""

    device: int
    host: int
    concurrency: int = 1  # requests sharing the memory equally; the sizes are one share
    is_shared: bool = False  # on a CPU: what is on the host is not available to the device

    @classmethod
    def of(cls, hardware: HardwareProfile, requirements: Requirements) -> Memory:
        """Return the memory of a described machine's rank that the weights leave.

        Raises InsufficientMemoryError if the weights alone do not fit.
        """
        weights = requirements.weight_bytes
        if weights >= hardware.device_memory:
            raise InsufficientMemoryError(
                f"the weights alone take {weights / 1e9:.1f} GB per GPU, and each GPU has "
                f"{hardware.device_memory / 1e9:.1f} GB. Use more or larger GPUs, or a smaller "
                "model."
                if hardware.runs_ahead
                else f"the weights alone take {weights / 1e9:.1f} GB, and "
                f"{hardware.device_memory / 1e9:.1f} GB of memory are available. Use a smaller "
                "model."
            )
        device = int(USABLE_SHARE * (hardware.device_memory - weights))
        host = int(hardware.host_memory) // requirements.ranks
        return cls(device, host, is_shared=not requirements.copies)

    def divided(self, concurrency: int) -> Memory:
        """Return one of `concurrency` equal shares."""
        device, host = self.device // concurrency, self.host // concurrency
        return Memory(device, host, concurrency, self.is_shared)


@dataclass(frozen=True)
class Plan:
    """Mode and retrieval budget of one request, and where its KV goes on one rank."""

    spec: RequestSpec  # in this mode and budget
    memory: MemoryPlan
    concurrency: int = 1  # requests in a batch, this one included
    reason: str = field(default="set", compare=False)  # why this mode and budget

    @classmethod
    def place(cls, spec: RequestSpec, memory: Memory) -> Plan:
        """Plan a request in a given mode and budget, with as many layers on the device as fit.

        Raises InsufficientMemoryError, stating the required and the available memory.
        """
        settings = spec.requirements.settings
        layers = settings.gpu_kv_layers, settings.split_kv_layers
        needs = spec.shared_memory(memory.concurrency)
        placed = plan_memory(needs, memory.device, memory.host, *layers)
        if memory.is_shared and (total := placed.device_bytes + placed.host_bytes) > memory.device:
            raise InsufficientMemoryError(
                f"the KV cache of {spec.tokens} tokens and all beside the weights need "
                f"{total / 1e9:.2f} GB of memory and {memory.device / 1e9:.2f} GB are available. "
                "Use a shorter `context`.",
                placed.host_bytes,
            )
        return cls(spec, placed, memory.concurrency)

    @property
    def requirements(self) -> Requirements:
        """Return the models and settings, in this mode and budget."""
        return self.spec.requirements

    @property
    def target_spec(self) -> TieredCacheSpec:
        """Return the layout of the target cache, with the layers placed."""
        return self._placed(self.spec)

    @cached_property
    def prompt_spec(self) -> TieredCacheSpec:
        """Return the layout of a target cache that holds the prompt alone, with these layers."""
        return self._placed(replace(self.spec, max_new_tokens=0))

    @cached_property
    def retrieval_layers(self) -> list[int]:
        """Return the layers that have a retrieval cache."""
        needs, layers = self.requirements, enumerate(self.prompt_spec.layers())
        if needs.has_retrieval:
            return [index for index, each in layers if each.kind != RECURRENT]
        return [index for index, each in layers if needs.has_split and each.kind == OFFLOADED]

    @cached_property
    def split_selection_layers(self) -> list[int]:
        """Return the split layers of which keys are selected."""
        if self.spec.split_selection is None:
            return []
        layers = enumerate(self.prompt_spec.layers())
        return [index for index, each in layers if each.kind == SPLIT]

    @cached_property
    def selecting_layers(self) -> int:
        """Return the number of layers of which chunks are selected: none with a window are."""
        window_of = self.requirements.layout.window_of
        layers = [*self.retrieval_layers, *self.split_selection_layers]
        return sum(window_of(layer) is None for layer in layers)

    @property
    def layers_on_host(self) -> int:
        """Return the number of layers with KV on the host during decoding."""
        return self.requirements.target.full_layers - self.memory.resident_layers

    @property
    def uses_link(self) -> bool:
        """Return whether a verification transfers KV over the link."""
        return self.requirements.copies and self.layers_on_host > 0

    @property
    def link_bytes(self) -> int:
        """Return the bytes of KV that this rank's link transfers per verification."""
        return self.prompt_spec.streamed_bytes(self.spec.prompt)

    @property
    def uncovered_bytes(self) -> int:
        """Return the bytes of the first slot's copy if no resident layer's compute hides it.

        Link-bound verifications already include it.
        """
        needs = self.requirements
        on_device = self.memory.resident_layers + needs.target.layers - needs.target.full_layers
        if on_device or not needs.copies:
            return 0
        return self.prompt_spec.buffers.slot_numel * needs.dtype.itemsize

    @property
    def selection_interval(self) -> int:
        """Return the minimum number of tokens between two selections."""
        default = SELECTION_INTERVAL_OVER_LINK if self.uses_link else SELECTION_INTERVAL_ON_DEVICE
        return self.requirements.settings.selection_interval or default

    @property
    def breakdown(self) -> Phases:
        """Return the device bytes by tier, without weights, during prefill and during decoding."""
        needs, plan = self.spec.shared_memory(self.concurrency), self.memory
        return device_breakdown(
            needs, plan.resident_layers, plan.deferred_layers, plan.split_layers
        )

    @property
    def extend_chunk(self) -> int:
        """Return the largest chunk with which the sequence can be extended after prefill.

        At least the tokens of the largest decoding forward. Larger chunks use the memory that the
        plan leaves beside such a forward, and the forward's own memory if no CUDA graph holds it.
        """
        spec, needs = self.spec, self.requirements
        _, decode = self.breakdown
        forward = 0 if needs.settings.graphs else spec.memory.forwards
        room = self.memory.device_bytes - sum(decode.values()) + forward
        low, high = needs.max_forward_tokens, spec.tokens
        while low < high:
            middle = ceil_div(low + high, 2)
            if spec.hidden_bytes(middle) <= room:
                low = middle
            else:
                high = middle - 1
        return low

    def _placed(self, spec: RequestSpec) -> TieredCacheSpec:
        plan = self.memory
        return spec.target.with_placement(
            plan.resident_layers, plan.deferred_layers, plan.split_layers
        )


def ahead_bytes(plan: Plan) -> int:
    """Return the bytes of a verification that the ring's slots hold before it begins."""
    spec, needs = plan.prompt_spec, plan.requirements
    if not needs.copies:
        return 0
    return min(plan.link_bytes, spec.slots * spec.buffers.slot_numel * needs.dtype.itemsize)


def tokens_ahead(plan: Plan) -> int:
    """Return how many tokens are drafted during a verification, at most."""
    return max_ahead(plan.spec) if plan.uses_link else 0


def split_tokens(plan: Plan) -> int:
    """Return the tokens per head of split layers with exact keys to draft from; 0 without any."""
    needs = plan.requirements
    budget = needs.strategy.split_budget if plan.memory.split_layers else 0
    return min(budget, plan.spec.prompt) // needs.settings.chunk_size * needs.settings.chunk_size


def effective_device_tokens(plan: Plan, split_share: float) -> float:
    """Return the 16-bit equivalent number of tokens that attention reads on the device.

    It is the mean over the layers with full attention. `split_share` is the time to read a high
    byte, relative to a 16-bit element; the low bits of selected keys are read at the same rate.
    """
    needs, memory, tokens = plan.requirements, plan.memory, plan.spec.prompt
    layers, split = needs.target.full_layers, memory.split_layers
    if not layers:
        return tokens
    read = float(split * tokens)  # high bytes
    if (fmt := split_format(needs.dtype)) is not None:
        read += split * split_tokens(plan) * fmt.low_bits / 16  # keys alone
    streamed = layers - memory.resident_layers - split
    whole = memory.resident_layers * tokens + split_share * read
    return (whole + streamed * min(needs.strategy.budget, tokens)) / layers
