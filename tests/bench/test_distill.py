"""The recipe of a draft: what it learns from, that it learns, and that it can be interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import demo.distill
import demo.windows
from bench.harness.text import long_text
from decoding.loading import load_tokenizer
from demo.distill import (
    Recipe,
    acceptance,
    digest_of,
    divergence,
    draft_of,
    keep_to,
    learn,
    load_target,
    read_texts,
    save_draft,
    trained,
)
from demo.windows import Windows, batches, one_prompt, warp, windows_of, write_windows
from offload.errors import TierForceError
from parallel.group import Group
from parallel.loading import Lender, load_model
from support.engines import DEMO
from support.gguf import Kind, convert
from support.loading import all_logits
from support.models import random_tokens

SIZES = (4, 24, 12)  # windows, tokens of a prompt, tokens written
RECIPE = Recipe((0, 2), files=2, steps=6, batch=3, rate=1e-2, seed=5)
Checkpoints = Callable[..., Path]


def transformers_of(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO / "target")


@pytest.fixture(scope="module")
def target(checkpoint: Checkpoints) -> Any:
    return transformers_of(checkpoint(vocab_size=2048, scale=0.5))


@pytest.fixture(scope="module")
def windows(target: Any, tokenizer: Any) -> Windows:
    return written(target, tokenizer, 0)


def written(target: Any, tokenizer: Any, seed: int) -> Windows:
    return write_windows(target, tokenizer, [long_text()[:20_000]], seed, SIZES)


@pytest.mark.parametrize("seed", range(3))
def test_a_window_has_the_law_behind_each_token(target: Any, tokenizer: Any, seed: int) -> None:
    found = written(target, tokenizer, seed)
    assert found.tokens.shape == (4, 36)
    logs = target(found.tokens).logits.log_softmax(-1)  # in one pass, not one by one
    top, ids = logs.topk(64)
    torch.testing.assert_close(found.logs.float(), top, atol=4e-3, rtol=1e-3)
    assert (found.ids == ids).float().mean() > 0.99  # but for ties
    # what is written is among the tokens that may follow
    following = found.tokens[:, SIZES[1] :, None]
    assert (found.ids[:, SIZES[1] - 1 : -1] == following).any(-1).all()
    again = written(target, tokenizer, seed)
    assert all(
        torch.equal(*pair) for pair in zip(vars(found).values(), vars(again).values(), strict=True)
    )


def test_prompts_are_passages_in_a_chat_or_alone(tokenizer: Any) -> None:
    text = long_text()[:20_000]
    tokenizer.chat_template = "<q>{{ messages[0]['content'] }}<a>"
    try:
        prompts = [
            one_prompt(tokenizer, [text], 60, torch.Generator().manual_seed(seed))
            for seed in range(40)
        ]
    finally:
        tokenizer.chat_template = None
    assert {len(prompt) for prompt in prompts} == {60}
    read = [tokenizer.decode(prompt) for prompt in prompts]
    asked = [each for each in read if each.startswith("<q>") and each.endswith("<a>")]
    assert 20 < len(asked) < 40
    assert all(each[3:20] in text for each in asked)
    assert all(each[:20] in text for each in read if each not in asked)


@pytest.mark.parametrize("law", [(0.6, 0.9), (1.0, 1.0), (0.8, 0.95)])
def test_a_law_is_warped_as_the_engine_does(law: tuple[float, float]) -> None:
    from decoding.speculation.sampling import Sampling

    logits = 3 * torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    logs, ids = logits.log_softmax(-1).sort(descending=True)
    temperature, top_p = law
    wanted = Sampling(temperature=temperature, top_p=top_p).law(logits)
    torch.testing.assert_close(warp(logs, *law), wanted.gather(1, ids))


def test_what_an_interrupted_run_has_written_is_kept(
    tmp_path: Path, target: Any, tokenizer: Any
) -> None:
    asked = list[int]()

    def write(number: int) -> Windows:
        asked.append(number)
        if asked == [0, 1]:
            raise KeyboardInterrupt
        return written(target, tokenizer, number)

    with pytest.raises(KeyboardInterrupt):
        windows_of(tmp_path, "some", 2, write)
    found = windows_of(tmp_path, "some", 2, write)
    assert asked == [0, 1, 1]
    assert torch.equal(found.tokens[4:], written(target, tokenizer, 1).tokens)


def test_batches_go_on_where_they_stopped(windows: Windows) -> None:
    def tokens(first: int) -> list[Tensor]:
        ahead = batches(windows, 3, 7, first)
        return [next(ahead).tokens for _ in range(9 - first)]

    for one, other in zip(tokens(0)[4:], tokens(4), strict=True):
        assert torch.equal(one, other)
    assert len({tuple(each.flatten().tolist()) for each in tokens(0)}) > 1


@pytest.mark.parametrize("others", [0, 5000])
def test_the_loss_is_the_divergence_of_whole_laws(
    target: Any, windows: Windows, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all other tokens are in the sample it is no estimate."""
    draft = draft_of(target, (0, 2))
    monkeypatch.setattr(demo.distill, "OTHERS", others)
    loss = divergence(draft, windows, torch.Generator().manual_seed(0))
    own = draft(windows.tokens).logits.log_softmax(-1).gather(2, windows.ids.long())
    law = windows.logs.float().exp()
    rest, own_rest = 1 - law.sum(-1), 1 - own.exp().sum(-1)
    wanted = (law * (law.log() - own)).sum(-1) + rest * (rest / own_rest).log()
    if others:
        torch.testing.assert_close(loss, wanted.mean(), atol=1e-4, rtol=1e-4)
    else:  # the rest of the draft's law is left out, which must make a difference
        assert abs(loss - wanted.mean()) > 1e-2


