"""TierForce compared with its peers: same machine, same model, same prompt.

Every run has a process of its own, which loads the models and whose memory is monitored from
outside; a run that fails becomes a row with the reason. Prefill and decoding are timed separately,
repeats are interleaved over all peers, and medians are reported. Finished rows are on disk after
every run; Ctrl-C keeps them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from bench.harness import options as opt
from bench.harness.experiment import Measurement, Row, benchmark, prepare
from bench.harness.process import Died, call_in_process
from bench.harness.tables import cell, say
from bench.harness.text import prompt_tokens
from bench.peers.base import Job, Result, Unavailable
from bench.peers.registry import PEERS
from decoding import Sampling
from decoding.models.loading import load_tokenizer
from decoding.speculation.sequence import common_prefix
from offload.errors import one_line
from parallel.model.loading import resolve
from parallel.ranks.process_group import TensorParallelGroup

Outcome = Result | str  # a result, or why there is none
PLAIN, OFFLOADED = "ours: plain", " offloaded"
OURS = "ours: "
COMPARISONS = (  # a peer, and the baseline that it should beat
    ("ours: retrieval", PLAIN),
    ("ours: hierarchical", PLAIN),
    ("ours: retrieval offloaded", "ours: plain offloaded"),
    ("ours: hierarchical offloaded", "ours: plain offloaded"),
    (PLAIN, "transformers: dynamic cache"),
    (PLAIN, "transformers: static cache"),
)


@dataclass
class Runs:
    """The outcomes of one peer at one context, and the peak memory of its processes."""

    outcomes: list[Outcome] = field(default_factory=list)
    peak_gb: float = 0.0

    @property
    def results(self) -> list[Result]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Result)]

    def row(self, context: int, peer: str, expected: list[int] | None) -> Row:
        """Return the row of these runs: medians of times, counts of the last finished run.

        `expected`: tokens of greedy plain decoding; None if tokens are sampled.
        """
        reasons = [outcome for outcome in self.outcomes if isinstance(outcome, str)]
        row = {"context": context, "peer": peer, "ms_per_token": None, "prefill_s": None}
        if not self.results:
            return row | {"note": reasons[-1]}
        times = [result.ms_per_token for result in self.results]
        last = self.results[-1]
        link_bytes = last.link_bytes_per_token
        return row | {
            "prefill_s": statistics.median(result.first_s for result in self.results),
            "ms_per_token": statistics.median(times),
            "min_ms_per_token": min(times),
            "max_ms_per_token": max(times),
            "tokens_per_verification": last.tokens_per_verification,
            "acceptance": last.acceptance.get("target"),
            "inner_acceptance": last.acceptance.get("retrieval"),
            "link_mb_per_token": link_bytes / 1e6 if link_bytes else None,
            "peak_gb": self.peak_gb,
            # compared with our own greedy plain decoding
            "same_text": None if expected is None else compare_tokens(last.tokens, expected),
            "note": reasons[0] if reasons else last.note,
        }


def compare_tokens(tokens: list[int], expected: list[int]) -> str:
    """Return "yes" if the tokens are as expected, else the length of their common prefix."""
    return "yes" if tokens == expected else f"to token {common_prefix(tokens, expected)}"


def attempt(name: str, job: Job, threads: int) -> Outcome:
    """Load one peer and run it, in this process."""
    prepare(threads)
    try:
        peer = PEERS[name](job)
        return replace(peer.run(), note=peer.note)
    except Unavailable as reason:
        return f"skipped: {reason}"
    except Exception as error:  # any failure of a peer is reported in its row
        return f"failed: {type(error).__name__}: {one_line(error)}"


def run(name: str, job: Job, threads: int, limit_s: float) -> tuple[Outcome, float]:
    """Run one peer in a process of its own; return its outcome and its peak memory in GB."""
    outcome, peak_gb = call_in_process(attempt, name, job, threads, limit_s=limit_s)
    return (f"failed: {outcome}" if isinstance(outcome, Died) else outcome), peak_gb


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return the speedup of each comparison, at every context that has both peers.

    Also that of our fastest on-device configuration over the fastest other peer.
    """
    claims: dict[str, float] = {}
    for context in dict.fromkeys(row["context"] for row in rows):
        times = {
            row["peer"]: row["ms_per_token"]
            for row in rows
            if row["context"] == context and row["ms_per_token"]
        }
        ours = [peer for peer in times if peer.startswith(OURS) and not peer.endswith(OFFLOADED)]
        others = [peer for peer in times if not peer.startswith(OURS)]
        pairs = [pair for pair in COMPARISONS if times.keys() >= set(pair)]
        for fast, slow in pairs:
            claim = f"{context:,} tokens: {fast}, times as fast as {slow}"
            claims[claim] = times[slow] / times[fast]
        if ours and others:
            fast, slow = (min(peers, key=times.__getitem__) for peers in (ours, others))
            claim = f"{context:,} tokens: {fast}, times as fast as the fastest other, {slow}"
            claims[claim] = times[slow] / times[fast]
    return claims


