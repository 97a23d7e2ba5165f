"""Engine settings: every choice in one frozen dataclass, validated on construction.

Importing this module does not import torch, so that the command line starts at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from decoding.config.defaults import (
    DEFAULT_RETRIEVAL_BUDGET,
    MAX_DRAFT,
    MAX_INNER_DRAFT,
    MAX_SPLIT_DRAFT,
)
from decoding.config.option import (
    MEMORY,
    PYTHON,
    SAMPLING,
    SPECULATION,
    check_options,
    option,
)
from offload.codec.format import SPLIT_DTYPES
from offload.dtypes import DTYPES
from offload.errors import TierForceError
from offload.memory.link_spec import emulated_rate
from offload.retrieval.policy_specs import POLICY_NAMES
from parallel.config.rope import rope_factor

MAX_NUM_DRAFT_TOKENS = 512  # every cache reserves room for one draft of this length
# levels below the target in each mode, outermost first; each one drafts for its predecessor
LEVELS: dict[str, tuple[str, ...]] = {
    "hierarchical": ("retrieval", "draft"),
    "retrieval": ("retrieval",),
    "speculative": ("draft",),
    "plain": (),
    "split": ("split",),
    "split-retrieval": ("split", "retrieval"),
    "split-speculative": ("split", "draft"),
    "split-hierarchical": ("split", "retrieval", "draft"),
}
MODES = ("auto", *LEVELS)
WEIGHTS = ("auto", "packed", "16-bit")


@dataclass(frozen=True)
class Settings:
    """How an engine runs. The engine chooses each value that is None, from the models, the machine
    and past requests.
    """

    mode: str = option(
        "What drafts for the target: hierarchical uses the draft model, or the target's own "
        "multi-token-prediction block, and the retrieval cache; retrieval has no draft model; "
        "speculative has no retrieval cache; plain drafts nothing. "
        "split, split-retrieval and so on draft against the high bytes of the whole KV cache, "
        "which stay on the device. auto is hierarchical with a draft and retrieval without, "
        "or speculative and plain if all layers have a window; for each request the engine picks "
        "the split variant where that is predicted to pay.",
        value="auto",
        group=SPECULATION,
        choices=MODES,
    )
    context: int | None = option(
        "Maximum length of prompt and output together. Longer documents are split or truncated.",
        value=None,
        unit="tokens",
        default="the model's limit",
        minimum=1,
    )
    rope: str | None = option(
        "RoPE scaling for contexts longer than the model was trained on: yarn:4 extends them "
        "fourfold.",
        value=None,
        group=MEMORY,
        default="as the model's config says",
    )
    retrieval_budget: int | None = option(
        "Size of the retrieval cache per head: selected tokens and the recent window.",
        value=None,
        group=MEMORY,
        unit="tokens",
        default="chosen by the hardware profile and measurements of past requests; "
        f"{DEFAULT_RETRIEVAL_BUDGET} without either",
        minimum=1,
    )
    chunk_size: int = option(
        "Consecutive tokens that the retrieval cache selects as one chunk.",
        value=8,
        group=SPECULATION,
        unit="tokens",
        minimum=1,
    )
    policy: str = option(
        "Selection policy of the retrieval cache. static is the published one.",
        value="attention",
        group=PYTHON,
        choices=POLICY_NAMES,
    )
    int8_retrieval: bool | None = option(
        "Store the retrieval cache's selected tokens in 8 bits per element: a budget then takes "
        "little more than half the memory.",
        value=None,
        group=PYTHON,
        default="on for 16-bit KV that may be on the host",
    )
    selection_interval: int | None = option(
        "Minimum number of tokens between two selections of the retrieval cache.",
        value=None,
        group=PYTHON,
        unit="tokens",
        default="1 with offloaded layers, where each verification selects anyway, else 16",
        minimum=1,
    )
    num_draft_tokens: int | None = option(
        "Draft tokens that the target verifies in one forward.",
        value=None,
        group=SPECULATION,
        unit="tokens",
        default="adapted to past rounds",
        minimum=1,
        maximum=MAX_NUM_DRAFT_TOKENS,
    )
    num_inner_draft_tokens: int | None = option(
        "Draft tokens that each verifying level below the target verifies in one forward.",
        value=None,
        group=PYTHON,
        unit="tokens",
        default="adapted to past rounds",
        minimum=1,
        maximum=MAX_NUM_DRAFT_TOKENS,
    )
    draft_ahead: bool | None = option(
        "Draft on while a verification waits for the host link, as if it accepted the whole draft. "
        "How far that gets depends on time, and so do sampled tokens; greedy ones do not.",
        value=None,
        group=PYTHON,
        default="on if `num_draft_tokens` is adapted",
    )
    prompt_lookup_ngram: int | None = option(
        "Length of the n-grams by which drafts are looked up in the prompt and output so far. "
        "Lookup comes before the draft model, or replaces it.",
        value=None,
        group=SPECULATION,
        unit="tokens",
        default="3 without a draft, else off",
        minimum=0,
        zero="off",
    )
    shard_draft: bool | None = option(
        "Shard the draft model over the GPUs, too.",
        value=None,
        group=PYTHON,
        default="from 3 GiB of weights on",
    )
    sinks: int = option(
        "Attention sinks: first tokens that the draft's cache always keeps.",
        value=16,
        group=PYTHON,
        unit="tokens",
        minimum=1,
    )
    window: int = option(
        "Recent tokens that the draft's cache keeps.",
        value=256,
        group=PYTHON,
        unit="tokens",
        minimum=1,
    )
    gpu_kv_layers: int | None = option(
        "Layers of the target, of those without a sliding window, whose KV cache stays on the "
        "device; that of the others is offloaded to host memory.",
        value=None,
        group=MEMORY,
        unit="layers",
        default="as many as fit",
        minimum=0,
    )
    split_kv_layers: int | None = option(
        "Layers of the target that keep the high byte of each 16-bit KV element on the device, in "
        "the split modes.",
        value=None,
        group=MEMORY,
        unit="layers",
        default="as many as fit, before any layer stays on the device whole",
        minimum=0,
    )
    split_budget: int | None = option(
        "Tokens per head of split layers whose keys are exact where drafts attend to them: those "
        "that matter most. A key takes an eighth of its token's bfloat16 KV, beside high bytes.",
        value=None,
        group=MEMORY,
        unit="tokens",
        default="chosen with `retrieval_budget`",
        minimum=0,
        zero="none",
    )
    compress_offload: bool | None = option(
        "Stream the bfloat16 KV of offloaded layers in 12 of 16 bits, losslessly. The few elements "
        "that need more are kept on the device.",
        value=None,
        group=MEMORY,
        default="on in split modes with bfloat16",
    )
    device_memory: int | None = option(
        "Device memory to use per rank, weights included.",
        value=None,
        group=MEMORY,
        unit="GB",
        scale=1e9,
        default="what is free",
        minimum=1,
    )
    hardware: str | None = option(
        "Hardware profile that mode and retrieval budget are chosen by: a file that `tierforce "
        "probe` wrote on this machine. Measurements of past requests correct it.",
        value=None,
        group=MEMORY,
        default="the built-in profile for GPUs of this name, if there is one",
    )
    link: str = option(
        "Host link: how KV reaches the device. On a CPU also view, which copies nothing, and "
        "emulated:RATE, in GB/s.",
        value="auto",
        group=MEMORY,
    )
    graphs: bool | None = option(
        "Capture short forwards as CUDA graphs. On a CPU they only take static shapes.",
        value=None,
        group=MEMORY,
        default="on where a self-test succeeds",
    )
    dtype: str = option(
        "Data type of weights and KV cache. auto is the checkpoint's own.",
        value="auto",
        group=MEMORY,
        choices=("auto", *DTYPES),
    )
    weights: str = option(
        "How quantised weights are stored: packed, as in the file, or 16-bit, "
        "unpacked once. They are the same weights. auto is packed where that is faster, or where "
        "16 bits would take more than half of the device's memory.",
        value="auto",
        group=MEMORY,
        choices=WEIGHTS,
    )
    prompt_cache: str | None = option(
        "Folder of the prompt cache, which stores the KV of prompts on disk: a prompt that shares "
        "a prefix with a stored one is not prefilled again.",
        value=None,
        group=MEMORY,
        default="off",
    )
    prompt_cache_limit: int | None = option(
        "Maximum size of the prompt cache. Least recently used prompts are evicted first.",
        value=None,
        group=MEMORY,
        unit="GB",
        scale=1e9,
        default="what the disk holds",
        minimum=1,
    )
    deterministic: bool = option(
        "Make the output a function of model, prompt and seed alone: also in 16 bits the same "
        "tokens as plain decoding, whatever drafts. Slower.",
        value=False,
        group=SAMPLING,
    )
    prefill_chunk: int | None = option(
        "Tokens per prefill chunk.",
        value=None,
        group=PYTHON,
        unit="tokens",
        default="as many as a bounded memory allows",
        minimum=1,
    )

    def __post_init__(self) -> None:
        """Raise TierForceError for an invalid value."""
        check_options(self)
        emulated_rate(self.link)
        if self.rope is not None:
            rope_factor(self.rope)
        if self.prompt_cache == "":
            raise TierForceError("`prompt_cache` is empty: name a folder.")
        if self.prompt_cache_limit is not None and self.prompt_cache is None:
            raise TierForceError(
                "`prompt_cache_limit` limits the folder of `prompt_cache`: give one."
            )
        for name in ("prompt_cache", "graphs", "prefill_chunk"):
            if self.deterministic and getattr(self, name):
                raise TierForceError(
                    f"`{name}` cannot be combined with `deterministic`, which fixes how everything "
                    "is computed: leave it out."
                )
        if self.retrieval_budget is not None and self.chunk_size > self.retrieval_budget:
            raise TierForceError(
                f"`retrieval_budget` {self.retrieval_budget} is less than one chunk of "
                f"{self.chunk_size} tokens: increase it."
            )
        levels = LEVELS.get(self.mode, ())
        if self.split_budget and "split" not in levels:
            raise TierForceError(
                f"`split_budget` {self.split_budget} needs a split mode: use `mode` split, or "
                f"another split mode, in place of {self.mode}."
            )
        if self.split_budget and self.chunk_size > self.split_budget:
            raise TierForceError(
                f"`split_budget` {self.split_budget} is less than one chunk of {self.chunk_size} "
                "tokens: increase it."
            )
        if self.split_kv_layers and "split" not in levels:
            raise TierForceError(
                f"`split_kv_layers` {self.split_kv_layers} needs a split mode: use `mode` split, "
                f"or another split mode, in place of {self.mode}."
            )

    def draft_length_range(self, mode: str) -> range:
        """Return the allowed draft lengths for the target in a mode, one of LEVELS."""
        longest = MAX_SPLIT_DRAFT if "split" in LEVELS[mode] else MAX_DRAFT
        return _lengths(self.num_draft_tokens, longest)

    @property
    def inner_draft_length_range(self) -> range:
        """Return the allowed draft lengths for a level below the target."""
        return _lengths(self.num_inner_draft_tokens, MAX_INNER_DRAFT)

    def check_layers(self, layers: int) -> None:
        """Raise TierForceError if more layers are requested than the model has.

        `layers` counts those with full attention: others are always on the device.
        """
        resident, split = self.gpu_kv_layers or 0, self.split_kv_layers or 0
        for name, count in (("gpu_kv_layers", resident), ("split_kv_layers", split)):
            if count > layers:
                raise TierForceError(
                    f"`{name}` {count}: the model has {layers} layers with full attention."
                )
        if resident + split > layers:
            raise TierForceError(
                f"`gpu_kv_layers` {resident} and `split_kv_layers` {split}: the model has "
                f"{layers} layers with full attention."
            )

    def check_split_dtype(self, mode: str, dtype: str) -> None:
        """Raise TierForceError if `mode` or `compress_offload` needs KV of another data type."""
        if "split" in LEVELS[mode] and dtype not in SPLIT_DTYPES:
            raise TierForceError(
                f"`mode` {mode} needs elements of 16 bits, found {dtype}: use `dtype` "
                f"{' or '.join(SPLIT_DTYPES)}, or another mode."
            )
        if self.compress_offload and dtype != "bfloat16":
            raise TierForceError(
                f"`compress_offload` saves nothing with {dtype}: use `dtype` bfloat16."
            )

    def resolved_mode(self, has_draft: bool, full_layers: int | None = None) -> str:
        """Return the mode, with `auto` resolved.

        A retrieval cache would save a target without layers with full attention nothing.

        Args:
            has_draft: whether there is a draft model.
            full_layers: the target's layers with full attention, once they are known.

        Raises TierForceError if the mode needs a draft model and there is none.
        """
        if self.mode == "auto":
            if full_layers == 0:
                return "speculative" if has_draft else "plain"
            return "hierarchical" if has_draft else "retrieval"
        levels = LEVELS[self.mode]
        if "draft" in levels and "retrieval" in levels and not has_draft:
            other = self.mode.replace("hierarchical", "retrieval")
            raise TierForceError(
                f"`mode` {self.mode} needs a draft model: give `draft`, or use `mode` {other}."
            )
        if "draft" in levels and not has_draft and not self.prompt_lookup_ngram:
            raise TierForceError(
                f"`mode` {self.mode} needs a draft model or prompt lookup: give `draft`, or "
                "`prompt_lookup_ngram` 3."
            )
        return self.mode


def _lengths(length: int | None, longest: int) -> range:
    return range(1, longest + 1) if length is None else range(length, length + 1)
