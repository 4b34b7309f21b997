"""The commands `modules`, `loras`, `sae`, `tuned`, `jacobian` and `runs` for named artifacts,
`global` for global steering, and `dynamic` for the ranks' state.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_args

import typer

from ...schemas.artifacts.jacobian_lenses import JacobianLens
from ...schemas.artifacts.loras import Lora
from ...schemas.artifacts.saes import Sae
from ...schemas.artifacts.tuned_lenses import TunedLens
from ...schemas.base.errors import MidstreamError, invalid
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
)

T = TypeVar("T")

ModulesName = Annotated[str, typer.Argument(metavar="NAME", help="A module's name.")]
LorasName = Annotated[str, typer.Argument(metavar="NAME", help="An adapter's name.")]
SaeName = Annotated[str, typer.Argument(metavar="NAME", help="An autoencoder's name.")]
TunedName = Annotated[str, typer.Argument(metavar="NAME", help="A tuned lens's name.")]
JacobianName = Annotated[str, typer.Argument(metavar="NAME", help="A Jacobian lens's name.")]
Description = Annotated[str, typer.Option(help="A description.")]
Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's name, or the id of a job with capture files.")
]
Steer = Annotated[
    list[str], typer.Option(metavar=options.STEER, help="Steering for every request; repeatable.")
]


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The commands `list`, `show` and `remove` of one kind of registered artifact.

    `calls`: the kind's calls of a client.
    """

    noun: str  # with its article: "a module"
    plural: str
    kind: type[T]
    calls: Callable[[Client], Named[Blocks, T]]

    def commands(self, help: str) -> typer.Typer:
        """Return a command group with `list`, `show` and `remove`."""
        app = typer.Typer(no_args_is_help=True, help=help)
        name = Annotated[str, typer.Argument(metavar="NAME", help=f"The name of {self.noun}.")]

        def list_(model: Model = None, json_: AsJson = False, url: Url = None) -> None:
            with connect(url) as client:
                result = self.calls(client).list(model)
            print_list(result, result, self.kind, self.plural, json_)

        def show(name: name, model: Model = None, json_: AsJson = False, url: Url = None) -> None:
            with connect(url) as client:
                print_record(self.calls(client).get(name, model), json_)

        def remove(name: name, model: Model = None, url: Url = None) -> None:
            with connect(url) as client:
                self.calls(client).delete(name, model)
            out.print(f"{name} removed", markup=False)

        app.command("list", help=f"List the {self.plural}.")(list_)
        app.command("show", help=f"Show {self.noun}.")(show)
        app.command(
            "remove", help=f"Remove {self.noun}; files stay. Requests accepted earlier keep it."
        )(remove)
        return app


modules_app = Registry("a module", "modules", ModuleView, attrgetter("modules")).commands(
    "Manage named modules: steering that requests refer to by name."
)
loras_app = Registry("an adapter", "adapters", Lora, attrgetter("loras")).commands(
    "Manage LoRA adapters: requests name one with --lora."
)
sae_app = Registry("a sparse autoencoder", "sparse autoencoders", Sae, attrgetter("saes")).commands(
    "Manage sparse autoencoders, whose features requests read and steer."
)
tuned_app = Registry("a tuned lens", "tuned lenses", TunedLens, attrgetter("lenses")).commands(
    "Manage tuned lenses, which map rows before the logit lens."
)
jacobian_app = Registry(
    "a Jacobian lens", "Jacobian lenses", JacobianLens, attrgetter("jacobians")
).commands("Manage Jacobian lenses, which map rows to what they make the model say.")
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


@modules_app.command("register")
def modules_register(
    name: ModulesName,
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help=f"A file of vectors, or {options.STEER_FILE}."),
    ],
    description: Description = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register a module, or replace it; running requests keep the old content."""
    entries = options.parse_steering(files, "FILE")
    with connect(url) as client:
        print_record(client.modules.register(name, entries, model, description), json_)


@modules_app.command("fit")
def modules_fit(
    name: ModulesName,
    file: Annotated[
        Path,
        typer.Argument(
            help="JSONL; a line has `positive` and `negative`, or one of them, or `prompt` and "
            "`target`."
        ),
    ],
    method: Annotated[str, typer.Option(help=f"{', '.join(get_args(FitMethod))}.")],
    layers: Annotated[str, typer.Option(help="Such as 12 or 10-15; each gets its own edit.")],
    hook: Annotated[str | None, typer.Option(help="Hook point; default: post_block.")] = None,
    read: Annotated[
        str | None,
        typer.Option(
            help="Rows that are read: last_prompt (default), all_prompt, or positions such as 1:."
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Of method reft; default: 4.")] = None,
    steps: Annotated[int | None, typer.Option(help="Most steps; default: 200.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Default: 0.01.")] = None,
    held_out: Annotated[float | None, typer.Option(help="Share; default: 0.25.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: 0.")] = None,
    register: Annotated[
        str | None, typer.Option(help="if_better (default), always or never.")
    ] = None,
    description: Description = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Learn a module from examples, and register it if it works on held-out examples."""
    lines = _lines(file)
    fields: dict[str, Any] = {
        "name": name,
        "method": method,
        "layers": layers,
        "hook": hook,
        "positive": [line["positive"] for line in lines if "positive" in line],
        "negative": [line["negative"] for line in lines if "negative" in line],
        "examples": [line for line in lines if "target" in line],
        "read": None if read is None else options.parse_positions(read),
        "rank": rank,
        "steps": steps,
        "learning_rate": learning_rate,
        "held_out": held_out,
        "seed": seed,
        "register": register,
        "description": description,
    }
    with connect(url) as client:
        result = client.fit_module(model=model or only_model(client), **fields)
        print_record(result, json_)


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file. Raises typer.BadParameter naming the line."""
    lines = []
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        try:
            value = json.loads(line or "{}")
        except ValueError as error:
            raise typer.BadParameter(f"line {number} of {file} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise typer.BadParameter(f"line {number} of {file} is not an object")
        lines.append(value)
    return lines


@modules_app.command("export")
def modules_export(
    name: ModulesName,
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    format: Annotated[
        str | None,
        typer.Option("--format", help=f"{', '.join(FORMATS)}; default: from the suffix."),
    ] = None,
    model: Model = None,
    url: Url = None,
) -> None:
    """Write a module to a file for other tools."""
    with connect(url) as client:
        written = client.modules.export(name, file, format, model)
    out.print(f"{name} written to {file} as {written}", markup=False, soft_wrap=True)


@loras_app.command("add")
def loras_add(
    name: LorasName,
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="PEFT folder, relative to the server's lora_dir."),
    ],
    description: Description = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register an adapter, or replace it; running requests keep the previous one."""
    with connect(url) as client:
        print_record(client.loras.register(name, path, model, description), json_)


