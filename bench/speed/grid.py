"""Decoding speed over a grid of settings, all timed on the same prompts.

The physics: a plain decoding step reads the whole KV cache once (attention), or transfers it over
the link once (offloading). A draft is verified in one such forward, so drafting gains the accepted
tokens, as long as verification and drafting cost less than they save. Over a link, a verification
costs the same for any draft, so long drafts pay off; when compute-bound, short ones do. A resident
layer saves its share of a verification; a larger retrieval budget makes verifications rarer and
drafting more expensive.

    python -m bench grid --vary mode=plain,hierarchical --vary num_draft_tokens=auto,8,16

Every setting continues the same prompts, in an order that rotates from prompt to prompt. Settings
that differ only by draft lengths share a prefill. Settings of `auto` are selected by the engine,
which learns from request to request: if the budget is `auto`, each setting has an engine of its
own, so that it learns only from its own draft lengths.

The number of accepted tokens is random, and a hundred rounds do not average it out. Besides the
measured ms/token there is an expected one: the seconds of a setting over the tokens that its drafts
yield on average, given the acceptance rate at each position of a draft.
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
from bench.harness.text import select_prompts, text_tokens
from decoding import Engine, Sampling, Settings
from decoding.config.option import options_of
from decoding.config.settings import LEVELS
from decoding.engine.session_manager import SequenceManager
from decoding.models.runtime import Runtime
from decoding.speculation.draft_length import Adaptive, Lengths, RoundStats, draft_lengths
from offload.errors import TierForceError

AUTO = "auto"
LOADED = ("dtype", "rope", "shard_draft", "context")  # fixed for an engine, which is loaded once
_RETRIEVAL = {"retrieval_budget", "chunk_size", "policy", "selection_interval"}
UNUSED = {  # settings without effect, by mode
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
Varied = dict[str, str]  # values of settings by name, as given on the command line


@dataclass
class Point:
    """One combination of settings, and its measurements."""

    varied: Varied
    settings: Settings
    # draft lengths by mode; adaptive ones persist from request to request, as in the engine
    lengths: dict[str, Lengths] = field(default_factory=dict)
    # runs, each with the selected settings
    runs: list[tuple[Settings, Run]] = field(default_factory=list)


@dataclass
class PrefillGroup:
    """Points that share a prefill: they differ only by draft lengths."""

    sessions: SequenceManager
    points: list[Point] = field(default_factory=list)

    @property
    def learns(self) -> bool:
        """Return whether the budget or draft lengths adapt to past requests."""
        runtime = self.sessions.runtime
        lengths = chain(*(draft_lengths(point.settings, runtime.mode) for point in self.points))
        adaptive = any(isinstance(length, Adaptive) for length in lengths)
        return runtime.requirements.has_choice or (adaptive and runtime.mode != "plain")


def row_of(point: Point, yields: dict[Settings, list[float]]) -> Row:
    """Return the row of a point's runs, given the expected yields by `acceptance_settings`.

    All selections of the engine are listed.
    """
    runs = [run for _, run in point.runs]
    selected = {
        name: " ".join(dict.fromkeys(str(getattr(settings, name)) for settings, _ in point.runs))
        for name in ("mode", "retrieval_budget", "gpu_kv_layers", "split_kv_layers")
    }
    seconds, tokens = sum(run.seconds for run in runs), sum(run.tokens for run in runs)
    rounds = [round_ for run in runs for round_ in run.rounds]
    times = [run.ms_per_token for run in runs]
    expected = sum(
        yields[acceptance_settings(settings)][round_.drafted - round_.has_tested]
        for settings, run in point.runs
        for round_ in run.rounds
    )
    rates = [run.acceptance for run in runs if run.acceptance is not None]
    has_budget = "retrieval_budget" not in UNUSED.get(point.varied.get("mode", AUTO), ())
    return {
        "setting": point.varied,
        "ms_per_token": 1e3 * seconds / tokens,
        "min_ms_per_token": min(times),  # over prompts
        "max_ms_per_token": max(times),
        "expected_ms_per_token": 1e3 * seconds / expected if rounds else None,
        "tokens_per_verification": tokens / len(rounds) if rounds else None,
        # mean rate of the draft tokens that the target verified
        "acceptance": statistics.fmean(rates) if rates else None,
        "mean_draft": statistics.fmean(round_.drafted for round_ in rounds) if rounds else None,
        "link_mb_per_token": sum(run.link_bytes for run in runs) / tokens / 1e6,
        "modes": selected["mode"],
        "budgets": selected["retrieval_budget"] if has_budget else "",
        "gpu_kv_layers": selected["gpu_kv_layers"],
        "split_kv_layers": selected["split_kv_layers"],
    }


def acceptance_settings(settings: Settings) -> Settings:
    """Return settings without those that the acceptance rate does not depend on."""
    # with split layers, it depends on how many layers are not split
    is_split = "split" in LEVELS.get(settings.mode, ())
    return replace(
        settings,
        num_draft_tokens=None,
        num_inner_draft_tokens=None,
        link="auto",
        gpu_kv_layers=settings.gpu_kv_layers if is_split else None,
        device_memory=None,
    )


def expected_yields(rounds: Sequence[RoundStats]) -> list[float]:
    """Return the tokens that a verified draft of 0, 1, ... tokens yields on average.

    That is 1 + sum_k prod_(i<=k) (1 - h_i). h_i is the rejection rate at position i if all previous
    tokens were accepted: the product-limit estimate of Kaplan and Meier 1958, as a draft that ended
    or was accepted completely is censored for later positions.
    """
    yields, survival = [1.0], 1.0
    for i in range(max((round_.drafted for round_ in rounds), default=0)):
        tested = sum(i <= round_.accepted and i < round_.drafted for round_ in rounds)
        rejected = sum(round_.accepted == i < round_.drafted for round_ in rounds)
        survival *= 1 - rejected / tested if tested else 1
        yields.append(yields[-1] + survival)
    return yields


def parse(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each setting. Raises TierForceError for other names or no value."""
    varied: dict[str, list[str]] = {}
    for word in words:
        name, _, values = word.partition("=")
        name = name.replace("-", "_")
        settings = [option for option in options_of(Settings) if option not in LOADED]
        if name not in settings or not values:
            known = ", ".join(settings)
            raise TierForceError(f"--vary {word}: give NAME=VALUE,VALUE. Names are {known}.")
        varied[name] = values.split(",")
    return varied


