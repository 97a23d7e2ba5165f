"""What crosses the link in a timed verification is what layers of that kind have on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.speed.transfer import LAYERS, saving, settings_of, verified
from decoding import Engine, Settings
from decoding.engine.session import SequenceState
from support.engines import DEMO
from support.prompts import prompt

SHARES = {"streamed": 1.0, "compressed": 0.75, "split": 0.25}


@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [("bfloat16", list(LAYERS)), ("float16", ["streamed", "split"]), ("float32", ["streamed"])],
)
def test_what_saves_nothing_of_a_dtype_is_left_out(dtype: str, kinds: list[str]) -> None:
    assert saving(dtype) == kinds


@pytest.mark.parametrize("layers", LAYERS)
def test_a_kind_of_layers_moves_its_share(layers: str) -> None:
    base = Settings(mode="plain", dtype="bfloat16", link="view", gpu_kv_layers=0)
    engine = Engine.from_pretrained(DEMO / "target", settings=base, device="cpu")
    model, text = engine.runtime.target, prompt("typing")
    settings = settings_of(layers, model.config.layers, base)
    near, far = (
        SequenceState(engine.runtime.with_settings(replace(settings, link=link)), text, 18)
        for link in ("view", "emulated:100")
    )
    for session in (near, far):
        session.prefill()
    row = verified(layers, 100, model, near, far, rows=17, repeats=1)
    prefix = far.target.boundary
    assert prefix > 0
    whole = model.config.kv_layout(1, engine.runtime.dtype).bytes(prefix)
    assert row["mb_per_verification"] == pytest.approx(SHARES[layers] * whole / 1e6)
    assert row["link_ms"] == pytest.approx(row["mb_per_verification"] / 100)
    for session in (near, far):
        session.close()