@sae_app.command("register")
def sae_register(
    name: SaeName,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="SAELens or Gemma Scope folder, relative to the server's sae_dir.",
        ),
    ],
    reads: Annotated[
        str, typer.Option(metavar="HOOK:LAYER", help="Its site, if its files do not name it.")
    ] = "",
    description: Description = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register a sparse autoencoder, or replace it; running requests keep the previous one."""
    hook, _, layer = reads.partition(":")
    if reads and not layer.isdigit():
        raise typer.BadParameter(
            f"{reads!r} is not HOOK:LAYER, such as post_block:12", param_hint="--reads"
        )
    with connect(url) as client:
        print_record(
            client.saes.register(
                name, path, hook or None, int(layer) if layer else None, model, description
            ),
            json_,
        )


@tuned_app.command("register")
def tuned_register(
    name: TunedName,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="Folder with lens.safetensors, relative to the server's lens_dir."
        ),
    ],
    reads: Annotated[
        str, typer.Option(metavar="HOOK", help="Hook point whose rows the lens maps.")
    ] = "post_block",
    residual: Annotated[
        bool, typer.Option("--residual", help="The maps' outputs are added to the rows.")
    ] = False,
    description: Description = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register a tuned lens, or replace it; running requests keep the previous one."""
    with connect(url) as client:
        print_record(client.lenses.register(name, path, reads, residual, model, description), json_)


@jacobian_app.command("register")
def jacobian_register(
    name: JacobianName,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="Folder with lens.safetensors, relative to the server's lens_dir."
        ),
    ],
    description: Description = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register a Jacobian lens, or replace it; running requests keep the previous one."""
    with connect(url) as client:
        print_record(client.jacobians.register(name, path, model, description), json_)


@jacobian_app.command("fit")
def jacobian_fit(
    name: JacobianName,
    file: Annotated[Path, typer.Argument(help="JSONL; a line has `text`.")],
    layers: Annotated[
        str | None, typer.Option(help="Such as 12 or 10-15; default: all below the last.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Output dimensions of each prompt; default: all (exact).")
    ] = None,
    skip_first: Annotated[
        int | None, typer.Option(help="Leading positions left out; default: 16.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of each prompt; default: 128.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: 0.")] = None,
    folder: Annotated[
        str | None, typer.Option(help="Below the server's lens_dir; default: NAME.")
    ] = None,
    description: Description = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Compute a Jacobian lens from a corpus, and register it, or replace it."""
    fields: dict[str, Any] = {
        "name": name,
        "prompts": [line["text"] for line in _lines(file) if "text" in line],
        "layers": layers,
        "rank": rank,
        "skip_first": skip_first,
        "max_tokens": max_tokens,
        "seed": seed,
        "folder": folder,
        "description": description,
    }
    with connect(url) as client:
        job = client.fits.submit_lens(model=model or only_model(client), **fields)
        print_record(client.fits.result(job), json_)


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
    try:
        layers = jacobian.convert(file, folder, checkpoint)
    except (OSError, ValueError) as error:
        raise invalid("FILE", str(error)) from error
    out.print(f"{folder}: layers {as_ranges(layers)}", markup=False)


@runs_app.command("list")
def runs_list(
    limit: Annotated[int, typer.Option(help="Number of runs.")] = 20,
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """List the newest named runs."""
    with connect(url) as client:
        page = client.source_runs.list(model, limit=limit)
    print_list(page, page.runs, RunView, "runs", json_)


@runs_app.command("show")
def runs_show(name: Run, model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """Show a run: its state, and the layers and positions of each prompt."""
    with connect(url) as client:
        print_record(client.source_runs.get(name, model), json_)


@runs_app.command("delete")
def runs_delete(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names of the runs.")],
    model: Model = None,
    url: Url = None,
) -> None:
    """Delete runs: their captures and their names."""
    with connect(url) as client:
        delete(names, lambda name: client.source_runs.delete(name, model))


@global_app.command("show")
def global_show(model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """Show global steering, and whether every worker has applied it."""
    with connect(url) as client:
        _print_global(client.global_steering.get(model), json_)


@global_app.command("set")
def global_set(steer: Steer, model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """Set global steering for new requests. If a rank rejects it, nothing changes, and the exit
    status is non-zero.
    """
    entries = options.parse_steering(steer)
    with connect(url) as client:
        _print_global(client.global_steering.set(entries, model), json_)


@global_app.command("clear")
def global_clear(model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """Clear global steering for new requests."""
    with connect(url) as client:
        _print_global(client.global_steering.clear(model), json_)


def dynamic(model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """Show the current checksums, table, versions and queues of each rank.

    Exits non-zero if the ranks disagree.
    """
    with connect(url) as client:
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