def value_of(name: str, word: str) -> Any:
    """Return the value of a setting. Raises TierForceError if `word` is not one."""
    hint = get_type_hints(Settings)[name]
    kinds = get_args(hint) or (hint,)
    if word == AUTO and type(None) in kinds:
        return None
    try:
        return {"yes": True, "no": False}[word] if bool in kinds else kinds[0](word)
    except (KeyError, ValueError):
        raise TierForceError(f"--vary {name}={word}: {word} is not a valid value.") from None


def settings_of(base: Settings, varied: Varied) -> Settings:
    """Return `base` with the settings of a point. Raises TierForceError for invalid settings."""
    return replace(base, **{name: value_of(name, word) for name, word in varied.items()})


def grid(varied: dict[str, list[str]]) -> list[Varied]:
    """Return every combination once, each without settings that its mode does not use."""
    points: list[Varied] = []
    for values in product(*varied.values()):
        point = dict(zip(varied, values, strict=True))
        unused = UNUSED.get(point.get("mode", AUTO), set())
        point = {name: value for name, value in point.items() if name not in unused}
        if point not in points:
            points.append(point)
    return points


def runnable(base: Settings, points: Sequence[Varied], has_draft: bool) -> list[Varied]:
    """Return the points that can run with or without a draft model; report the skipped modes.

    Raises TierForceError if no point can run, and for invalid settings.
    """
    selected, skipped = list[Varied](), set[str]()
    for point in points:
        settings = settings_of(base, point)
        try:
            settings.resolved_mode(has_draft)
        except TierForceError:
            skipped.add(settings.mode)
        else:
            selected.append(point)
    for mode in sorted(skipped):
        say(f"skipped: mode {mode} needs a draft model, give --draft")
    if not selected:
        raise TierForceError("no setting can run without a draft model: give --draft.")
    return selected


def group_by_prefill(
    runtime: Runtime, base: Settings, points: Sequence[Varied]
) -> list[PrefillGroup]:
    """Return the points, grouped by shared prefill."""
    links: dict[str, Runtime] = {}
    groups: dict[Settings, PrefillGroup] = {}
    draft_tokens = [int(point.get("num_draft_tokens", AUTO).replace(AUTO, "0")) for point in points]
    for point in points:
        settings = settings_of(base, point)
        if settings.link not in links:
            links[settings.link] = runtime.with_settings(settings)
        layers = runtime.target.config.full_layers
        mode = settings.resolved_mode(runtime.draft is not None, layers)
        point_runtime = replace(links[settings.link], settings=settings, mode=mode)
        shared = settings
        # an automatic budget depends on the draft lengths
        if not point_runtime.requirements.has_choice:
            # room for the longest draft; runs override the lengths
            longest = replace(settings, num_draft_tokens=None).draft_length_range(mode)[-1]
            shared = replace(
                settings,
                num_draft_tokens=max(longest, *draft_tokens),
                num_inner_draft_tokens=None,
            )
        if shared not in groups:
            groups[shared] = PrefillGroup(SequenceManager(replace(point_runtime, settings=shared)))
        groups[shared].points.append(Point(point, settings))
    return list(groups.values())


