"""The recipe of the built-in pair: a tokenizer, a target and a draft, from scratch, from any folder
of text, on a CPU.

    python -m demo.train --input books/ --output pair/

The target learns at three lengths in turn, so that it learns to attend to distant tokens, by
which retrieval policies differ; the draft sees 512 tokens only, as on a StreamingLLM cache. The
default steps make a pair of the shape of the built-in one; by the step times it prints they take
about 15 hours on 2 cores (a prediction), and `--scale 0.001` runs the whole recipe in minutes.
Needs only the project's own dependencies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 2048
POSITIONS = 131_072


@dataclass(frozen=True)
class Stage:
    """One stretch of training: `steps` updates on `batch` windows of `length` tokens, at a peak
    learning rate.
    """

    length: int
    batch: int
    steps: int
    rate: float


TARGET = [Stage(512, 16, 12_000, 1.5e-3), Stage(4096, 2, 3_000, 6e-4), Stage(16_384, 1, 800, 3e-4)]
DRAFT = [Stage(512, 16, 12_000, 3e-3)]


def main(
    input: Annotated[Path, typer.Option(help="Folder of .txt and .md files to train on.")],
    output: Annotated[Path, typer.Option(help="Folder for target/ and draft/.")],
    held_out: Annotated[
        str, typer.Option(help="File name in that folder to evaluate on and never to train on.")
    ] = "",
    scale: Annotated[float, typer.Option(help="Multiplies all step counts.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of initialisation and window order.")] = 0,
) -> None:
    """Train a tokenizer and a target/draft pair and save them in Hugging Face format."""
    torch.manual_seed(seed)
    files = sorted(path for path in input.rglob("*") if path.suffix in (".txt", ".md"))
    known = [path for path in files if path.name != held_out]
    if not known:
        raise typer.BadParameter(f"{input} has no .txt or .md file to train on")
    tokenizer = train_tokenizer(known)
    tokens = torch.cat([encode(tokenizer, path) for path in known])
    unseen = (
        torch.cat([encode(tokenizer, path) for path in files if path.name == held_out])
        if held_out
        else tokens[-50_000:]
    )
    print(f"{len(known)} files, {len(tokens):,} tokens")
    for name, model, stages in (
        ("target", build(layers=6, hidden=256, heads=4, intermediate=768), TARGET),
        ("draft", build(layers=2, hidden=128, heads=2, intermediate=384), DRAFT),
    ):
        print(f"{name}: {model.num_parameters():,} parameters")
        for stage in stages:
            learn(name, model, tokens, stage, max(1, int(stage.steps * scale)))
            print(
                f"{name}: loss {loss_of(model, unseen, stage.length):.3f} at {stage.length} tokens "
                f"of {held_out or 'the last file'}"
            )
        model.to(torch.bfloat16).save_pretrained(output / name)
        tokenizer.save_pretrained(output / name)


def train_tokenizer(files: list[Path]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, about 3 characters per token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train(
        [str(path) for path in files],
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


def encode(tokenizer: PreTrainedTokenizerFast, path: Path) -> Tensor:
    return torch.tensor(tokenizer(path.read_text(encoding="utf-8")).input_ids)


def build(layers: int, hidden: int, heads: int, intermediate: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def windows(tokens: Tensor, length: int, batch: int) -> Iterator[Tensor]:
    """Endless batches (batch, length + 1) of windows from anywhere in the text."""
    length = min(length, len(tokens) - 1)
    while True:
        starts = torch.randint(len(tokens) - length, (batch,))
        yield torch.stack([tokens[start : start + length + 1] for start in starts.tolist()])


def learn(name: str, model: LlamaForCausalLM, tokens: Tensor, stage: Stage, steps: int) -> None:
    """AdamW with a short warm-up and a cosine down to a tenth; prints its progress."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=max(1, steps // 50))
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, stage.rate / 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, fall], [max(1, steps // 50)])
    model.train()
    started, batches = time.perf_counter(), windows(tokens, stage.length, stage.batch)
    for step in range(1, steps + 1):
        loss = loss_on(model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % max(1, steps // 20) == 0:
            pace = (time.perf_counter() - started) / step
            print(
                f"{name}: {stage.length} tokens, step {step} of {steps}, loss {loss.item():.3f}, "
                f"{pace:.2f} s/step",
                flush=True,
            )


def loss_on(model: LlamaForCausalLM, window: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(window[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def loss_of(model: LlamaForCausalLM, tokens: Tensor, length: int) -> float:
    """Mean loss on up to 8 windows spread over the text."""
    model.eval()
    length = min(length, len(tokens) - 1)
    starts = torch.linspace(0, len(tokens) - length - 1, 8).long().tolist()
    return sum(
        loss_on(model, tokens[None, start : start + length + 1]).item() for start in starts
    ) / len(starts)


if __name__ == "__main__":
    typer.run(main)
