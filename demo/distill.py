"""The recipe of a draft: a few of a target's own layers, trained to say what the target says.

    python -m demo.distill --target smollm2 --texts books/ --output draft/ --layers 0,1,28,29

The draft is made of the layers named, between the target's own embedding and head, which it
borrows at load and does not store. Only these layers and the last norm learn: to the law that the
target has behind each token, on windows that begin with passages of the texts and go on with what
the target writes about them (`demo.windows`). A run that was interrupted goes on where the same
command is given again, and ends with the very weights of one that was not.

Source: distillation of drafts, Zhou et al. 2023, DistillSpec (arXiv 2310.08461), section 4.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import ModuleList
from transformers import AutoModelForCausalLM, GgufConfig

from decoding.loading import load_tokenizer
from demo.windows import (
    PASSAGE,
    PROMPT,
    Windows,
    batches,
    likeliest,
    warp,
    windows_of,
    write_windows,
)
from offload.errors import TierForceError
from parallel.group import Group
from parallel.loading import resolve
from parallel.named import is_gguf

SEEDS = 100_000  # that a run has for windows; those nobody learns from come behind HELD_SEED
HELD_SEED = 10_000
OTHERS = 2048  # unlikely tokens by which the rest of the draft's law is estimated in a step
WARM_UP = 0.05  # of all steps
FLOOR = 0.1  # of the rate, which is reached in the end
SERVED = {"T 1": (1.0, 1.0), "T 0.6, top-p 0.9": (0.6, 0.9)}  # temperature and top-p


@dataclass(frozen=True)
class Recipe:
    """All that the weights in the end depend on."""

    layers: tuple[int, ...]  # of the target
    files: int  # of windows to learn from
    steps: int
    batch: int  # windows a step
    rate: float  # of learning, at its peak
    seed: int
    source: str = ""  # a digest of the target's name, the texts and which are held out

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step: a linear rise, then a cosine."""
        warm = max(1, round(WARM_UP * self.steps))
        if step < warm:
            return self.rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.rate * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2)


def main(
    target: Annotated[str, typer.Option(help="Target: a folder, a GGUF file, a hub name.")],
    texts: Annotated[Path, typer.Option(help="Folder of .txt and .md files with passages.")],
    output: Annotated[Path, typer.Option(help="Folder for the draft, and work/ for the rest.")],
    layers: Annotated[str, typer.Option(help="Layers of the target, by number.")] = "0,1,28,29",
    held_out: Annotated[
        str, typer.Option(help="Names of files in that folder to evaluate on and not learn from.")
    ] = "",
    files: Annotated[
        int, typer.Option(min=1, help="Files of 32 windows to write and learn from.")
    ] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Updates.")] = 4000,
    batch: Annotated[int, typer.Option(min=1, help="Windows an update.")] = 4,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 5e-4,
    every: Annotated[int, typer.Option(min=1, help="Steps from one checkpoint to the next.")] = 100,
    seed: Annotated[int, typer.Option(help="Of passages, what is drawn, and order.")] = 0,
) -> None:
    """Train a draft for a target and save it as a folder that borrows."""
    try:
        chosen = tuple(int(layer) for layer in layers.split(","))
    except ValueError:
        raise typer.BadParameter(f"--layers {layers}: give numbers, such as 0,1,28,29") from None
    known, unseen = read_texts(texts, held_out.split(",") if held_out else [])
    source = digest_of(target, *known, "held out", *unseen)
    recipe, work = Recipe(chosen, files, steps, batch, rate, seed, source), output / "work"
    keep_to(recipe, work / "recipe.json")
    model, tokenizer = load_target(target)
    draft = draft_of(model, chosen)

    def writer(passages: list[str], first: int) -> Any:
        return lambda number: write_windows(model, tokenizer, passages, first + number)

    first = SEEDS * seed
    held = windows_of(work, f"held-{seed}", 1, writer(unseen or known, first + HELD_SEED))
    windows = windows_of(work, f"learn-{seed}", files, writer(known, first))
    print(f"{sum(each.numel() for each in trained(draft)):,} parameters learn", flush=True)
    print(f"before: {told(acceptance(draft, held, PROMPT))}", flush=True)
    learn(draft, windows, recipe, work / "checkpoint.pt", every)
    print(f"behind {steps} steps: {told(acceptance(draft, held, PROMPT))}", flush=True)
    save_draft(draft, output)