def test_acceptance_is_the_overlap_of_the_laws(target: Any, windows: Windows) -> None:
    assert acceptance(target, windows, SIZES[1])["T 0.6, top-p 0.9"] > 0.99
    draft = draft_of(target, (0, 2))
    written_on = slice(SIZES[1] - 1, None)
    laws = []
    for model in (target, draft):
        law = model(windows.tokens).logits[:, written_on].softmax(-1)
        least = law.topk(64).values[..., -1:]
        laws.append(law.where(law >= least, 0))  # unlikely tokens are not counted
    found = acceptance(draft, windows, SIZES[1])["T 1"]
    assert found == pytest.approx(torch.minimum(*laws).sum(-1).mean().item(), abs=2e-3)
    assert found > 0.05


def test_it_learns_and_what_is_borrowed_stays(
    target: Any, windows: Windows, tmp_path: Path
) -> None:
    draft = draft_of(target, (0, 2))
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    noise = torch.Generator().manual_seed(0)
    loss = divergence(draft, windows, noise).item()
    learn(draft, windows, RECIPE, tmp_path / "checkpoint.pt", every=100)
    assert divergence(draft, windows, noise).item() < 0.8 * loss
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("stop", [2, 4])
def test_a_run_that_was_interrupted_ends_with_the_same_weights(
    target: Any, windows: Windows, tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(path: Path) -> list[Tensor]:
        draft = draft_of(target, (0, 2))
        learn(draft, windows, RECIPE, path, every=2)
        return trained(draft)

    whole, path, calls = run(tmp_path / "whole.pt"), tmp_path / "cut.pt", list[int]()

    def interrupted(*arguments: Any) -> Tensor:
        calls.append(0)
        if len(calls) == stop + 2:  # one step behind the checkpoint is lost
            raise KeyboardInterrupt
        return divergence(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(demo.distill, "divergence", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(path)
    for one, other in zip(whole, run(path), strict=True):
        assert torch.equal(one, other)
    other_rate = Recipe((0, 2), files=2, steps=6, batch=3, rate=1e-3, seed=5)
    with pytest.raises(TierForceError, match="is of another recipe"):
        learn(draft_of(target, (0, 2)), windows, other_rate, path, every=2)


@pytest.mark.parametrize("name", ["llama", "qwen3", "granite"])
def test_the_folder_is_the_draft_that_was_trained(
    checkpoint: Checkpoints, tmp_path: Path, name: str
) -> None:
    folder = checkpoint(name)
    draft = draft_of(transformers_of(folder), (1, 2))
    save_draft(draft, tmp_path)
    lender = Lender(load_model(folder, Group(), "float32"), folder)
    loaded = load_model(tmp_path, Group(), "float32", lender=lender)
    with torch.no_grad():
        for parameter in trained(draft):
            parameter.copy_(parameter.bfloat16())
    tokens = random_tokens(30)
    wanted = draft(tokens[None], use_cache=False).logits[0]
    torch.testing.assert_close(all_logits(loaded, tokens), wanted, atol=1e-4, rtol=1e-4)
    assert all(
        kept.dtype == torch.bfloat16 for kept in load_file(tmp_path / "model.safetensors").values()
    )


def test_the_command_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "one.txt").write_text(long_text()[:20_000])
    (texts / "two.txt").write_text(long_text()[20_000:40_000])
    monkeypatch.setattr(demo.distill, "PROMPT", SIZES[1])
    monkeypatch.setattr(
        demo.distill, "write_windows", lambda *given: write_windows(*given, sizes=SIZES)
    )
    app = typer.Typer()
    app.command()(demo.distill.main)
    words = f"--target {DEMO / 'target'} --texts {texts} --output {tmp_path / 'draft'}"
    options = "--layers 0,5 --held-out two.txt --files 1 --steps 4 --batch 2"
    done = CliRunner().invoke(app, f"{words} {options}".split(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "before: acceptance at T 1 0." in done.output
    assert "behind 4 steps: acceptance at T 1 0." in done.output
    assert (tmp_path / "draft" / "model.safetensors").stat().st_size < 4_000_000


def test_a_folder_is_gone_on_with_by_the_same_recipe_alone(tmp_path: Path) -> None:
    place = tmp_path / "work" / "recipe.json"
    keep_to(RECIPE, place)
    keep_to(RECIPE, place)
    with pytest.raises(TierForceError, match="is of another recipe"):
        keep_to(replace(RECIPE, source=digest_of("another text")), place)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfe" * 9000, "cannot be read as UTF-8"), (b"short", "has 5 characters, fewer than")],
)
def test_texts_of_no_use_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "one.txt").write_bytes(content)
    with pytest.raises(TierForceError, match=words):
        read_texts(tmp_path, [])


def test_a_text_of_too_few_words_is_refused(tokenizer: Any) -> None:
    with pytest.raises(TierForceError, match="no passage of 400 tokens"):
        one_prompt(tokenizer, ["hardly a word"], 400, torch.Generator().manual_seed(0))


def test_a_draft_of_a_gguf_target_is_one_that_loads(tmp_path: Path) -> None:
    convert(DEMO / "target", tmp_path / "target.gguf", Kind.Q8_0)
    target, _ = load_target(str(tmp_path / "target.gguf"))
    save_draft(draft_of(target, (0, 5)), tmp_path / "draft")
    group = Group()
    lender = Lender(load_model(tmp_path / "target.gguf", group), tmp_path / "target.gguf")
    loaded = load_model(tmp_path / "draft", group, "bfloat16", lender=lender)
    assert len(loaded.layers) == 2
    assert loaded.embed.weight is lender.model.embed.weight
    assert str(tmp_path) not in (tmp_path / "draft" / "config.json").read_text()
