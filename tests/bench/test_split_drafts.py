"""Drafts from split layers are measured on the values that the engine's layers have."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor

from bench.drafts.split import CHUNK, HIGH_BYTES, SplitTrace, main
from bench.drafts.split_view import SPLIT_DTYPE, EmulatedSplitView
from bench.harness.text import BUILT_IN, books, long_text
from decoding import Sampling, Settings
from decoding.config.defaults import SPLIT_BLOCK, SPLIT_RECENT
from decoding.models.runtime import Runtime
from offload.attention.head_major import token_slice
from offload.codec.selected_keys import SelectedKeys
from offload.errors import TierForceError
from offload.kernels.group_attention import FAST
from offload.retrieval.shape import SplitSelectionSpec
from offload.retrieval.split_selection import SplitSelection
from offload.tiered.layer import KVGroup, attend_groups
from offload.tiered.split import SplitLayer
from offload.traffic import ByteCounters
from parallel.model.loading import load_model
from parallel.ranks.process_group import TensorParallelGroup
from support.driving import tiered_cache
from support.engines import DEMO
from support.links import make_test_link
from support.prompts import prompt

NUCLEUS = Sampling(0.6, top_p=0.9)
WHOLE = 4096  # a budget of all tokens
BUDGETS = (HIGH_BYTES, 320, WHOLE)
DRAFT = 32


@pytest.fixture(scope="module")
def models() -> Runtime:
    torch.set_num_threads(1)
    model = load_model(DEMO / "target", TensorParallelGroup(), "float32")
    return Runtime.create(model, None, "retrieval", Settings(mode="retrieval", dtype="float32"))


@pytest.fixture(scope="module")
def trace(models: Runtime) -> SplitTrace:
    return SplitTrace(models, prompt("argparse"), 160, BUDGETS, DRAFT)


def resident_kv(view: EmulatedSplitView, layer: int) -> Tensor:
    """Return the target's KV (2, Hkv, T, D) of a layer, in bfloat16."""
    kv = view.target.layers[layer].buffer
    assert kv is not None
    return token_slice(kv, 0, view.target.length).to(SPLIT_DTYPE)


def attention(view: EmulatedSplitView, layer: int, q: Tensor) -> Tensor:
    """Return attention in bfloat16 to what the view has of a layer."""
    recent = token_slice(resident_kv(view, layer), view.target.boundary, view.target.length)
    group = KVGroup(0, recent.shape[1], (view.prefix(layer), recent), recent)
    return attend_groups(q, [group], FAST, ByteCounters())[0]


def split_layers(view: EmulatedSplitView) -> list[SplitLayer]:
    """Return split layers of an engine's cache in bfloat16, with the KV of the view's target."""
    target, link = view.target, make_test_link("view")
    layout = replace(target.layout, dtype=SPLIT_DTYPE)
    cache = tiered_cache(
        link,
        resident=0,
        split=layout.layers,
        layout=layout,
        capacity=target.shape.capacity,
        recent=SPLIT_RECENT,
        block=SPLIT_BLOCK,
        slot_heads=layout.heads,
    )
    layers = []
    for index, layer in enumerate(cache.layers):
        assert isinstance(layer, SplitLayer)
        kv = resident_kv(view, index)
        for start in range(0, target.length, 500):  # a prompt's blocks
            layer.store(token_slice(kv, start, start + 500), start, target.boundary)
        layers.append(layer)
    return layers


def assert_exact(selected: SelectedKeys, values: Tensor, prefix: Tensor) -> None:
    """Assert that selected keys of values (2, Hkv, N, D) are those of prefix, others rounded."""
    for head, chunks in enumerate(selected.chunks):
        assert chunks.unique().shape == chunks.shape
        keys, exact = (kv[0, head].unflatten(0, (-1, selected.chunk)) for kv in (values, prefix))
        is_same = keys == exact
        assert is_same[chunks].float().mean() > 0.99  # all but outliers
        is_same[chunks] = False
        assert is_same.float().mean() < 0.3


def test_values_are_those_of_split_layers(trace: SplitTrace) -> None:
    target = trace.target
    start = target.boundary
    for chunk in trace.sample(3 * DRAFT, NUCLEUS).split(DRAFT):
        trace.model(chunk, target, 1)
        target.advance(len(chunk))
    assert target.boundary > start  # tokens were split while decoding
    views, layout = trace.caches, target.layout
    q = torch.randn(5, layout.heads * layout.groups, layout.head_dim).to(SPLIT_DTYPE)
    for index, layer in enumerate(split_layers(views[HIGH_BYTES])):
        prefix = token_slice(resident_kv(views[HIGH_BYTES], index), 0, target.boundary)
        for budget, view in views.items():
            selected = view.selection and view.selection.selected_keys(index)
            assert (selected is None) == (budget == HIGH_BYTES)
            if selected is not None:
                assert_exact(selected, view.prefix(index), prefix)
            args = q, target.length, target.boundary, ByteCounters(), selected
            assert torch.equal(attention(view, index, q), layer.attend_on_device(*args)[0])
    trace.rewind()


