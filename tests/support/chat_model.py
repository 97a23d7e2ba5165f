"""A model with a chat template, and a document to chat about."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.commands import TARGET

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STORY = "It was the best of times, it was the worst of times. " * 50
GREEDY_FP32 = ("--dtype", "float32", "--temperature", "0", "--max-new-tokens", "12")


def chat_model(folder: Path) -> tuple[str, ...]:
    """Copy the built-in target with a chat template; return the options that name it."""
    shutil.copytree(TARGET, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return "--model", str(folder), "--device", "cpu", *GREEDY_FP32


def story_options(folder: Path) -> tuple[str, str]:
    """Write the story to a file; return the options that name it."""
    path = folder / "story.txt"
    path.write_text(STORY)
    return "--document", str(path)
