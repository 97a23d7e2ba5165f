"""What the command line can do: `summarize` and `generate`, alone, through --gpus, or under torchrun; `plan` and `probe`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from decoding import probing
from decoding.documents import Document, find_documents
from decoding.engine import Engine
from decoding.interrupts import Interrupts
from decoding.options import Common, with_common
from decoding.planning import plan
from decoding.progress import Display
from decoding.prompt import INSTRUCTION, Template
from decoding.records import Records
from decoding.settings import dtype_of
from decoding.stream import stream
from decoding.summarize import longest_prompt
from decoding.summarize import summarize as summarize_all
from offload import TierForceError
from parallel import Group
from parallel.launch import launch, under_launcher

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
terminal = Console(stderr=True)
app.command()(plan)


@app.command()
@with_common
def summarize(
    common: Common,
    input: Annotated[Path, typer.Option(help="A folder of .txt and .md files, one file, or a .jsonl with id and text.")],
    output: Annotated[Path, typer.Option(help="JSONL, one record as each document finishes; an existing file is resumed.")],
    instruction: Annotated[str, typer.Option(help="What is asked about each document.")] = INSTRUCTION,
) -> None:
    """Summarise every document, exactly as the target model alone would, with one durable record each."""
    settings, sampling = common.settings, common.sampling
    _spread(common.gpus)
    interrupts = Interrupts(lambda name: say(f"interrupted ({name}) before a document was begun: run the same command to go on"))
    group = Group.from_environment(common.device)
    with group.together():
        documents = find_documents(input) if group.rank == 0 else []
        records = Records(output) if group.rank == 0 else None
    due = [document for document in documents if records and document.id not in records.finished]
    if group.broadcast(not due):
        say(f"all {len(documents)} documents were finished before, in {output}")
        return
    engine = Engine.from_pretrained(common.model, common.draft, settings, group=group)
    with group.together():
        template = Template.summary(engine.tokenizer, instruction)
    engine.check(group.broadcast(longest_prompt(engine, due, template, common.max_new_tokens)), common.max_new_tokens)
    if records is None:
        engine.follow()
        return

    def last_words(name: str) -> None:
        display.stop()
        say(f"interrupted ({name}); {len(records.finished)} finished records are safe in {output}: run the same command to go on")

    with records, Display(len(documents), terminal) as display:
        interrupts.last_words = last_words
        failed = summarize_all(engine, documents, records, template, common.max_new_tokens, sampling, display)
    engine.close()
    say(f"{len(due) - failed} of {len(due)} documents summarised in {output}")
    if failed:
        raise TierForceError(f"{failed} of {len(due)} documents failed; their records in {output} say why.")


@app.command()
@with_common
def generate(
    common: Common,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the text to continue.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The text to continue itself.")] = None,
) -> None:
    """Continue a text, exactly as the target model alone would, printing it as it is verified."""
    settings, sampling = common.settings, common.sampling
    if (prompt is None) == (prompt_file is None):
        raise TierForceError("give the text to continue with either --prompt-file or --prompt.")
    _spread(common.gpus)
    interrupts = Interrupts(lambda name: say(f"interrupted ({name})"))
    group = Group.from_environment(common.device)
    with group.together():
        text = Document(prompt_file.name, prompt_file, 0).read() if prompt_file is not None else prompt or ""
    engine = Engine.from_pretrained(common.model, common.draft, settings, group=group)
    if group.rank:
        engine.follow()
        return

    def last_words(name: str) -> None:
        display.stop()
        say(f"interrupted ({name})")

    with Display(1, terminal) as display:
        interrupts.last_words = last_words
        stream(engine, text, common.max_new_tokens, sampling, display)
    engine.close()


@app.command()
def probe(
    gpus: Annotated[int, typer.Option(min=1, help="Ranks to measure with; CPU ranks where there is no GPU.")] = 1,
    model: Annotated[
        str | None, typer.Option(help="Whose dimensions kernels are measured with: a folder, a hub name, or a config.json.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    output: Annotated[Path, typer.Option(help="Hardware file to write, for `tierforce plan --hardware`.")] = Path("probe.json"),
) -> None:
    """Measure what this machine can do, warn of what costs most, and write a hardware file for `tierforce plan`."""
    kind = dtype_of(dtype)
    _spread(gpus)
    group = Group.from_environment(device)
    found = probing.profile(group, model, kind)
    with group.together():
        if group.rank == 0:
            probing.write(found, output)
    if group.rank == 0:
        Console().print(probing.table(found, str(group.device)))
        say(f"driver: {found['machine']['driver']}")
        for warning in found["warnings"]:
            say(f"warning: {warning}")
        say(f"written to {output}")


def say(line: str) -> None:
    """A line on standard error, as it is."""
    terminal.print(line, highlight=False, markup=False, soft_wrap=True)


def _spread(gpus: int) -> None:
    """With --gpus above 1 and no launcher yet: run this very command as that many ranks, and end with their exit code."""
    if gpus > 1 and not under_launcher():
        sys.exit(launch(gpus, "decoding.cli", sys.argv[1:]))
