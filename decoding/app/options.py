"""The options that commands share, once: a command takes them as one `Common`, typer sees them one
by one.
"""

# no `from __future__ import annotations`: typer reads these annotations as objects
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any

import typer

from decoding.settings import Settings
from decoding.speculation.sampling import Sampling
from offload.errors import TierForceError
from offload.policies import POLICY_NAMES


@dataclass(frozen=True)
class Common:
    """What every command that loads an engine can be told."""

    model: Annotated[
        str,
        typer.Option(
            help="Target model: a Hugging Face folder, or a hub name.", show_default=False
        ),
    ]
    draft: Annotated[
        str | None, typer.Option(help="Small draft model with the target's vocabulary.")
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="GPUs to split the model over, by default 1; CPU ranks where there is no GPU.",
        ),
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), bfloat16, float16 or float32.")
    ] = "auto"
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 512
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.6
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0
    top_p: Annotated[
        float, typer.Option(help="Keep the likeliest tokens that together reach this mass.")
    ] = 0.9
    seed: Annotated[
        int,
        typer.Option(
            help=(
                "The same seed and settings give the same text, if draft lengths, budget and "
                "refresh are set too."
            )
        ),
    ] = 0
    mode: Annotated[
        str,
        typer.Option(
            help=(
                "auto, hierarchical, retrieval (no draft model), speculative (no retrieval cache) "
                "or plain."
            )
        ),
    ] = "auto"
    context: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of prompt and output together; by default the model's limit."
        ),
    ] = None
    budget: Annotated[
        int | None,
        typer.Option(
            help=(
                "Retrieval budget, tokens a head: those selected, summaries of the others, and the "
                "recent window. By default what pays: 4096 for the first text, then what past "
                "texts showed."
            )
        ),
    ] = None
    chunk_size: Annotated[int, typer.Option(help="Tokens that are selected together.")] = (
        Settings.chunk_size
    )
    policy: Annotated[
        str,
        typer.Option(
            help=(
                f"What selects them: {', '.join(POLICY_NAMES)}. static, with --summary-size 0, is "
                "the paper's."
            )
        ),
    ] = Settings.policy
    summary_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens that one summary stands for; 0 for no summaries, by default 64 or more."
        ),
    ] = None
    refresh: Annotated[
        int | None,
        typer.Option(
            help=(
                "Tokens that one selection serves at least; by default 1, each verification "
                "selects, over a link, else 16."
            )
        ),
    ] = None
    draft_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens put before the target at once; by default what has paid in past rounds."
        ),
    ] = None
    inner_length: Annotated[
        int | None,
        typer.Option(
            help=(
                "Tokens put before the retrieval level at once; by default what has paid in past "
                "rounds."
            )
        ),
    ] = None
    lookup: Annotated[
        int | None,
        typer.Option(
            help=(
                "Prompt lookup by n-grams of this length, 0 for none; by default 3 where there is "
                "no draft."
            )
        ),
    ] = None
    shard_draft: Annotated[
        bool | None,
        typer.Option(
            help="Split the draft model over the GPUs; by default from 3 GiB of weights on."
        ),
    ] = None
    resident_layers: Annotated[
        int | None,
        typer.Option(help="Target layers whose KV stays on the device; by default as many as fit."),
    ] = None
    device_memory: Annotated[
        float | None,
        typer.Option(
            help="Device memory to use per rank, in GB, weights included; by default what is free."
        ),
    ] = None
    graphs: Annotated[
        bool | None,
        typer.Option(
            help=(
                "Record short passes as CUDA graphs; by default where it works. On a CPU they only "
                "take fixed shapes."
            )
        ),
    ] = None
    link: Annotated[
        str,
        typer.Option(help="auto; on a CPU also view (nothing is copied) or emulated:RATE (GB/s)."),
    ] = "auto"

    @property
    def settings(self) -> Settings:
        """Raises TierForceError for values that make no sense."""
        shared = {field.name for field in fields(Settings)} & {field.name for field in fields(self)}
        values = {name: getattr(self, name) for name in shared}
        if self.device_memory is not None:
            if not 1e-9 <= self.device_memory < float("inf"):
                raise TierForceError(
                    f"--device-memory must be above 0 GB, found {self.device_memory}."
                )
            values["device_memory"] = int(self.device_memory * 1e9)
        return Settings(**values)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


def with_common(command: Callable[..., None]) -> Callable[..., None]:
    """A command (common: Common, own options...) as typer should see it: Common's fields in front
    of the command's own options.
    """
    own = list(inspect.signature(command).parameters.values())[1:]
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field.default),
            annotation=field.type,
        )
        for field in fields(Common)
    ]
    names = {parameter.name for parameter in shared}

    def run(**options: Any) -> None:
        common = Common(**{name: options.pop(name) for name in names})
        command(common, **options)

    parameters = shared + [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _default(value: Any) -> Any:
    return inspect.Parameter.empty if value is MISSING else value
