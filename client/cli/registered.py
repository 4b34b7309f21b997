"""The commands `modules`, `loras`, `sae`, `tuned`, `jacobian` and `runs` for named artifacts,
`global` for global steering, and `dynamic` for the ranks' state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeVar, get_args

import typer
from msgspec import DecodeError, json

from ...schemas.artifacts.jacobian_lenses import JacobianLens
from ...schemas.artifacts.loras import Lora
from ...schemas.artifacts.saes import Sae
from ...schemas.artifacts.tuned_lenses import TunedLens
from ...schemas.base.errors import MidstreamError, Translated, invalid
from ...schemas.jobs.fits import FitResult
from ...schemas.prompts.selectors import as_ranges
from ...schemas.requests.source_runs import RunView
from ...schemas.requests.steering import GlobalView, ModuleView
from ...schemas.requests.trainings import FitMethod
from ..render import steering
from ..sdk.calls import Blocks
from ..sdk.client import Client
from ..sdk.registered import Named
from ..vectors import FORMATS, jacobian
from . import options
from .jobs import (
    AsJson,
    Model,
    Url,
    connect,
    delete,
    only_model,
    out,
    print_json,
    print_list,
    print_record,
    with_client,
)
from .options import optional

T = TypeVar("T")

ModulesName = Annotated[str, typer.Argument(metavar="NAME", help="A module's name.")]
Description = Annotated[str, typer.Option(help="A description.")]
Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's name, or the id of a job with capture files.")
]
Steer = Annotated[
    list[str], typer.Option(metavar=options.STEER, help="Steering for every request; repeatable.")
]


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The commands `list`, `show` and `delete` of one kind of registered artifact.

    `calls`: the kind's calls of a client.
    """

    noun: str  # with its article: "a module"
    plural: str
    kind: type[T]
    calls: Callable[[Client], Named[Blocks, T]]

    def commands(self, help: str) -> typer.Typer:
        """Return a command group with `list`, `show` and `delete`."""
        app = typer.Typer(no_args_is_help=True, help=help)
        name = Annotated[str, typer.Argument(metavar="NAME", help=f"The name of {self.noun}.")]

        @with_client
        def list_(client: Client, model: Model = None, json_: AsJson = False) -> None:
            result = self.calls(client).list(model)
            print_list(result, result, self.kind, self.plural, json_)

        @with_client
        def show(client: Client, name: name, model: Model = None, json_: AsJson = False) -> None:
            print_record(self.calls(client).get(name, model), json_)

        @with_client
        def delete(client: Client, name: name, model: Model = None) -> None:
            self.calls(client).delete(name, model)
            out.print(f"{name} deleted", markup=False)

        app.command("list", help=f"List the {self.plural}.")(list_)
        app.command("show", help=f"Show {self.noun}.")(show)
        app.command(
            "delete", help=f"Delete {self.noun}; files stay. Requests accepted earlier keep it."
        )(delete)
        return app


def makes(
    app: typer.Typer,
    command: str,
    noun: str,
    argument: Any,
    run: Callable[[Client, str, Any, dict[str, Any]], Any],
    own: Mapping[str, Any] = MappingProxyType({}),
    help: str = "Register {}, or replace it; running requests keep the previous one.",
) -> None:
    """Add a command that makes a named artifact and prints it. `argument`: annotation of what it is
    made from; `own`: further options, see `options.optional`; `run`: makes it of the client, the
    name, the argument and the fields that the options give.
    """
    name = Annotated[str, typer.Argument(metavar="NAME", help=f"The name of {noun}.")]

    @options.with_options("fields", options.parameters(own), dict)
    def make(
        name: name,
        source: argument,
        *,
        fields: dict[str, Any],
        description: Description = "",
        model: Model = None,
        json_: AsJson = False,
        url: Url = None,
    ) -> None:
        fields |= {"model": model, "description": description}
        with connect(url) as client:
            print_record(run(client, name, source, fields), json_)

    app.command(command, help=help.format(noun))(make)


def _path(help: str, metavar: str = "PATH") -> Any:
    return Annotated[str, typer.Argument(metavar=metavar, help=help)]


def _register_sae(client: Client, name: str, path: str, fields: dict[str, Any]) -> Sae:
    reads = fields.pop("reads") or ""
    hook, _, layer = reads.partition(":")
    if reads and not layer.isdigit():
        raise typer.BadParameter(
            f"{reads!r} is not HOOK:LAYER, such as post_block:12", param_hint="--reads"
        )
    fields |= {"hook": hook or None, "layer": int(layer) if layer else None}
    return client.saes.put(name, path, **fields)


