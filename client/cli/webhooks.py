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
from .jobs import AsJson, Url, connect, delete, err, out, print_json, print_list

Tenant = Annotated[str | None, typer.Option(help="This tenant's; requires scope admin.")]

webhooks_app = typer.Typer(
    no_args_is_help=True, help="List and redeliver webhooks; manage signing secrets and receivers."
)


def register(app: typer.Typer) -> None:
    """Add `webhooks …` to `midstream`."""
    app.add_typer(webhooks_app, name="webhooks")


@webhooks_app.command("list")
def webhooks_list(
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
    url: Url = None,
) -> None:
    """List the newest webhooks and their outcome."""
    with connect(url) as client:
        if disabled:
            _print_disabled(client.webhooks.disabled(tenant=tenant), json_)
            return
        page = client.webhooks.deliveries(
            job=job, state=cast(DeliveryState | None, state), tenant=tenant, limit=limit
        )
    print_list(page, page.deliveries, Delivery, "webhooks", json_)


@webhooks_app.command("show")
def webhooks_show(
    delivery_id: Annotated[
        str, typer.Argument(metavar="ID", help="A delivery's id: the header `webhook-id`.")
    ],
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Show a webhook and all its attempts."""
    with connect(url) as client:
        delivery = client.webhooks.delivery(delivery_id)
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
def webhooks_redeliver(
    ids: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Ids of the deliveries, in any state.")
    ],
    url: Url = None,
) -> None:
    """Send webhooks again, under the same ids."""
    with connect(url) as client:
        delete(ids, client.webhooks.redeliver, "will be sent again")


@webhooks_app.command("secret")
def webhooks_secret(json_: AsJson = False, url: Url = None) -> None:
    """Show the secret that signs webhooks about this key's jobs, and the previous secret while it
    also signs.
    """
    with connect(url) as client:
        _print_secrets(client.webhooks.secrets(), json_)


@webhooks_app.command("rotate")
def webhooks_rotate(
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
    url: Url = None,
) -> None:
    """Create a new signing secret."""
    with connect(url) as client:
        _print_secrets(
            client.webhooks.rotate_secret(
                keep_former_s=seconds(keep_former, "--keep-former"), own=own
            ),
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
def webhooks_enable(
    receiver: Annotated[
        str,
        typer.Argument(
            metavar="RECEIVER", help="Its URL, as shown by `midstream webhooks list --disabled`."
        ),
    ],
    tenant: Tenant = None,
    url: Url = None,
) -> None:
    """Re-enable a receiver that responded with 410.

    Use `redeliver` for webhooks that were disabled in the meantime.
    """
    with connect(url) as client:
        client.webhooks.enable(receiver, tenant=tenant)
    out.print(f"{receiver} is enabled", markup=False)
