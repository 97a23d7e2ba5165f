"""What the command line can do: `summarize` and `generate`, alone, through --gpus, or under
torchrun; `plan` and `probe`.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from decoding.app.documents import Document, find_documents
from decoding.app.interrupts import Interrupts
from decoding.app.job import Job, model_digest, model_name
from decoding.app.options import Common, with_common
from decoding.app.plan import plan
from decoding.app.probe_view import table
from decoding.app.progress import Display
from decoding.app.prompt import INSTRUCTION, Template
from decoding.app.records import Records
from decoding.app.stream import opening, stream
from decoding.app.summarize import Longest, due_documents, longest_prompt
from decoding.app.summarize import summarize as summarize_all
from decoding.app.terminal import say, warn
from decoding.engine import Engine
from decoding.probe.probe import profile, write
from decoding.settings import dtype_of
from offload.errors import FitError, TierForceError
from parallel.environment import ignored_variables
from parallel.group import Group
from parallel.launch import launch, under_launcher
from parallel.loading import resolve

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(plan)


@app.command()
@with_common
def summarize(
    common: Common,
    input: Annotated[
        Path,
        typer.Option(
            help="A folder of .txt and .md files, one file, or a .jsonl with id and text."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="JSONL, one record as each document finishes; an existing file is resumed."
        ),
    ],
    instruction: Annotated[
        str, typer.Option(help="What is asked about each document.")
    ] = INSTRUCTION,
) -> None:
    """Summarise every document, exactly as the target model alone would, with one durable record
    each.
    """
    settings, sampling = common.settings, common.sampling
    interrupts = _start(
        common, "interrupted ({name}) before a document was begun: run the same command to go on"
    )
    group = Group.from_environment(common.device)
    with group.together():
        documents = find_documents(input) if group.rank == 0 else []
    folder = resolve(common.model, group)
    with group.together():
        records = Records(output) if group.rank == 0 else None
        job = Job(
            model=model_name(common.model),
            draft=model_name(common.draft) if common.draft is not None else None,
            weights=model_digest(folder) if group.rank == 0 else "",
            instruction=instruction,
            max_new_tokens=common.max_new_tokens,
            context=settings.context,
            dtype=settings.dtype,
            sampling=sampling,
        )
        due = due_documents(documents, records, job) if records is not None else []
    if group.broadcast(not due):
        say(f"all {len(documents)} documents were finished before, in {output}")
        return
    if records is not None and (
        changed := sum(document.id in records.finished for document in due)
    ):
        warn(
            f"{changed} finished records in {output} are of another text, instruction, model or "
            "sampling law: these documents are summarised again, and their old records stay."
        )
    engine = Engine.from_pretrained(folder, common.draft, settings, group=group)
    with group.together():
        template = Template.summary(engine.tokenizer, instruction)
    _say_what_fits(
        engine,
        group.broadcast(longest_prompt(engine, due, template, common.max_new_tokens)),
        common,
    )
    if records is None:
        engine.follow()
        return

    def last_words(name: str) -> None:
        display.stop()
        safe = f"{len(records.finished)} finished records are safe in {output}"
        say(f"interrupted ({_culprit(name)}); {safe}: run the same command to go on")

    with records, Display(len(documents), sys.stderr) as display:
        interrupts.last_words = last_words
        failed = summarize_all(engine, documents, due, records, template, job, display)
    engine.close()
    cut = sum(
        records.finished[document.id].cut
        for document in documents
        if document.id in records.finished
    )
    done = f"{len(documents) - failed} of {len(documents)} documents summarised in {output}"
    say(
        f"{done}, {cut} of them cut: their ends are beyond the context of {engine.context:,} tokens"
        if cut
        else done
    )
    if failed:
        raise TierForceError(
            f"{failed} of {len(documents)} documents failed; their records in {output} say why."
        )


@app.command()
@with_common
def generate(
    common: Common,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the text to continue.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The text to continue itself.")] = None,
) -> None:
    """Continue a text, exactly as the target model alone would, printing it as it is verified."""
    settings, sampling = common.settings, common.sampling
    if (prompt is None) == (prompt_file is None):
        raise TierForceError("give the text to continue with either --prompt-file or --prompt.")
    interrupts = _start(common, "interrupted ({name})")
    group = Group.from_environment(common.device)
    with group.together():
        text = (
            Document(prompt_file.name, prompt_file, 0).read()
            if prompt_file is not None
            else prompt or ""
        )
    engine = Engine.from_pretrained(common.model, common.draft, settings, group=group)
    _say_what_fits(engine, None, common)
    if group.rank:
        engine.follow()
        return

    def last_words(name: str) -> None:
        display.stop()
        say(f"interrupted ({_culprit(name)})")

    with Display(1, sys.stderr) as display:
        interrupts.last_words = last_words
        stream(engine, text, common.max_new_tokens, sampling, display)
    engine.close()


@app.command()
def probe(
    gpus: Annotated[
        int, typer.Option(min=1, help="Ranks to measure with; CPU ranks where there is no GPU.")
    ] = 1,
    model: Annotated[
        str | None,
        typer.Option(
            help=(
                "Whose dimensions kernels are measured with: a folder, a hub name, or a "
                "config.json."
            )
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    output: Annotated[
        Path, typer.Option(help="Hardware file to write, for `tierforce plan --hardware`.")
    ] = Path("probe.json"),
) -> None:
    """Measure what this machine can do, warn of what costs most, and write a hardware file for
    `tierforce plan`.
    """
    kind = dtype_of(dtype)
    _spread(gpus)
    group = Group.from_environment(device)
    found = profile(group, model, kind)
    with group.together():
        if group.rank == 0:
            write(found, output)
    if group.rank == 0:
        Console().print(table(found, str(group.device)))
        say(f"driver: {found['machine']['driver']}")
        for warning in found["warnings"]:
            say(f"warning: {warning}")
        say(f"written to {output}")


def _start(common: Common, last_words: str) -> Interrupts:
    """Become as many ranks as are asked for, and listen for signals from here on."""
    _spread(common.gpus or 1)
    if (ignored := ignored_variables()) is not None:
        warn(
            f"{ignored} in the environment names no group of ranks and is ignored: this process "
            "works alone."
        )
    return Interrupts(lambda name: say(last_words.format(name=_culprit(name))))


def _culprit(name: str) -> str:
    """Name a signal, and who may have sent it: a launcher ends all ranks when it has lost one."""
    return f"{name}, or another rank ended" if name == "SIGTERM" and under_launcher() else name


def _say_what_fits(engine: Engine, longest: Longest | None, common: Common) -> None:
    """Say what runs where, and warn of what the user may not have meant; all ranks call it."""
    place = None
    if engine.group.device.type == "cpu" and common.gpus is not None and common.device == "auto":
        warn(
            f"--gpus {common.gpus}, but torch finds no GPU here: the processor does all the work, "
            "hundreds of times slower. Look at nvidia-smi and at the build of torch, or say "
            "--device cpu."
        )
    if longest is not None:
        try:
            place = engine.check(longest.tokens, common.max_new_tokens)
        except FitError as error:  # of one document: the others may fit
            warn(
                f"{longest.name}, of {longest.tokens:,} prompt tokens, will get a record that says:"
                f" {error}"
            )
    say(opening(engine, longest.tokens if longest else 0, place))


def _spread(gpus: int) -> None:
    """With --gpus above 1 and no launcher yet: run this very command as that many ranks, and end
    with their exit code.
    """
    if gpus > 1 and not under_launcher():
        sys.exit(launch(gpus, "decoding.cli", sys.argv[1:]))
