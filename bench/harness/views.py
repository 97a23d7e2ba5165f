"""The tables of README and docs/results, made of the committed documents and of nothing else.

A table stands between `<!-- NAME -->` and `<!-- end -->`, where NAME is one of VIEWS.
`python -m bench report` fills it in anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.tables import flat, heading, markdown

RESULTS = Path(__file__).parents[2] / "docs" / "results"
_BLOCK = re.compile(r"(<!-- ([a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class View:
    """Some fields of a document's rows, and what its ratios show."""

    file: str
    columns: str = ""  # names of fields, separated by spaces
    headings: Mapping[str, str] = field(default_factory=dict)  # where other than usual
    rows: str = "rows"
    keep: Callable[[dict[str, Any]], bool] = lambda row: True
    ratios: str | None = ""  # how the ratios shown begin; None: they are not shown


_PEERS = (
    *("ours: hierarchical", "ours: plain"),
    *("ours: hierarchical offloaded", "ours: plain offloaded"),
    *("transformers: static cache", "transformers: dynamic cache"),
    *("DeepSpeed ZeRO-Inference", "llama.cpp"),
)
_RECIPE = {
    "name": "experiment",
    "run": "run here",
    "ms_per_token": "ms here",
    "plain_ms_per_token": "plain ms here",
    "gain": "gain here",
}
_VARIED = "name predicted_ms ms_per_token acceptance tokens_per_verification"

VIEWS = {
    "compare": View(
        "compare-cpu.json",
        "peer ms_per_token prefill_s tokens_per_verification peak_gb",
        {"peer": "65,536 tokens"},
        keep=lambda row: row["context"] == 65_536 and row["peer"] in _PEERS,
        ratios=None,
    ),
    "peers": View(
        "compare-cpu.json",
        "context peer ms_per_token min_ms_per_token max_ms_per_token prefill_s "
        "tokens_per_verification acceptance link_mb_per_token peak_gb note",
        keep=lambda row: row["context"] == 65_536,
        ratios="65,536",
    ),
    "greedy": View(
        "compare-greedy-cpu.json",
        "context peer ms_per_token same_text note",
        {"same_text": "same text as ours"},
    ),
    "offload": View(
        "recipe-offload-cpu.json",
        "name published_ms published_plain_ms published_gain plain_is_of "
        "predicted_ms predicted_plain_ms predicted_gain run ms_per_token "
        "plain_ms_per_token gain",
        _RECIPE,
    ),
    "onchip": View(
        "recipe-on-chip-cpu.json",
        "name published_gain predicted_gain ms_per_token plain_ms_per_token gain acceptance",
        _RECIPE,
    ),
    "contexts": View(
        "recipe-contexts-cpu.json",
        "name predicted_ms predicted_plain_ms predicted_gain ms_per_token "
        "plain_ms_per_token gain tokens_per_verification",
        _RECIPE,
    ),
    "budgets": View("recipe-budgets-cpu.json", _VARIED, _RECIPE),
    "temperatures": View("recipe-temperatures-cpu.json", _VARIED, _RECIPE),
    "summaries": View(
        "recipe-summaries-cpu.json",
        "name predicted_ms ms_per_token plain_ms_per_token gain first_token_s",
        _RECIPE,
    ),
    "counts": View(
        "acceptance-cpu.json",
        "context temperature policy tokens_per_verification",
        rows="counts",
    ),
    "policies": View(
        "acceptance-cpu.json",
        "policy rejected.16 rejected.32 expected_tokens.16 expected_tokens.32",
        {
            "policy": "policy, budget 768",
            "rejected.16": "rejected, refresh every 16 tokens",
            "rejected.32": "every 32",
            "expected_tokens.16": "expected tokens, draft 16",
            "expected_tokens.32": "draft 32",
        },
        rows="policies",
        keep=lambda row: row["context"] == 16_384,
    ),
    "lengths": View(
        "lengths-cpu.json",
        "link_gbps policy lengths ms_per_token expected_ms_per_token tokens_per_verification",
        {"lengths": "draft lengths"},
        keep=lambda row: row["lengths"] in ("adaptive", "16, 2", "32, 2"),
    ),
    "needle": View(
        "needle-cpu.json",
        "model policy probability stands",
        {"policy": "proposed from"},
        rows="needle",
        keep=lambda row: row["policy"].startswith(("full", "window", "static", "mass + ")),
    ),
    "recall": View(
        "recipe-needle-cpu.json",
        "model policy probability stands",
        {"policy": "proposed from"},
    ),
    "refresh": View(
        "refresh-cpu.json",
        "dtype rows retrieval_cache verification_ms refresh_ms refresh_share",
        {"refresh_share": "refresh / verification without"},
        keep=lambda row: not row["retrieval_cache"].startswith("static"),
    ),
    "decode": View(
        "decode-cpu.json",
        "method ms_per_token tokens_per_verification acceptance link_mb_per_token",
    ),
    "transfer": View("transfer-cpu.json", "link_gbps link_ms compute_ms wall_ms wall_over_bound"),
    "prefill": View("prefill-cpu.json", "tokens method seconds tokens_per_s peak_mb_per_rank"),
    "longprefill": View(
        "prefill-64k-cpu.json", "tokens method seconds tokens_per_s peak_mb_per_rank"
    ),
    "passes": View(
        "passes-cpu.json",
        "tokens prefill_s target_1 target_17 target_33 target_33_refresh retrieval_2 draft_1",
        {
            "target_1": "a step",
            "target_17": "17 rows",
            "target_33": "33 rows",
            "target_33_refresh": "33 rows and a refresh",
            "retrieval_2": "retrieval, 2 rows",
            "draft_1": "draft",
        },
    ),
    "predictions": View(
        "model-cpu.json",
        "context mode link_gbps resident_layers budget draft_length first_s "
        "predicted_first_s ms_per_token predicted_ms_per_token",
        {
            "first_s": "first token s",
            "predicted_first_s": "predicted s",
            "predicted_ms_per_token": "predicted ms",
        },
    ),
    "tune": View("tune-cpu.json"),
    "memory": View(
        "limits-cpu.json",
        "context mode planned_layers planned_mb share tokens ended",
        {"planned_layers": "layers on the device", "share": "share of it given"},
    ),
}


