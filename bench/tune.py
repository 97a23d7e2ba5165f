"""Does the engine find settings as good as the best of a grid, where budget and resident layers share too little memory?

The physics: over a link every layer that is resident saves its share of a verification; every token of retrieval budget makes
verifications rarer, and drafting dearer. Which is worth more depends on the link, and on how often proposals stand.

The engine reads some texts first, to learn, and is then timed on others, on which every setting of the grid is timed too: a
budget, with as many resident layers as fit beside it, and a draft length. As in `bench.lengths`, the expected ms/token takes
out the luck of how much of a draft stood.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.continued import continued
from bench.lengths import expected_yields
from bench.options import Context, Draft, Dtype, Output, Rates, Target, Temperature, Text, Threads, TopP
from bench.overlap import prompts
from bench.record import prepare, save, show
from bench.text import DEMO, text_tokens
from decoding import Engine, Sampling, Settings
from decoding.lengths import Fixed, Noted, Round
from decoding.models import Models, plan
from decoding.session import Session
from parallel import parameter_bytes

SMALLEST, MOST_LAYERS = 512, 4  # the memory is what this budget and so many layers take
INNER = 2


@dataclass
class Runs:
    """All texts of one setting."""

    layers: int = 0
    seconds: float = 0.0
    tokens: int = 0
    rounds: list[Round] = field(default_factory=list)

    def add(self, layers: int, seconds: float, tokens: int, rounds: list[Round]) -> None:
        self.layers, self.seconds, self.tokens = layers, self.seconds + seconds, self.tokens + tokens
        self.rounds += rounds


def memory_for(models: Models, prompt: int, new: int) -> int:
    """Device memory, weights included, in which budgets and layers have to be weighed against each other."""
    small = models.spending(SMALLEST)
    place = plan(replace(small, settings=replace(small.settings, resident_layers=MOST_LAYERS)), prompt, new)
    weights = sum(parameter_bytes(model) for model in (models.target, models.draft) if model is not None)
    return weights + place.device_bytes + (1 << 20)


def tuned(engine: Engine, prompt: list[int], new: int, sampling: Sampling, found: dict[int, Runs]) -> str:
    """One text through the engine as it is; why it chose what it did."""
    engine.stop_tokens = frozenset()
    for _ in engine.generate(prompt, new, sampling):
        pass
    stats = engine.stats
    assert stats.choice is not None
    assert stats.choice.budget is not None
    assert stats.plan is not None
    runs = found.setdefault(stats.choice.budget, Runs())
    runs.add(stats.plan.resident_layers, stats.decode_s, stats.new_tokens - 1, stats.rounds)
    return f"budget {stats.choice.budget}, {stats.plan.resident_layers} layers: {stats.choice.why}"


def main(
    model: Target = DEMO / "target",
    draft: Draft = DEMO / "draft",
    text: Text = None,
    context: Context = 16_384,
    rates: Rates = "0.5,2",
    budgets: Annotated[str, typer.Option(help="Budgets of the grid.")] = "512,1024,2048,4096,8192",
    lengths: Annotated[str, typer.Option(help="Draft lengths of the grid.")] = "6,12,20,32,48,64",
    learn: Annotated[int, typer.Option(help="Texts the engine learns from.")] = 4,
    texts: Annotated[int, typer.Option(help="Texts that are timed.")] = 3,
    new_tokens: Annotated[int, typer.Option(help="Tokens a run.")] = 96,
    dtype: Dtype = "bfloat16",
    temperature: Temperature = 0.6,
    top_p: TopP = 0.9,
    threads: Threads = 0,
    output: Output = Path("results/tune.json"),
) -> None:
    """Time a grid of budgets and draft lengths, and what the engine chooses by itself, on each link."""
    prepare(threads)
    base = Engine.from_pretrained(model, draft, Settings(dtype=dtype))
    stretches = prompts(text_tokens(base.tokenizer, text), context, learn + texts, new_tokens + 1)
    timed = stretches[:: (learn + texts) // texts][:texts]
    learnt = [stretch for stretch in stretches if stretch not in timed][:learn]
    grid = list(product(map(int, budgets.split(",")), map(int, lengths.split(","))))
    progress, rows, ratios, said = Console(stderr=True), [], {}, {}
    for rate in map(float, rates.split(",")):
        settings = Settings(mode="hierarchical", dtype=dtype, link=f"emulated:{rate}")
        memory = memory_for(base.models.over(settings), context, new_tokens + 1)
        models = base.models.over(replace(settings, device_memory=memory))
        engine, found, reasons = Engine(models, base.tokenizer, frozenset()), dict[int, Runs](), list[str]()
        law = Sampling(temperature, top_p=top_p)
        for number, prompt in enumerate(learnt):
            reasons.append(tuned(engine, prompt, new_tokens + 1, replace(law, seed=100 + number), {}))
            progress.print(f"{rate} GB/s, learning: {reasons[-1]}")
        fixed: dict[tuple[int, int], Runs] = {setting: Runs() for setting in grid}
        for number, prompt in enumerate(timed):
            sampling = replace(law, seed=number)
            reasons.append(tuned(engine, prompt, new_tokens + 1, sampling, found))
            progress.print(f"{rate} GB/s, text {number + 1}: {reasons[-1]}")
            for budget in dict.fromkeys(budget for budget, _ in grid):
                session = Session(models.spending(budget), prompt, new_tokens + 1)
                first = int(session.prefill().argmax())
                start = session.snapshot()
                for length in (length for each, length in grid if each == budget):
                    session.rewind(start)
                    rounds: list[Round] = []
                    decoder, seconds = continued(session, first, sampling, (Noted(Fixed(length), rounds), Fixed(INNER)))
                    fixed[budget, length].add(session.plan.resident_layers, seconds, decoder.stats.produced, rounds)
                progress.print(f"{rate} GB/s, text {number + 1}: budget {budget}, {session.plan.resident_layers} layers")
        models.link.close()
        all_rounds: dict[int, list[Round]] = {}
        for budget, runs in [*((budget, runs) for (budget, _), runs in fixed.items()), *found.items()]:
            all_rounds.setdefault(budget, []).extend(runs.rounds)
        yields = {budget: expected_yields(rounds) for budget, rounds in all_rounds.items()}
        here = [_row(rate, budget, str(length), runs, yields[budget]) for (budget, length), runs in fixed.items()]
        seconds, plain, expected = (
            sum(each) for each in zip(*(_counts(yields[b], runs) for b, runs in found.items()), strict=True)
        )
        chosen = {
            "link GB/s": rate,
            "budget": " ".join(map(str, found)),
            "resident": " ".join(str(runs.layers) for runs in found.values()),
        }
        chosen |= {"draft length": "tuned", "ms/token": 1e3 * seconds / plain, "ms/token, expected": 1e3 * seconds / expected}
        for time_of in ("ms/token", "ms/token, expected"):
            best = min(here, key=lambda row: row[time_of])
            name = f"{rate:g} GB/s, {time_of}: tuned / best of {len(here)} (budget {best['budget']}, draft {best['draft length']})"
            ratios[name] = chosen[time_of] / best[time_of]
        rows += [*here, chosen]
        said[f"{rate:g} GB/s"] = reasons
        said[f"{rate:g} GB/s"].append(f"device memory {memory / 1e6:.1f} MB")
    show(f"{context:,} tokens, {dtype}, T {temperature}, top-p {top_p}, {texts} texts of {new_tokens}", rows)
    for claim, value in ratios.items():
        print(f"{claim}: {value:.2f}")
    used = {"context": context, "dtype": dtype, "temperature": temperature, "top_p": top_p, "learn": learn, "texts": texts}
    save(output, {"settings": {**used, "new_tokens": new_tokens}, "rows": rows, "ratios": ratios, "choices": said})


def _counts(yields: list[float], runs: Runs) -> tuple[float, float, float]:
    """Seconds, tokens, and tokens that its drafts yield on average."""
    return runs.seconds, runs.tokens, sum(yields[past.drafted] for past in runs.rounds)


def _row(rate: float, budget: int, length: str, runs: Runs, yields: list[float]) -> dict[str, Any]:
    seconds, plain, expected = _counts(yields, runs)
    row = {"link GB/s": rate, "budget": str(budget), "resident": str(runs.layers), "draft length": length}
    return {**row, "ms/token": 1e3 * seconds / plain, "ms/token, expected": 1e3 * seconds / expected}


if __name__ == "__main__":
    typer.run(main)
