"""The main job end to end on the built-in pair: a long real document over two ranks.

It is summarised twice, first by hierarchical and then by plain decoding. `python -m demo.run` (or
`make demo`) needs no download and no GPU. What it shows is the machinery: both runs draw from the
same model's law, and one needs a fraction of the link's bytes and time. What the tiny model writes
is period-flavoured nonsense.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.harness.text import long_text
from bench.paper.jobs import summarize
from offload.errors import TierForceError

HERE = Path(__file__).parent
OUT = HERE / "out"
CONTEXT = 36_864
COMMON = [
    "--gpus",
    "2",
    "--device",
    "cpu",
    "--resident-layers",
    "0",
    "--link",
    "emulated:0.25",
    "--context",
    str(CONTEXT),
]


def main() -> None:
    """Run both modes on the same document, and compare what they took."""
    started = time.perf_counter()
    console = Console(width=None if sys.stdout.isatty() else 120)
    text = long_text()

    def say(line: str) -> None:
        console.print(line, style="bold", highlight=False, markup=False, soft_wrap=True)

    console.print(
        f"The document: Python's language reference, {len(text):,} characters, cut to a context of "
        f"{CONTEXT:,} tokens.\nThe machine: two CPU ranks; no KV stays on the 'device', and a "
        "thread a rank plays the link at 0.25 GB/s.\nThe model has 5.6 million parameters and "
        "writes nonsense; watch the numbers, not the prose.\n"
    )
    records = {}
    for mode in ("hierarchical", "plain"):
        models = ["--model", str(HERE / "target"), "--draft", str(HERE / "draft"), "--mode", mode]
        options = [*models, "--max-new-tokens", "64", *COMMON]
        try:
            (records[mode],) = summarize(
                OUT, mode, {"python-language-reference": text}, options, say
            )
        except TierForceError as error:
            sys.exit(str(error))
        console.print(
            f"\n{records[mode]['summary']}\n", style="italic", highlight=False, markup=False
        )
    table = Table(title="The same document, model and sampling law", title_justify="left")
    for heading in (
        "",
        "time to first token, s",
        "ms/token",
        "tokens per verification",
        "link MB/token, per rank",
    ):
        table.add_column(heading, justify="right" if heading else "left")
    for mode, record in records.items():
        table.add_row(
            mode,
            f"{record['time_to_first_token_s']:.1f}",
            f"{record['ms_per_token']:.1f}",
            f"{record['tokens_per_verification']:.2f}",
            f"{record['link_bytes_per_token'] / 1e6:.1f}",
        )
    console.print(table)
    ratio = records["plain"]["ms_per_token"] / records["hierarchical"]["ms_per_token"]
    rates = ", ".join(
        f"{level} {rate:.2f}" for level, rate in records["hierarchical"]["acceptance"].items()
    )
    console.print(
        f"Hierarchical decoding was {ratio:.1f} times as fast; acceptance rates: {rates}."
    )
    console.print(f"Records: {OUT}/*.jsonl. The demo took {time.perf_counter() - started:.0f} s.")


if __name__ == "__main__":
    main()
