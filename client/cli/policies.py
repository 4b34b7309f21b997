"""The commands `midstream policy …`."""

from operator import attrgetter
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ...schemas.requests.policies import Policy, PolicyRequest
from ..sdk.wire import given
from .jobs import AsJson, Model, Url, connect, print_record, read_request
from .registered import Registry

Name = Annotated[str, typer.Argument(metavar="NAME", help="A policy's name.")]
policy_app = Registry("a policy", "policies", Policy, attrgetter("policies")).commands(
    "Manage policies, which act on the scores of probes; requests name one with --policy."
)


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    app.add_typer(policy_app, name="policy")


@policy_app.command("register")
def policy_register(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The policy, as JSON.")],
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register a policy, or a new version of it; running requests keep the previous one."""
    fields = msgspec.structs.asdict(read_request(file, PolicyRequest))
    with connect(url) as client:
        print_record(client.policies.register(name, **fields), json_)


@policy_app.command("change")
def policy_change(
    name: Name,
    mode: Annotated[str | None, typer.Option(help="shadow, canary or active.")] = None,
    share: Annotated[float | None, typer.Option(help="Share of requests of a canary.")] = None,
    version: Annotated[int | None, typer.Option(help="The version to restore.")] = None,
    all_traffic: Annotated[bool | None, typer.Option(help="Apply it to every request.")] = None,
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Change a policy's mode, or restore a version."""
    fields = {"mode": mode, "share": share, "version": version, "all_traffic": all_traffic}
    with connect(url) as client:
        print_record(client.policies.change(name, model, **given(**fields)), json_)
