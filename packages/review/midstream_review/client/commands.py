"""The command `mark`."""

from typing import Annotated

import typer

from midstream.client.cli.jobs import print_view
from midstream.client.cli.terminal import AsJson, Model, with_client
from midstream.client.sdk.client import Client

@with_client
def mark(
    client: Client,
    policy: Annotated[str, typer.Argument(help="A policy's name.")],
    hit: Annotated[str, typer.Argument(help="A hit's id, of `midstream list hits POLICY`.")],
    verdict: Annotated[str, typer.Argument(help="right, false_alarm or unsure.")],
    note: Annotated[str, typer.Option(help="Why.")] = "",
    model: Model = None,
    json_: AsJson = False,
) -> None:
    """Say whether a hit of a policy is right; replaces an earlier mark."""
    print_view(client.hits.mark(policy, hit, verdict, note, model), json_)


COMMANDS = (mark,)