def filled(text: str, beside: Path = RESULTS, folder: Path = RESULTS) -> str:
    """Return a text with its tables made anew from the documents in `folder`.

    Links are those of a file in the folder `beside`. Raises KeyError for a table nobody knows.
    """
    links = "" if beside == RESULTS else "docs/results/"

    def block(match: re.Match[str]) -> str:
        return match[1] + table(VIEWS[match[2]], folder, links) + match[3]

    return _BLOCK.sub(block, text)


def table(view: View, folder: Path, links: str) -> str:
    """Return the table, its ratios, and what was run where and when."""
    document = json.loads((folder / view.file).read_text(encoding="utf-8"))
    lines = []
    if names := view.columns.split():
        headings = [view.headings.get(name, heading(name)) for name in names]
        rows = [flat(row) for row in document[view.rows] if view.keep(row)]
        cells = [[row.get(name) for name in names] for row in rows]
        lines = markdown(headings, cells)
    ratios = document.get("ratios", {}) if view.ratios is not None else {}
    shown = [claim for claim in ratios if claim.startswith(view.ratios or "")]
    if shown:
        lines += ["", *(f"- {claim}: **{ratios[claim]:.2f}**" for claim in shown)]
    return "\n".join([*lines, "", caption(document["environment"], links + view.file), ""])


def caption(environment: Mapping[str, Any], path: str) -> str:
    """Return one line: the command, the machine, the day, the commit and the document."""
    return (
        f"`{environment['command']}` on {machine_of(environment)}, {environment['date'][:10]}, "
        f"commit {commit_of(environment)} ([{Path(path).name}]({path}))"
    )


def machine_of(environment: Mapping[str, Any]) -> str:
    """Return the GPUs, the processor and how many threads were used."""
    processor = f"{environment['cpu']}, {environment['threads']} threads"
    return ", ".join([*environment["gpus"], processor])


def commit_of(environment: Mapping[str, Any]) -> str:
    """Return the commit in short, and whether there were changes on top of it."""
    commit, changes, _ = environment["commit"].partition("+changes")
    return commit[:7] + changes
