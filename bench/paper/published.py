"""The published experiments (TriForce, arXiv 2404.11912), with their settings and results.

Results are from https://infini-ai-lab.github.io/TriForce/ (the offloading table), the paper's
abstract (on-chip, 2.31 times) and the README of github.com/Infini-AI-Lab/TriForce (2.2 times).
Settings are those of that README's commands; it has none for the 13B, whose 1794 ms/token imply 6
resident layers (docs/memory.md). Results that the paper only plots as curves are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DRAFT = "JackFram/llama-68m"
SEVEN, THIRTEEN = "NousResearch/Yarn-Llama-2-7b-128k", "NousResearch/Yarn-Llama-2-13b-128k"
CHAT = "LargeWorldModel/LWM-Text-Chat-128K"
Options = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """One experiment: as published, and reduced to SmolLM2 on two cores. Times are ms/token."""

    name: str
    full: Options
    small: Options | None  # None: it requires the checkpoint
    checkpoint: str = SEVEN
    hardware: str = "2x4090"  # hardware of the published and the predicted times
    published: float | None = None
    published_plain: float | None = None
    published_gain: float | None = None
    baseline: str | None = None  # engine of the published plain time, if not TriForce's own
    plain: bool = True  # whether plain decoding is run for comparison
    plain_full: Options = field(default_factory=dict)  # settings that differ for plain decoding

    def options(self, mode: str) -> Options:
        """Return the options at full size."""
        return self.full | (self.plain_full if mode == "plain" else {})


@dataclass(frozen=True)
class Recipe:
    """The experiments on one question."""

    about: str
    rows: tuple[Experiment, ...]
    books: int = 3  # documents per row; medians are reported, as acceptance varies by document


BOOK = {
    "context": 130_560,
    "max_new_tokens": 512,
    "temperature": 0.6,
    "top_p": 0.9,
    "concurrency": 1,
}
TWO = BOOK | {"gpus": 2, "retrieval_budget": 12_288, "num_draft_tokens": 16, "gpu_kv_layers": 9}
ONE = BOOK | {"gpus": 1, "retrieval_budget": 8_192, "num_draft_tokens": 12, "gpu_kv_layers": 0}
ON_CHIP = BOOK | {
    "context": 125_440,
    "gpus": 1,
    "retrieval_budget": 4_096,
    "num_draft_tokens": 6,
    "gpu_kv_layers": 32,
    "device_memory": 84,
}
SIX = {"context": 19_456, "retrieval_budget": 768, "temperature": 0.0, "concurrency": 6}
# reduced sizes: about the same shares of the context and of the layers
SMALL = BOOK | {"context": 7_424, "max_new_tokens": 96, "device": "cpu"}
SMALL_TWO = SMALL | {
    "gpus": 2,
    "retrieval_budget": 704,
    "num_draft_tokens": 16,
    "gpu_kv_layers": 8,
    "link": "emulated:0.25",
}
SMALL_ONE = SMALL_TWO | {
    "gpus": 1,
    "retrieval_budget": 512,
    "num_draft_tokens": 12,
    "gpu_kv_layers": 0,
}
SMALL_CHIP = SMALL | {"gpus": 1, "retrieval_budget": 512, "num_draft_tokens": 6, "link": "view"}
SMALL_LINK = SMALL_CHIP | {"num_draft_tokens": 16, "gpu_kv_layers": 0, "link": "emulated:0.5"}


def offloaded(
    name: str, small: Options | None, checkpoint: str, published: float, gain: float
) -> Experiment:
    """Return a row of the project page's table; the last word of `name` is the hardware."""
    hardware = name.split()[-1]
    full, plain, plain_layers, baseline = {
        "2x4090": (TWO, 840, 12, None),
        "1x4090": (ONE, 1516, 2, "DeepSpeed-ZeRO-Inference"),
    }[hardware]
    plain_full = {"gpu_kv_layers": plain_layers}
    if checkpoint == THIRTEEN:
        full, plain, plain_full = full | {"gpu_kv_layers": 6}, 1794, {}
    return Experiment(
        name, full, small, checkpoint, hardware, published, plain, gain, baseline, True, plain_full
    )


def on_chip(name: str, temperature: float, **more: Any) -> Experiment:
    """Return a row with all KV on the device."""
    sampling = {"temperature": temperature}
    return Experiment(name, ON_CHIP | sampling, SMALL_CHIP | sampling, hardware="1xA100-80", **more)


def all_offloaded(name: str, full: Options, small: Options, plain: bool = True) -> Experiment:
    """Return a row with all KV offloaded, and these options changed."""
    return Experiment(name, TWO | full, SMALL_LINK | small, plain=plain)


BUDGETS = ((1024, 128), (2048, 256), (4096, 512), (8192, 1024), (12_288, 1536))
CONTEXTS = ((16_384, 928), (32_768, 1_856), (65_536, 3_712), (130_560, 7_424))

RECIPES: dict[str, Recipe] = {
    "offload": Recipe(
        "one book of 127K tokens over PCIe: hierarchical decoding compared with plain offloading "
        "(DeepSpeed-ZeRO-Inference on one GPU)",
        (
            offloaded("Llama-2-7B, 2x4090", SMALL_TWO, SEVEN, published=108, gain=7.78),
            offloaded("LWM-Text-Chat, 2x4090", None, CHAT, published=114, gain=7.37),
            offloaded("Llama-2-13B, 2x4090", None, THIRTEEN, published=226, gain=7.94),
            offloaded("Llama-2-7B, 1x4090", SMALL_ONE, SEVEN, published=312, gain=4.86),
            offloaded("LWM-Text-Chat, 1x4090", None, CHAT, published=314, gain=4.83),
        ),
        books=1,
    ),
    "on-chip": Recipe(
        "all KV on the device, a retrieval budget of 4K",
        (
            on_chip("greedy", 0.0, published_gain=2.31),
            on_chip("T 0.6, top-p 0.9", 0.6, published_gain=2.2),
            Experiment(
                "6 concurrent prompts of 19K, greedy",
                ON_CHIP | SIX,
                None,
                hardware="1xA100-80",
                published_gain=1.9,
            ),
        ),
    ),
    "temperatures": Recipe(
        "acceptance and speed by temperature, on-chip; the paper's acceptance is above 0.9 up to T 1.0",
        tuple(on_chip(f"T {t}", t, plain=t == 0) for t in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)),
    ),
    "budgets": Recipe(
        "acceptance and speed by retrieval budget and by chunk size, offloaded",
        (
            *(
                all_offloaded(
                    f"budget {full:,} ({small:,} here)",
                    {"retrieval_budget": full},
                    {"retrieval_budget": small},
                    plain=small == 128,
                )
                for full, small in BUDGETS
            ),
            *(
                all_offloaded(f"chunks of {n}", {"chunk_size": n}, {"chunk_size": n}, plain=False)
                for n in (1, 4, 8, 16, 32, 64)
            ),
        ),
    ),
    "contexts": Recipe(
        "speed by context, offloaded",
        tuple(
            all_offloaded(
                f"{full:,} tokens ({small:,} here)", {"context": full}, {"context": small}
            )
            for full, small in CONTEXTS
        ),
    ),
    "summaries": Recipe(
        "summaries of books, as from NarrativeQA (--data narrativeqa, which needs the hub)",
        (all_offloaded("3 books", {"max_new_tokens": 256}, {}),),
    ),
}
