"""The commands that do one thing with every kind of thing: `list`, `get`, `put`, `change`,
`delete`, `export`, `check` and `create`; and `redeliver`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, get_type_hints

import typer

from ...schemas.base.errors import MidstreamError, Translated, invalid
from ..render import records
from ..sdk.calls import keyword_check
from ..sdk.client import Client
from ..values import checked
from . import keys, options
from .kind import Kind
from .kinds import find, kinds_with
from .terminal import (
    AsJson,
    Connector,
    FieldsOption,
    File,
    Model,
    Url,
    connecting,
    out,
    print_json,
    print_list,
    say,
    with_client,
)


def kind_argument(verb: str) -> Any:
    """Return the annotation of a command's argument for the kind of things."""
    names = kinds_with(verb)
    return typer.Argument(
        metavar="KIND",
        help=f"{', '.join(names)}.",
        autocompletion=lambda incomplete: [name for name in names if name.startswith(incomplete)],
    )


NameArgument = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Its name or id.")]
#: Number of the entries that are listed of kinds of which there may be many.
LISTED = 20


def _given(*names: str | None) -> list[str]:
    return [name for name in names if name is not None]


@contextmanager
def _acting(
    name: str, verb: str, url: str | None
) -> Iterator[tuple[Kind, Connector, Callable[..., Any]]]:
    """Yield the kind, what connects to the service, and the verb's act. Calling the act raises
    MidstreamError for names and fields that it does not take, and for values of other types.
    """
    kind, act = find(name, verb)
    with connecting(url) as connect:

        def acting(*names: str, **fields: Any) -> Any:
            function: Any = (
                attrgetter(act)(connect()) if isinstance(act, str) else partial(act, connect)
            )
            taken = inspect.signature(function)
            keyword_check(taken.parameters.values())(fields)
            kinds = {} if isinstance(act, str) else get_type_hints(act, include_extras=True)
            fields = {
                field: checked(item, kinds.get(field, Any), field) for field, item in fields.items()
            }
            meant = next(
                (f"a field is given as --set {each}" for each in names if "=" in each), None
            )
            with Translated(
                TypeError,
                lambda error: invalid("NAME", f"{verb} {name}: {error}", hint=meant),
                hidden=True,
            ):
                taken.bind(*names, **fields)
            return function(*names, **fields)

        yield kind, connect, acting


def _show(kind: Kind, connect: Connector, answer: Any, as_json: bool) -> None:
    """Print what an act returned; an act that returns nothing has printed it."""
    if answer is None or print_json(answer, as_json):
        return
    if kind.show is not None:
        kind.show(connect, answer)
    else:
        out.print(*records.parts(answer), sep="\n")


def act_on(
    verb: str,
    kind: str,
    names: Iterable[str | None],
    fields: dict[str, Any],
    url: str | None,
    json_: bool,
) -> Any:
    """Do what a verb does with things of a kind; print what the act returned, and return it."""
    with _acting(kind, verb, url) as (row, connect, act):
        answer = act(*_given(*names), **fields)
        _show(row, connect, answer, json_)
        return answer


def list_(
    kind: Annotated[str, kind_argument("list")],
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Of hits and precisions: the policy.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Number of entries, newest first; default: 20.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Of jobs, only those that triggered this policy.")
    ] = None,
    flagged: Annotated[
        bool | None, typer.Option("--flagged", help="Of jobs, only those that were flagged.")
    ] = None,
    model: Model = None,
    set_: FieldsOption = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """List the things of a kind; `--set state=failed` and the like choose among them."""
    chosen = {"model": model, "limit": limit, "policy": policy, "flagged": flagged}
    fields = options.fields(None, set_, chosen)
    with _acting(kind, "list", url) as (row, _, act):
        if limit is None and row.paged:
            fields["limit"] = LISTED
        answer = act(*_given(name), **fields)
    entries = answer if isinstance(answer, list) else getattr(answer, answer.__struct_fields__[0])
    print_list(answer, entries, row.plural, json_)


