"""Windows of text with the target's laws: what a draft learns from, and is judged by.

A window begins with a passage of a book, mostly asked about through the chat template, and goes on
with what the target itself writes: that is the text a draft has to predict. With each token comes
the law of the next one, as its likeliest tokens and their logarithms; what they lack of 1 is the
rest of the vocabulary's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Cache, DynamicLayer

from offload.errors import TierForceError

PROMPT, WRITTEN = 224, 160  # tokens of a window: a draft on a StreamingLLM cache sees some 500
BATCH = 32  # windows that are written at once, and lie in one file
LIKELIEST = 64  # tokens of a law that are kept
LAWS = ((0.6, 0.9), (1.0, 1.0), (0.8, 0.95))  # temperature and top-p of what is written, in turn
TRIES = 50  # for a passage of a text
PASSAGE = 16  # characters a token of the prompt that are read at most
ASKED = (
    "Summarize the text above.",
    "Summarize the text above in a few sentences.",
    "What happens in the text above?",
    "Who appears in this passage, and what do they want?",
    "Describe the style of this passage.",
    "Explain the passage to a child.",
    "What are the main ideas of the text above?",
    "Continue the story.",
)


@dataclass(frozen=True)
class Windows:
    """Windows of tokens, with the target's law behind each token."""

    tokens: Tensor  # (W, L) int32
    ids: Tensor  # (W, L, K) int32: the likeliest next tokens, in falling order
    logs: Tensor  # (W, L, K) float16: the logarithms of their probabilities, at temperature 1

    def __len__(self) -> int:
        return len(self.tokens)

    def at(self, chosen: Tensor) -> Windows:
        """Return the windows of these numbers."""
        return Windows(self.tokens[chosen], self.ids[chosen], self.logs[chosen])


class RoomyLayer(DynamicLayer):
    """A layer of transformers' cache with room for a whole window: nothing is copied to grow."""

    def __init__(self, room: int):
        super().__init__()
        self.room = room
        self.used = 0
        self.stored: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take the KV of new tokens, (B, Hkv, T, D) each; return that of all so far."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            shape = (*keys.shape[:2], self.room, keys.shape[3])
            self.stored = [keys.new_empty(shape), values.new_empty(shape)]
        first, self.used = self.used, self.used + keys.shape[2]
        for stored, new in zip(self.stored, (keys, values), strict=True):
            stored[:, :, first : self.used] = new
        self.keys, self.values = (stored[:, :, : self.used] for stored in self.stored)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.used


def windows_of(
    folder: Path,
    kind: str,
    files: int,
    write: Callable[[int], Windows],
) -> Windows:
    """Return the windows of so many files in a folder, KIND-0.safetensors and on.

    A file that is missing is written, by a seed of its own: what an interrupted run has left is
    gone on with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for number in range(files):
        path = folder / f"{kind}-{number}.safetensors"
        if not path.is_file():
            print(f"writing {path.name}, {number + 1} of {files}", flush=True)
            unfinished = path.with_suffix(".unfinished")
            save_file(vars(write(number)), unfinished)
            unfinished.replace(path)
        parts.append(load_file(path))
    names = ("tokens", "ids", "logs")
    return Windows(*(torch.cat([part[name] for part in parts]) for name in names))


@torch.inference_mode()
def write_windows(
    target: Any,
    tokenizer: Any,
    texts: Sequence[str],
    seed: int,
    sizes: tuple[int, int, int] = (BATCH, PROMPT, WRITTEN),
) -> Windows:
    """Have the target write behind passages of texts; every window of a seed is the same again.

    Args:
        target: a causal language model of transformers.
        tokenizer: its tokenizer.
        texts: what passages are taken from.
        seed: of passages, questions and what is drawn.
        sizes: windows, tokens of a prompt, and tokens written behind it.

    Returns:
        The windows, with the laws of all their tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, prompt, written = sizes
    prompts = [one_prompt(tokenizer, texts, prompt, generator) for _ in range(rows)]
    new = torch.tensor(prompts, device=target.device)  # (B, T)
    cache = Cache(layers=[RoomyLayer(prompt + written) for _ in target.model.layers])
    tokens, laws = [new], list[tuple[Tensor, Tensor]]()
    temperature, top_p = LAWS[seed % len(LAWS)]
    for left in reversed(range(written + 1)):
        hidden = target.model(new, past_key_values=cache).last_hidden_state  # (B, T, hidden)
        # of one token of all windows after the other: the laws of all at once would not fit
        laws += [likeliest(target, part) for part in hidden.split(1, dim=1)]
        if left:
            new = drawn(*laws[-1], temperature, top_p, generator)
            tokens.append(new)
    ids, logs = (torch.cat(parts, dim=1).cpu() for parts in zip(*laws, strict=True))
    return Windows(torch.cat(tokens, dim=1).int().cpu(), ids.int(), logs.half())