@pytest.mark.slow
def test_selected_keys_lower_rejections(trace: SplitTrace) -> None:
    tokens = trace.sample(5 * DRAFT + 1, NUCLEUS)
    chains = trace.chains(tokens, DRAFT, NUCLEUS)
    again = trace.chains(tokens, DRAFT, NUCLEUS)
    assert [len(measured) for measured in chains.values()] == [5, 5, 5]
    alone, some, all_tokens = (
        1 - float(torch.stack([chain.overlap for chain in measured]).mean())
        for measured in chains.values()
    )
    assert 0 < all_tokens < some < alone < 0.1
    for budget in BUDGETS:
        for first, second in zip(chains[budget], again[budget], strict=True):
            assert torch.equal(first.overlap, second.overlap)


@pytest.mark.slow
def test_document_has_rows_of_books_and_their_means(tmp_path: Path) -> None:
    words = long_text()
    files = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for start, file in enumerate(files):
        file.write_text(words[start * 20_000 :][:6_000])
    saved = tmp_path / "split.json"
    main(
        str(DEMO / "target"),
        text=files,
        contexts="400,500",
        budgets="256",
        draft_tokens="8,16",
        new_tokens=32,
        threads=1,
        output=saved,
    )
    document = json.loads(saved.read_text())
    assert document["settings"]["text"] == ["one.txt", "two.txt"]
    assert document["settings"]["text_sha256"] == [
        hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files
    ]
    rows = {(row["book"], row["context"], row["split_budget"]): row for row in document["rows"]}
    assert list(rows) == [
        (book, context, budget)
        for contexts, names in (([400, 500], ["one.txt", "two.txt"]), ([400, 500], ["mean of 2"]))
        for context in contexts
        for book in names
        for budget in (HIGH_BYTES, 256)
    ]
    for (book, context, budget), row in rows.items():
        assert list(row["rejected"]) == list(row["expected_tokens"]) == ["8", "16"]
        for n in ("8", "16"):
            assert 0 < row["rejected"][n] < 0.1
            assert 1 < row["expected_tokens"][n] <= int(n) + 1
            alone = rows[book, context, HIGH_BYTES]["rejected"][n]
            assert row["against_high_bytes"][n] == pytest.approx(row["rejected"][n] / alone)
            if book == "mean of 2":
                each = (rows[name, context, budget] for name in ("one.txt", "two.txt"))
                mean = sum(part["rejected"][n] for part in each) / 2
                assert row["rejected"][n] == pytest.approx(mean)
        if budget == HIGH_BYTES:
            assert row["memory"] == 0
        else:
            assert row["memory"] == pytest.approx(256 / context / 8, rel=0.2)


def test_memory_of_a_spec_is_that_of_the_cache(trace: SplitTrace) -> None:
    selection = trace.caches[320].selection
    assert isinstance(selection, SplitSelection)
    spec = SplitSelectionSpec(320, CHUNK, trace.target.shape.capacity)
    assert selection.selector.shape == spec.selector
    layout = replace(trace.target.layout, dtype=SPLIT_DTYPE)
    assert selection.device_bytes == layout.layers * spec.layer_bytes(layout)


def test_invalid_options_are_reported_in_one_line(tmp_path: Path) -> None:
    output = tmp_path / "split.json"
    with pytest.raises(typer.BadParameter, match="512 is not a multiple of each of 64,96"):
        main(draft_tokens="64,96", output=output)
    with pytest.raises(typer.BadParameter, match="4 is less than a chunk of 8 tokens"):
        main(budgets="512,4", output=output)
    with pytest.raises(TierForceError, match=r"--text .* cannot be read"):
        books([tmp_path / "missing.txt"])


def test_books_are_files_or_those_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "novels").mkdir()
    paths = [tmp_path / "one.txt", tmp_path / "novels/two.txt", tmp_path / "novels/three.txt"]
    for path in paths:
        path.write_text(path.stem)
    found = books([paths[0], tmp_path / "novels"])
    assert found == {"one.txt": "one", "three.txt": "three", "two.txt": "two"}
    assert list(books(None)) == [BUILT_IN]
    with pytest.raises(TierForceError, match=r"another file is called one\.txt"):
        books([paths[0], paths[0]])
