"""A model made by hand that can do one thing: recall. The built-in pair is too small for needles.

Its vocabulary is fillers, facts of several words, questions and answers. One attention head looks,
at question i, for the first word of fact i, wherever in the text it stands, and at a word of an
answer for the fact's next word; the model says what it found. Without the fact in view all it knows
is that some word of an answer is due. So a cache of recent tokens cannot propose the answer, full
attention always can, and a retrieval cache can as far as it holds the words that are asked for
next.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Generator, Tensor
from transformers import LlamaConfig

from parallel.config import ModelConfig
from parallel.group import Group
from parallel.model import Layer, Llama

FACTS, WORDS = 8, 12  # facts, and words of each
FILLERS = 200
_ALL = FACTS * WORDS
_ASKED = 30.0  # the score of a word that is asked for
_SURE, _DUE = 16.0, 8.0  # logits of the answer that was found, and of any answer when one is due


def fact(index: int) -> list[int]:
    """Return the tokens that state a fact."""
    return [FILLERS + index * WORDS + word for word in range(WORDS)]


def answer(index: int) -> list[int]:
    """Return the tokens that repeat a fact."""
    return [token + _ALL for token in fact(index)]


def question(index: int) -> int:
    """Return the token that asks for a fact."""
    return FILLERS + 2 * _ALL + index


def fillers(count: int, seed: int) -> list[int]:
    """Draw tokens that say nothing."""
    return torch.randint(FILLERS, (count,), generator=Generator().manual_seed(seed)).tolist()


def recall_model(context: int) -> Llama:
    """Return the model in float32 on a CPU, for texts of up to `context` tokens."""
    config = LlamaConfig(
        vocab_size=FILLERS + 2 * _ALL + FACTS,
        hidden_size=3 * _ALL + 32,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4 * _ALL,
        max_position_embeddings=context,
        # the slower half of the dimensions does not turn at all
        rope_parameters={"rope_type": "default", "rope_theta": 1e18},
        tie_word_embeddings=False,
    )
    model = Llama(ModelConfig.from_hf(config), Group())
    for parameter in model.parameters():
        parameter.zero_()
    _make(model)
    return model.eval()


def _make(model: Llama) -> None:
    """Write the weights.

    Hidden dimensions: the word a fact states, the word that is asked for, the word that was found,
    and noise for fillers.
    """
    hidden, dim = model.config.hidden, model.config.head_dim
    states, asks, found = (slice(part * _ALL, (part + 1) * _ALL) for part in range(3))
    eye = torch.eye(_ALL)
    layer = cast(Layer, model.layers[0])
    for norm in (model.norm, layer.attention.norm, layer.mlp.norm):
        norm.weight.fill_(1.0)
    embed = model.embed.weight
    noise = torch.randn(FILLERS, hidden - 3 * _ALL, generator=Generator().manual_seed(0))
    embed[:FILLERS, 3 * _ALL :] = noise / noise.norm(dim=1, keepdim=True)
    embed[FILLERS : FILLERS + _ALL, states] = eye
    for index in range(FACTS):
        embed[question(index), asks] = eye[index * WORDS]
        for word, token in enumerate(answer(index)[:-1]):
            embed[token, asks] = eye[index * WORDS + word + 1]
    q, k, v = layer.attention.qkv.weight.split(dim)
    # of each rotated pair the first; the pair's frequency is theta ** -0.5 or less
    still = slice(dim // 4, dim // 4 + _ALL)
    # a normalised one-hot has the length of the hidden size's root
    scale = (_ASKED * dim**0.5 / hidden) ** 0.5
    q[still, asks], k[still, states] = scale * eye, scale * eye
    v[:_ALL, states] = eye / hidden**0.5
    layer.attention.o.weight[found, :_ALL] = eye
    head = model.head.weight
    answers: Tensor = head[FILLERS + _ALL : FILLERS + 2 * _ALL]
    # two dimensions of the hidden state are 1 once a word is found
    answers[:, found] = eye * _SURE / (hidden / 2) ** 0.5
    answers[:, asks] = _DUE / (hidden / 2) ** 0.5
