"""Decoding speed over a grid of settings, all timed on the same texts.

The physics: a plain step reads all KV once (attention) or moves it over the link once (offloading),
per token. A draft is verified in one such pass, so drafting gains by the tokens that stand, as long
as verifying and drafting cost less than that. Over a link a verification costs the same for any
draft, and long drafts pay; where compute is the cost, short ones do. A resident layer saves its
share of a verification; a larger retrieval budget makes verifications rarer, and drafting dearer.

    python -m bench grid --vary mode=plain,hierarchical --vary num_draft_tokens=auto,8,16

Every setting continues the same prompts; which comes first changes from text to text. Settings that
differ by draft lengths alone continue the same prefill. What is `auto` is chosen by the engine
itself, which learns from text to text: where that is the budget, each setting is an engine of its
own, that no other's lengths teach.

How much of a draft stands is a matter of luck, which a hundred rounds do not even out. So beside
the plain ms/token there is an expected one: the seconds of a setting over the tokens that its
drafts yield on average, given how often proposals stand at each place of a draft.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from bench.harness import options as opt
from bench.harness.decode_loop import PrefilledPrompt, Run
from bench.harness.experiment import Measurement, Row, benchmark
from bench.harness.tables import say
from bench.harness.text import prompts, text_tokens
from decoding import Engine, Sampling, Settings
from decoding.config.option import options_of
from decoding.config.settings import LEVELS
from decoding.engine.session_manager import SequenceManager
from decoding.models.runtime import Runtime
from decoding.planning.memory_requirements import MAX_DRAFT
from decoding.speculation.draft_length import Adaptive, Lengths, RoundStats, draft_lengths
from offload.errors import TierForceError

AUTO = "auto"
LOADED = ("dtype", "rope", "shard_draft", "context")  # an engine is loaded by these, once
_RETRIEVAL = {"retrieval_budget", "chunk_size", "policy", "selection_interval"}
UNUSED = {  # by mode, settings that make no difference to it
    "plain": {
        *_RETRIEVAL,
        "num_draft_tokens",
        "num_inner_draft_tokens",
        "prompt_lookup_ngram",
        "sinks",
        "window",
    },
    "speculative": {*_RETRIEVAL, "num_inner_draft_tokens"},
    "retrieval": {"sinks", "window"},
}
Varied = dict[str, str]  # settings by name, as they were typed


@dataclass
class Point:
    """One setting of the grid, and what was measured of it."""

    varied: Varied
    settings: Settings
    # by mode; adaptive ones go on from text to text, as in the engine
    lengths: dict[str, Lengths] = field(default_factory=dict)
    # with all that was chosen
    runs: list[tuple[Settings, Run]] = field(default_factory=list)


@dataclass
class Group:
    """Points that continue the same prefill: they differ by draft lengths alone."""

    sessions: SequenceManager
    points: list[Point] = field(default_factory=list)

    @property
    def learns(self) -> bool:
        """Whether any of it goes by past texts: a budget, or the lengths of drafts."""
        runtime = self.sessions.runtime
        lengths = chain(*(draft_lengths(point.settings) for point in self.points))
        adaptive = any(isinstance(length, Adaptive) for length in lengths)
        return runtime.requirements.has_choice or (adaptive and runtime.mode != "plain")


def row_of(point: Point, yields: dict[Settings, list[float]]) -> Row:
    """Return the row of a point's runs, given what drafts yield under each law of acceptance.

    Where the engine chose, all its choices are named.
    """
    runs = [run for _, run in point.runs]
    chosen = {
        name: " ".join(dict.fromkeys(str(getattr(settings, name)) for settings, _ in point.runs))
        for name in ("mode", "retrieval_budget", "gpu_kv_layers", "split_kv_layers")
    }
    seconds, tokens = sum(run.seconds for run in runs), sum(run.tokens for run in runs)
    rounds, times = (
        [each for run in runs for each in run.rounds],
        [run.ms_per_token for run in runs],
    )
    expected = sum(
        yields[law_of(settings)][each.drafted]
        for settings, run in point.runs
        for each in run.rounds
    )
    rates = [run.acceptance for run in runs if run.acceptance is not None]
    has_budget = "retrieval_budget" not in UNUSED.get(point.varied.get("mode", AUTO), ())
    return {
        "setting": point.varied,
        "ms_per_token": 1e3 * seconds / tokens,
        "min_ms_per_token": min(times),  # of one text
        "max_ms_per_token": max(times),
        "expected_ms_per_token": 1e3 * seconds / expected if rounds else None,
        "tokens_per_verification": tokens / len(rounds) if rounds else None,
        # of what was put before the target
        "acceptance": statistics.fmean(rates) if rates else None,
        "mean_draft": statistics.fmean(each.drafted for each in rounds) if rounds else None,
        "link_mb_per_token": sum(run.link_bytes for run in runs) / tokens / 1e6,
        "modes": chosen["mode"],
        "budgets": chosen["retrieval_budget"] if has_budget else "",
        "gpu_kv_layers": chosen["gpu_kv_layers"],
        "split_kv_layers": chosen["split_kv_layers"],
    }


def law_of(settings: Settings) -> Settings:
    """Return settings without those that how often proposals stand does not depend on."""
    has_codes = "split" in LEVELS.get(settings.mode, ())  # in so many layers
    return replace(
        settings,
        num_draft_tokens=None,
        num_inner_draft_tokens=None,
        link="auto",
        gpu_kv_layers=settings.gpu_kv_layers if has_codes else None,
        device_memory=None,
    )


def expected_yields(rounds: Sequence[RoundStats]) -> list[float]:
    """Return the tokens that a verified draft of 0, 1, ... tokens yields on average.

    That is 1 + sum_k prod_(i<=k) (1 - h_i). h_i is how often a proposal at place i was rejected
    when all before it stood: the product-limit estimate of Kaplan and Meier 1958, for a draft that
    ended, or stood whole, tells nothing of later places.
    """
    yields, standing = [1.0], 1.0
    for place in range(max((each.drafted for each in rounds), default=0)):
        tested = sum(place <= each.accepted and place < each.drafted for each in rounds)
        rejected = sum(each.accepted == place < each.drafted for each in rounds)
        standing *= 1 - rejected / tested if tested else 1
        yields.append(yields[-1] + standing)
    return yields


def parse(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each setting. Raises TierForceError for what is none."""
    varied: dict[str, list[str]] = {}
    for word in words:
        name, _, values = word.partition("=")
        name = name.replace("-", "_")
        settings = [each for each in options_of(Settings) if each not in LOADED]
        if name not in settings or not values:
            known = ", ".join(settings)
            raise TierForceError(f"--vary {word}: give NAME=VALUE,VALUE. Names are {known}.")
        varied[name] = values.split(",")
    return varied


