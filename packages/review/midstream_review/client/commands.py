"""The commands `mark` and `replay`."""

from typing import Annotated

import typer

from midstream.client.cli import options
from midstream.client.cli.jobs import print_view
from midstream.client.cli.terminal import (
    AsJson,
    FieldsOption,
    Model,
    Wait,
    detach,
    out,
    print_json,
    with_client,
)
from midstream.client.render import records
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


@with_client
def replay(
    client: Client,
    policy: Annotated[str, typer.Argument(help="A policy's name.")],
    version: Annotated[
        int | None, typer.Option(help="The version to try; default: the current one.")
    ] = None,
    against: Annotated[
        int | None, typer.Option(help="The version to compare with; default: the current one.")
    ] = None,
    of: Annotated[
        str | None, typer.Option(help="Prompts of the last jobs (jobs) or hits (hits).")
    ] = None,
    last: Annotated[int | None, typer.Option(help="Number of prompts; default: 100.")] = None,
    set_: FieldsOption = None,
    model: Model = None,
    wait: Wait = True,
    json_: AsJson = False,
) -> None:
    """Read prompts of the past under another version of a policy, before it acts;
    `--set condition.at_least=3` tries another condition.
    """
    typed = {"version": version, "against": against, "of": of, "last": last}
    job = client.replays.submit(policy, model, **options.fields(None, set_, typed))
    detach(job, wait, json_)
    client.wait(job)
    found = client.replays.get(policy, job)
    if not print_json(found, json_):
        out.print(*records.parts(found), sep="\n")


COMMANDS = (mark, replay)
