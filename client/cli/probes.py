"""The commands `midstream probe …` and `midstream policy …`."""

from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import msgspec
import numpy as np
import typer

from ...schemas.artifacts.conditions import Aggregation
from ...schemas.artifacts.probes import Probe
from ...schemas.base.errors import Translated, invalid
from ...schemas.prompts.selectors import HookName
from ...schemas.requests.policies import Policy, PolicyRequest
from ..captures.row_matrix import samples
from ..render import readings as render
from ..sdk.client import Client
from ..sdk.wire import given
from . import options
from .jobs import AsJson, Model, Url, connect, only_model, out, print_record
from .registered import Registry

Name = Annotated[str, typer.Argument(metavar="NAME", help="A probe's name.")]
probe_app = Registry("a probe", "probes", Probe, attrgetter("probes")).commands(
    "Train and manage linear probes; requests name one with --probe."
)

PolicyName = Annotated[str, typer.Argument(metavar="NAME", help="A policy's name.")]
policy_app = Registry("a policy", "policies", Policy, attrgetter("policies")).commands(
    "Manage policies, which act on the scores of probes; requests name one with --policy."
)

#: Tag of the rows that probes are trained on.
_TAG = "probe-training"


class Example(msgspec.Struct):
    """A line of a training file."""

    text: str
    label: str | int | bool


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    app.add_typer(probe_app, name="probe")
    app.add_typer(policy_app, name="policy")


@probe_app.command("train")
def probe_train(
    name: Name,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help='JSON lines such as {"text": "…", "label": "…"}.')
    ],
    layer: Annotated[int, typer.Option(help="Layer of the rows.")],
    hook: Annotated[str, typer.Option(help="Hook point of the rows.")] = "post_block",
    rows: Annotated[
        str, typer.Option(help="Rows of a text: last, mean or all of its tokens.")
    ] = "last",
    aggregation: Annotated[
        str, typer.Option(help=f"Aggregate of the scores: {', '.join(get_args(Aggregation))}.")
    ] = "last",
    decay: Annotated[float | None, typer.Option(help="Decay of `exponential`.")] = None,
    held_out: Annotated[
        float, typer.Option(help="Share of the texts that is used only for the metrics.")
    ] = 0.25,
    strength: Annotated[
        float, typer.Option(help="Inverse of the regularisation: scikit-learn's C.")
    ] = 1.0,
    description: Annotated[str, typer.Option(help="A description.")] = "",
    model: Model = None,
    url: Url = None,
) -> None:
    """Capture rows of labelled texts, fit a probe on them, show its metrics on held-out texts, and
    register it.
    """
    if rows not in ("last", "mean", "all"):
        raise invalid("rows", f"{rows!r} is not a selection of rows", allowed="last, mean, all")
    examples = read_examples(file)
    with connect(url) as client:
        served = model or only_model(client)
        matrix, groups = _rows(client, served, examples, layer, hook, rows)
        from ..probes import fit

        probe = fit(
            matrix,
            [examples[group].label for group in groups],
            groups=groups,
            held_out=held_out,
            strength=strength,
        )
        out.print(render.measured(probe.metrics))
        fields: dict[str, Any] = {
            "layer": layer,
            "hook": hook,
            "aggregation": aggregation,
            "decay": decay,
            "description": description,
        }
        print_record(client.probes.put(name, probe, model=served, **fields), False)


