"""Prefill's chunk: as many tokens as fill the multiprocessors of a GPU in attention."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.harness.dimensions import LLAMA_7B, config_of
from decoding import GREEDY, Settings
from decoding.app.hardware.model_on_machine import requirements_on
from decoding.engine import session
from decoding.planning import request_spec
from decoding.planning.activations import attention_utilisation, prefill_chunk
from decoding.planning.hardware_profile import HardwareProfile
from decoding.planning.request_spec import RequestSpec
from decoding.planning.requirements import Requirements
from parallel.model.transformer import Transformer
from support.engines import DEMO, Pair
from support.models import random_tokens

ROOT = Path(__file__).parents[3]
H200 = 132  # multiprocessors
HEADS = {"7B": 32, "7B on 2": 16, "8B": 32, "8B on 2": 16}  # per GPU


def test_utilisation_is_what_an_h200_was_measured_at() -> None:
    """7 numbers of rows for 4 numbers of heads, between 208 and 357 TFLOP/s."""
    measured = json.loads((ROOT / "docs/results/gpu-kernels-h200.json").read_text())["rows"]
    rates = {row["what"]: row["value"] for row in measured if row["part"] == "chunks"}
    rates = {what: rate for what, rate in rates.items() if what.endswith(" rows")}
    assert len(rates) == 28
    for what, rate in rates.items():
        model, rows = what.removesuffix(" rows").split(", ")
        share = attention_utilisation(int(rows.replace(",", "")) * HEADS[model], H200)
        assert share * 360 == pytest.approx(rate, rel=0.08), what


@pytest.mark.parametrize(
    ("gpus", "multiprocessors", "tokens"),
    # 2,304 tokens on two GPUs, and 1,536 on one, are as many as there is memory for
    [(2, None, 2304), (2, 128, 2048), (2, H200, 2048), (1, 128, 1536), (1, 90, 1024)],
)
def test_a_chunk_leaves_few_multiprocessors_idle(
    gpus: int, multiprocessors: int | None, tokens: int
) -> None:
    needs = requirements_of_7b(gpus, multiprocessors)
    assert prefill_chunk(needs) == tokens
    fixed = replace(needs, settings=replace(needs.settings, prefill_chunk=300))
    assert prefill_chunk(fixed) == 300


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    # at once; 3 waves and one of 2 halves; 2 and 2
    [(2100, 2304), (2304, 2304), (2305, 2048), (4096, 2048), (130_048, 2048)],
)
def test_a_prompt_that_fits_one_chunk_is_read_at_once(prompt: int, tokens: int) -> None:
    """In chunks of 2,048 the rest would leave most multiprocessors idle."""
    assert prefill_chunk(requirements_of_7b(2, 128), prompt) == tokens


def test_planned_memory_is_that_of_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = requirements_of_7b(2, 128)
    of_prompt = [RequestSpec(needs, tokens, 8).hidden_bytes(4000) for tokens in (2304, 2305)]
    monkeypatch.setattr(request_spec, "prefill_chunk", lambda *_: 2304)
    assert RequestSpec(needs, 2304, 8).hidden_bytes(4000) == of_prompt[0]
    monkeypatch.setattr(request_spec, "prefill_chunk", lambda *_: 2048)
    assert RequestSpec(needs, 2305, 8).hidden_bytes(4000) == of_prompt[1] < of_prompt[0]


def test_a_sequence_is_read_in_the_chunks_that_memory_was_planned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a later turn, which is longer than the prompt."""
    chunks, prefill_steps = [], Transformer.prefill_steps

    def record(*args: Any) -> Any:
        chunks.append(args[3])
        return prefill_steps(*args)

    for module in (request_spec, session):
        monkeypatch.setattr(
            module, "prefill_chunk", lambda needs, prompt=0: {300: 100, 600: 90}.get(prompt, 7)
        )
    monkeypatch.setattr(Transformer, "prefill_steps", record)
    prompt = random_tokens(600).tolist()
    pair = Pair(DEMO / "target", DEMO / "draft")
    with pair.engine("plain") as engine, engine.conversation(room=1000):
        list(engine.generate(prompt[:300], 4, GREEDY))
        list(engine.generate(prompt, 4, GREEDY))
    assert set(chunks) == {100}
    assert len(chunks) > 1
    with pair.engine("plain") as engine:
        list(engine.generate(prompt, 4, GREEDY))
    assert chunks[-1] == 90


def requirements_of_7b(gpus: int, multiprocessors: int | None) -> Requirements:
    machine = replace(
        HardwareProfile.from_name(f"{gpus}x4090"),
        multiprocessors=multiprocessors,
        device_memory=80e9,
    )
    settings = Settings(mode="plain", dtype="bfloat16")
    return requirements_on(machine, config_of(LLAMA_7B), None, settings)