def get(
    kind: Annotated[str, kind_argument("get")],
    name: NameArgument = None,
    model: Model = None,
    set_: FieldsOption = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Show one thing."""
    answer = act_on("get", kind, [name], options.fields(None, set_, {"model": model}), url, json_)
    if (agreement := getattr(answer, "determinism", None)) and not agreement.consistent:
        raise MidstreamError("ranks_disagree", agreement.detail or "the ranks do not agree")


def put(
    kind: Annotated[str, kind_argument("put")],
    name: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME] [SOURCE]...",
            help="Its name, and what it is made from: a folder or file, or of a module and of "
            f"global steering: {options.STEER}.",
        ),
    ] = None,
    file: File = None,
    model: Model = None,
    set_: FieldsOption = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Store a thing under its name, or replace it; running requests keep the previous one."""
    fields = options.fields(file, set_, {"model": model})
    act_on("put", kind, name or (), fields, url, json_)


def change(
    kind: Annotated[str, kind_argument("change")],
    name: NameArgument = None,
    file: File = None,
    model: Model = None,
    set_: FieldsOption = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Change fields of a thing, such as a policy's mode; the others stay."""
    fields = options.fields(file, set_, {"model": model})
    act_on("change", kind, [name], fields, url, json_)


def delete(
    kind: Annotated[str, kind_argument("delete")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Names or ids.")
    ] = None,
    model: Model = None,
    set_: FieldsOption = None,
    url: Url = None,
) -> None:
    """Delete things. Requests that were accepted with a name keep what it named; files below the
    server's folders stay.
    """
    fields = options.fields(None, set_, {"model": model})
    with _acting(kind, "delete", url) as (row, connect, act):
        for given in [[name] for name in names or ()] or [[]]:
            _show(row, connect, act(*given, **fields), as_json=False)
            if given:
                say(f"{given[0]} deleted")


def export(
    kind: Annotated[str, kind_argument("export")],
    name: Annotated[str, typer.Argument(help="Its name or id; of captures, also a folder.")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="The file: of a job or probe .json, .csv or a figure's; of a module .npz, "
            ".safetensors, .gguf, .pt; of a capture .npz, .safetensors or a folder; of a streamed "
            "harvest file:FOLDER.",
        ),
    ] = None,
    model: Model = None,
    set_: FieldsOption = None,
    url: Url = None,
) -> None:
    """Write a thing to a file for other programs; a job's result to standard output by default."""
    with _acting(kind, "export", url) as (_, _, act):
        said = act(*_given(name, output), **options.fields(None, set_, {"model": model}))
    if said:
        say(said)


def check(
    kind: Annotated[str, kind_argument("check")],
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="Ids of jobs, folders or URIs.")
    ],
    set_: FieldsOption = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Compute checksums again from the files, and look for what is missing; exits non-zero if
    anything differs, after all were checked.
    """
    faults = []
    with _acting(kind, "check", url) as (row, connect, act):
        for name in names:
            try:
                _show(row, connect, act(name, **options.fields(None, set_)), json_)
            except MidstreamError as error:
                faults.append(f"{name}: {error}" if len(names) > 1 else str(error))
    if faults:
        raise MidstreamError("capture_damaged", "; ".join(faults))


def create(
    kind: Annotated[str, kind_argument("create")],
    name: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"Of a key: a label, and --set {', '.join(keys.key.__kwdefaults__)}; of "
            "CURVE keys: ROLE NAME.",
        ),
    ] = None,
    set_: FieldsOption = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Make a secret: an API key, a signing secret, CURVE keys, passwords of Redis."""
    act_on("create", kind, name or (), options.fields(None, set_), url, json_)


@with_client
def redeliver(
    client: Client,
    ids: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Ids of webhooks, in any state.")
    ],
) -> None:
    """Send webhooks again, under the same ids."""
    for webhook in ids:
        client.webhooks.redeliver(webhook)
        say(f"{webhook} will be sent again")


COMMANDS = (list_, get, put, change, delete, export, check, create, redeliver)
