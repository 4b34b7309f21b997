"""The command `fit`."""

from typing import Annotated

import typer

from midstream.client.cli import options
from midstream.client.cli.kinds import keywords_of
from midstream.client.cli.terminal import AsJson, Model, Url
from midstream.client.cli.verbs import act_on, kind_argument

#: What `fit` takes, by kind.
_FITTED = "; ".join(f"of a {kind} {', '.join(names)}" for kind, names in keywords_of("fit").items())


def fit(
    kind: Annotated[str, kind_argument("fit")],
    name: Annotated[str, typer.Argument(help="The name to register it under.")],
    file: Annotated[
        str | None,
        typer.Argument(
            help="Examples in CSV, JSON lines or Parquet, FILE[:COLUMN,…]: see the guides to fits "
            "and probes."
        ),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="hits:POLICY", help="In place of FILE, of a probe: marked hits."
        ),
    ] = None,
    model: Model = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help=f"A field, repeatable: {_FITTED}."),
    ] = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Learn a module, a Jacobian lens or a probe from examples, and register it."""
    fields = options.fields(None, set_, {"model": model})
    act_on("fit", kind, [name, file or from_], fields, url, json_)


COMMANDS = (fit,)
