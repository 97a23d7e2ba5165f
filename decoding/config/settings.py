"""How an engine runs: every choice in one frozen place, checked when it is made.

Reading it needs no torch, so that the command line answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from decoding.config.defaults import DEFAULT_BUDGET
from decoding.config.option import (
    MEMORY,
    PYTHON,
    SAMPLING,
    SPECULATION,
    check_options,
    option,
)
from offload.codec.format import SLICED_DTYPES
from offload.dtypes import DTYPES
from offload.errors import TierForceError
from offload.memory.link_spec import emulated_rate
from offload.retrieval.policy_specs import POLICY_NAMES
from parallel.config.rope import stretch_factor

MAX_DRAFT_LENGTH = 512  # tokens: all caches have room for one draft of so many
# the levels below the target that a mode has, outermost first; each proposes to the one before it
LEVELS: dict[str, tuple[str, ...]] = {
    "hierarchical": ("retrieval", "draft"),
    "retrieval": ("retrieval",),
    "speculative": ("draft",),
    "plain": (),
    "sliced": ("sliced",),
    "sliced-retrieval": ("sliced", "retrieval"),
    "sliced-speculative": ("sliced", "draft"),
    "sliced-hierarchical": ("sliced", "retrieval", "draft"),
}
MODES = ("auto", *LEVELS)


@dataclass(frozen=True)
class Settings:
    """What is None is chosen by the engine: from the models, the machine and past texts."""

    mode: str = option(
        "What drafts for the target: hierarchical is draft model, then retrieval cache; retrieval "
        "has no draft model; speculative has no retrieval cache; plain drafts nothing. sliced, and "
        "sliced-retrieval and so on, draft against 8 of 16 bits of the whole KV cache, which stay "
        "on the device. auto is hierarchical with a draft model and retrieval without, or the same "
        "with codes for a text for which that is expected to pay.",
        value="auto",
        group=SPECULATION,
        choices=MODES,
    )
    context: int | None = option(
        "Longest prompt and output together. Longer documents are cut.",
        value=None,
        unit="tokens",
        default="the model's limit",
        at_least=1,
    )
    rope: str | None = option(
        "Stretch the positions of a model to texts longer than it was trained on: yarn:4 makes "
        "room for four times as many tokens.",
        value=None,
        group=MEMORY,
        default="as the model's config says",
    )
    budget: int | None = option(
        "Size of the retrieval cache for each head: selected tokens and the recent window.",
        value=None,
        group=MEMORY,
        unit="tokens",
        default=f"for the first text what the machine's numbers promise, {DEFAULT_BUDGET} where "
        "there are none; then what past texts showed to pay",
        at_least=1,
    )
    chunk_size: int = option(
        "Tokens that the retrieval cache selects together.",
        value=8,
        group=SPECULATION,
        unit="tokens",
        at_least=1,
    )
    policy: str = option(
        "What selects the chunks of the retrieval cache. static is the published way.",
        value="attention",
        group=PYTHON,
        choices=POLICY_NAMES,
    )
    int8_retrieval: bool | None = option(
        "Keep what the retrieval cache selects in 8 bits an element. A budget then takes little "
        "more than half of the memory.",
        value=None,
        group=PYTHON,
        default="where KV has 16 bits and may be on the host, on a GPU with 51 MiB of L2 cache",
    )
    refresh: int | None = option(
        "Tokens that one selection serves at least.",
        value=None,
        group=PYTHON,
        unit="tokens",
        default="1 over a link, where each verification selects, else 16",
        at_least=1,
    )
    draft_length: int | None = option(
        "Tokens put before the target at once.",
        value=None,
        group=SPECULATION,
        unit="tokens",
        default="what has paid in past rounds",
        at_least=1,
        at_most=MAX_DRAFT_LENGTH,
    )
    inner_length: int | None = option(
        "Tokens put at once before each level that verifies below the target.",
        value=None,
        group=PYTHON,
        unit="tokens",
        default="what has paid in past rounds",
        at_least=1,
        at_most=MAX_DRAFT_LENGTH,
    )
    lookup: int | None = option(
        "Length of the n-grams by which drafts are looked up in the text itself. They come before "
        "the draft model's, or in their place.",
        value=None,
        group=SPECULATION,
        unit="tokens",
        default="3 without a draft model, else off",
        at_least=0,
        zero="off",
    )
    shard_draft: bool | None = option(
        "Split the draft model over the GPUs, too.",
        value=None,
        group=PYTHON,
        default="from 3 GiB of weights on",
    )
    sinks: int = option(
        "First tokens that the draft's cache always keeps.",
        value=16,
        group=PYTHON,
        unit="tokens",
        at_least=1,
    )
    window: int = option(
        "Recent tokens that the draft's cache keeps.",
        value=256,
        group=PYTHON,
        unit="tokens",
        at_least=1,
    )
    resident_layers: int | None = option(
        "Layers of the target whose KV cache stays on the device; the others' stays on the host.",
        value=None,
        group=MEMORY,
        unit="layers",
        default="as many as fit",
        at_least=0,
    )
    sliced_layers: int | None = option(
        "Layers of the target with 8 of the 16 bits of their KV cache on the device, in the modes "
        "that draft against them.",
        value=None,
        group=MEMORY,
        unit="layers",
        default="as many as fit, before any layer stays whole",
        at_least=0,
    )
    packed: bool | None = option(
        "Stream bfloat16 of layers without codes in 12 of 16 bits. The few elements that need more "
        "are on the device.",
        value=None,
        group=MEMORY,
        default="in sliced modes, of bfloat16",
    )
    device_memory: int | None = option(
        "Device memory to use for each rank, weights included.",
        value=None,
        group=MEMORY,
        unit="GB",
        scale=1e9,
        default="what is free",
        at_least=1,
    )
    hardware: str | None = option(
        "What the first text's budget and mode are chosen by: a file that `tierforce probe` has "
        "made of this machine. Later texts go by what past ones showed.",
        value=None,
        group=MEMORY,
        default="numbers of GPUs of this name, where they come along",
    )
    link: str = option(
        "How KV reaches the device. On a CPU also view, which copies nothing, and emulated:RATE, "
        "in GB/s.",
        value="auto",
        group=MEMORY,
    )
    graphs: bool | None = option(
        "Record short passes as CUDA graphs. On a CPU they only take fixed shapes.",
        value=None,
        group=MEMORY,
        default="where trying it shows that it works",
    )
    dtype: str = option(
        "Number format of weights and KV cache. auto is the checkpoint's own.",
        value="auto",
        group=MEMORY,
        choices=("auto", *DTYPES),
    )
    keep: str | None = option(
        "Folder in which the KV cache of what was read stays: a text that begins like one of those "
        "is not read again.",
        value=None,
        group=MEMORY,
        default="nothing stays",
    )
    keep_limit: int | None = option(
        "Most that is kept there. What was used longest ago goes first.",
        value=None,
        group=MEMORY,
        unit="GB",
        scale=1e9,
        default="what the disk holds",
        at_least=1,
    )
    identical: bool = option(
        "Let the text be a function of model, prompt and seed alone: in 16 bits, too, the same as "
        "plain decoding writes, token for token, whatever drafts for it. Takes longer.",
        value=False,
        group=SAMPLING,
    )
    prefill_chunk: int | None = option(
        "Tokens that prefill computes at once.",
        value=None,
        group=PYTHON,
        unit="tokens",
        default="as many as a bounded memory allows",
        at_least=1,
    )

    def __post_init__(self) -> None:
        """Raise TierForceError for a value that is not allowed."""
        check_options(self)
        emulated_rate(self.link)
        if self.rope is not None:
            stretch_factor(self.rope)
        if self.keep == "":
            raise TierForceError("`keep` is empty: name a folder.")
        if self.keep_limit is not None and self.keep is None:
            raise TierForceError("`keep_limit` is a limit of the folder `keep`: name one.")
        for name in ("keep", "graphs", "prefill_chunk"):
            if self.identical and getattr(self, name):
                raise TierForceError(
                    f"`{name}` is not for `identical`, which computes in its own way: leave it out."
                )
        if self.budget is not None and self.chunk_size > self.budget:
            raise TierForceError(
                f"`budget` {self.budget} is less than a chunk of {self.chunk_size} tokens: give "
                "more."
            )
        if self.sliced_layers and "sliced" not in LEVELS.get(self.mode, ()):
            raise TierForceError(
                f"`sliced_layers` {self.sliced_layers} goes with a mode that drafts against codes: "
                f"use `mode` sliced, or another with that name, in place of {self.mode}."
            )

    def refuse_missing_layers(self, layers: int) -> None:
        """Raise TierForceError where more layers are asked for than a model has."""
        resident, sliced = self.resident_layers or 0, self.sliced_layers or 0
        for name, count in (("resident_layers", resident), ("sliced_layers", sliced)):
            if count > layers:
                raise TierForceError(f"`{name}` {count}: the model has {layers} layers.")
        if resident + sliced > layers:
            raise TierForceError(
                f"`resident_layers` {resident} and `sliced_layers` {sliced}: the model has "
                f"{layers} layers."
            )

    def refuse_unsliced(self, mode: str, dtype: str) -> None:
        """Raise TierForceError where a mode, or `packed`, would cut what is not cut into slices."""
        if "sliced" in LEVELS[mode] and dtype not in SLICED_DTYPES:
            raise TierForceError(
                f"`mode` {mode} needs elements of 16 bits, found {dtype}: use `dtype` "
                f"{' or '.join(SLICED_DTYPES)}, or another mode."
            )
        if self.packed and dtype != "bfloat16":
            raise TierForceError(f"`packed` saves nothing of {dtype}: use `dtype` bfloat16.")

    def resolved_mode(self, has_draft: bool) -> str:
        """Return the mode that `auto` stands for.

        Raises TierForceError when a mode lacks its draft model.
        """
        if self.mode == "auto":
            return "hierarchical" if has_draft else "retrieval"
        levels = LEVELS[self.mode]
        if "draft" in levels and "retrieval" in levels and not has_draft:
            other = self.mode.replace("hierarchical", "retrieval")
            raise TierForceError(
                f"`mode` {self.mode} needs a draft model: give `draft`, or use `mode` {other}."
            )
        if "draft" in levels and not has_draft and not self.lookup:
            raise TierForceError(
                f"`mode` {self.mode} needs a draft model or a lookup: give `draft` or `lookup` 3."
            )
        return self.mode
