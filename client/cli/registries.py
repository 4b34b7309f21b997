"""The commands that all registries share: `list`, `show` and `remove` of adapters, autoencoders,
tuned lenses, probes and modules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import typer

from ...schemas.base.records import to_json
from ..sdk.client import Client
from .jobs import AsJson, Model, Url, connect, out, print_list

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """One kind of thing that has a name.

    The calls take the client, and the model or None; all but `every` a name before it.
    """

    thing: str  # with its article
    things: str
    every: Callable[[Client, str | None], list[T]]
    one: Callable[[Client, str, str | None], T]
    remove: Callable[[Client, str, str | None], None]
    listed: Callable[[Sequence[T]], Any]
    shown: Callable[[T], Sequence[Any]]  # what is printed of one, for people

    def print(self, thing: T, as_json: bool) -> None:
        if as_json:
            print(to_json(thing).decode())
        else:
            out.print(*self.shown(thing), sep="\n")

    def add_to(self, app: typer.Typer) -> None:
        """Add the commands, for the calls of the registry."""
        name = Annotated[str, typer.Argument(metavar="NAME", help=f"The name of {self.thing}.")]

        def list_(model: Model = None, json_: AsJson = False, url: Url = None) -> None:
            with connect(url) as client:
                result = self.every(client, model)
            print_list(result, result, self.listed, self.things, json_)

        def show(name: name, model: Model = None, json_: AsJson = False, url: Url = None) -> None:
            with connect(url) as client:
                self.print(self.one(client, name, model), json_)

        def remove(name: name, model: Model = None, url: Url = None) -> None:
            with connect(url) as client:
                self.remove(client, name, model)
            out.print(f"{name} removed", markup=False)

        app.command("list", help=f"List the {self.things}.")(list_)
        app.command("show", help=f"Show {self.thing}.")(show)
        app.command(
            "remove", help=f"Remove {self.thing}; files stay. Requests accepted earlier keep it."
        )(remove)
