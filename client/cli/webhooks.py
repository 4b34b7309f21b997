"""The commands `webhooks list`, `show`, `redeliver`, `secret`, `rotate`, `enable`."""

import time
from typing import Annotated, cast

import typer
from rich.markup import escape

from ...schemas.access.webhooks import (
    Delivery,
    DeliveryAttempt,
    DeliveryState,
    DisabledEndpoint,
    SecretList,
)
from ..durations import seconds
from ..render import jobs, records
from ..sdk.client import Client
from .jobs import AsJson, delete, err, out, print_json, print_list, with_client

Tenant = Annotated[str | None, typer.Option(help="This tenant's; requires scope admin.")]

webhooks_app = typer.Typer(
    no_args_is_help=True, help="List and redeliver webhooks; manage signing secrets and receivers."
)


def register(app: typer.Typer) -> None:
    """Add `webhooks …` to `midstream`."""
    app.add_typer(webhooks_app, name="webhooks")


@webhooks_app.command("list")
@with_client
def webhooks_list(
    client: Client,
    job: Annotated[str | None, typer.Option(help="Only webhooks about this job.")] = None,
    state: Annotated[
        str | None,
        typer.Option(help="Only this state: pending, delivered, failed, disabled or refused."),
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of webhooks.")] = 20,
    disabled: Annotated[
        bool,
        typer.Option(
            "--disabled", help="List the receivers disabled because they responded with 410."
        ),
    ] = False,
    tenant: Tenant = None,
    json_: AsJson = False,
) -> None:
    """List the newest webhooks and their outcome."""
    if disabled:
        _print_disabled(client.disabled.list(tenant=tenant), json_)
        return
    page = client.webhooks.list(
        job=job, state=cast(DeliveryState | None, state), tenant=tenant, limit=limit
    )
    print_list(page, page.deliveries, Delivery, "webhooks", json_)


@webhooks_app.command("show")
@with_client
def webhooks_show(
    client: Client,
    delivery_id: Annotated[
        str, typer.Argument(metavar="ID", help="A delivery's id: the header `webhook-id`.")
    ],
    json_: AsJson = False,
) -> None:
    """Show a webhook and all its attempts."""
    delivery = client.webhooks.get(delivery_id)
    if print_json(delivery, json_):
        return
    out.print(
        f"{delivery.id}  {delivery.event}  {jobs.coloured(delivery.state)}\nto "
        f"{escape(delivery.url)}\nof {delivery.job}"
    )
    if delivery.attempts:
        out.print(records.listed(delivery.attempts, DeliveryAttempt))
    if delivery.next_attempt is not None:
        out.print(f"again in {max(delivery.next_attempt - time.time(), 0):.0f} s", style="dim")


@webhooks_app.command("redeliver")
@with_client
def webhooks_redeliver(
    client: Client,
    ids: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Ids of the deliveries, in any state.")
    ],
) -> None:
    """Send webhooks again, under the same ids."""
    delete(ids, client.webhooks.redeliver, "will be sent again")


@webhooks_app.command("secret")
@with_client
def webhooks_secret(client: Client, json_: AsJson = False) -> None:
    """Show the secret that signs webhooks about this key's jobs, and the previous secret while it
    also signs.
    """
    _print_secrets(client.secrets.list(), json_)


@webhooks_app.command("rotate")
@with_client
def webhooks_rotate(
    client: Client,
    keep_former: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long the previous secret also signs, such as 12h; 0: not at all.",
        ),
    ] = "1d",
    own: Annotated[
        bool, typer.Option("--own", help="A secret for this key only, instead of its tenant's.")
    ] = False,
    json_: AsJson = False,
) -> None:
    """Create a new signing secret."""
    _print_secrets(
        client.secrets.create(keep_former_s=seconds(keep_former, "--keep-former"), own=own),
        json_,
    )


def _print_secrets(listed: SecretList, json_: bool) -> None:
    if print_json(listed, json_):
        return
    print(listed.secrets[0].secret)
    for previous in listed.secrets[1:]:
        until = records.moment(previous.until)
        err.print(f"also valid until {until}: {previous.secret}", style="dim")


def _print_disabled(endpoints: list[DisabledEndpoint], as_json: bool) -> None:
    if print_json(endpoints, as_json):
        return
    for endpoint in endpoints:
        since = records.moment(endpoint.since)
        out.print(
            f"{endpoint.url}  since {since}  ({endpoint.tenant})", markup=False, soft_wrap=True
        )
    if not endpoints:
        out.print("no disabled receivers", style="dim")


@webhooks_app.command("enable")
@with_client
def webhooks_enable(
    client: Client,
    receiver: Annotated[
        str,
        typer.Argument(
            metavar="RECEIVER", help="Its URL, as shown by `midstream webhooks list --disabled`."
        ),
    ],
    tenant: Tenant = None,
) -> None:
    """Re-enable a receiver that responded with 410.

    Use `redeliver` for webhooks that were disabled in the meantime.
    """
    client.disabled.delete(receiver, tenant=tenant)
    out.print(f"{receiver} is enabled", markup=False)
