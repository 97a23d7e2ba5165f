"""A timed verification transfers the host bytes of its kind of layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.speed.transfer import LAYERS, settings_of, time_verification, useful_kinds
from decoding import Engine, Settings
from decoding.engine.session import SequenceState
from support.engines import DEMO
from support.prompts import prompt
from support.slow import slow_except

SHARES = {"streamed": 1.0, "compressed": 0.75, "split": 0.25}


@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [("bfloat16", list(LAYERS)), ("float16", ["streamed", "split"]), ("float32", ["streamed"])],
)
def test_default_kinds_are_those_that_save_bytes(dtype: str, kinds: list[str]) -> None:
    assert useful_kinds(dtype) == kinds


@pytest.mark.parametrize("layers", slow_except(LAYERS))
def test_link_bytes_by_kind_of_layers(layers: str) -> None:
    base = Settings(mode="plain", dtype="bfloat16", link="view", gpu_kv_layers=0)
    engine = Engine.from_pretrained(DEMO / "target", settings=base, device="cpu")
    model, tokens = engine.runtime.target, prompt("typing")
    settings = settings_of(layers, model.config.layers, base)
    on_device, offloaded = (
        SequenceState(engine.runtime.with_settings(replace(settings, link=link)), tokens, 18)
        for link in ("view", "emulated:100")
    )
    for session in (on_device, offloaded):
        session.prefill()
    row = time_verification(layers, 100, model, on_device, offloaded, rows=17, repeats=1)
    prefix = offloaded.target.boundary
    assert prefix > 0
    whole = model.config.kv_layout(1, engine.runtime.dtype).bytes(prefix)
    assert row["mb_per_verification"] == pytest.approx(SHARES[layers] * whole / 1e6)
    assert row["link_ms"] == pytest.approx(row["mb_per_verification"] / 100)
    for session in (on_device, offloaded):
        session.close()
