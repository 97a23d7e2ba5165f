"""Draft lengths: do the adaptive ones end near the best fixed pair? And how fast is each selection policy at its own best length?

The physics: over a link a verification costs the same for any draft, so long drafts pay until proposals stop standing; where
compute is the cost they pay less. Which pair of lengths is best depends on acceptance and on the link, so the engine finds it
while it runs.

Every setting continues the same prompts, interleaved, in hierarchical mode; ms/token is seconds over tokens of all texts together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.continued import continued
from bench.overlap import OURS, STATIC, Variant, prompts
from bench.record import prepare, save, show
from bench.text import DEMO, text_tokens
from decoding import Engine, Sampling, Settings
from decoding.decoders import Decoder
from decoding.lengths import Fixed
from decoding.models import MOST
from decoding.session import Session, draft_lengths

Pair = tuple[int, int] | None  # draft length and inner length; None: adaptive


@dataclass
class Total:
    """All runs of one setting."""

    seconds: float = 0.0
    tokens: int = 0
    verifications: int = 0
    proposed: int = 0
    inner_proposed: int = 0
    inner_passes: int = 0
    by_text: list[float] = field(default_factory=list)  # ms/token

    def add(self, decoder: Decoder, seconds: float) -> None:
        """One more text."""
        outer, inner = (level.stats for level in decoder.levels()[:2])
        self.seconds += seconds
        self.tokens += outer.produced
        self.verifications += outer.passes
        self.proposed += outer.proposed
        self.inner_proposed += inner.proposed
        self.inner_passes += inner.passes
        self.by_text.append(1e3 * seconds / outer.produced)

    def row(self, rate: float, policy: str, pair: Pair, pooled: float) -> dict[str, Any]:
        return {
            "link GB/s": rate,
            "policy": policy,
            "lengths": f"{pair[0]}, {pair[1]}" if pair else "adaptive",
            "ms/token": 1e3 * self.seconds / self.tokens,
            "least": min(self.by_text),
            "most": max(self.by_text),
            "tokens per verification": self.tokens / self.verifications,
            "ms/token, pooled": pooled,
            "mean draft": self.proposed / self.verifications,
            "mean inner draft": self.inner_proposed / self.inner_passes,
        }


def main(
    model: Annotated[Path, typer.Option(help="Target model folder.")] = DEMO / "target",
    draft: Annotated[Path, typer.Option(help="Draft model folder.")] = DEMO / "draft",
    text: Annotated[Path | None, typer.Option(help="Text to read; Python's language reference by default.")] = None,
    context: Annotated[int, typer.Option(help="Prompt tokens.")] = 16_384,
    rates: Annotated[str, typer.Option(help="Emulated links, GB/s.")] = "0.5,2",
    lengths: Annotated[str, typer.Option(help="Draft lengths of the grid.")] = "8,16,32,48",
    inner: Annotated[str, typer.Option(help="Inner draft lengths of the grid.")] = "1,2",
    budget: Annotated[int, typer.Option(help="Retrieval budget of both policies, tokens a head.")] = 768,
    published: Annotated[bool, typer.Option(help="Also the published policy, beside the engine's own.")] = True,
    texts: Annotated[int, typer.Option(help="Prompts.")] = 4,
    new_tokens: Annotated[int, typer.Option(help="Tokens a run.")] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "float32",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.6,
    top_p: Annotated[float, typer.Option(help="Nucleus.")] = 0.9,
    threads: Annotated[int, typer.Option(help="CPU threads; 0: all cores.")] = 0,
    output: Annotated[Path, typer.Option(help="JSON document.")] = Path("results/lengths.json"),
) -> None:
    """Time a grid of fixed lengths and the adaptive ones, on each link, for the published policy and the engine's own."""
    prepare(threads)
    engine = Engine.from_pretrained(model, draft, Settings(dtype=dtype))
    tokens = text_tokens(engine.tokenizer, text)
    grid: list[Pair] = [(int(outer), int(below)) for outer, below in product(lengths.split(","), inner.split(","))]
    progress = Console(stderr=True)
    totals: dict[tuple[float, Variant, Pair], Total] = {}
    for rate, variant in product(map(float, rates.split(",")), (OURS, STATIC) if published else (OURS,)):
        longest = max(MOST, *(pair[0] for pair in grid if pair))  # makes room; every run has lengths of its own
        settings = Settings(mode="hierarchical", dtype=dtype, budget=budget, link=f"emulated:{rate}", resident_layers=0)
        settings = replace(settings, draft_length=longest)
        adaptive = draft_lengths(replace(settings, draft_length=None))  # for text after text, as in the engine
        settings = replace(settings, policy=variant.policy, chunk_size=variant.chunk, summary_size=variant.summary)
        models = engine.models.over(settings)
        for number, prompt in enumerate(prompts(tokens, context, texts, new_tokens)):
            session = Session(models, prompt, new_tokens + 1)
            first = int(session.prefill().argmax())
            start = session.snapshot()
            pairs = [None, *grid]
            for pair in pairs[number % len(pairs) :] + pairs[: number % len(pairs)]:  # nobody is always the first
                total = totals.setdefault((rate, variant, pair), Total())
                session.rewind(start)
                chosen = (Fixed(pair[0]), Fixed(pair[1])) if pair else adaptive
                total.add(*continued(session, first, Sampling(temperature, top_p=top_p, seed=number), chosen))
                name = "adaptive" if pair is None else f"{pair[0]}, {pair[1]}"
                progress.print(f"{rate} GB/s, {variant.name}, text {number + 1}, {name}: {total.by_text[-1]:.1f} ms/token")
        models.link.close()
    rows = [
        total.row(rate, variant.name, pair, _pooled(totals, rate, variant, pair)) for (rate, variant, pair), total in totals.items()
    ]
    show(f"{context:,} tokens, budget {budget}, {dtype}, T {temperature}, top-p {top_p}, {texts} texts of {new_tokens}", rows)
    ratios = _ratios(rows)
    for claim, value in ratios.items():
        print(f"{claim}: {value:.2f}")
    used = {"context": context, "budget": budget, "dtype": dtype, "temperature": temperature, "top_p": top_p, "texts": texts}
    save(output, {"settings": {**used, "new_tokens": new_tokens}, "rows": rows, "ratios": ratios})


