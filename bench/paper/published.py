"""The published experiments (TriForce, arXiv 2404.11912; its project page and README) as rows that
can be run again.

Figures are those of https://infini-ai-lab.github.io/TriForce/ (the table of offloading), of the
paper's abstract (on-chip, 2.31 times) and of the README of github.com/Infini-AI-Lab/TriForce (2.2
times). Settings are those of that README's commands; it has none for the 13B, whose 1794 ms/token
imply 6 resident layers (docs/memory.md). Where the paper only draws a curve, no number is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DRAFT = "JackFram/llama-68m"
SEVEN, THIRTEEN = "NousResearch/Yarn-Llama-2-7b-128k", "NousResearch/Yarn-Llama-2-13b-128k"
CHAT = "LargeWorldModel/LWM-Text-Chat-128K"
Options = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One experiment: as published, and at a size for the built-in pair on two cores. Times are ms
    a token.
    """

    name: str
    full: Options
    small: Options | None  # None: what it shows needs the checkpoint
    checkpoint: str = SEVEN
    hardware: str = "2x4090"  # that the published time is of, and the prediction
    published: float | None = None
    published_plain: float | None = None
    published_gain: float | None = None
    baseline: str | None = None  # what the published plain time is of, where that is another engine
    plain: bool = True  # whether plain decoding is run beside it
    plain_full: Options = field(default_factory=dict)  # where its baseline was given other settings


@dataclass(frozen=True)
class Recipe:
    """Rows of one question."""

    about: str
    rows: tuple[Row, ...]
    books: int = 3  # read for each row; the median counts, for of one text it is luck what stands


BOOK = {"context": 130_560, "max_new_tokens": 512, "temperature": 0.6, "top_p": 0.9}
TWO = BOOK | {"gpus": 2, "budget": 12_288, "draft_length": 16, "resident_layers": 9}
ONE = BOOK | {"gpus": 1, "budget": 8_192, "draft_length": 12, "resident_layers": 0}
ON_CHIP = BOOK | {
    "context": 125_440,
    "gpus": 1,
    "budget": 4_096,
    "draft_length": 6,
    "resident_layers": 32,
    "device_memory": 84,
}
# about the same shares of the text and of the layers
SMALL = {"context": 32_768, "max_new_tokens": 96, "temperature": 0.6, "top_p": 0.9, "device": "cpu"}
SMALL_TWO = SMALL | {
    "gpus": 2,
    "budget": 3_072,
    "draft_length": 16,
    "resident_layers": 2,
    "link": "emulated:0.25",
}
SMALL_ONE = SMALL | {
    "gpus": 1,
    "budget": 2_048,
    "draft_length": 12,
    "resident_layers": 0,
    "link": "emulated:0.25",
}
SMALL_CHIP = SMALL | {
    "context": 16_384,
    "max_new_tokens": 128,
    "gpus": 1,
    "budget": 1_024,
    "draft_length": 6,
    "link": "view",
}
SMALL_LINK = SMALL_CHIP | {"draft_length": 16, "resident_layers": 0, "link": "emulated:0.5"}
TWELVE, TWO_LAYERS, ZERO = (
    {"resident_layers": 12},
    {"resident_layers": 2},
    "DeepSpeed-ZeRO-Inference",
)

RECIPES: dict[str, Recipe] = {
    "offload": Recipe(
        "one book of 127K tokens over PCIe: hierarchical decoding against plain offloading "
        "(DeepSpeed-ZeRO-Inference on one GPU)",
        (
            Row(
                "Llama-2-7B, 2x4090",
                TWO,
                SMALL_TWO,
                SEVEN,
                "2x4090",
                108,
                840,
                7.78,
                plain_full=TWELVE,
            ),
            Row(
                "LWM-Text-Chat, 2x4090",
                TWO,
                None,
                CHAT,
                "2x4090",
                114,
                840,
                7.37,
                plain_full=TWELVE,
            ),
            Row(
                "Llama-2-13B, 2x4090",
                TWO | {"resident_layers": 6},
                None,
                THIRTEEN,
                "2x4090",
                226,
                1794,
                7.94,
            ),
            Row(
                "Llama-2-7B, 1x4090",
                ONE,
                SMALL_ONE,
                SEVEN,
                "1x4090",
                312,
                1516,
                4.86,
                ZERO,
                plain_full=TWO_LAYERS,
            ),
            Row(
                "LWM-Text-Chat, 1x4090",
                ONE,
                None,
                CHAT,
                "1x4090",
                314,
                1516,
                4.83,
                ZERO,
                plain_full=TWO_LAYERS,
            ),
        ),
        books=1,
    ),
    "on-chip": Recipe(
        "all KV on the device, a retrieval budget of 4K",
        (
            Row(
                "greedy",
                ON_CHIP | {"temperature": 0.0},
                SMALL_CHIP | {"temperature": 0.0},
                SEVEN,
                "1xA100-80",
                published_gain=2.31,
            ),
            Row("T 0.6, top-p 0.9", ON_CHIP, SMALL_CHIP, SEVEN, "1xA100-80", published_gain=2.2),
        ),
    ),
    "temperatures": Recipe(
        "acceptance and speed by temperature, on-chip; the paper's acceptance stays above 0.9 to "
        "T 1.0",
        tuple(
            Row(
                f"T {t}",
                ON_CHIP | {"temperature": t},
                SMALL_CHIP | {"temperature": t},
                SEVEN,
                "1xA100-80",
                plain=t == 0,
            )
            for t in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
        ),
    ),
    "budgets": Recipe(
        "acceptance and speed by retrieval budget and by chunk size, offloaded",
        (
            *(
                Row(
                    f"budget {full:,} ({small:,} here)",
                    TWO | {"budget": full},
                    SMALL_LINK | {"budget": small},
                    plain=small == 256,
                )
                for full, small in (
                    (1024, 256),
                    (2048, 512),
                    (4096, 1024),
                    (8192, 2048),
                    (12_288, 3072),
                )
            ),
            *(
                Row(
                    f"chunks of {size}",
                    TWO | {"chunk_size": size},
                    SMALL_LINK | {"chunk_size": size},
                    plain=False,
                )
                for size in (1, 4, 8, 16, 32, 64)
            ),
        ),
    ),
    "contexts": Recipe(
        "speed by context, offloaded",
        tuple(
            Row(
                f"{full:,} tokens ({small:,} here)",
                TWO | {"context": full},
                SMALL_LINK | {"context": small},
            )
            for full, small in (
                (16_384, 8192),
                (32_768, 16_384),
                (65_536, 32_768),
                (130_560, 65_536),
            )
        ),
    ),
    "summaries": Recipe(
        "summaries of books, as from NarrativeQA (--data narrativeqa where the hub can be reached)",
        (Row("3 books", TWO | {"max_new_tokens": 256}, SMALL_LINK),),
    ),
}