@probe_app.command("register")
def probe_register(
    name: Name,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A .npz file with `weight` [k, hidden], and `bias` [k] if it is not zero.",
        ),
    ],
    layer: Annotated[int, typer.Option(help="Layer of the rows.")],
    hook: Annotated[str, typer.Option(help="Hook point of the rows.")] = "post_block",
    at: Annotated[str, typer.Option(help="before or after steering at the same site.")] = "before",
    label: Annotated[
        list[str] | None, typer.Option(help="Name of a row of `weight`; repeat it in row order.")
    ] = None,
    threshold: Annotated[
        list[float] | None, typer.Option(help="Threshold of each label, or one for all labels.")
    ] = None,
    aggregation: Annotated[
        str, typer.Option(help=f"Aggregate of the scores: {', '.join(get_args(Aggregation))}.")
    ] = "last",
    decay: Annotated[float | None, typer.Option(help="Decay of `exponential`.")] = None,
    description: Annotated[str, typer.Option(help="A description.")] = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register a probe, or replace it; running requests keep the previous one."""
    # numpy parses a file's header as a Python literal, which can raise many kinds of errors
    with (
        Translated(
            Exception,
            lambda error: invalid(
                "file",
                f"{file}: {error}",
                allowed="a .npz file with `weight` and, optionally, `bias`",
            ),
        ),
        np.load(file, allow_pickle=False) as arrays,
    ):
        tensors = {key: np.array(arrays[key]) for key in ("weight", "bias") if key in arrays}
    if "weight" not in tensors:
        raise invalid("file", f"{file} has no array `weight`")
    thresholds = threshold[0] if threshold and len(threshold) == 1 else threshold
    fields: dict[str, Any] = {
        **tensors,
        "layer": layer,
        "hook": hook,
        "at": at,
        "labels": label,
        "thresholds": thresholds,
        "aggregation": aggregation,
        "decay": decay,
        "description": description,
        "model": model,
    }
    with connect(url) as client:
        print_record(client.probes.put(name, **fields), json_)


@policy_app.command("register")
def policy_register(
    name: PolicyName,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The policy, as JSON.")],
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register a policy, or a new version of it; running requests keep the previous one."""
    fields = msgspec.structs.asdict(options.read_json(file, PolicyRequest, "body"))
    with connect(url) as client:
        print_record(client.policies.put(name, **fields), json_)


@policy_app.command("change")
def policy_change(
    name: PolicyName,
    mode: Annotated[str | None, typer.Option(help="shadow, canary or active.")] = None,
    share: Annotated[float | None, typer.Option(help="Share of requests of a canary.")] = None,
    version: Annotated[int | None, typer.Option(help="The version to restore.")] = None,
    all_traffic: Annotated[bool | None, typer.Option(help="Apply it to every request.")] = None,
    edits: Annotated[
        str | None, typer.Option(help="Edits of what it reads: refuse, allow.")
    ] = None,
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Change a policy's mode, or restore a version."""
    fields = given(mode=mode, share=share, version=version, all_traffic=all_traffic, edits=edits)
    with connect(url) as client:
        print_record(client.policies.change(name, model, **fields), json_)


def read_examples(file: Path) -> list[Example]:
    """Read labelled texts, one JSON object per line.

    Raises MidstreamError that names an invalid line.
    """
    examples = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                examples.append(msgspec.json.decode(line, type=Example))
            except msgspec.DecodeError as error:
                raise invalid(
                    "file",
                    f"{file}, line {number} is not a JSON object: {error}",
                    allowed='JSON lines such as {"text": "…", "label": "…"}',
                    hint="this is a CSV file: convert it" if file.suffix == ".csv" else None,
                ) from error
    if not examples:
        raise invalid("file", f"{file} has no lines")
    return examples


def _rows(
    client: Client, model: str, examples: list[Example], layer: int, hook: str, rows: str
) -> tuple[np.ndarray, list[int]]:
    """Capture the rows of the examples; return `[samples, hidden]`, and the index of each sample's
    example.
    """
    capture = {
        "layers": [layer],
        "hook": cast(HookName, hook),
        "positions": "last_prompt" if rows == "last" else "all_prompt",
        "tag": _TAG,
    }
    result = client.run(
        model=model, prompts=[example.text for example in examples], capture=capture, max_tokens=1
    )
    reader = client.capture(result)
    chosen: Any = rows
    groups = [sample.request for sample in samples(reader, chosen)]
    matrix = client.captures.matrix([result], layer, cast(Any, hook), chosen)
    client.captures.delete(result)
    return matrix, groups
