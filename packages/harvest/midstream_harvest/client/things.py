"""What the verbs of the command line do with harvests."""

from typing import Annotated

import msgspec

from midstream.client.cli.kind import Kind, calls_of
from midstream.client.cli.terminal import Connector, say
from midstream.client.render.jobs import size
from midstream.client.sdk.client import Client
from midstream.schemas.base.errors import MidstreamError

from ..reader.verification import verify
from ..records.harvests import HarvestView
from .bridge import bridge, target_of
from .progress import harvest_bar


def _stream(
    connect: Connector,
    harvest: str,
    to: str,
    /,
    *,
    consumer: str = "trainer",
    limit: Annotated[int, msgspec.Meta(ge=1)] = 4096,
) -> str:
    """Hand a stream's documents to a trainer, as hs_connectors reads them; goes on where it was
    after an interruption. A trainer takes a sample by deleting it.

    `limit`: wait while this many samples are not taken.
    """
    bridge(connect(), harvest, target_of(to, harvest), consumer, limit)
    return f"{harvest} handed to {to}"


def _check_harvest(connect: Connector, uri: str, /) -> None:
    """Recompute checksums, keys, order and counts from the files. Raises MidstreamError if anything
    differs.
    """

    result = verify(uri)
    verdict = "ok" if result.ok else "damaged"
    say(f"{result.shards:,} shards, {result.rows:,} rows, {size(result.bytes)}: {verdict}")
    if not result.ok:
        raise MidstreamError("capture_damaged", "; ".join(result.faults[:5]))


def _wait(client: Client, harvest: str, timeout: float | None) -> HarvestView:
    with harvest_bar() as progress:
        return client.harvests.wait(harvest, progress, timeout)


def _cancel(client: Client, harvest: str) -> HarvestView:
    return client.harvests.cancel(harvest)


THINGS = [
    Kind(
        "harvest",
        "harvests",
        calls_of("harvests", "list", "get", "delete")
        | {"export": _stream, "check": _check_harvest},
        paged=True,
        begins="hrv_",
        followed={"wait": _wait, "cancel": _cancel},
    )
]