def _pooled(totals: dict[tuple[float, Variant, Pair], Total], rate: float, variant: Variant, pair: Pair) -> float:
    """ms/token with the luck of the draw shared: seconds a verification over tokens a verification of all pairs of this draft
    length.

    How many tokens of a draft stand does not depend on the inner length, nor on the link: the law of the drafts is the same.
    """
    own = totals[rate, variant, pair]
    like = [total for (_, who, other), total in totals.items() if who == variant and pair and other and other[0] == pair[0]] or [
        own
    ]
    tokens = sum(total.tokens for total in like) / sum(total.verifications for total in like)
    return 1e3 * own.seconds / own.verifications / tokens


def _ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Adaptive against the best fixed pair, and the policies at the best pair of each, on every link; by plain and by pooled
    times.
    """
    found = {}
    for rate, time_of in product(dict.fromkeys(row["link GB/s"] for row in rows), ("ms/token", "ms/token, pooled")):
        best = {}
        for policy in dict.fromkeys(row["policy"] for row in rows):
            here = [row for row in rows if (row["link GB/s"], row["policy"]) == (rate, policy)]
            fixed = min((row for row in here if row["lengths"] != "adaptive"), key=lambda row: row[time_of])
            adaptive = next(row for row in here if row["lengths"] == "adaptive")
            best[policy] = fixed[time_of]
            found[f"{policy}, {rate:g} GB/s, {time_of}: adaptive / best pair ({fixed['lengths']})"] = (
                adaptive[time_of] / fixed[time_of]
            )
        if STATIC.name in best:
            name = f"{OURS.name}, {rate:g} GB/s, {time_of}: times as fast as {STATIC.name}, each at its best pair"
            found[name] = best[STATIC.name] / best[OURS.name]
    return found


if __name__ == "__main__":
    typer.run(main)