def time_prompt(
    group: PrefillGroup, prompt: list[int], new_tokens: int, sampling: Sampling, limit: float
) -> None:
    """Prefill a prompt once, and decode after it with every point of the group."""
    sessions = group.sessions
    session = sessions.open(prompt, new_tokens + 1)
    with ExitStack() as opened:
        opened.callback(sessions.close, session)
        prefilled = PrefilledPrompt(session)
        for point in rotated(group.points, sampling.seed):
            requirements, plan = session.plan.requirements, session.plan
            mode = requirements.mode
            lengths = point.lengths.setdefault(mode, draft_lengths(point.settings, mode))
            run = prefilled.run(sampling, lengths, limit)
            settings = replace(
                requirements.settings,
                # the interval determines how recent the retrieval cache of a draft is
                selection_interval=plan.selection_interval,
                gpu_kv_layers=plan.memory.resident_layers,
                split_kv_layers=plan.memory.split_layers,
            )
            point.runs.append((settings, run))
            sessions.record(session, run.rounds)
            label = ", ".join(f"{name} {value}" for name, value in point.varied.items())
            say(f"prompt {sampling.seed}: {label}: {run.ms_per_token:.1f} ms/token")


def rotated(points: list[Any], start: int) -> list[Any]:
    """Return the points in their order, rotated to begin with number `start`."""
    first = start % len(points)
    return points[first:] + points[:first]


@benchmark(
    "Decoding after {context:,} tokens: {dtype}, T {temperature}, top-p {top_p}, "
    "{prompts} prompts, {new_tokens} new tokens each"
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
    prompts: Annotated[int, typer.Option(help="Timed prompts.")] = 3,
    learn: Annotated[
        int, typer.Option(help="Untimed prompts before, from which the engine learns.")
    ] = 0,
    new_tokens: opt.NewTokens = 96,
    limit_s: Annotated[float, typer.Option(help="Seconds after which a run ends.")] = 20,
    dtype: opt.Dtype = "bfloat16",
    temperature: opt.Temperature = 0.6,
    top_p: opt.TopP = 0.9,
    threads: opt.Threads = 0,
    output: opt.Output = Path("results/grid.json"),
) -> Measurement:
    """Time every combination of the varied settings."""
    varied = parse(vary or ["mode=plain,retrieval,hierarchical"])
    base = Settings(rope=rope, dtype=dtype)
    # invalid settings are reported before the models are loaded
    combinations = runnable(base, grid(varied), draft is not None)
    engine = Engine.from_pretrained(target, draft, base)
    total, tokens = learn + prompts, text_tokens(engine.tokenizer, text)
    selected = select_prompts(tokens, context, total, new_tokens + 1)
    timed = selected[:: total // prompts][:prompts]
    untimed = [prompt for prompt in selected if prompt not in timed]
    base = replace(base, graphs=engine.runtime.settings.graphs)  # resolved when models were loaded
    groups = group_by_prefill(engine.runtime, base, combinations)
    points = [point for group in groups for point in group.points]
    points.sort(key=lambda point: combinations.index(point.varied))
    for seed, prompt in enumerate([*untimed, *timed]):
        for group in rotated(groups, seed):
            if seed == len(untimed):
                for point in group.points:
                    point.runs.clear()
            if seed >= len(untimed) or group.learns:
                sampling = Sampling(temperature, top_p=top_p, seed=seed)
                time_prompt(group, prompt, new_tokens, sampling, limit_s)
        if seed >= len(untimed):
            rows = rows_of(points)
            yield {"rows": rows, "ratios": ratios(rows, varied)}


def rows_of(points: Sequence[Point]) -> list[Row]:
    """Return a row per point; points with equal `acceptance_settings` share expected yields."""
    rounds: dict[Settings, list[RoundStats]] = {}
    for point in points:
        for settings, run in point.runs:
            rounds.setdefault(acceptance_settings(settings), []).extend(run.rounds)
    yields = {settings: expected_yields(shared) for settings, shared in rounds.items()}
    return [row_of(point, yields) for point in points]


def ratios(rows: list[Row], varied: dict[str, list[str]]) -> dict[str, float]:
    """Return, per link, the speedup of the best settings with each value over the first value."""
    claims: dict[str, float] = {}
    for link in varied.get("link", [AUTO]):
        link_rows = [row for row in rows if row["setting"].get("link", link) == link]
        for name, values in varied.items():
            times = {
                value: [
                    row["ms_per_token"] for row in link_rows if row["setting"].get(name) == value
                ]
                for value in values
            }
            first, *others = values
            for value in others:
                if name != "link" and times[first] and times[value]:
                    claim = f"link {link}, times as fast as {name} {first}: {value}"
                    claims[claim] = min(times[first]) / min(times[value])
    return claims
