"""Side by side: on this machine, with this model, on this text, what does each alternative do?

Every run is a process of its own: models loaded afresh, its memory watched from outside, and
whatever happens to it is a row with the reason. Prefill and decoding are timed apart, repeats go
round all peers, and medians count. What is finished is on disk after every run; Ctrl-C ends with
the rows that there are.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoTokenizer

from bench.harness.options import Draft, Dtype, Output, Target, Temperature, Text, Threads, TopP
from bench.harness.process import Died, apart
from bench.harness.record import benchmark, prepare, save, show
from bench.harness.text import DEMO, prompt_tokens
from bench.peers.base import Job, Result, Unavailable
from bench.peers.registry import PEERS
from decoding import Sampling
from offload.errors import TierForceError, one_line

Outcome = Result | str  # or why there is none
PLAIN, HIERARCHICAL, DYNAMIC = "ours: plain", "ours: hierarchical", "transformers: dynamic cache"
AIMED_AT = 65_536  # tokens
AIMS = (  # how many times as fast one is to be as another there
    (HIERARCHICAL, PLAIN, 2.5),
    (HIERARCHICAL, DYNAMIC, 8.0),
    ("ours: hierarchical offloaded", "ours: plain offloaded", 8.0),
    (PLAIN, DYNAMIC, 4.0),
    (PLAIN, "transformers: static cache", 1.5),
)


def attempt(name: str, job: Job, threads: int) -> Outcome:
    """One run."""
    prepare(threads)
    try:
        return PEERS[name](job).run()
    except Unavailable as reason:
        return f"skipped: {reason}"
    except Exception as error:  # a peer may fail in any way; that is what the row then says
        return f"failed: {type(error).__name__}: {one_line(error)}"


def run(name: str, job: Job, threads: int, limit_s: float) -> tuple[Outcome, float]:
    """What came of it, and the most memory it held, in GB."""
    outcome, peak = apart(attempt, name, job, threads, limit_s=limit_s)
    return (f"failed: {outcome}" if isinstance(outcome, Died) else outcome), peak


def row(
    context: int, name: str, runs: list[tuple[Outcome, float]], wanted: list[int] | None
) -> dict[str, Any]:
    """Medians of the times of what was finished, counts of the last of it; `wanted`: our own plain
    greedy text, None where tokens are drawn.
    """
    done = [outcome for outcome, _ in runs if isinstance(outcome, Result)]
    found: dict[str, Any] = {
        "context": context,
        "peer": name,
        "prefill s": None,
        "ms/token": None,
        "least": None,
        "most": None,
    }
    found |= {"tokens per verification": None, "acceptance": None, "inner acceptance": None}
    found |= {"link MB/token": None, "peak GB": None, "same text": None}
    if not done:
        return {**found, "note": runs[-1][0]}
    times = sorted(1e3 * each.decode_s / max(1, len(each.tokens) - 1) for each in done)
    last = done[-1]
    found |= {
        "prefill s": statistics.median(each.first_s for each in done),
        "ms/token": statistics.median(times),
    }
    found |= {"least": times[0], "most": times[-1], "peak GB": max(peak for _, peak in runs)}
    found |= {
        "tokens per verification": last.tokens_per_verification,
        "acceptance": last.acceptance.get("target"),
    }
    found["inner acceptance"] = last.acceptance.get("retrieval")
    if last.link_bytes_per_token:
        found["link MB/token"] = last.link_bytes_per_token / 1e6
    if wanted is not None:
        same = next(
            (
                index
                for index, pair in enumerate(zip(last.tokens, wanted, strict=False))
                if pair[0] != pair[1]
            ),
            None,
        )
        alike = min(len(last.tokens), len(wanted)) if same is None else same
        found["same text"] = "yes" if last.tokens == wanted else f"to token {alike}"
    failed = [outcome for outcome, _ in runs if isinstance(outcome, str)]
    return {**found, "note": failed[0] if failed else None}


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What was aimed at, and what came of it, at every context that has both; and our hierarchical
    against the fastest other.
    """
    found: dict[str, float] = {}
    for context in dict.fromkeys(row["context"] for row in rows):
        times = {
            row["peer"]: row["ms/token"]
            for row in rows
            if row["context"] == context and row["ms/token"]
        }
        for fast, slow, aim in AIMS:
            if fast in times and slow in times:
                aimed = f" (aim: {aim:g})" if context == AIMED_AT else ""
                found[f"{context:,} tokens: {fast}, times as fast as {slow}{aimed}"] = (
                    times[slow] / times[fast]
                )
        others = {peer: value for peer, value in times.items() if not peer.startswith("ours")}
        if others and HIERARCHICAL in times:
            best = min(others, key=others.__getitem__)
            found[
                f"{context:,} tokens: {HIERARCHICAL}, times as fast as the fastest other, {best}"
            ] = others[best] / times[HIERARCHICAL]
    return found