def one_prompt(
    tokenizer: Any, texts: Sequence[str], tokens: int, generator: torch.Generator
) -> list[int]:
    """Return a prompt of so many tokens about a passage; of each four one is the passage alone.

    Raises TierForceError for a text that has no such passage.
    """

    def choose(options: int) -> int:
        return int(torch.randint(options, (1,), generator=generator))

    text = texts[choose(len(texts))]
    alone, question = choose(4) == 0, ASKED[choose(len(ASKED))]
    for _ in range(TRIES):  # a stretch of blanks or dashes is few tokens
        start = choose(max(1, len(text) - PASSAGE * tokens))
        passage = encode(tokenizer, text[start : start + PASSAGE * tokens])
        if len(passage) >= tokens:
            break
    else:
        raise TierForceError(
            f"--texts: no passage of {tokens} tokens was found in a text that begins with "
            f"{text[:40]!r}: take it out of the folder."
        )
    before, after = list[int](), list[int]()
    if tokenizer.chat_template is not None and not alone:
        before, after = (encode(tokenizer, part) for part in chat(tokenizer, question))
    cut = before + passage[: max(0, tokens - len(before) - len(after))] + after
    return cut[-tokens:]


def chat(tokenizer: Any, question: str) -> list[str]:
    """Return what stands before and behind a passage in a chat that asks this about it."""
    mark = "(passage)"
    message = {"role": "user", "content": f"{mark}\n\n{question}"}
    asked = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return list(asked.split(mark, 1))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return a text's tokens, and none around them."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def likeliest(target: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens (B, T, K) that most likely follow hidden states, and their logarithms."""
    logits = target.lm_head(hidden).float() / getattr(target.config, "logits_scaling", 1.0)
    top, ids = logits.topk(min(LIKELIEST, logits.shape[-1]))
    return ids, top - logits.logsumexp(-1, keepdim=True)


def warp(logs: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return the law (..., K) over the likeliest tokens, as the engine warps it.

    Temperature 1 and top-p 1 leave it as it is: then it lacks the rest of the vocabulary's share.
    """
    if (temperature, top_p) == (1.0, 1.0):
        return logs.exp()
    law = (logs / temperature).softmax(-1)
    law = law * (law.cumsum(-1) - law < top_p)  # the token that crosses the threshold stays
    return law / law.sum(-1, keepdim=True)


def drawn(
    ids: Tensor, logs: Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> Tensor:
    """Draw the next tokens (B, 1) from laws (B, 1, K); the rest of the vocabulary is left out."""
    law = warp(logs[:, 0], temperature, top_p).cpu()
    chosen = torch.multinomial(law, 1, generator=generator).to(ids.device)
    return ids[:, 0].gather(1, chosen)


def batches(windows: Windows, size: int, seed: int, first: int) -> Iterator[Windows]:
    """Yield batches without end: all windows in a new order, and again.

    From batch `first` on they are the same whether those before were asked for or not.
    """
    size = min(size, len(windows))
    each = len(windows) // size  # batches of one order; what is left over has its turn in another
    for number in count(first):
        order = torch.Generator().manual_seed(seed + number // each)
        chosen = torch.randperm(len(windows), generator=order)
        at = number % each * size
        yield windows.at(chosen[at : at + size])