def value_of(name: str, word: str) -> Any:
    """Return a setting's value. Raises TierForceError for a word that is none."""
    hint = get_type_hints(Settings)[name]
    kinds = get_args(hint) or (hint,)
    if word == AUTO and type(None) in kinds:
        return None
    try:
        return {"yes": True, "no": False}[word] if bool in kinds else kinds[0](word)
    except (KeyError, ValueError):
        raise TierForceError(f"--vary {name}={word}: {word} is not a value of it.") from None


def settings_of(base: Settings, varied: Varied) -> Settings:
    """Return settings with those of a point. Raises TierForceError for what makes no sense."""
    return replace(base, **{name: value_of(name, word) for name, word in varied.items()})


def grid(varied: dict[str, list[str]]) -> list[Varied]:
    """Return every combination once, of the settings that its mode uses."""
    points: list[Varied] = []
    for values in product(*varied.values()):
        point = dict(zip(varied, values, strict=True))
        unused = UNUSED.get(point.get("mode", AUTO), set())
        point = {name: value for name, value in point.items() if name not in unused}
        if point not in points:
            points.append(point)
    return points


def possible(base: Settings, points: Sequence[Varied], has_draft: bool) -> list[Varied]:
    """Return the points that can be run with or without a draft model; say which are left out.

    Raises TierForceError where none is left, and for a point that makes no sense.
    """
    kept, without = list[Varied](), set[str]()
    for point in points:
        settings = settings_of(base, point)
        try:
            settings.resolved_mode(has_draft)
        except TierForceError:
            without.add(settings.mode)
        else:
            kept.append(point)
    for mode in sorted(without):
        say(f"left out: mode {mode} needs a draft model, give --draft")
    if not kept:
        raise TierForceError("no setting is left to time: give --draft.")
    return kept


def grouped(runtime: Runtime, base: Settings, points: Sequence[Varied]) -> list[Group]:
    """Put every point into the group whose prefill it continues."""
    links: dict[str, Runtime] = {}
    groups: dict[Settings, Group] = {}
    given = [int(point.get("num_draft_tokens", AUTO).replace(AUTO, "0")) for point in points]
    for point in points:
        settings = settings_of(base, point)
        if settings.link not in links:
            links[settings.link] = runtime.with_settings(settings)
        mode = settings.resolved_mode(runtime.draft is not None)
        here = replace(links[settings.link], settings=settings, mode=mode)
        shared = settings
        if not here.requirements.has_choice:  # a chosen one depends on the lengths
            # room for the longest draft; every run has lengths of its own
            shared = replace(
                settings, num_draft_tokens=max(MAX_DRAFT, *given), num_inner_draft_tokens=None
            )
        if shared not in groups:
            groups[shared] = Group(SequenceManager(replace(here, settings=shared)))
        groups[shared].points.append(Point(point, settings))
    return list(groups.values())