@benchmark(
    "{new_tokens} new tokens, {dtype}, T {temperature}, top-p {top_p}, {threads} threads, "
    "link {link}"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    rope: opt.Rope = None,
    text: opt.Text = None,
    context: opt.Contexts = f"{opt.NATIVE}",
    new_tokens: opt.NewTokens = 128,
    peers: Annotated[
        str, typer.Option(help="Peers to run, by parts of their names; default: all.")
    ] = "",
    link: Annotated[
        str,
        typer.Option(help="Link of our offloaded modes: emulated:GB/s on a CPU, auto on a GPU."),
    ] = "emulated:0.5",
    retrieval_budget: Annotated[
        int | None, typer.Option(help="Retrieval budget; default: the engine's own.")
    ] = None,
    dtype: opt.Dtype = "bfloat16",
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    threads: opt.Threads = 0,
    repeats: opt.Repeats = 1,
    limit_s: Annotated[float, typer.Option(help="Time limit of a run, seconds.")] = 900,
    output: opt.Output = Path("results/compare.json"),
) -> Measurement:
    """Run every peer at every context and compare them."""
    names = [name for name in PEERS if any(part.strip() in name for part in peers.split(","))]
    if not names:
        known = ", ".join(PEERS)
        raise typer.BadParameter(f"no peer matches; peers are {known}", param_hint="--peers")
    model = resolve(target, TensorParallelGroup())
    small = None if draft is None else resolve(draft, TensorParallelGroup())
    tokenizer = load_tokenizer(model)
    prompts = [prompt_tokens(tokenizer, tokens, text) for tokens in opt.integers(context)]
    sampling, scratch = Sampling(temperature, top_p=top_p), output.parent / "converted"
    jobs = [
        Job(
            model, small, rope, prompt, new_tokens, sampling, dtype, retrieval_budget, link, scratch
        )
        for prompt in prompts
    ]
    for name in names:
        with suppress(Exception):  # it fails again in its run, whose row then has the reason
            PEERS[name].convert(jobs[0])
    runs: dict[tuple[int, str], Runs] = {}
    greedy: dict[int, list[int]] = {}  # tokens of our own plain decoding, by context
    for job, repeat, name in product(jobs, range(repeats), names):
        tokens = len(job.prompt)
        seeded = replace(job, sampling=replace(sampling, seed=repeat))
        outcome, peak_gb = run(name, seeded, threads, limit_s)
        peer_runs = runs.setdefault((tokens, name), Runs())
        peer_runs.outcomes.append(outcome)
        peer_runs.peak_gb = max(peer_runs.peak_gb, peak_gb)
        if name == PLAIN and isinstance(outcome, Result) and sampling.temperature == 0:
            greedy.setdefault(tokens, outcome.tokens)
        rows = {key: peer_runs.row(*key, greedy.get(key[0])) for key, peer_runs in runs.items()}
        row = rows[tokens, name]
        speed = f"{cell(row['ms_per_token'])} ms/token, prefill {cell(row['prefill_s'])} s"
        say(f"{tokens} tokens, {name}: {row['note'] or speed}")
        yield {"rows": list(rows.values()), "ratios": ratios(list(rows.values()))}