def read_texts(folder: Path, held_out: list[str]) -> tuple[list[str], list[str]]:
    """Return the texts of a folder: those to learn from, and those held out by name."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md"))
    if missing := set(held_out) - {path.name for path in paths}:
        raise typer.BadParameter(f"{folder} holds no {', '.join(sorted(missing))}")
    kept = {path: read_text(path) for path in paths}
    known = [text for path, text in kept.items() if path.name not in held_out]
    if not known:
        raise typer.BadParameter(f"{folder} holds no .txt or .md file to learn from")
    return known, [text for path, text in kept.items() if path.name in held_out]


def read_text(path: Path) -> str:
    """Return a file's text. Raises TierForceError for one of no use."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TierForceError(f"--texts: {path} cannot be read as UTF-8 ({error}).") from error
    if len(text) < PASSAGE * PROMPT:
        raise TierForceError(
            f"--texts: {path} has {len(text)} characters, fewer than the {PASSAGE * PROMPT} that "
            "passages are taken from: take it out of the folder."
        )
    return text


def digest_of(*texts: str) -> str:
    """Return a digest of texts, in order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def keep_to(recipe: Recipe, path: Path) -> None:
    """Note the recipe of a folder, before anything is made there.

    Raises TierForceError for a folder that was begun with another one.
    """
    noted = json.dumps(asdict(recipe))
    if path.is_file() and path.read_text() != noted:
        raise TierForceError(
            f"{path} is of another recipe, {path.read_text()}: give the same options, target and "
            "texts, or another --output."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(noted)


def load_target(name: str) -> tuple[Any, Any]:
    """Return transformers' model of a target in float32, which learns nothing, and its tokenizer.

    Raises TierForceError.
    """
    path = resolve(name, Group())
    place: dict[str, Any] = {}
    if is_gguf(path):
        place = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    model: Any = AutoModelForCausalLM.from_pretrained(
        path.parent if is_gguf(path) else path, dtype=torch.float32, **place
    )
    return model.eval().requires_grad_(False), load_tokenizer(path)


def draft_of(target: Any, layers: tuple[int, ...]) -> Any:
    """Return a model of copies of these layers between the target's own embedding and head.

    Its last norm is a copy, too. Raises TierForceError for layers that the target has not.
    """
    count = len(target.model.layers)
    if not all(0 <= layer < count for layer in layers):
        raise TierForceError(f"--layers {layers}: the target's are 0 to {count - 1}.")
    fields = {
        # what a config tells layer by layer, such as their types
        name: [value[layer] for layer in layers]
        if isinstance(value, list) and len(value) == count
        else value
        for name, value in target.config.to_dict().items()
    }
    config = type(target.config).from_dict({**fields, "num_hidden_layers": len(layers)})
    with init_empty_weights():
        draft = type(target)(config)
    draft.model.embed_tokens, draft.lm_head = target.model.embed_tokens, target.lm_head
    draft.model.rotary_emb = target.model.rotary_emb
    # the layers of the empty model know their numbers
    draft.model.layers = ModuleList(
        own.to_empty(device=target.device) for own in draft.model.layers
    )
    for own, layer in zip(draft.model.layers, layers, strict=True):
        own.load_state_dict(target.model.layers[layer].state_dict())
    draft.model.norm = draft.model.norm.to_empty(device=target.device)
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    for parameter in trained(draft):
        parameter.requires_grad_(True)
    return draft.eval()


def trained(draft: Any) -> list[Tensor]:
    """Return the parameters that learn."""
    return [*draft.model.layers.parameters(), *draft.model.norm.parameters()]


def learn(draft: Any, windows: Windows, recipe: Recipe, checkpoint: Path, every: int) -> None:
    """Train a draft by AdamW, from the checkpoint on where there is one.

    What a step learns from, and draws, follows from the seed and its number: nothing else has to be
    kept. Raises TierForceError for a checkpoint of another recipe.
    """
    optimizer = torch.optim.AdamW(trained(draft), lr=recipe.rate, betas=(0.9, 0.95))
    first = restore(draft, optimizer, recipe, checkpoint)
    ahead = batches(windows, recipe.batch, recipe.seed, first)
    started, told_at = time.perf_counter(), max(1, recipe.steps // 40)
    for step in range(first, recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step)
        noise = torch.Generator().manual_seed(1_000_003 * recipe.seed + step)
        loss = divergence(draft, next(ahead), noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained(draft), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        if done % told_at == 0:
            pace = (time.perf_counter() - started) / (done - first)
            print(
                f"step {done} of {recipe.steps}: {loss.item():.3f} nats, {pace:.2f} s a step",
                flush=True,
            )
        if done % every == 0 or done == recipe.steps:
            store(draft, optimizer, recipe, done, checkpoint)


def store(draft: Any, optimizer: Any, recipe: Recipe, step: int, checkpoint: Path) -> None:
    """Write a checkpoint beside the last one, and put it in its place."""
    unfinished = checkpoint.with_suffix(".unfinished")
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "recipe": json.dumps(asdict(recipe)),
        "step": step,
        "weights": trained(draft),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, unfinished)
    unfinished.replace(checkpoint)


def restore(draft: Any, optimizer: Any, recipe: Recipe, checkpoint: Path) -> int:
    """Take up a checkpoint, if there is one; return how many steps are done.

    Raises TierForceError for one of another recipe.
    """
    if not checkpoint.is_file():
        return 0
    state = torch.load(checkpoint, weights_only=True)
    if state["recipe"] != json.dumps(asdict(recipe)):
        raise TierForceError(
            f"{checkpoint} is of another recipe, {state['recipe']}: give the same options, or "
            "another --output."
        )
    with torch.no_grad():
        for parameter, weight in zip(trained(draft), state["weights"], strict=True):
            parameter.copy_(weight)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def divergence(draft: Any, batch: Windows, noise: torch.Generator) -> Tensor:
    """Return the mean divergence KL(target || draft) of the laws behind a batch's tokens, in nats.

    A law is its likeliest tokens and the rest as one. Of the head only the rows are used that are
    likely somewhere in the batch, and a sample of the others, which stands for all of them: the
    whole head would take most of the step.
    """
    head, device = draft.lm_head.weight, draft.lm_head.weight.device
    tokens = batch.tokens.to(device)
    hidden = draft.model(tokens, use_cache=False).last_hidden_state.flatten(0, 1)  # (N, hidden)
    ids, logs = batch.ids.to(device).flatten(0, 1).long(), batch.logs.to(device).flatten(0, 1)
    likely, place = ids.unique(return_inverse=True)
    unlikely = torch.ones(len(head), dtype=torch.bool, device=device)
    unlikely[likely] = False
    others = unlikely.nonzero()[:, 0]
    sample = others[torch.randperm(len(others), generator=noise)[:OTHERS].to(device)]
    scaling = getattr(draft.config, "logits_scaling", 1.0)
    scores = F.linear(hidden, head[torch.cat((likely, sample))]).float() / scaling
    if len(sample):
        scores[:, len(likely) :] += math.log(len(others) / len(sample))
    own = scores.gather(1, place) - scores.logsumexp(-1, keepdim=True)  # (N, K)
    logs = logs.float()
    rest, own_rest = (1 - each.exp().sum(-1).clamp(max=1 - 1e-6) for each in (logs, own))
    known = (logs.exp() * (logs - own)).sum(-1)
    return (known + rest * (rest.log() - own_rest.log())).mean()


@torch.inference_mode()
def acceptance(draft: Any, windows: Windows, prompt: int) -> dict[str, float]:
    """Return how often a token that the draft draws would stand before the target.

    That is sum_x min(p(x), q(x)) of their laws, in the mean over what the target has written behind
    prompts of so many tokens. What is not among the target's likeliest tokens counts as rejected.
    """
    found = {name: list[Tensor]() for name in SERVED}
    for number in range(len(windows)):
        one = windows.at(torch.tensor([number]))
        tokens = one.tokens.to(draft.device)
        hidden = draft.model(tokens, use_cache=False).last_hidden_state
        first = prompt - 1  # the law of the first token that was written
        own_ids, own_logs = likeliest(draft, hidden[:, first:])
        ids, logs = one.ids[:, first:].long(), one.logs[:, first:].float()
        for name, law in SERVED.items():
            own = torch.zeros(*ids.shape[:2], draft.config.vocab_size)
            own.scatter_(2, own_ids.cpu(), warp(own_logs.cpu(), *law))
            stood = torch.minimum(warp(logs, *law), own.gather(2, ids)).sum(-1)
            found[name].append(stood.flatten())
    return {name: float(torch.cat(stood).mean()) for name, stood in found.items()}


def told(rates: dict[str, float]) -> str:
    """Return acceptance rates as a line of text."""
    return ", ".join(f"acceptance at {name} {rate:.3f}" for name, rate in rates.items())


def save_draft(draft: Any, folder: Path) -> None:
    """Write a draft as a folder that borrows its embedding and head, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous().cpu()
        for name, tensor in draft.state_dict().items()
        if name.startswith(("model.layers.", "model.norm."))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {
        **draft.config.to_dict(),
        "dtype": "bfloat16",
        "architectures": [type(draft).__name__],
    }
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(name, None)  # of the target's files, which these are not
    fields["tierforce"] = {"borrows": ["embed_tokens", "lm_head"]}
    text = json.dumps(fields, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        typer.run(main)
    except TierForceError as error:
        sys.exit(str(error))