def _fit_module(client: Client, name: str, file: str, fields: dict[str, Any]) -> FitResult:
    lines = _lines(file)
    for side in ("positive", "negative"):
        fields[side] = [line[side] for line in lines if side in line]
    fields["examples"] = [line for line in lines if "target" in line]
    if fields["read"] is not None:
        fields["read"] = options.parse_positions(fields["read"])
    fields["model"] = fields["model"] or only_model(client)
    return client.fit_module(name=name, **fields)


def _fit_lens(client: Client, name: str, file: str, fields: dict[str, Any]) -> JacobianLens:
    fields["prompts"] = [line["text"] for line in _lines(file) if "text" in line]
    fields["model"] = fields["model"] or only_model(client)
    return client.fit_lens(name=name, **fields)


def _lines(file: str) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file. Raises MidstreamError naming the file."""
    with Translated(
        DecodeError,
        lambda error: invalid("FILE", f"{file}: {error}", allowed="an object on each line"),
    ):
        return [json.decode(line, type=dict[str, Any]) for line in options.read_lines(Path(file))]


modules_app = Registry("a module", "modules", ModuleView, attrgetter("modules")).commands(
    "Manage named modules: steering that requests refer to by name."
)
makes(
    modules_app,
    "register",
    "a module",
    Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help=f"A file of vectors, or {options.STEER_FILE}."),
    ],
    lambda client, name, files, fields: client.modules.put(
        name, options.parse_steering(files, "FILE"), **fields
    ),
)
makes(
    modules_app,
    "fit",
    "a module",
    _path(
        "JSONL; a line has `positive` and `negative`, or one of them, or `prompt` and `target`.",
        "FILE",
    ),
    _fit_module,
    {
        "method": optional(str, f"{', '.join(get_args(FitMethod))}."),
        "layers": optional(str, "Such as 12 or 10-15; each gets its own edit."),
        "hook": optional(str, "Hook point; default: post_block."),
        "read": optional(
            str, "Rows that are read: last_prompt (default), all_prompt, or positions such as 1:."
        ),
        "rank": optional(int, "Of method reft; default: 4."),
        "steps": optional(int, "Most steps; default: 200."),
        "learning_rate": optional(float, "Default: 0.01."),
        "held_out": optional(float, "Share; default: 0.25."),
        "seed": optional(int, "Default: 0."),
        "register": optional(str, "if_better (default), always or never."),
    },
    "Learn {} from examples, and register it if it works on held-out examples.",
)
loras_app = Registry("an adapter", "adapters", Lora, attrgetter("loras")).commands(
    "Manage LoRA adapters: requests name one with --lora."
)
makes(
    loras_app,
    "add",
    "an adapter",
    _path("PEFT folder, relative to the server's lora_dir."),
    lambda client, name, path, fields: client.loras.put(name, path, **fields),
)
sae_app = Registry("a sparse autoencoder", "sparse autoencoders", Sae, attrgetter("saes")).commands(
    "Manage sparse autoencoders, whose features requests read and steer."
)
makes(
    sae_app,
    "register",
    "a sparse autoencoder",
    _path("SAELens or Gemma Scope folder, relative to the server's sae_dir."),
    _register_sae,
    {"reads": optional(str, "Its site, if its files do not name it.", metavar="HOOK:LAYER")},
)
tuned_app = Registry("a tuned lens", "tuned lenses", TunedLens, attrgetter("lenses")).commands(
    "Manage tuned lenses, which map rows before the logit lens."
)
_LENS_FOLDER = _path("Folder with lens.safetensors, relative to the server's lens_dir.")
makes(
    tuned_app,
    "register",
    "a tuned lens",
    _LENS_FOLDER,
    lambda client, name, path, fields: client.lenses.put(
        name, path, fields.pop("reads") or "post_block", bool(fields.pop("residual")), **fields
    ),
    {
        "reads": optional(str, "Hook point of the rows; default: post_block.", metavar="HOOK"),
        "residual": Annotated[
            bool, typer.Option("--residual", help="The maps' outputs are added to the rows.")
        ],
    },
)
jacobian_app = Registry(
    "a Jacobian lens", "Jacobian lenses", JacobianLens, attrgetter("jacobians")
).commands("Manage Jacobian lenses, which map rows to what they make the model say.")
makes(
    jacobian_app,
    "register",
    "a Jacobian lens",
    _LENS_FOLDER,
    lambda client, name, path, fields: client.jacobians.put(name, path, **fields),
)
makes(
    jacobian_app,
    "fit",
    "a Jacobian lens",
    _path("JSONL; a line has `text`.", "FILE"),
    _fit_lens,
    {
        "layers": optional(str, "Such as 12 or 10-15; default: all below the last."),
        "rank": optional(int, "Output dimensions of each prompt; default: all (exact)."),
        "skip_first": optional(int, "Leading positions left out; default: 16."),
        "max_tokens": optional(int, "Of each prompt; default: 128."),
        "seed": optional(int, "Default: 0."),
        "folder": optional(str, "Below the server's lens_dir; default: NAME."),
    },
    "Compute {} from a corpus, and register it, or replace it.",
)
runs_app = typer.Typer(
    no_args_is_help=True, help="List, inspect and delete source runs: rows for patching."
)
global_app = typer.Typer(
    no_args_is_help=True, help="Manage global steering: steering of every request to a model."
)


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    groups = {
        "modules": modules_app,
        "global": global_app,
        "loras": loras_app,
        "sae": sae_app,
        "tuned": tuned_app,
        "jacobian": jacobian_app,
        "runs": runs_app,
    }
    for name, group in groups.items():
        app.add_typer(group, name=name)
    app.command("dynamic")(dynamic)


@modules_app.command("export")
@with_client
def modules_export(
    client: Client,
    name: ModulesName,
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    format: Annotated[
        str | None,
        typer.Option("--format", help=f"{', '.join(FORMATS)}; default: from the suffix."),
    ] = None,
    model: Model = None,
) -> None:
    """Write a module to a file for other tools."""
    written = client.modules.export(name, file, format, model)
    out.print(f"{name} written to {file} as {written}", markup=False, soft_wrap=True)


@jacobian_app.command("convert")
def jacobian_convert(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A lens of neuronpedia or TransformerLens: .pt.")
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to write, below the server's lens_dir.")
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder of the model's checkpoint, whose output matrix edits need."),
    ] = None,
) -> None:
    """Write a folder that can be registered from another tool's file."""
    with Translated((OSError, ValueError), lambda error: invalid("FILE", str(error))):
        layers = jacobian.convert(file, folder, checkpoint)
    out.print(f"{folder}: layers {as_ranges(layers)}", markup=False)