def time_text(group: Group, prompt: list[int], new: int, sampling: Sampling, limit: float) -> None:
    """Read a prompt once, and continue it with every point of the group."""
    sessions = group.sessions
    session = sessions.open(prompt, new + 1)
    with ExitStack() as opened:
        opened.callback(sessions.close, session)
        text = PrefilledPrompt(session)
        for point in turned(group.points, sampling.seed):
            needs, plan = session.runtime.requirements, session.plan
            lengths = point.lengths.setdefault(needs.mode, draft_lengths(point.settings))
            run = text.run(sampling, lengths, limit)
            settings = replace(
                needs.settings,
                selection_interval=needs.selection_interval(
                    plan
                ),  # which decides how old proposals' KV is
                gpu_kv_layers=plan.resident_layers,
                split_kv_layers=plan.split_layers,
            )
            point.runs.append((settings, run))
            sessions.record(session, run.rounds)
            named = ", ".join(f"{name} {value}" for name, value in point.varied.items())
            say(f"text {sampling.seed}: {named}: {run.ms_per_token:.1f} ms/token")


def turned(points: list[Any], turn: int) -> list[Any]:
    """Return the points in their order, beginning with the one whose turn it is."""
    first = turn % len(points)
    return points[first:] + points[:first]


@benchmark(
    "Decoding behind {context:,} tokens: {dtype}, T {temperature}, top-p {top_p}, {texts} texts of "
    "{new_tokens}"
)
def main(
    target: opt.Target = opt.SMOLLM2,
    draft: opt.Draft = None,
    rope: opt.Rope = None,
    text: opt.Text = None,
    context: opt.Context = opt.NATIVE,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting and its values: retrieval_budget=512,4096. One value fixes it."
        ),
    ] = None,
    texts: Annotated[int, typer.Option(help="Prompts that are timed.")] = 3,
    learn: Annotated[int, typer.Option(help="Prompts before, for the engine to learn from.")] = 0,
    new_tokens: opt.NewTokens = 96,
    limit_s: Annotated[float, typer.Option(help="Seconds after which a run may end.")] = 20,
    dtype: opt.Dtype = "bfloat16",
    temperature: opt.Temperature = 0.6,
    top_p: opt.TopP = 0.9,
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/grid.json"),
) -> Measurement:
    """Time every combination of the settings that are varied."""
    varied = parse(vary or ["mode=plain,retrieval,hierarchical"])
    base = Settings(rope=rope, dtype=dtype)
    # what makes no sense is refused before anything is read
    combinations = possible(base, grid(varied), draft is not None)
    engine = Engine.from_pretrained(target, draft, base)
    stretches = prompts(text_tokens(engine.tokenizer, text), context, learn + texts, new_tokens + 1)
    timed = stretches[:: (learn + texts) // texts][:texts]
    learnt = [stretch for stretch in stretches if stretch not in timed]
    base = replace(base, graphs=engine.runtime.settings.graphs)  # as loading has found to work
    groups = grouped(engine.runtime, base, combinations)
    every = [point for group in groups for point in group.points]
    every.sort(key=lambda point: combinations.index(point.varied))
    for seed, prompt in enumerate([*learnt, *timed]):
        for group in turned(groups, seed):
            if seed == len(learnt):
                for point in group.points:
                    point.runs.clear()
            if seed >= len(learnt) or group.learns:
                law = Sampling(temperature, top_p=top_p, seed=seed)
                time_text(group, prompt, new_tokens, law, limit_s)
        if seed >= len(learnt):
            rows = rows_of(every)
            yield {"rows": rows, "ratios": ratios(rows, varied)}


def rows_of(points: Sequence[Point]) -> list[Row]:
    """Return a row per point; points under one law of acceptance share what drafts yield."""
    rounds: dict[Settings, list[RoundStats]] = {}
    for point in points:
        for settings, run in point.runs:
            rounds.setdefault(law_of(settings), []).extend(run.rounds)
    yields = {law: expected_yields(each) for law, each in rounds.items()}
    return [row_of(point, yields) for point in points]


def ratios(rows: list[Row], varied: dict[str, list[str]]) -> dict[str, float]:
    """Compare, on each link, the best settings of each value with those of the first value."""
    claims: dict[str, float] = {}
    for link in varied.get("link", [AUTO]):
        here = [row for row in rows if row["setting"].get("link", link) == link]
        for name, values in varied.items():
            times = {
                value: [row["ms_per_token"] for row in here if row["setting"].get(name) == value]
                for value in values
            }
            first, *others = values
            for value in others:
                if name != "link" and times[first] and times[value]:
                    claim = f"link {link}, times as fast as {name} {first}: {value}"
                    claims[claim] = min(times[first]) / min(times[value])
    return claims