@benchmark
def main(
    model: Target = DEMO / "target",
    draft: Draft = DEMO / "draft",
    text: Text = None,
    context: Annotated[str, typer.Option(help="Prompt tokens.")] = "8192,32768,65536",
    new_tokens: Annotated[int, typer.Option(help="Tokens per run.")] = 128,
    peers: Annotated[
        str, typer.Option(help="Parts of the names of peers to run; all by default.")
    ] = "",
    link: Annotated[
        str, typer.Option(help="Of our offloaded modes: emulated:GB/s on a CPU, auto on a GPU.")
    ] = "emulated:0.5",
    budget: Annotated[
        int | None, typer.Option(help="Retrieval budget; by default the engine's own.")
    ] = None,
    dtype: Dtype = "bfloat16",
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    threads: Threads = 0,
    repeats: Annotated[int, typer.Option(help="Runs of each peer, interleaved.")] = 1,
    limit_s: Annotated[float, typer.Option(help="Seconds a run may take.")] = 900,
    output: Output = Path("results/compare.json"),
) -> None:
    """Run every peer at every context, and compare."""
    prepare(threads)
    tokenizer, progress = AutoTokenizer.from_pretrained(model), Console(stderr=True)
    names = [
        name
        for name in PEERS
        if not peers or any(part.strip() in name for part in peers.split(","))
    ]
    if not names:
        raise typer.BadParameter(
            f"no peer is named like that: {', '.join(PEERS)}", param_hint="--peers"
        )
    settings = {
        "new_tokens": new_tokens,
        "dtype": dtype,
        "temperature": temperature,
        "top_p": top_p,
        "link": link,
    }
    settings |= {"repeats": repeats, "budget": budget}
    try:
        prompts = {
            tokens: prompt_tokens(tokenizer, tokens, text)
            for tokens in map(int, context.split(","))
        }
    except TierForceError as error:
        raise typer.BadParameter(str(error), param_hint="--context") from None
    rows: list[dict[str, Any]] = []
    rounds: dict[tuple[int, str], dict[str, float | None]] = {}

    def keep(quiet: bool = False) -> None:
        timelines = [
            {"context": tokens, "peer": name, **found} for (tokens, name), found in rounds.items()
        ]
        save(
            output,
            {"settings": settings, "rows": rows, "ratios": ratios(rows), "rounds": timelines},
            quiet,
        )

    try:
        for tokens, prompt in prompts.items():
            runs: dict[str, list[tuple[Outcome, float]]] = {}
            before = list(rows)
            for repeat in range(repeats):
                for name in names:
                    law = Sampling(temperature, top_p=top_p, seed=repeat)
                    job = Job(
                        model,
                        draft,
                        prompt,
                        new_tokens,
                        law,
                        dtype,
                        budget,
                        link,
                        output.parent / "converted",
                    )
                    outcome = run(name, job, threads, limit_s)
                    runs.setdefault(name, []).append(outcome)
                    if isinstance(outcome[0], Result) and outcome[0].rounds:
                        rounds[tokens, name] = outcome[0].rounds
                    plain = next(
                        (each for each, _ in runs.get(PLAIN, []) if isinstance(each, Result)), None
                    )
                    wanted = plain.tokens if plain and temperature == 0 else None
                    rows = before + [
                        row(tokens, each, found, wanted) for each, found in runs.items()
                    ]
                    keep(quiet=True)
                    last = rows[-1 if repeat == 0 else len(before) + names.index(name)]
                    said = (
                        last["note"]
                        or f"{last['ms/token']:.1f} ms/token, prefill {last['prefill s']:.1f} s"
                    )
                    progress.print(f"{tokens} tokens, {name}: {said}", highlight=False)
    except KeyboardInterrupt:
        progress.print("interrupted: what is finished is kept")
    if rows:
        title = f"{new_tokens} new tokens, {dtype}, T {temperature}, top-p {top_p},"
        show(f"{title} {torch.get_num_threads()} threads, link {link}", rows)
        for claim, value in ratios(rows).items():
            print(f"{claim}: {value:.2f}")
        keep()
