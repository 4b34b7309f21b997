"""Has what commands share: consoles, common options, the connection, and printed answers."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ...schemas.base.records import to_json
from ...schemas.settings.settings import load_settings
from ..render import records
from ..sdk.client import Client
from ..sdk.wire import only_model

out = Console(soft_wrap=False, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)

Url = Annotated[
    str | None,
    typer.Option(help="URL of the API; default: the stack running on the data directory."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str | None, typer.Option(help="The model; default: the first one served.")]
FieldsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="A field of the request, such as capture.tag=mine; JSON or text; repeatable.",
    ),
]
File = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Fields of the request: a JSON or TOML file."),
]
Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait for the result, or print the id and exit.")
]

#: Returns the client, which connects when it is first asked for.
Connector = Callable[[], Client]


def connect(given: str | None) -> Client:
    return Client(given, load_settings().api_key)


@contextmanager
def connecting(url: str | None) -> Iterator[Connector]:
    """Yield what returns the client, for commands that may need none."""
    with ExitStack() as stack:
        yield cache(lambda: stack.enter_context(connect(url)))


def with_client(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `client` by the option --url: the command gets a connection to
    the API there.
    """

    @wraps(command)
    def connected(*, url: str | None, **arguments: Any) -> None:
        with connect(url) as client:
            command(client=client, **arguments)

    signature = inspect.signature(command, eval_str=True)
    kept = [each for name, each in signature.parameters.items() if name != "client"]
    url = inspect.Parameter("url", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Url)
    vars(connected)["__signature__"] = signature.replace(parameters=[*kept, url])
    return connected


def print_json(record: Any, as_json: bool = True) -> bool:
    """Print a record as JSON if `as_json`; return `as_json`."""
    if as_json:
        print(to_json(record).decode(), flush=True)
    return as_json


def say(text: str) -> None:
    """Print a line as it is, without markup and folds."""
    out.print(text, markup=False, soft_wrap=True)


def print_list(answer: Any, entries: Sequence[Any], things: str, as_json: bool) -> None:
    """Print a list as JSON (`answer`, the response) or as a table of its entries."""
    if print_json(answer, as_json):
        return
    if not entries:
        out.print(f"no {things}", style="dim")
    elif isinstance(entries[0], str):
        print("\n".join(entries))
    else:
        out.print(records.listed(entries, type(entries[0])))


def detach(view: Any, wait: bool, as_json: bool) -> None:
    """Without `wait`, print what was submitted, and end the command."""
    if not wait:
        print(to_json(view).decode() if as_json else view.id)
        raise typer.Exit


def first_model(client: Client) -> str:
    """Return the first served model. Raises what `only_model` raises without any."""
    return only_model(client.models()[:1])