@runs_app.command("list")
@with_client
def runs_list(
    client: Client,
    limit: Annotated[int, typer.Option(help="Number of runs.")] = 20,
    model: Model = None,
    json_: AsJson = False,
) -> None:
    """List the newest named runs."""
    page = client.source_runs.list(model, limit=limit)
    print_list(page, page.runs, RunView, "runs", json_)


@runs_app.command("show")
@with_client
def runs_show(client: Client, name: Run, model: Model = None, json_: AsJson = False) -> None:
    """Show a run: its state, and the layers and positions of each prompt."""
    print_record(client.source_runs.get(name, model), json_)


@runs_app.command("delete")
@with_client
def runs_delete(
    client: Client,
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names of the runs.")],
    model: Model = None,
) -> None:
    """Delete runs: their captures and their names."""
    delete(names, lambda name: client.source_runs.delete(name, model))


@global_app.command("show")
@with_client
def global_show(client: Client, model: Model = None, json_: AsJson = False) -> None:
    """Show global steering, and whether every worker has applied it."""
    _print_global(client.global_steering.get(model), json_)


@global_app.command("set")
def global_set(steer: Steer, model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """Set global steering for new requests. If a rank rejects it, nothing changes, and the exit
    status is non-zero.
    """
    entries = options.parse_steering(steer)
    with connect(url) as client:
        _print_global(client.global_steering.put(entries, model), json_)


@global_app.command("clear")
@with_client
def global_clear(client: Client, model: Model = None, json_: AsJson = False) -> None:
    """Clear global steering for new requests."""
    _print_global(client.global_steering.delete(model), json_)


@with_client
def dynamic(client: Client, model: Model = None, json_: AsJson = False) -> None:
    """Show the current checksums, table, versions and queues of each rank.

    Exits non-zero if the ranks disagree.
    """
    result = client.global_steering.dynamic(model)
    if not print_json(result, json_):
        for worker in result.workers:
            out.print(steering.worker_line(worker), soft_wrap=True)
            out.print(steering.ranks(worker, result.determinism))
        out.print(steering.agreement_line(result), soft_wrap=True)
    if not result.determinism.consistent:
        raise MidstreamError(
            "ranks_disagree", result.determinism.detail or "the ranks do not agree"
        )


def _print_global(view: GlobalView, as_json: bool) -> None:
    if print_json(view, as_json):
        return
    out.print(steering.global_line(view), soft_wrap=True)
    if view.entries:
        out.print(steering.entries(view.entries))
